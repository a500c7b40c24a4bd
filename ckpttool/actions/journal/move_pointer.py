"""The undoable action that moves the pointer."""

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
    same,
    text,
)
from ckpttool.errors import FormatError
from ckpttool.io.folder import plain_name
from ckpttool.model.names import POINTER_NAME
from ckpttool.model.pointer import POINTER_BYTES

if TYPE_CHECKING:
    from ckpttool.io.durable import Progress


class MovePointer(UndoableAction):
    """Replaces the pointer's content `old` (None: there is no pointer) by `new`.

    The old pointer itself is kept in the operation's folder, so that taking it back restores the
    very file. The new one gets its mode. A pointer that is no regular file has to be set aside
    first.
    """

    __slots__ = ("aside", "new", "old")
    kind = "move-pointer"

    def __init__(
        self, directory: str | os.PathLike[str], old: bytes | None, new: bytes, why: str = ""
    ) -> None:
        super().__init__(directory, POINTER_NAME, why)
        if old == new or max(len(old or b""), len(new)) > POINTER_BYTES:
            raise ValueError("the new pointer must differ from the old one, and be of a sane size")
        self.old = old
        self.new = new
        self.aside = ""

    def describe(self) -> str:
        """`write latest.json: step 6, step_000000000006.pt`."""
        words = f"write {POINTER_NAME}: {_words(self.new)}"
        return words + (f": {self.why}" if self.why else "")

    def facts(self) -> dict[str, Any]:
        """What the pointer says afterwards."""
        content = _content(self.new)
        return {"step": content.get("step"), "file": content.get("file"), "why": self.why}

    def prepare(self, folder: str, taken: set[str]) -> None:
        """Picks the names in the folder."""
        super().prepare(folder, taken)
        self.aside = free_name(POINTER_NAME, taken)
        taken.add(self._fresh)

    def to_record(self) -> dict[str, Any]:
        """Both contents."""
        from base64 import b64encode

        def encoded(data: bytes | None) -> str | None:
            return None if data is None else b64encode(data).decode("ascii")

        contents = {"old": encoded(self.old), "new": encoded(self.new)}
        return {**super().to_record(), "aside": self.aside, **contents}

    @classmethod
    def from_record(
        cls, directory: str, operation_folder: str, record: dict[str, Any]
    ) -> UndoableAction:
        """The action in a record."""
        old = None if record.get("old") is None else _decoded(text(record, "old"))
        try:
            action = cls(directory, old, _decoded(text(record, "new")), text(record, "why"))
        except ValueError as error:
            raise FormatError(str(error)) from None
        action.folder = operation_folder
        action.aside = plain_name(text(record, "aside"))
        return action

    def note(self) -> dict[str, Any]:
        """Where the old pointer lies."""
        lies = {} if self.old is None else {"from": self.path, "lies_in": self.aside}
        return {**super().note(), **lies}

    def state_in(self, places: Places) -> str:
        """By what the pointer says."""
        try:
            now = places.home.read(POINTER_NAME, POINTER_BYTES)
        except OSError:
            return FOREIGN
        if now == self.new:
            return AFTER
        if now != self.old:
            return FOREIGN
        here, kept = look_at(places.home, POINTER_NAME), look_at(places.aside, self.aside)
        return BETWEEN if same(here, kept) else BEFORE

    def apply(self, progress: Progress | None = None) -> None:
        """Keeps the old pointer, then replaces it in one rename."""
        with self.places() as places:
            state = self.state_in(places)
            if state == FOREIGN:
                raise self.refuse("has changed since it was read; run it again")
            if state != AFTER:
                if state == BEFORE and self.old is not None:
                    self._keep(places)
                self._write(places, self.new)
            places.aside.remove(self._fresh)  # its second name, where a kill left it one
            places.home.sync()

    def revert(self) -> None:
        """Lets the old pointer replace the new one in one rename."""
        with self.places() as places:
            state = self.state_in(places)
            if state == FOREIGN:
                raise self.refuse("has changed since")
            if state == AFTER:
                self._bring_back(places)
            elif state == BETWEEN:
                places.aside.remove(self.aside)
            places.home.sync()
            places.aside.sync()

    def obstacle(self, places: Places, ahead: dict[str, Identity | None]) -> str | None:
        """A pointer that says something else by now."""
        if POINTER_NAME not in ahead and self.state_in(places) == FOREIGN:
            return "names something else by now"
        kept = look_at(places.aside, self.aside)
        here = look_ahead(places, POINTER_NAME, ahead)
        ahead[POINTER_NAME] = None if self.old is None else kept or here
        return None

    def _keep(self, places: Places) -> None:
        try:
            places.home.link(POINTER_NAME, places.aside, self.aside)
        except OSError:
            # No hard links here, or a copy is there already from a try that was killed.
            places.aside.write_new(self.aside, self.old or b"")
        places.aside.sync()

    def _write(self, places: Places, content: bytes) -> None:
        old = places.home.status(POINTER_NAME)
        mode = None if old is None else stat.S_IMODE(old.st_mode)
        places.aside.write_new(self._fresh, content, mode)
        self._refuse_moved(places)  # syncing took time, and not every trainer keeps the lock
        if old is None:
            places.aside.move(self._fresh, places.home, POINTER_NAME)
        else:
            places.aside.rename(self._fresh, places.home, POINTER_NAME)

    def _refuse_moved(self, places: Places) -> None:
        if places.home.read(POINTER_NAME, POINTER_BYTES) not in (self.old, self.new):
            raise self.refuse("has changed since it was read; run it again")

    def _bring_back(self, places: Places) -> None:
        if self.old is None:
            places.aside.remove(self._fresh)  # a rename between two names of one file does nothing
            places.home.rename(POINTER_NAME, places.aside, self._fresh)
        elif self._kept_is_whole(places):
            places.aside.rename(self.aside, places.home, POINTER_NAME)
        else:
            self._write(places, self.old)

    def _kept_is_whole(self, places: Places) -> bool:
        try:
            return places.aside.read(self.aside, POINTER_BYTES) == self.old
        except OSError:
            return False

    @property
    def _fresh(self) -> str:
        return f"{self.aside}.new"


def _decoded(text: str) -> bytes:
    from base64 import b64decode

    try:
        return b64decode(text, validate=True)
    except ValueError:
        raise FormatError("a pointer in the journal is no base64") from None


def _content(data: bytes) -> dict[str, Any]:
    import json

    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _words(data: bytes) -> str:
    content = _content(data)
    return f"step {content.get('step')}, {content.get('file')}"
