"""Actions that can be finished, or taken back, from any state in which a kill can leave them.

None of them trusts what the journal says of how far it came: each looks at the disk. For that the
plan holds, of every file that it moves, what tells it from another (`Identity`).
"""

from __future__ import annotations

import os
import stat
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.actions.plan import Action
from ckpttool.errors import FormatError, RefusedError, UnreadableError
from ckpttool.io.folder import Folder, plain_name
from ckpttool.model.names import LOCK_NAME, QUARANTINE_NAME
from ckpttool.model.operations import JOURNAL_NAME, NOTE_NAME

if TYPE_CHECKING:
    from ckpttool.io.durable import Progress

BEFORE, AFTER, BETWEEN, FOREIGN = "before", "after", "between", "foreign"

_KINDS = {stat.S_IFREG: "file", stat.S_IFLNK: "link", stat.S_IFDIR: "directory"}


class Identity(NamedTuple):
    """What tells a file from another, wherever in its file system it is moved to.

    Sizes are in bytes, times in nanoseconds. A regular file is the same as long as its size and its
    time agree, as far as the coarser of the two file systems keeps it: one that was written over in
    place still has its inode number. Of a link or a folder the number or the time has to agree.
    """

    kind: str
    ino: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Identity:
        """The identity of what `lstat` was asked about."""
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "special")
        return cls(kind, status.st_ino, status.st_size, status.st_mtime_ns)

    @classmethod
    def from_record(cls, record: object) -> Identity:
        """The identity in a journal. Raises FormatError."""
        if not isinstance(record, dict):
            raise FormatError("a file's identity is missing")
        kind = record.get("kind")
        numbers = [n for n in map(record.get, cls._fields[1:]) if type(n) is int]
        if not isinstance(kind, str) or len(numbers) != 3:
            raise FormatError("a file's identity is malformed")
        return cls(kind, *numbers)

    def is_that_of(self, other: Identity | None) -> bool:
        """Whether both are the same file."""
        if other is None or self.kind != other.kind:
            return False
        if self.kind == "directory":  # its size follows from what is in it, and from the system
            return self.ino == other.ino or self.mtime_ns == other.mtime_ns
        if self.size != other.size:
            return False
        if self.kind == "file":
            return _is_one_time(self.mtime_ns, other.mtime_ns)
        return self.ino == other.ino or self.mtime_ns == other.mtime_ns


# How exactly file systems keep a time, in nanoseconds: NTFS, NFS, and down to FAT.
_KEPT_NS = (100, 1_000, 1_000_000, 1_000_000_000, 2_000_000_000)


def _is_one_time(one: int, other: int) -> bool:
    """Whether two times are the same, or one is the other as it was kept less exactly."""
    low, high = min(one, other), max(one, other)
    return low == high or any(high - high % kept == low for kept in _KEPT_NS)


def alike(identities: Iterable[Identity]) -> set[Identity]:
    """Those that nothing but their numbers tells from another of them."""
    found: set[Identity] = set()
    seen: dict[tuple[str, int, int], list[Identity]] = {}
    for one in identities:
        seen.setdefault((one.kind, one.size, one.mtime_ns), []).append(one)
    for (kind, size, time), same_time in seen.items():
        coarser = {time - time % kept for kept in _KEPT_NS} - {time}
        others = [other for at in coarser for other in seen.get((kind, size, at), [])]
        if others or len(same_time) > 1:
            found.update(others, same_time)
    return found


def look_at(folder: Folder, name: str) -> Identity | None:
    """What has this name in a folder, None where nothing has."""
    status = folder.status(name)
    return None if status is None else Identity.of(status)


def recorded(identity: Identity | None) -> dict[str, Any] | None:
    """An identity as `Identity.from_record` takes it."""
    return None if identity is None else identity._asdict()


def same(one: Identity | None, other: Identity | None) -> bool:
    """Whether both are one file under two names of one file system."""
    return one is not None and other is not None and one.ino == other.ino


class Places(NamedTuple):
    """The two folders between which files are moved: the directory, and the operation's own."""

    home: Folder
    aside: Folder


def look_ahead(places: Places, name: str, ahead: dict[str, Identity | None]) -> Identity | None:
    """What the directory will hold under this name: see `UndoableAction.obstacle`."""
    return ahead[name] if name in ahead else look_at(places.home, name)


class UndoableAction(Action):
    """One small change in a directory that can be taken back.

    `name` is the entry that it changes, `why` the reason in words. `folder` is that of the
    operation, once `prepare` has been called or the action was read from a journal. `apply` and
    `revert` do what is left to do, nothing where that is nothing, and are durable when they return.
    They raise RefusedError where the disk is not as planned, OSError where the system refuses.
    """

    __slots__ = ("directory", "folder", "name", "why")

    def __init__(self, directory: str | os.PathLike[str], name: str, why: str = "") -> None:
        self.directory = os.fspath(directory)
        self.name = own_name(name)
        self.why = why
        self.folder: str | None = None
        super().__init__(os.path.join(self.directory, name))

    def prepare(self, folder: str, taken: set[str]) -> None:
        """Looks at the files and notes what `to_record` needs. `taken` are names in the folder.

        Raises UnreadableError for a file that is gone.
        """
        self.folder = folder

    def to_record(self) -> dict[str, Any]:
        """All that it takes to finish it or take it back, as plain data for the journal."""
        return {"kind": self.kind, "name": self.name, "why": self.why}

    @classmethod
    @abstractmethod
    def from_record(
        cls, directory: str, operation_folder: str, record: dict[str, Any]
    ) -> UndoableAction:
        """The action in a record; `self` of subclasses. Raises FormatError for a bad one."""

    @abstractmethod
    def apply(self, progress: Progress | None = None) -> None:
        """Makes the change, or the rest of it."""

    @abstractmethod
    def revert(self) -> None:
        """Takes the change back, or the part of it that was made."""

    def state(self) -> str:
        """`before`, `after`, `between`; `foreign` where the disk is not as the plan says."""
        with self.places() as places:
            return self.state_in(places)

    @abstractmethod
    def state_in(self, places: Places) -> str:
        """`state`, in folders that are open."""

    @abstractmethod
    def obstacle(self, places: Places, ahead: dict[str, Identity | None]) -> str | None:
        """What stands in the way of `revert`, in words. Changes nothing on disk.

        `ahead` says what names will hold when its turn comes, where actions after it are to be
        taken back first; it adds what its own taking back will make of them.
        """

    def note(self) -> dict[str, Any]:
        """What the operation's note says of it."""
        return {"action": self.describe(), "name": self.name, "why": self.why}

    @contextmanager
    def places(self) -> Iterator[Places]:
        """Opens the directory and the operation's folder in it."""
        assert self.folder is not None, "not prepared"
        id = os.path.basename(self.folder)
        with (
            Folder(self.directory) as home,
            home.enter(QUARANTINE_NAME) as quarantine,
            quarantine.enter(id) as aside,
        ):
            yield Places(home, aside)

    def refuse(self, words: str) -> RefusedError:
        """The error for a disk that is not as the plan says."""
        return RefusedError(f"{self.path}: {words}")

    def look(self) -> os.stat_result:
        """What `lstat` says of the entry. UnreadableError where it is gone."""
        with Folder(self.directory) as home:
            status = home.status(self.name)
        if status is None:
            raise UnreadableError(self.path, "is gone")
        return status


def own_name(name: object) -> str:
    """A name that an action may change: one component, and not what keeps the books.

    Raises FormatError, so that no journal can lead elsewhere.
    """
    plain = plain_name(name)
    if plain in (QUARANTINE_NAME, LOCK_NAME):
        raise FormatError(f"no action may change {plain}")
    return plain


def free_name(name: str, taken: set[str]) -> str:
    """The name under which a file lies in the operation's folder; it is taken from now on."""
    candidate, number = name, 1
    while candidate in taken or candidate in (JOURNAL_NAME, NOTE_NAME):
        number += 1
        candidate = f"{name}~{number}"
    taken.add(candidate)
    return candidate


def text(record: dict[str, Any], key: str) -> str:
    """A text in a record. Raises FormatError."""
    value = record.get(key)
    if not isinstance(value, str):
        raise FormatError(f"an action in the journal has no {key}")
    return value
