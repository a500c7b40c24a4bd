"""What survives in a damaged file, and the proof of it."""
