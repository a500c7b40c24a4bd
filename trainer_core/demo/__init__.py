"""A small run to watch: `python -m trainer_core.demo DIR` trains a character-level transformer."""
