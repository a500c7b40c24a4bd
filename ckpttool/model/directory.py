"""A checkpoint directory: its step files, its pointer, and whatever else lies there.

Nothing is opened to find that out. Order is by the number in the name, compared as an integer:
never by text (widths may differ), never by time (file systems and copies get it wrong).
"""

from __future__ import annotations

import os
import stat
from typing import Any, NamedTuple

from ckpttool.errors import UnreadableError
from ckpttool.model.names import (
    LOCK_NAME,
    MANIFEST_NAME,
    POINTER_NAME,
    QUARANTINE_NAME,
    Temporary,
    has_full_width,
    parse_step_file_name,
    parse_temporary_name,
)
from ckpttool.model.pointer import Pointer, read_pointer


class StepFile(NamedTuple):
    """An entry named like a step file. `mode` is the whole `st_mode`; `size` is in bytes.

    `is_regular` is False for links, directories and the like, which are never opened or followed.
    """

    step: int
    name: str
    path: str
    size: int
    mode: int
    mtime_ns: int
    is_link: bool
    is_regular: bool

    def as_dict(self) -> dict[str, Any]:
        """The step file as plain data."""
        return {
            "step": self.step,
            "name": self.name,
            "path": self.path,
            "size": self.size,
            "mode": f"{stat.S_IMODE(self.mode):04o}",
            "mtime_ns": self.mtime_ns,
            "is_link": self.is_link,
            "is_regular": self.is_regular,
        }


class Other(NamedTuple):
    """An entry that is neither a step file nor the pointer.

    `kind` is `temporary`, `lock`, `manifest`, `quarantine`, `link`, `directory`, `special` or
    `foreign`. `link` is where a link points, as written in it. `temporary` is the parsed name of a
    writer's temporary.
    """

    name: str
    path: str
    kind: str
    size: int
    mode: int
    link: str | None = None
    temporary: Temporary | None = None

    def as_dict(self) -> dict[str, Any]:
        """The entry as plain data."""
        return {"name": self.name, "path": self.path, "kind": self.kind, "size": self.size}


class CheckpointDirectory:
    """What `scan` found. `steps` ascend by step, then by name; `mode` is the directory's own."""

    __slots__ = ("mode", "others", "path", "pointer", "steps")

    def __init__(
        self, path: str, mode: int, steps: list[StepFile], pointer: Pointer, others: list[Other]
    ) -> None:
        self.path = path
        self.mode = mode
        self.steps = steps
        self.pointer = pointer
        self.others = others

    def find(self, step: int) -> StepFile | None:
        """The regular step file for `step`, the 12-digit name first where there are several."""
        found = [file for file in self.steps if file.step == step and file.is_regular]
        return max(found, key=lambda file: has_full_width(file.name), default=None)

    def as_dict(self) -> dict[str, Any]:
        """The directory as plain data."""
        return {
            "path": self.path,
            "steps": [file.as_dict() for file in self.steps],
            "pointer": self.pointer.as_dict(),
            "others": [other.as_dict() for other in self.others],
        }


def scan(path: str | os.PathLike[str]) -> CheckpointDirectory:
    """List the directory `path`. Raises UnreadableError where it is missing or cannot be listed."""
    where = os.fspath(path)
    steps: list[StepFile] = []
    others: list[Other] = []
    try:
        mode = os.stat(where).st_mode
        with os.scandir(where) as entries:
            for entry in entries:
                _sort_entry(entry, steps, others)
    except OSError as error:
        raise UnreadableError(where, error.strerror or str(error)) from error
    steps.sort(key=lambda file: (file.step, file.name))
    others.sort(key=lambda other: other.name)
    return CheckpointDirectory(where, mode, steps, read_pointer(where), others)


def _sort_entry(entry: os.DirEntry[str], steps: list[StepFile], others: list[Other]) -> None:
    if entry.name == POINTER_NAME:
        return
    try:
        facts = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return  # a running trainer may have pruned it between the listing and this look
    step = parse_step_file_name(entry.name)
    if step is None:
        others.append(_other(entry, facts))
        return
    link, regular = stat.S_ISLNK(facts.st_mode), stat.S_ISREG(facts.st_mode)
    steps.append(
        StepFile(
            step,
            entry.name,
            entry.path,
            facts.st_size,
            facts.st_mode,
            facts.st_mtime_ns,
            link,
            regular,
        )
    )


_KNOWN = {LOCK_NAME: "lock", MANIFEST_NAME: "manifest"}


def _other(entry: os.DirEntry[str], facts: os.stat_result) -> Other:
    kind, link, temporary = "foreign", None, None
    if stat.S_ISLNK(facts.st_mode):
        kind, link = "link", os.readlink(entry.path)
    elif stat.S_ISDIR(facts.st_mode):
        kind = "quarantine" if entry.name == QUARANTINE_NAME else "directory"
    elif not stat.S_ISREG(facts.st_mode):
        kind = "special"
    elif entry.name in _KNOWN:
        kind = _KNOWN[entry.name]
    elif (temporary := parse_temporary_name(entry.name)) is not None:
        kind = "temporary"
    return Other(entry.name, entry.path, kind, facts.st_size, facts.st_mode, link, temporary)
