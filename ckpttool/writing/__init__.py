"""Torch's container and pickle, written without torch. Shares no code with the readers."""
