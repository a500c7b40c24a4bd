"""The undoable actions: setting aside, publishing, changing a mode; and those of other files."""

from __future__ import annotations

import os
import stat
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ckpttool.actions.journal.install_mended import InstallMended
from ckpttool.actions.journal.move_pointer import MovePointer
from ckpttool.actions.journal.undoable import (
    AFTER,
    BEFORE,
    BETWEEN,
    FOREIGN,
    Identity,
    Places,
    UndoableAction,
    free_name,
    look_ahead,
    look_at,
    own_name,
    same,
    text,
)
from ckpttool.checks.base import quoted
from ckpttool.errors import FormatError
from ckpttool.io.folder import plain_name
from ckpttool.model.directory import size_of_directory
from ckpttool.model.names import MANIFEST_NAME, parse_step_directory_name

if TYPE_CHECKING:
    from ckpttool.io.durable import Progress

__all__ = ["ChangeMode", "InstallMended", "MovePointer", "PublishTemporary", "SetAside"]

_PERMISSIONS = 0o777


class SetAside(UndoableAction):
    """Moves an entry of any kind into the operation's folder: name, mode and times stay.

    `seen` is what `lstat` said of the file that was judged; another one is not moved.
    """

    __slots__ = ("aside", "facts_known", "identity", "seen")
    kind = "set-aside"

    def __init__(
        self,
        directory: str | os.PathLike[str],
        name: str,
        why: str,
        seen: os.stat_result | None = None,
    ) -> None:
        super().__init__(directory, name, why)
        self.seen = seen
        self.aside = ""
        self.identity: Identity | None = None
        self.facts_known: dict[str, Any] = {}

    def describe(self) -> str:
        """`set step_000000000008.pt aside: why`."""
        return f"set {self.name} aside" + (f": {self.why}" if self.why else "")

    def facts(self) -> dict[str, Any]:
        """Why, and how many bytes."""
        return {"why": self.why, "size": self.identity and self.identity.size}

    def prepare(self, folder: str, taken: set[str]) -> None:
        """Notes which file it is. RefusedError where it is not the one that was judged."""
        super().prepare(folder, taken)
        status = self.look()
        self.identity = Identity.of(status)
        if self.seen is not None and not Identity.of(self.seen).is_that_of(self.identity):
            raise self.refuse("has changed since it was looked at; run it again")
        self.aside = free_name(self.name, taken)
        self.facts_known = _what_is_known(self.path, status)

    def to_record(self) -> dict[str, Any]:
        """Name, the name in the folder, and which file it is."""
        return {
            **super().to_record(),
            "aside": self.aside,
            "file": self.identity._asdict() if self.identity else None,
        }

    @classmethod
    def from_record(
        cls, directory: str, operation_folder: str, record: dict[str, Any]
    ) -> UndoableAction:
        """The action in a record."""
        action = cls(directory, own_name(text(record, "name")), text(record, "why"))
        action.folder = operation_folder
        action.aside = plain_name(text(record, "aside"))
        action.identity = Identity.from_record(record.get("file"))
        return action

    def note(self) -> dict[str, Any]:
        """Where from, how large, when, and its SHA-256 where that is known."""
        return {**super().note(), "from": self.path, "lies_in": self.aside, **self.facts_known}

    def state_in(self, places: Places) -> str:
        """By where the file is."""
        here, there = look_at(places.home, self.name), look_at(places.aside, self.aside)
        if there is None:
            return BEFORE if self._is_it(here) else FOREIGN
        if not self._is_it(there):
            return FOREIGN
        return BETWEEN if same(here, there) else AFTER

    def apply(self, progress: Progress | None = None) -> None:
        """One rename; both folders are synced."""
        with self.places() as places:
            state = self.state_in(places)
            if state == FOREIGN:
                raise self.refuse("is no longer the file that was to be set aside")
            if state == BETWEEN:
                places.aside.sync()
                places.home.remove(self.name)
            elif state == BEFORE:
                places.home.rename(self.name, places.aside, self.aside)
            places.aside.sync()
            places.home.sync()

    def revert(self) -> None:
        """Moves it back, unless another file has its name by now: then RefusedError."""
        with self.places() as places:
            if look_at(places.aside, self.aside) is None:
                return
            if obstacle := self.obstacle(places, {}):
                raise self.refuse(obstacle)
            places.aside.move(self.aside, places.home, self.name)

    def obstacle(self, places: Places, ahead: dict[str, Identity | None]) -> str | None:
        """A file that has the name by now, or one that was changed where it lay."""
        there = look_at(places.aside, self.aside)
        if there is None:
            return None if self._is_it(look_ahead(places, self.name, ahead)) else "is gone"
        if not self._is_it(there):
            lies = os.path.join(places.aside.path, self.aside)
            back = f"mv -n -- {quoted(lies)} {quoted(self.path)}"
            return f"its time or size has changed since it was set aside; by hand: {back}"
        here = look_ahead(places, self.name, ahead)
        ahead[self.name] = there
        if here is None or same(here, there):
            return None
        return "another file has this name by now"

    def _is_it(self, found: Identity | None) -> bool:
        return self.identity is not None and self.identity.is_that_of(found)


class PublishTemporary(UndoableAction):
    """Gives a writer's whole temporary the name that it was to have, never over another file."""

    __slots__ = ("identity", "target")
    kind = "publish-temporary"

    def __init__(
        self, directory: str | os.PathLike[str], temporary_name: str, target: str, why: str = ""
    ) -> None:
        super().__init__(directory, temporary_name, why)
        self.target = own_name(target)
        self.identity: Identity | None = None

    def describe(self) -> str:
        """`publish .step_….pt.tmp-4711 as step_….pt`."""
        return f"publish {self.name} as {self.target}" + (f": {self.why}" if self.why else "")

    def facts(self) -> dict[str, Any]:
        """The name that it gets, and why."""
        return {"target": self.target, "why": self.why}

    def prepare(self, folder: str, taken: set[str]) -> None:
        """Notes which file it is."""
        super().prepare(folder, taken)
        status = self.look()
        if parse_step_directory_name(self.target) is None:
            if not stat.S_ISREG(status.st_mode):
                raise self.refuse("is not a regular file")
        elif not stat.S_ISDIR(status.st_mode):
            raise self.refuse("is not a directory")
        self.identity = Identity.of(status)

    def to_record(self) -> dict[str, Any]:
        """Both names, and which file it is."""
        return {
            **super().to_record(),
            "target": self.target,
            "file": self.identity._asdict() if self.identity else None,
        }

    @classmethod
    def from_record(
        cls, directory: str, operation_folder: str, record: dict[str, Any]
    ) -> UndoableAction:
        """The action in a record."""
        names = own_name(text(record, "name")), own_name(text(record, "target"))
        action = cls(directory, *names, text(record, "why"))
        action.folder = operation_folder
        action.identity = Identity.from_record(record.get("file"))
        return action

    def state_in(self, places: Places) -> str:
        """By which of the two names the file has."""
        here, there = look_at(places.home, self.name), look_at(places.home, self.target)
        if self._is_it(here):
            return BETWEEN if same(here, there) else BEFORE
        return AFTER if self._is_it(there) else FOREIGN

    def apply(self, progress: Progress | None = None) -> None:
        """Syncs its content, which its writer may not have done, and moves it."""
        with self.places() as places:
            state = self.state_in(places)
            if state == FOREIGN:
                raise self.refuse("is no longer the file that was to be published")
            if state != AFTER:
                places.home.sync_tree(self.name)
                places.home.move(self.name, places.home, self.target)

    def revert(self) -> None:
        """Gives it the temporary's name again."""
        with self.places() as places:
            state = self.state_in(places)
            if state == FOREIGN:
                raise self.refuse(f"{self.target} is no longer the file that was published")
            if state != BEFORE:
                places.home.move(self.target, places.home, self.name)

    def obstacle(self, places: Places, ahead: dict[str, Identity | None]) -> str | None:
        """Another file under either name."""
        here, there = (look_ahead(places, name, ahead) for name in (self.name, self.target))
        if self._is_it(there):
            ahead[self.target], ahead[self.name] = None, there
            taken = here is not None and not same(here, there)
            return "another file has this name by now" if taken else None
        return None if self._is_it(here) else f"{self.target} has been replaced since"

    def _is_it(self, found: Identity | None) -> bool:
        return self.identity is not None and self.identity.is_that_of(found)


class ChangeMode(UndoableAction):
    """Sets the permission bits of a regular file; `old` and `new` are within 0o777."""

    __slots__ = ("new", "old")
    kind = "change-mode"

    def __init__(
        self, directory: str | os.PathLike[str], name: str, old: int, new: int, why: str = ""
    ) -> None:
        super().__init__(directory, name, why)
        if not (0 <= old <= _PERMISSIONS and 0 <= new <= _PERMISSIONS):
            raise FormatError(f"not permission bits: {old:o}, {new:o}")
        self.old = old
        self.new = new

    def describe(self) -> str:
        """`change the mode of step_….pt from 0666 to 0644`."""
        words = f"change the mode of {self.name} from {self.old:04o} to {self.new:04o}"
        return words + (f": {self.why}" if self.why else "")

    def facts(self) -> dict[str, Any]:
        """Old and new mode, in octal digits."""
        return {"old": f"{self.old:04o}", "new": f"{self.new:04o}", "why": self.why}

    def to_record(self) -> dict[str, Any]:
        """Name and both modes."""
        return {**super().to_record(), "old": self.old, "new": self.new}

    @classmethod
    def from_record(
        cls, directory: str, operation_folder: str, record: dict[str, Any]
    ) -> UndoableAction:
        """The action in a record."""
        old, new = record.get("old"), record.get("new")
        if type(old) is not int or type(new) is not int:
            raise FormatError("a change of mode in the journal has no modes")
        action = cls(directory, own_name(text(record, "name")), old, new, text(record, "why"))
        action.folder = operation_folder
        return action

    def state_in(self, places: Places) -> str:
        """By the mode that the file has."""
        status = places.home.status(self.name)
        if status is None or not stat.S_ISREG(status.st_mode):
            return FOREIGN
        mode = stat.S_IMODE(status.st_mode)
        return AFTER if mode == self.new else BEFORE if mode == self.old else FOREIGN

    def apply(self, progress: Progress | None = None) -> None:
        """Sets the new mode, where the old one is set."""
        self._change(BEFORE, self.new)

    def revert(self) -> None:
        """Sets the old mode, where the new one is set."""
        self._change(AFTER, self.old)

    def obstacle(self, places: Places, ahead: dict[str, Identity | None]) -> str | None:
        """A mode that is neither. A file that is gone needs none."""
        if self.name in ahead or places.home.status(self.name) is None:
            return None
        return "has another mode by now" if self.state_in(places) == FOREIGN else None

    def _change(self, only_in: str, mode: int) -> None:
        with self.places() as places:
            state = self.state_in(places)
            if state == FOREIGN and (only_in == BEFORE or places.home.status(self.name)):
                raise self.refuse("has another mode by now, or is gone")
            if state == only_in:
                places.home.change_mode(self.name, mode)
                places.home.sync()


def _what_is_known(path: str, status: os.stat_result) -> dict[str, Any]:
    """What the note says of a file that is set aside."""
    is_directory = stat.S_ISDIR(status.st_mode)
    facts = {
        "size": size_of_directory(path) if is_directory else status.st_size,
        "mode": f"{stat.S_IMODE(status.st_mode):04o}",
        "mtime_ns": status.st_mtime_ns,
    }
    sha256 = None if is_directory else _known_sha256(path)
    return facts if sha256 is None else {**facts, "sha256": sha256}


def _known_sha256(path: str) -> str | None:
    """`model.manifest.known_sha256`, with the manifest read once for all files of an operation."""
    from ckpttool.model.manifest import pointer_record

    directory, name = os.path.split(path)
    directory = directory or os.curdir
    recorded = pointer_record(directory, name)
    if recorded is not None and recorded.sha256 is not None:
        return recorded.sha256
    try:
        status = os.lstat(os.path.join(directory, MANIFEST_NAME))
    except OSError:
        return None
    stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    return _sha256_by_name(directory, stamp).get(name)


@lru_cache(maxsize=1)
def _sha256_by_name(directory: str, stamp: tuple[int, ...]) -> dict[str, str]:
    """What the manifest records; `stamp` tells one version of it from another."""
    from ckpttool.model.manifest import read_manifest

    entries = read_manifest(directory).entries
    return {name: entry.sha256 for name, entry in entries.items() if entry.sha256 is not None}
