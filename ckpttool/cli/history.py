"""`ckpttool history`: the operations in a directory that can be taken back, or were."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckpttool.checks.base import command as command_line
from ckpttool.checks.base import plural
from ckpttool.cli.common import example, json_option, path_argument, require_directory, write_json
from ckpttool.exitcodes import ExitCode
from ckpttool.render.text import Printer, escape, size_text

if TYPE_CHECKING:
    from ckpttool.actions.journal.operations import Operation
    from ckpttool.model.operations import SetAside

_HEADERS = ("operation", "verb", "state", "actions", "set aside", "size", "why")


@click.command(epilog=example("ckpttool history runs/a", "ckpttool history runs/a --json"))
@path_argument
@json_option
def command(path: str, as_json: bool) -> ExitCode:
    """List what was done to the directory PATH, oldest first, with the IDs that "undo" takes.

    Of each operation: whether it was finished, taken back, or left half-way, and what lies in its
    folder in .quarantine.
    """
    from ckpttool.actions.journal.operations import history

    require_directory(path)
    operations = [(one, _aside(one)) for one in history(path)]
    if as_json:
        write_json({"path": path, "operations": [_entry(*one) for one in operations]})
    else:
        _show(Printer(), path, operations)
    return ExitCode.OK


def _aside(operation: Operation) -> SetAside | None:
    from ckpttool.model.operations import what_is_set_aside

    try:
        return what_is_set_aside(operation.recorded)
    except OSError:
        return None


def _entry(operation: Operation, aside: SetAside | None) -> dict[str, Any]:
    lies = None if aside is None else aside._asdict()
    return {**operation.as_dict(), "set_aside": lies}


def _show(printer: Printer, path: str, operations: list[tuple[Operation, SetAside | None]]) -> None:
    from ckpttool.actions.journal.operations import way_on
    from ckpttool.actions.purge import why_it_stays

    if not operations:
        printer.line("no operations")
        return
    printer.table(_HEADERS, [_row(*one) for one in operations], right=(3, 4, 5))
    for operation, _ in operations:
        if operation.recorded.is_open:
            undo = escape(command_line("undo", path, operation.id))
            printer.line(f"{operation.id} was left half-way: `{undo}` takes it back")
        elif operation.recorded.problem:
            printer.line(escape(f"{operation.id} {way_on(operation)}"))
    deletable = [(one, aside) for one, aside in operations if why_it_stays(one) is None]
    nbytes = sum(aside.nbytes for _, aside in deletable if aside is not None)
    if nbytes:
        purge = escape(command_line("purge", path))
        count = plural(len(deletable), "operation")
        printer.line(f"{count}, {size_text(nbytes)} set aside; `{purge}` deletes that for good")


def _row(operation: Operation, aside: SetAside | None) -> list[str]:
    return [
        operation.id,
        escape(operation.verb),
        operation.state,
        str(len(operation.actions)),
        "?" if aside is None else str(len(aside.names)),
        "?" if aside is None else size_text(aside.nbytes),
        escape(operation.recorded.why or "-"),
    ]
