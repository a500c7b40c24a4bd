"""Renaming a step file, undoably."""

from __future__ import annotations

from ckpttool.actions.journal.moves import PublishTemporary


class RenameStep(PublishTemporary):
    """Gives a step file the name of the step that it holds, never over another file."""

    __slots__ = ()
    kind = "rename-step"

    def describe(self) -> str:
        """`rename step_000000000008.pt to step_000000000006.pt: why`."""
        return f"rename {self.name} to {self.target}" + (f": {self.why}" if self.why else "")
