"""What a directory records of its step files, held against the files that are there.

The pointer and the manifest may each record the size and the SHA-256 that a file had when it was
saved. A file that differs is not what training saved, however whole it is. Where one record has the
file's own SHA-256, though, the file is proven, and any other record is merely out of date.

They also say which is meant where several names here stand for one step: see `Precedence`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.model.manifest import Entry, Manifest, read_manifest, recorded_by
from ckpttool.model.names import has_full_width, parse_step_directory_name
from ckpttool.model.pointer import read_pointer

if TYPE_CHECKING:
    from ckpttool.model.pointer import Pointer

POINTER, MANIFEST = "the pointer", "the manifest"

# Gives the SHA-256 of the file in lower case, or None where it could not be taken.
Hasher = Callable[[], str | None]


class Precedence(NamedTuple):
    """Which of several names for one step is meant: the highest that is valid.

    What the pointer names comes first, then what the manifest recorded last, then a name with all
    twelve digits, then the directory of a sharded step, then the last by name.
    """

    pointed: bool
    recorded: int
    full_width: bool
    sharded: bool
    name: str

    def why(self) -> str:
        """Why it comes before another, in words."""
        if self.pointed:
            return "which the pointer names"
        if self.recorded >= 0:
            return "which the manifest recorded last"
        return "as its name has twelve digits" if not self.sharded else "the directory"


class Records:
    """The records of one directory. `of` gives those of a file, `precedence` what they weigh."""

    __slots__ = ("_manifest", "_places", "_pointer")

    def __init__(self, pointer: Pointer, manifest: Manifest | None) -> None:
        self._pointer = recorded_by(pointer)
        self._manifest = manifest
        names = () if manifest is None else manifest.entries
        self._places = {name: place for place, name in enumerate(names)}

    def precedence(self, name: str) -> Precedence:
        """What the name of a step weighs against another of the same step."""
        pointed = self._pointer is not None and self._pointer.file == name
        sharded = parse_step_directory_name(name) is not None
        place = self._places.get(name, -1)
        return Precedence(pointed, place, has_full_width(name), sharded, name)

    def of(self, name: str) -> list[tuple[str, Entry]]:
        """Who records something of the file `name`, and what; the last word of each first."""
        found = []
        if self._pointer is not None and self._pointer.file == name:
            found.append((POINTER, self._pointer))
        if self._manifest is not None and name in self._manifest.entries:
            lines = [self._manifest.entries[name], *reversed(self._manifest.older.get(name, []))]
            found += [(MANIFEST, line) for line in lines]
        return found

    def contradict(self, name: str, size: int, hasher: Hasher | None) -> str | None:
        """How the file `name` differs from what is recorded of it, in words; None if it does not.

        The SHA-256 is taken only where it is recorded beside the same size; without `hasher` the
        sizes alone are compared. What could not be hashed is not called different.
        """
        records = self.of(name)
        if not any(entry.size is not None or entry.sha256 is not None for _, entry in records):
            return None
        alike = [entry for _, entry in records if entry.size in (None, size)]
        hashes = {entry.sha256 for entry in alike if entry.sha256 is not None}
        if hasher is None and (hashes or any(entry.size == size for entry in alike)):
            return None
        sha256 = hasher() if hasher is not None and hashes else None
        if hashes and (sha256 is None or sha256 in hashes):
            return None
        return _difference(records, size, sha256)


def read_records(directory: str | os.PathLike[str]) -> Records:
    """The records of a directory. Never raises."""
    return Records(read_pointer(directory), read_manifest(directory))


def _difference(records: Iterable[tuple[str, Entry]], size: int, sha256: str | None) -> str | None:
    last_words = dict(reversed(list(records)))
    for who, entry in reversed(last_words.items()):
        if entry.size is not None and entry.size != size:
            return f"it has {size:,} bytes, {who} records {entry.size:,}"
        if entry.sha256 is not None and sha256 is not None and entry.sha256 != sha256:
            return f"it has another SHA-256 than {who} records"
    return None
