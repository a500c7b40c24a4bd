"""Operations: actions carried out under a journal, so that each can be finished or taken back.

Before anything in the directory changes, the whole plan is on disk (`model.operations` tells how);
a line before and after each action follows, each synced before the next thing happens. Whoever
changes a directory holds its writer's lock meanwhile (`io.lock`): the functions here leave that to
their callers, who look at the directory under the same lock first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ckpttool.actions.journal import file as journal_file
from ckpttool.actions.journal.arrange_files import ArrangeFiles
from ckpttool.actions.journal.file import Journal, in_words, open_journal
from ckpttool.actions.journal.moves import (
    ChangeMode,
    InstallMended,
    MovePointer,
    PublishTemporary,
    SetAside,
)
from ckpttool.actions.journal.rename_step import RenameStep
from ckpttool.actions.journal.undoable import (
    BEFORE,
    BETWEEN,
    FOREIGN,
    Identity,
    Places,
    UndoableAction,
)
from ckpttool.errors import CkptToolError, FormatError, RefusedError, UnreadableError, WriteError
from ckpttool.model.names import QUARANTINE_NAME
from ckpttool.model.operations import (
    Recorded,
    id_order,
    list_operations,
    not_a_quarantine,
    what_is_set_aside,
)

if TYPE_CHECKING:
    from ckpttool.io.durable import Progress

KINDS: dict[str, type[UndoableAction]] = {
    action.kind: action
    for action in (
        *(SetAside, PublishTemporary, RenameStep, InstallMended, ChangeMode, MovePointer),
        ArrangeFiles,
    )
}


class Operation:
    """One operation in a directory: what its journal records, and its actions.

    `folder` is where its journal and what it set aside lie. `recorded` has the facts; `state` is
    one of those of `Recorded`. `actions` is empty where the journal is damaged. `is_stuck`
    says that it may stand half-way, and that its journal does not tell how to go on.
    """

    __slots__ = ("actions", "directory", "is_stuck", "recorded")

    def __init__(
        self, directory: str, recorded: Recorded, actions: Sequence[UndoableAction] = ()
    ) -> None:
        self.directory = directory
        self.recorded = recorded
        self.actions = list(actions)
        self.is_stuck = recorded.unchecked

    @property
    def id(self) -> str:
        """Its name: when it was begun, in UTC."""
        return self.recorded.id

    @property
    def folder(self) -> str:
        """The path of its own folder."""
        return self.recorded.path

    @property
    def verb(self) -> str:
        """The verb that carried it out."""
        return self.recorded.verb

    @property
    def state(self) -> str:
        """How far it came: see `Recorded`."""
        return self.recorded.state

    def as_dict(self) -> dict[str, Any]:
        """The operation as plain data."""
        recorded = self.recorded
        return {
            "id": recorded.id,
            "folder": recorded.path,
            "verb": recorded.verb,
            "why": recorded.why,
            "time": recorded.time,
            "tool": recorded.tool,
            "state": recorded.state,
            "problem": recorded.problem,
            "actions": [action.as_dict() for action in self.actions],
        }

    def __repr__(self) -> str:
        return f"Operation({self.id}, {self.verb}, {self.state})"


def history(directory: str | os.PathLike[str]) -> list[Operation]:
    """Every operation in a directory, oldest first. UnreadableError where nobody may look."""
    where = os.fspath(directory)
    return [_operation(where, recorded) for recorded in list_operations(where)]


def unfinished(directory: str | os.PathLike[str]) -> list[Operation]:
    """The operations that stand half-way: each has to be finished or taken back.

    RefusedError where one of them has a journal that does not tell how, or where `.quarantine` is
    no folder; UnreadableError where nobody may look.
    """
    found = history(directory)
    if words := not_a_quarantine(directory):
        raise RefusedError(_no_quarantine(os.fspath(directory), words))
    for operation in found:
        if operation.recorded.unchecked:
            raise UnreadableError(operation.folder, str(operation.recorded.problem))
        if operation.is_stuck:
            raise RefusedError(f"{operation.id} was left half-way, and {way_on(operation)}")
    return [operation for operation in found if operation.recorded.is_open]


def way_on(operation: Operation) -> str:
    """What is to be done about an operation whose journal can't be read, in words."""
    from ckpttool.checks.base import command, few, quoted

    where, folder = operation.directory, operation.folder
    try:
        names = what_is_set_aside(operation.recorded).names
    except OSError:
        names = []
    lie = f"{few(names)} in {folder}" if names else f"whatever it set aside in {folder}"
    back = f"mv -n -- {quoted(os.path.join(folder, names[0] if names else 'FILE'))}"
    return (
        f"has no journal that can be read ({operation.recorded.problem}): it left {lie}; "
        f"move back by hand what is needed, as with `{back} {quoted(where)}/`, then "
        f"`{command('purge', where, operation.id)}` deletes the rest"
    )


def _no_quarantine(directory: str, words: str) -> str:
    from ckpttool.checks.base import quoted

    path = os.path.join(directory, QUARANTINE_NAME)
    move = f"mv -n -- {quoted(path)} {quoted(path + '.old')}"
    return f"{path}: {words}, so nothing can be set aside: move it away: {move}"


def refuse_if_unfinished(directory: str | os.PathLike[str]) -> None:
    """RefusedError where an operation stands half-way, so that no other may be begun."""
    from ckpttool.checks.base import command

    for operation in unfinished(directory):
        undo = command("undo", directory, operation.id)
        words = f"{operation.verb} {operation.id} was not finished: `{undo}` takes it back"
        raise RefusedError(f"{os.fspath(directory)}: {words}")


def open_operation(directory: str | os.PathLike[str], verb: str, why: str = "") -> Operation:
    """Makes the folder of an operation whose plan is not known yet, for files to be made in.

    Hand it to `carry_out`. Raises WriteError, RefusedError where one stands half-way.
    """
    where = os.fspath(directory)
    refuse_if_unfinished(where)
    operation = _make(where)
    try:
        with open_journal(where, operation.id) as journal:
            journal.append_line(journal_file.head_line(where, verb, why, None))
            journal_file.write_note(where, operation.id, verb, why, ())
    except BaseException:
        journal_file.remove_if_bare(where, operation.id)
        raise
    return _read_again(operation)


def carry_out(
    directory: str | os.PathLike[str],
    verb: str,
    actions: Sequence[UndoableAction],
    *,
    why: str = "",
    progress: Progress | None = None,
    operation: Operation | None = None,
) -> Operation:
    """Journals a plan and carries it out. `operation` is one that `open_operation` gave.

    When something goes wrong, an interrupt included, what was done is taken back, and the error
    raised: RefusedError where the disk is not as it was when the plan was made, or where an earlier
    operation stands half-way, WriteError where the system refuses. What can't be taken back
    either stays journaled, for `finish` and `undo`.
    """
    where = os.fspath(directory)
    if operation is None:
        refuse_if_unfinished(where)
        operation = _make(where)
    try:
        _write_plan(operation, verb, why, actions)
    except BaseException:
        journal_file.remove_if_bare(where, operation.id)
        raise
    with open_journal(where, operation.id) as journal:
        try:
            _apply(journal, actions, range(len(actions)), progress)
            journal.append("finished")
        except BaseException:
            _take_back_quietly(operation, journal)
            raise
    return _read_again(operation)


def finish(operation: Operation, progress: Progress | None = None) -> Operation:
    """Carries on an operation that stands half-way, in the direction in which it was going.

    Raises RefusedError where a file is not as the plan says (then `undo` may take it back), and
    WriteError where the system refuses.
    """
    if operation.state == "taking-back":
        return _undo(operation)
    if operation.state == "unfinished":
        # What is done may have been taken back since, with no room on the disk to write that down.
        left = (
            number
            for number, action in enumerate(operation.actions)
            if number not in operation.recorded.done or action.state() in (BEFORE, BETWEEN)
        )
        with open_journal(operation.directory, operation.id) as journal:
            _apply(journal, operation.actions, left, progress)
            journal.append("finished")
    return _read_again(operation)


def choose(directory: str | os.PathLike[str], id: str | None = None) -> Operation:
    """The operation to take back: the one with this id, or the newest that was not taken back.

    Raises UnreadableError where there is none, RefusedError for one that can't be taken back.
    """
    where = os.fspath(directory)
    found = history(where)
    if id is None:
        states = ("finished", "unfinished", "taking-back")
        candidates = [one for one in found if one.state in states]
        if not candidates:
            for operation in reversed(found):
                if operation.state == "damaged":
                    _refuse_unless_undoable(operation)
            raise UnreadableError(where, "there is no operation to take back")
        return candidates[-1]
    for operation in found:
        if operation.id == id:
            _refuse_unless_undoable(operation)
            return operation
    raise UnreadableError(where, f"there is no operation {id[:80]}: `ckpttool history` lists them")


def undo(directory: str | os.PathLike[str], id: str | None = None) -> Operation:
    """Takes an operation back: the newest that was not, or the one with this id.

    Where something stands in the way (a new file has the name of one that was set aside, the
    pointer has been moved on), RefusedError says all of it, and nothing is changed.
    """
    return _undo(choose(directory, id))


def obstacles(operation: Operation) -> list[str]:
    """What stands in the way of taking an operation back, in words."""
    found: list[str] = []
    names: set[str] = set()
    ahead: dict[str, Identity | None] = {}
    try:
        with journal_file.open_folder(operation.directory, operation.id) as (home, _, aside):
            for _, action in _to_take_back(operation):
                if words := action.obstacle(Places(home, aside), ahead):
                    found.append(f"{action.path}: {words}")
                    names |= _names_of(action)
    except OSError as error:
        raise in_words(operation.folder, error) from error
    later = _later_with(operation, names) if found else []
    return [*found, *(f"take back what came later first: {undo}" for undo in later[:1])]


def _later_with(operation: Operation, names: set[str]) -> list[str]:
    """How to take back the operations after this one that changed the same names, newest first."""
    from ckpttool.checks.base import command

    return [
        command("undo", operation.directory, one.id)
        for one in reversed(history(operation.directory))
        if one.state in ("finished", "unfinished", "taking-back")
        and id_order(one.id) > id_order(operation.id)
        and any(names & _names_of(action) for action in one.actions)
    ]


def _names_of(action: UndoableAction) -> set[str]:
    return {action.name, str(getattr(action, "target", action.name))}


def _undo(operation: Operation) -> Operation:
    if found := obstacles(operation):
        raise RefusedError(f"{operation.id} cannot be taken back: " + "; ".join(found))
    with open_journal(operation.directory, operation.id) as journal:
        journal.append("taking-back")
        for number, action in _to_take_back(operation):
            _revert(action)
            try:
                journal.append("back", action=number)
            except WriteError:  # a full disk must not stop it half-way: the disk itself tells
                continue
        journal.append("undone")
    return _read_again(operation)


def _to_take_back(operation: Operation) -> list[tuple[int, UndoableAction]]:
    """The actions that may have changed something, the last first: others have not even begun.

    One that was begun, and whose file is now in neither of its places, changed nothing: somebody
    else did.
    """
    begun, done = operation.recorded.begun, operation.recorded.done
    return [
        (number, action)
        for number, action in reversed(list(enumerate(operation.actions)))
        if number in done or (number in begun and action.state() != FOREIGN)
    ]


def _refuse_unless_undoable(operation: Operation) -> None:
    if operation.recorded.unchecked:
        raise UnreadableError(operation.folder, str(operation.recorded.problem))
    if operation.state == "damaged":
        raise RefusedError(f"{operation.id} {way_on(operation)}")
    words = {
        "undone": "was taken back already",
        "prepared": "changed nothing, so there is nothing to take back",
        "purging": "cannot be taken back: its files are being deleted",
    }
    if operation.state in words:
        raise RefusedError(f"{operation.id} {words[operation.state]}")


def _operation(directory: str, recorded: Recorded) -> Operation:
    try:
        actions = [_action(directory, recorded, record) for record in recorded.plan]
    except FormatError as error:
        damaged = recorded._replace(state="damaged", problem=str(error))
        operation = Operation(directory, damaged)
        operation.is_stuck = recorded.is_open and bool(recorded.begun)
        return operation
    return Operation(directory, recorded, actions)


def _action(directory: str, recorded: Recorded, record: dict[str, Any]) -> UndoableAction:
    kind = KINDS.get(str(record.get("kind")))
    if kind is None:
        raise FormatError(f"its journal holds an unknown action {str(record.get('kind'))[:40]!r}")
    return kind.from_record(directory, recorded.path, record)


def _make(directory: str) -> Operation:
    id = journal_file.make_folder(directory)
    path = os.path.join(directory, QUARANTINE_NAME, id)
    return Operation(directory, Recorded(id, path, "prepared"))


def _read_again(operation: Operation) -> Operation:
    for one in history(operation.directory):
        if one.id == operation.id:
            return one
    raise UnreadableError(operation.folder, "is gone")


def _write_plan(
    operation: Operation, verb: str, why: str, actions: Sequence[UndoableAction]
) -> None:
    taken: set[str] = set()
    for action in actions:
        try:
            action.prepare(operation.folder, taken)
        except OSError as error:
            raise in_words(action.path, error) from error
    records = [action.to_record() for action in actions]
    where = operation.directory
    # The note first: once the plan is there, the operation has begun.
    journal_file.write_note(where, operation.id, verb, why, actions)
    with open_journal(where, operation.id) as journal:
        if operation.recorded.time:
            journal.append("plan", actions=records)
        else:
            journal.append_line(journal_file.head_line(where, verb, why, records))
    journal_file.sync_folder(where, operation.id)


def _apply(
    journal: Journal,
    actions: Sequence[UndoableAction],
    numbers: Iterable[int],
    progress: Progress | None,
) -> None:
    for number in numbers:
        journal.append("begin", action=number)
        try:
            actions[number].apply(progress)
        except OSError as error:
            raise in_words(actions[number].path, error) from error
        journal.append("done", action=number)


def _revert(action: UndoableAction) -> None:
    try:
        action.revert()
    except OSError as error:
        raise in_words(action.path, error) from error


def _take_back_quietly(operation: Operation, journal: Journal) -> None:
    """After something went wrong: what went wrong first is what the caller must hear of.

    No line goes before an action here: the disk may be full, and it tells by itself how far this
    came.
    """
    try:
        for _, action in _to_take_back(_read_again(operation)):
            action.revert()
    except (OSError, CkptToolError):
        return
    try:
        journal.append("undone")
    except OSError:
        journal_file.remove_if_bare(operation.directory, operation.id)
