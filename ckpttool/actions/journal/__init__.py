"""Changes that can be finished or taken back after a kill at any point, and the journal of them."""
