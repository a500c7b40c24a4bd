"""The `ckpttool` command: one file per verb."""
