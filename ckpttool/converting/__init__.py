"""A whole file made better: plain, smaller, or in another format."""
