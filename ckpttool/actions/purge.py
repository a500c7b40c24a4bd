"""Deletes for good what operations have set aside, and nothing else."""

from __future__ import annotations

import os
import stat
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.actions.journal.file import in_words, open_folder, open_journal, remove_bare
from ckpttool.actions.journal.operations import Operation, history
from ckpttool.errors import RefusedError, UnreadableError
from ckpttool.model.operations import JOURNAL_NAME, SetAside, id_order, what_is_set_aside

if TYPE_CHECKING:
    from collections.abc import Collection

_DAY = 86400
_STAYS = {
    "unfinished": "was not finished: finish it or take it back first",
    "taking-back": "was not wholly taken back: `ckpttool undo` does that",
    "damaged": "has no journal that can be read: look at its files; named by its ID it is deleted",
}


class Going(NamedTuple):
    """An operation that is about to be deleted, and what its folder holds."""

    operation: Operation
    aside: SetAside

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        operation = self.operation
        return {
            "id": operation.id,
            "verb": operation.verb,
            "state": operation.state,
            "files": self.aside.names,
            "nbytes": self.aside.nbytes,
        }


class PurgePlan(NamedTuple):
    """What `purge` is about to delete, oldest first, and what stays though it was asked for."""

    path: str
    going: list[Going]
    staying: list[Operation]

    @property
    def frees(self) -> int:
        """How many bytes it gives back, by the files' sizes."""
        return sum(one.aside.nbytes for one in self.going)


def why_it_stays(operation: Operation, *, named: bool = False) -> str | None:
    """Why an operation can't be deleted, in words; None where it can. `named`: by its ID."""
    if named and operation.state == "damaged":
        return None
    return _STAYS.get(operation.state)


def plan_purge(
    path: str, ids: Collection[str] = (), *, older_than_days: float | None = None
) -> PurgePlan:
    """Plans to delete these operations of the directory `path`, or all; only older ones if asked.

    Raises UnreadableError for an id that is not there, RefusedError for one that may not be
    deleted. One whose journal can't be read has to be named.
    """
    found = history(path)
    known = {operation.id: operation for operation in found}
    for id in ids:
        if id not in known:
            raise UnreadableError(path, f"there is no operation {id[:80]}")
        if words := why_it_stays(known[id], named=True):
            raise RefusedError(f"{id} {words}")
    chosen = [one for one in found if not ids or one.id in ids]
    if older_than_days is not None:
        chosen = [one for one in chosen if _age_in_days(one.id) >= older_than_days]
    going = [one for one in chosen if why_it_stays(one, named=bool(ids)) is None]
    staying = [one for one in chosen if why_it_stays(one, named=bool(ids)) is not None]
    return PurgePlan(path, [Going(one, _look(one)) for one in going], staying)


def purge(operation: Operation) -> None:
    """Deletes an operation's folder with everything in it, a damaged one too. Raises WriteError.

    Killed on the way it leaves an operation that can only be purged, not taken back.
    """
    where, id = operation.directory, operation.id
    if words := why_it_stays(operation, named=True):
        raise RefusedError(f"{id} {words}")
    if operation.recorded.time and operation.state != "purging":
        with open_journal(where, id) as journal:
            journal.append("purging")
    try:
        with open_folder(where, id) as (_, _, folder):
            for name in folder.names():
                # The journal goes last: without it nobody knows what the rest is.
                if name != JOURNAL_NAME or _is_folder(folder.status(name)):
                    folder.remove_tree(name)
            folder.sync()
        remove_bare(where, id)
    except OSError as error:
        raise in_words(operation.folder, error) from error


def _is_folder(status: os.stat_result | None) -> bool:
    return status is not None and stat.S_ISDIR(status.st_mode)


def _look(operation: Operation) -> SetAside:
    try:
        return what_is_set_aside(operation.recorded)
    except OSError as error:
        raise UnreadableError(operation.folder, error.strerror or str(error)) from error


def _age_in_days(id: str) -> float:
    from calendar import timegm

    moment = timegm(time.strptime(id_order(id)[0], "%Y%m%dT%H%M%SZ"))
    return (time.time() - moment) / _DAY
