"""A checkpoint directory: its steps, its pointer, and whatever else lies there.

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
    parse_step_directory_name,
    parse_step_file_name,
    parse_temporary_name,
)
from ckpttool.model.pointer import Pointer, read_pointer
from ckpttool.model.sharded_listing import METADATA_NAME, list_sharded


class StepFile(NamedTuple):
    """An entry named like a step: a file, or the directory of a sharded step.

    `mode` is the whole `st_mode`; `size` is in bytes, for a directory those of all its files, and
    `mtime_ns` then the newest of them. `is_regular` is False for links, directories and the like.
    `is_sharded` marks a directory named like a sharded step; `metadata_size` is that of its
    `.metadata`, None where there is none. What is neither is never opened or followed.
    """

    step: int
    name: str
    path: str
    size: int
    mode: int
    mtime_ns: int
    is_link: bool
    is_regular: bool
    is_sharded: bool = False
    metadata_size: int | None = None

    @property
    def opens(self) -> bool:
        """Whether it may be opened and judged: a regular file, or a sharded step."""
        return self.is_regular or self.is_sharded

    @property
    def recorded_path(self) -> str:
        """The file whose size and SHA-256 the pointer and the manifest record of it."""
        return os.path.join(self.path, METADATA_NAME) if self.is_sharded else self.path

    @property
    def recorded_size(self) -> int | None:
        """The size of that file in bytes, None where it is missing."""
        return self.metadata_size if self.is_sharded else self.size

    def is_still(self, now: os.stat_result) -> bool:
        """Whether what has its name, of which `lstat` says `now`, is what was listed."""
        found = step_entry(self.path, now)
        if found is None or (found.is_regular, found.is_sharded) != (
            self.is_regular,
            self.is_sharded,
        ):
            return False
        return (found.size, found.mtime_ns) == (self.size, self.mtime_ns)

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
            "is_sharded": self.is_sharded,
        }


class Other(NamedTuple):
    """An entry that is neither a step file nor the pointer.

    `kind` is `temporary`, `lock`, `manifest`, `quarantine`, `link`, `directory`, `special` or
    `foreign`. `link` is where a link points, as written in it. `temporary` is the parsed name of a
    writer's temporary, which is a file, or the directory of a sharded step.
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

    def all_of(self, step: int) -> list[StepFile]:
        """The regular files and sharded steps for `step`, the one that is meant first.

        See `records.Precedence`. Reads the manifest where there are several.
        """
        from ckpttool.model.records import read_records

        found = [file for file in self.steps if file.step == step and file.opens]
        if len(found) > 1:
            records = read_records(self.path)
            found.sort(key=lambda file: records.precedence(file.name), reverse=True)
        return found

    def find(self, step: int) -> StepFile | None:
        """The first of `all_of`."""
        return next(iter(self.all_of(step)), None)

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
    found = step_entry(entry.path, facts)
    if found is None:
        others.append(_other(entry, facts))
    else:
        steps.append(found)


def step_entry(path: str, facts: os.stat_result) -> StepFile | None:
    """What lies at `path`, of which `lstat` says `facts`, as a step; None if it is named otherwise.

    Of a name without `.pt` a directory is one, and a link, wherever it leads.
    """
    name = os.path.basename(path)
    link, regular = stat.S_ISLNK(facts.st_mode), stat.S_ISREG(facts.st_mode)
    whole = path, facts.st_size, facts.st_mode, facts.st_mtime_ns, link, regular
    step = parse_step_file_name(name)
    if step is not None:
        return StepFile(step, name, *whole)
    step = parse_step_directory_name(name)
    if step is not None and link:
        return StepFile(step, name, *whole)
    if step is None or not stat.S_ISDIR(facts.st_mode):
        return None
    try:
        listed = list_sharded(path)
    except UnreadableError:
        return StepFile(step, name, *whole, is_sharded=True)
    metadata = listed.sizes.get(METADATA_NAME)
    size, newest = listed.size, listed.mtime_ns
    return StepFile(step, name, path, size, facts.st_mode, newest, link, regular, True, metadata)


_KNOWN = {LOCK_NAME: "lock", MANIFEST_NAME: "manifest"}


def _other(entry: os.DirEntry[str], facts: os.stat_result) -> Other:
    kind, link, temporary, size = "foreign", None, None, facts.st_size
    if stat.S_ISLNK(facts.st_mode):
        kind, link = "link", os.readlink(entry.path)
    elif stat.S_ISDIR(facts.st_mode):
        kind = "quarantine" if entry.name == QUARANTINE_NAME else "directory"
        temporary = parse_temporary_name(entry.name)
        if temporary is not None and parse_step_directory_name(temporary.target) is not None:
            kind, size = "temporary", size_of_directory(entry.path)
        else:
            temporary = None
    elif not stat.S_ISREG(facts.st_mode):
        kind = "special"
    elif entry.name in _KNOWN:
        kind = _KNOWN[entry.name]
    elif (temporary := parse_temporary_name(entry.name)) is not None:
        kind = "temporary"
    return Other(entry.name, entry.path, kind, size, facts.st_mode, link, temporary)


def size_of_directory(path: str) -> int:
    """Bytes of the files in a directory; 0 where it cannot be listed."""
    try:
        return list_sharded(path).size
    except UnreadableError:
        return 0
