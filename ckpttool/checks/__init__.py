"""What can be wrong: one small class per finding id, in families, and `verify`, which runs them."""
