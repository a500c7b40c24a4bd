"""State that no state dict has: what has changed in attributes since a trainer was made.

`census` finds and sets back, `owners` says whose attributes, `marks` what they were, `kept_values`
how a checkpoint holds what they are.
"""
