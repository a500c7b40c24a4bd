"""One node of a small run over a shared store: `python -m trainer_core.diloco.demo --help`."""
