"""The place in the data, and the seeds and generators of whatever draws there."""
