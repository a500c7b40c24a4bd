"""`ckpttool undo`: takes an operation back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckpttool.cli.common import (
    dry_run_option,
    example,
    json_option,
    path_and_ids,
    path_argument,
    refuse_live_writer,
    require_directory,
    show_actions,
    show_end,
    write_json,
    writer_lock,
)
from ckpttool.errors import RefusedError
from ckpttool.exitcodes import ExitCode
from ckpttool.render.text import Printer, escape

if TYPE_CHECKING:
    from ckpttool.actions.journal.operations import Operation


@click.command(
    epilog=example(
        "ckpttool undo runs/a",
        "ckpttool undo runs/a 20261129T194042Z --dry-run",
    )
)
@path_argument
@click.argument("id", required=False, metavar="[ID]")
@dry_run_option
@json_option
def command(path: str, id: str | None, dry_run: bool, as_json: bool) -> ExitCode:
    """Take back the newest operation in the directory PATH, or the one with this ID.

    Every file that it set aside gets its place back, the very file with its mode and times, and the
    pointer is what it was. Where something stands in the way, say a new file of the same name, all
    of it is said and nothing is changed (exit code 4). "ckpttool history" lists operations.
    """
    from ckpttool.actions.journal.operations import choose, undo

    path, ids = path_and_ids(path, () if id is None else (id,))
    wanted = ids[0] if ids else None
    if dry_run:
        require_directory(path)
        refuse_live_writer(path, "undo", dry_run)
        operation = choose(path, wanted)
        _show(as_json, operation)
        _refuse_obstacles(operation)
    else:
        with writer_lock(path, "undo"):
            operation = choose(path, wanted)
            _show(as_json, operation)
            operation = undo(path, operation.id)
    if as_json:
        document = {"path": path, "dry_run": dry_run, "operation": operation.as_dict()}
        write_json({**document, "done": not dry_run})
    else:
        show_end(Printer(), dry_run)
    return ExitCode.OK


def _refuse_obstacles(operation: Operation) -> None:
    from ckpttool.actions.journal.operations import obstacles

    if found := obstacles(operation):
        raise RefusedError(f"{operation.id} cannot be taken back: " + "; ".join(found))


def _show(as_json: bool, operation: Operation) -> None:
    if as_json:
        return
    named = f"{escape(operation.verb)} {operation.id}"
    show_actions(Printer(), operation.actions[::-1], f"take back {named}, the last action first:")
