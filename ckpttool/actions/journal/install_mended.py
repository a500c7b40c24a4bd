"""The undoable action that puts a mended file in the place of the damaged one."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Any

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
    recorded,
    same,
    text,
)
from ckpttool.checks.base import quoted
from ckpttool.io.folder import plain_name

if TYPE_CHECKING:
    from ckpttool.io.durable import Progress


class InstallMended(UndoableAction):
    """Puts a finished file from the operation's folder in the place of `name`.

    `made` is the path of the finished file, which lies in the operation's folder. The original gets
    a second name in that folder first, so that nobody ever finds nothing under its own; where the
    file system has no hard links it is moved there, and for a moment nothing is. Where nothing has
    the name, the finished file simply gets it. It gets the original's mode, too. With `freed`, an
    earlier action moves away what has the name now.
    """

    __slots__ = ("aside", "freed", "made", "mended", "mode", "original", "seen")
    kind = "install-mended"

    def __init__(
        self,
        directory: str | os.PathLike[str],
        name: str,
        made: str | os.PathLike[str],
        why: str = "",
        seen: os.stat_result | None = None,
        *,
        freed: bool = False,
    ) -> None:
        super().__init__(directory, name, why)
        self.freed = freed
        self.made = plain_name(os.path.basename(made))
        self.seen = seen
        self.aside = ""
        self.original: Identity | None = None
        self.mended: Identity | None = None
        self.mode: int | None = None

    def describe(self) -> str:
        """`put the mended file in the place of step_….pt`."""
        return f"put the mended file in the place of {self.name}" + (
            f": {self.why}" if self.why else ""
        )

    def facts(self) -> dict[str, Any]:
        """Why."""
        return {"why": self.why}

    def prepare(self, folder: str, taken: set[str]) -> None:
        """Notes which files they are, and syncs the finished one."""
        super().prepare(folder, taken)
        taken.add(self.made)
        with self.places() as places:
            places.aside.sync_file(self.made)
            self.mended = look_at(places.aside, self.made)
            status = places.home.status(self.name)
        if status is not None:
            if not self.freed:
                self.original = Identity.of(status)
            self.mode = stat.S_IMODE(status.st_mode) if stat.S_ISREG(status.st_mode) else None
        if self.seen is not None and not Identity.of(self.seen).is_that_of(self.original):
            raise self.refuse("has changed since it was looked at; run it again")
        self.aside = free_name(self.name, taken)

    def to_record(self) -> dict[str, Any]:
        """Names, and which files they are."""
        files = {"original": self.original, "mended": self.mended}
        return {
            **super().to_record(),
            "made": self.made,
            "aside": self.aside,
            "mode": self.mode,
            **{key: recorded(file) for key, file in files.items()},
        }

    @classmethod
    def from_record(
        cls, directory: str, operation_folder: str, record: dict[str, Any]
    ) -> UndoableAction:
        """The action in a record."""
        name, made = own_name(text(record, "name")), plain_name(text(record, "made"))
        action = cls(directory, name, made, text(record, "why"))
        action.folder = operation_folder
        action.aside = plain_name(text(record, "aside"))
        action.mended = Identity.from_record(record.get("mended"))
        if record.get("original") is not None:
            action.original = Identity.from_record(record["original"])
        mode = record.get("mode")
        action.mode = mode & 0o777 if type(mode) is int else None
        return action

    def note(self) -> dict[str, Any]:
        """Where the original lies."""
        where = {} if self.original is None else {"from": self.path, "lies_in": self.aside}
        size = {} if self.original is None else {"size": self.original.size}
        return {**super().note(), **where, **size}

    def state_in(self, places: Places) -> str:
        """By where both files are."""
        here, kept, made = self._look(places)
        if made is None:
            in_place = _is(self.mended, here) and (self.original is None or kept is not None)
            return AFTER if in_place else FOREIGN
        if kept is None:
            if self.original is None:
                return BEFORE if here is None else BETWEEN if same(here, made) else FOREIGN
            return BEFORE if _is(self.original, here) else FOREIGN
        return BETWEEN if here is None or same(here, kept) or same(here, made) else FOREIGN

    def apply(self, progress: Progress | None = None) -> None:
        """Keeps the original, then lets the finished file replace it in one rename."""
        with self.places() as places:
            state = self.state_in(places)
            if state == FOREIGN:
                raise self.refuse("is no longer the file that was mended")
            if state == BEFORE and self.original is not None:
                self._keep_original(places)
            if state != AFTER:
                self._put(places)
            places.home.sync()
            places.aside.sync()

    def _keep_original(self, places: Places) -> None:
        try:
            places.home.link(self.name, places.aside, self.aside)
        except OSError:  # no hard links here
            places.home.rename(self.name, places.aside, self.aside)
        places.aside.sync()

    def _put(self, places: Places) -> None:
        here, kept, made = self._look(places)
        if same(here, made):
            places.aside.remove(self.made)  # taking it back had begun
            return
        if self.mode is not None:
            places.aside.change_mode(self.made, self.mode)
        if here is None:
            places.aside.move(self.made, places.home, self.name)
        elif same(here, kept):
            places.aside.rename(self.made, places.home, self.name)

    def revert(self) -> None:
        """Keeps the finished file in the folder, and lets the original replace it in one rename."""
        with self.places() as places:
            state = self.state_in(places)
            if state == FOREIGN:
                raise self.refuse("is no longer the file that was put there")
            if state == AFTER:
                self._keep_mended(places)
            if state != BEFORE:
                self._put_back(places)
            places.home.sync()
            places.aside.sync()

    def _keep_mended(self, places: Places) -> None:
        try:
            places.home.link(self.name, places.aside, self.made)
        except OSError:
            places.home.rename(self.name, places.aside, self.made)
        places.aside.sync()

    def _put_back(self, places: Places) -> None:
        here, kept, made = self._look(places)
        if kept is None:
            if same(here, made):
                places.home.remove(self.name)
        elif same(here, kept):
            places.home.sync()
            places.aside.remove(self.aside)
        elif here is None:
            places.aside.move(self.aside, places.home, self.name)
        else:
            places.aside.rename(self.aside, places.home, self.name)

    def obstacle(self, places: Places, ahead: dict[str, Identity | None]) -> str | None:
        """Another file in the place, or one that was changed where it lay."""
        here, kept, made = self._look(places)
        here = look_ahead(places, self.name, ahead)
        ahead[self.name] = self.original
        if self.original is not None and kept is None:
            found = _is(self.original, here)
            return None if found else "the original is gone from the folder"
        ours = here is None or same(here, kept) or same(here, made) or _is(self.mended, here)
        if here is None and made is None:
            lies = os.path.join(places.aside.path, self.aside)
            back = f"mv -n -- {quoted(lies)} {quoted(self.path)}"
            return "the mended file is not there any more" + (
                f"; by hand: {back}" if kept is not None else ""
            )
        return None if ours else "another file has this name by now, or it was written over"

    def _look(self, places: Places) -> tuple[Identity | None, Identity | None, Identity | None]:
        """What has the name; the original and the finished file, where they lie in the folder."""
        kept = look_at(places.aside, self.aside)
        made = look_at(places.aside, self.made)
        return (
            look_at(places.home, self.name),
            kept if _is(self.original, kept) else None,
            made if _is(self.mended, made) else None,
        )


def _is(identity: Identity | None, found: Identity | None) -> bool:
    return identity is not None and identity.is_that_of(found)
