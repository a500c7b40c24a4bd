"""From bytes to facts: what a file is, what its container holds, what its pickles say."""
