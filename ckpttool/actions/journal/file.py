"""The folder of an operation and the journal in it, as they are written.

What they hold tells `ckpttool.model.operations`, which reads them.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ckpttool.errors import CkptToolError
from ckpttool.io.durable import write_error
from ckpttool.io.folder import Folder, write_all
from ckpttool.model.names import QUARANTINE_NAME
from ckpttool.model.operations import (
    JOURNAL_NAME,
    MOST_JOURNAL_BYTES,
    NOTE_NAME,
    SCHEMA,
    id_order,
    is_id,
    whole_length,
)

if TYPE_CHECKING:
    from ckpttool.actions.journal.undoable import UndoableAction


class Journal:
    """The journal of an operation, open for more lines. Get it from `open_journal`."""

    __slots__ = ("_descriptor", "_length", "_own_length", "path")

    def __init__(self, path: str, descriptor: int, whole: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._own_length = whole
        self._length = os.fstat(descriptor).st_size

    def append(self, event: str, **facts: Any) -> None:
        """Adds a line about what happens now, and syncs it. Raises WriteError."""
        self.append_line({"event": event, **facts, "time": now_text()})

    def append_line(self, line: dict[str, Any]) -> None:
        """Adds a line and syncs it. Raises WriteError, and then leaves no part of it."""
        import json

        data = json.dumps(line).encode("ascii") + b"\n"
        try:
            if self._length != self._own_length:  # a part of a line, whose writer died or failed
                os.ftruncate(self._descriptor, self._own_length)
            self._length = -1
            write_all(self._descriptor, data)
            os.fsync(self._descriptor)
        except OSError as error:
            raise write_error(self.path, error) from error
        self._own_length += len(data)
        self._length = self._own_length


@contextmanager
def open_folder(directory: str, id: str) -> Iterator[tuple[Folder, Folder, Folder]]:
    """The directory, its `.quarantine`, and an operation's folder in it, held open by name."""
    with (
        Folder(directory) as home,
        home.enter(QUARANTINE_NAME) as quarantine,
        quarantine.enter(id) as folder,
    ):
        yield home, quarantine, folder


@contextmanager
def open_journal(directory: str, id: str) -> Iterator[Journal]:
    """The journal of an operation, made if missing. OSError becomes WriteError."""
    try:
        with open_folder(directory, id) as (_, _, folder):
            data = folder.read(JOURNAL_NAME, MOST_JOURNAL_BYTES) or b""
            descriptor = folder.appender(JOURNAL_NAME)
            try:
                path = os.path.join(folder.path, JOURNAL_NAME)
                yield Journal(path, descriptor, whole_length(data))
            finally:
                os.close(descriptor)
    except OSError as error:
        raise in_words(os.path.join(directory, QUARANTINE_NAME, id), error) from error


def make_folder(directory: str) -> str:
    """Makes the folder of a new operation, durably, and gives its id. Raises WriteError."""
    try:
        with Folder(directory) as home:
            if home.status(QUARANTINE_NAME) is None:
                home.make(QUARANTINE_NAME)
            with home.enter(QUARANTINE_NAME) as quarantine:
                id = _new_id(quarantine.names())
                quarantine.make(id)
                return id
    except OSError as error:
        raise in_words(os.path.join(directory, QUARANTINE_NAME), error) from error


def _new_id(names: list[str]) -> str:
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    # Even when the clock was set back, the newest operation has the highest id.
    last, number = max((id_order(name) for name in names if is_id(name)), default=("", 0))
    return now if now > last else f"{last}-{number + 1}"


def remove_if_bare(directory: str, id: str) -> None:
    """Removes the folder of an operation that has changed nothing, if nothing else lies in it."""
    try:
        remove_bare(directory, id)
    except OSError:
        return


def remove_bare(directory: str, id: str) -> None:
    """Removes an operation's folder in which only its journal and its note are left.

    `.quarantine` goes as well once it is empty. Raises OSError.
    """
    with open_folder(directory, id) as (home, quarantine, folder):
        others = set(folder.names()) - {JOURNAL_NAME, NOTE_NAME}
        if others:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), folder.path)
        folder.remove(NOTE_NAME)
        folder.remove(JOURNAL_NAME)
        quarantine.remove_folder(id)
        quarantine.sync()
        if not quarantine.names():
            home.remove_folder(QUARANTINE_NAME)


def head_line(
    directory: str, verb: str, why: str, records: list[dict[str, Any]] | None
) -> dict[str, Any]:
    """The first line of a journal."""
    status = os.stat(directory)
    where = {"path": os.path.abspath(directory), "dev": status.st_dev, "ino": status.st_ino}
    return {
        "schema": SCHEMA,
        "verb": verb,
        "why": why,
        "tool": _tool(),
        "time": now_text(),
        "directory": where,
        "actions": records,
    }


def write_note(
    directory: str, id: str, verb: str, why: str, actions: Sequence[UndoableAction]
) -> None:
    """Writes `note.json` for whoever finds the folder, durably. Raises WriteError."""
    import json

    from ckpttool.checks.base import command

    where = os.path.abspath(directory)
    note = {
        "what": f"files that `ckpttool {verb}` set aside, and how to get them back",
        "operation": id,
        "verb": verb,
        "why": why,
        "tool": _tool(),
        "time": now_text(),
        "directory": where,
        "actions": [action.note() for action in actions],
        "take_back": command("undo", where, id),
        "delete_for_good": command("purge", where, id),
    }
    try:
        with open_folder(directory, id) as (_, _, folder):
            folder.write_new(NOTE_NAME, (json.dumps(note, indent=2) + "\n").encode("ascii"))
            folder.sync()
    except OSError as error:
        raise in_words(os.path.join(directory, QUARANTINE_NAME, id, NOTE_NAME), error) from error


def sync_folder(directory: str, id: str) -> None:
    """Makes the names in an operation's folder durable. Raises WriteError."""
    try:
        with open_folder(directory, id) as (_, _, folder):
            folder.sync()
    except OSError as error:
        raise in_words(os.path.join(directory, QUARANTINE_NAME, id), error) from error


def now_text() -> str:
    """The time in UTC: `2026-11-29T19:40:42Z`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def in_words(path: str, error: OSError) -> OSError:
    """An error of this package's own as it is, any other as a WriteError about `path`."""
    return error if isinstance(error, CkptToolError) else write_error(path, error)


def _tool() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"ckpttool {version('ckpttool')}"
    except PackageNotFoundError:
        return "ckpttool"
