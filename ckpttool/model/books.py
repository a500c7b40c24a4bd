"""What a directory records about itself: its manifest, its lock, what was done to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckpttool.errors import UnreadableError
from ckpttool.model.names import LOCK_NAME, MANIFEST_NAME, QUARANTINE_NAME

if TYPE_CHECKING:
    from ckpttool.io.lock_holder import Holder
    from ckpttool.model.directory import CheckpointDirectory
    from ckpttool.model.manifest import Entry, Manifest
    from ckpttool.model.operations import Recorded


class Books(NamedTuple):
    """`manifest` is None where there is none, `holder` where there is no lock.

    `quarantine_problem` says why nobody knows which operations there were.
    """

    manifest: Manifest | None = None
    holder: Holder | None = None
    operations: tuple[Recorded, ...] = ()
    quarantine_problem: str | None = None

    def entry(self, name: str) -> Entry | None:
        """What the manifest records of the file `name`, or None."""
        return None if self.manifest is None else self.manifest.entries.get(name)


def read_books(directory: CheckpointDirectory) -> Books:
    """Reads what `scan` has found to be there. Raises for nothing that it finds."""
    names = {other.name for other in directory.others}
    books = Books()
    if MANIFEST_NAME in names:
        from ckpttool.model.manifest import read_manifest

        books = books._replace(manifest=read_manifest(directory.path))
    if LOCK_NAME in names:
        from ckpttool.io.lock_holder import read_holder

        books = books._replace(holder=read_holder(directory.path))
    if QUARANTINE_NAME in names:
        from ckpttool.model.operations import list_operations

        try:
            books = books._replace(operations=tuple(list_operations(directory.path)))
        except UnreadableError as error:
            books = books._replace(quarantine_problem=error.reason)
    return books
