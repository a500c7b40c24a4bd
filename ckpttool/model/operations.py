"""What was done to a directory and can be taken back, as `.quarantine` records it.

    <directory>/.quarantine/20261129T194042Z/
    ├── journal.jsonl        what was planned, and a line before and after each action
    ├── note.json            the same for people
    └── step_000000000008.pt a file that was set aside

The first line of a journal is an object with `schema`, `verb`, `tool`, `time`, `directory` and
`actions`, the whole plan (null where it was not known yet: then a line with the event `plan`
follows). Every further line has an `event`: `begin` and `done` of an action, `finished`;
`taking-back`, `back` of an action, `undone`; `purging`. A last line without its end was being
written when the writer died, and counts as not written; so does one with zero bytes in it, which a
power cut leaves where a line was not yet synced.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from typing import Any, NamedTuple

from ckpttool.errors import FormatError, UnreadableError
from ckpttool.io.folder import Folder
from ckpttool.model.names import QUARANTINE_NAME

JOURNAL_NAME = "journal.jsonl"
NOTE_NAME = "note.json"
SCHEMA = 1
MOST_JOURNAL_BYTES = 256 << 20

_ID = re.compile(r"([0-9]{8}T[0-9]{6}Z)(?:-([0-9]{1,9}))?\Z")
_OWN_NAMES = frozenset((JOURNAL_NAME, NOTE_NAME))
# What is said of a journal that is a link, a folder or the like, or larger than any journal is.
_NO_JOURNAL = frozenset({errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.EFBIG, errno.ENXIO})
_ENDS = {state: state for state in ("finished", "taking-back", "undone", "purging")}


class Recorded(NamedTuple):
    """One operation as its journal tells it.

    `state` is `finished` or `undone`; `unfinished` or `taking-back`, where it was killed on the way
    there or back; `prepared`, where it never began to change anything; `purging`, where its files
    are being deleted; `damaged`, where the journal cannot be read, as `problem` says. `plan` are
    the records of its actions. `begun` and `done` are the numbers of those that have the line
    before them, and the one after, and have not been taken back. `unchecked` says that the system
    did not let us look, so that a damaged one may be anything, even half-way.
    """

    id: str
    path: str
    state: str
    verb: str = "unknown"
    why: str = ""
    tool: str = ""
    time: str = ""
    plan: tuple[dict[str, Any], ...] = ()
    begun: frozenset[int] = frozenset()
    done: frozenset[int] = frozenset()
    problem: str | None = None
    unchecked: bool = False

    @property
    def is_open(self) -> bool:
        """Whether it stands half-way, so that it has to be finished or taken back."""
        return self.state in ("unfinished", "taking-back")


class SetAside(NamedTuple):
    """What lies in an operation's folder beside its journal: how many entries, how many bytes."""

    names: list[str]
    nbytes: int


def id_order(id: str) -> tuple[str, int]:
    """To sort ids by: their time, then their number within the second. ValueError for no id."""
    match = _ID.match(id)
    if match is None:
        raise ValueError(f"not the id of an operation: {id[:80]!r}")
    return match[1], int(match[2] or 1)


def is_id(text: str) -> bool:
    """Whether a text has the shape of an operation's id."""
    return _ID.match(text) is not None


def list_operations(directory: str | os.PathLike[str]) -> list[Recorded]:
    """Every operation that is recorded in a directory, oldest first.

    Folders whose names are no ids are none of ours, and left out; so is a `.quarantine` that is no
    folder, or a link to one (see `not_a_quarantine`). A folder that may not be read is `damaged`.
    Raises UnreadableError where the directory or its `.quarantine` may not be looked into.
    """
    try:
        with Folder(directory) as home, home.enter(QUARANTINE_NAME) as quarantine:
            ids = sorted(filter(is_id, quarantine.names()), key=id_order)
            found = (_read_operation(quarantine, id) for id in ids)
            return [operation for operation in found if operation is not None]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        path = os.path.join(os.fspath(directory), QUARANTINE_NAME)
        raise UnreadableError(path, error.strerror or str(error)) from error


def not_a_quarantine(directory: str | os.PathLike[str]) -> str | None:
    """What stands in the place of `.quarantine` and is no folder, in words; None where nothing is.

    While it is there, nothing can be set aside.
    """
    try:
        mode = os.lstat(os.path.join(os.fspath(directory), QUARANTINE_NAME)).st_mode
    except OSError:
        return None
    if stat.S_ISDIR(mode):
        return None
    return "is a link, not a folder" if stat.S_ISLNK(mode) else "is not a folder"


def what_is_set_aside(operation: Recorded) -> SetAside:
    """What an operation's folder holds, by a look at it. Raises OSError."""
    names, nbytes = [], 0
    with os.scandir(operation.path) as entries:
        for entry in entries:
            if entry.name not in _OWN_NAMES:
                names.append(entry.name)
                nbytes += _bytes_of(entry)
    return SetAside(sorted(names), nbytes)


def whole_length(data: bytes) -> int:
    """How many bytes of a journal are lines that were completed."""
    end = data.rfind(b"\n") + 1
    start = data.rfind(b"\n", 0, max(0, end - 1)) + 1
    return start if b"\0" in data[start:end] else end


def _bytes_of(entry: os.DirEntry[str]) -> int:
    if not entry.is_dir(follow_symlinks=False):
        return entry.stat(follow_symlinks=False).st_size
    total = 0
    for folder, _, names in os.walk(entry.path):
        total += sum(os.lstat(os.path.join(folder, name)).st_size for name in names)
    return total


def _read_operation(quarantine: Folder, id: str) -> Recorded | None:
    path = os.path.join(quarantine.path, id)
    status = quarantine.status(id)
    if status is None or not stat.S_ISDIR(status.st_mode):
        return None
    try:
        with quarantine.enter(id) as folder:
            names = set(folder.names())
            data = folder.read(JOURNAL_NAME, MOST_JOURNAL_BYTES) or b""
    except OSError as error:
        problem = error.strerror or str(error)
        unchecked = error.errno not in _NO_JOURNAL
        return Recorded(id, path, "damaged", problem=problem, unchecked=unchecked)
    lines = data[: whole_length(data)].split(b"\n")[:-1]
    if not lines and names <= _OWN_NAMES:
        return Recorded(id, path, "prepared")
    try:
        return _tell(Recorded(id, path, "prepared"), lines)
    except FormatError as error:
        return Recorded(id, path, "damaged", problem=str(error))


def _tell(blank: Recorded, lines: list[bytes]) -> Recorded:
    if not lines:
        raise FormatError("it has no journal")
    head, *events = (_object(line, number) for number, line in enumerate(lines, 1))
    if head.get("schema") != SCHEMA:
        raise FormatError(f"its journal is of the unknown kind {str(head.get('schema'))[:40]!r}")
    plan = head.get("actions")
    begun: set[int] = set()
    done: set[int] = set()
    state = None
    for event in events:
        kind, number = event.get("event"), event.get("action")
        state = _ENDS.get(str(kind), state)
        if kind == "plan":
            plan = event.get("actions")
        elif type(number) is int and kind == "back":
            begun.discard(number)
            done.discard(number)
        elif type(number) is int:
            (done if kind == "done" else begun).add(number)
    named = _named(blank, head)._replace(begun=frozenset(begun), done=frozenset(done))
    if plan is None:
        return named._replace(state=state or "prepared")
    return named._replace(state=state or "unfinished", plan=_records(plan))


def _named(blank: Recorded, head: dict[str, Any]) -> Recorded:
    def text(key: str) -> str:
        return str(head.get(key) or "")[:1000]

    return blank._replace(verb=text("verb"), why=text("why"), tool=text("tool"), time=text("time"))


def _object(line: bytes, number: int) -> dict[str, Any]:
    import json

    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise FormatError(f"line {number} of its journal cannot be read")
    return found


def _records(plan: object) -> tuple[dict[str, Any], ...]:
    if not isinstance(plan, list) or not all(isinstance(record, dict) for record in plan):
        raise FormatError("its journal holds no plan")
    return tuple(plan)
