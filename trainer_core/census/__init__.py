"""State that no state dict has: what has changed in attributes since a trainer was made.

`attributes` is what a trainer has of it, `roots` say of what; `census` finds what has changed,
`owners` and `places` whose attributes and where they lie, `marks` what they were. `kept_values` is
how a checkpoint holds them (`plain_forms`, `records`: what has no such form itself; `handles`,
`clocks`: what is no state), `returned_values` and `setting_back` the way back. `prints` tell
whether what never changes was made anew.
"""
