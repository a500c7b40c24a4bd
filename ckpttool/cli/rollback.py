"""`ckpttool rollback`: makes an earlier step the latest, and sets aside whatever is later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckpttool.checks.base import command as command_line
from ckpttool.cli.common import (
    dry_run_option,
    example,
    json_option,
    path_argument,
    refuse_live_writer,
    require_directory,
    show_actions,
    show_end,
    with_progress,
    write_json,
    writer_lock,
)
from ckpttool.exitcodes import ExitCode
from ckpttool.render.text import Printer, escape
from ckpttool.render.words import pointer_words

if TYPE_CHECKING:
    from ckpttool.actions.journal.operations import Operation
    from ckpttool.actions.rollback import RollbackPlan
    from ckpttool.io.durable import Progress
    from ckpttool.io.lock import WriterLock


@click.command(
    epilog=example(
        "ckpttool rollback runs/a --to 400 --dry-run",
        "ckpttool rollback runs/a --to 400",
        "ckpttool undo runs/a",
    )
)
@path_argument
@click.option(
    "--to",
    "step",
    type=click.IntRange(min=0),
    required=True,
    metavar="STEP",
    help="The step that becomes the latest; it must be valid.",
)
@dry_run_option
@json_option
def command(path: str, step: int, dry_run: bool, as_json: bool) -> ExitCode:
    """Make an earlier step of the directory PATH the latest.

    Later step files, and what was left of writing such, are set aside together in .quarantine, so
    that a resumed run does not mix with them, and the pointer moves. Nothing is deleted: "ckpttool
    undo" brings all of it back. An operation that was killed half-way is finished first.
    """
    printer = None if as_json else Printer()
    if dry_run:
        require_directory(path)
        refuse_live_writer(path, "rollback", dry_run)
        plan = with_progress(_plan, path, step)
        _show(printer, plan)
        return _end(path, plan, None, [], dry_run, as_json)
    with writer_lock(path, "rollback") as lock:
        earlier = _finish_earlier(path, printer, lock)
        plan = with_progress(_plan, path, step, lock)
        _show(printer, plan)
        operation = _carry_out(path, plan, lock) if plan.actions else None
    return _end(path, plan, operation, earlier, dry_run, as_json)


def _plan(
    path: str, step: int, lock: WriterLock | None = None, *, progress: Progress
) -> RollbackPlan:
    from ckpttool.actions.rollback import plan_rollback

    keeping = progress if lock is None else lock.keeping(progress)
    return plan_rollback(path, step, progress=keeping)


def _finish_earlier(path: str, printer: Printer | None, lock: WriterLock) -> list[Operation]:
    from ckpttool.actions.journal.operations import finish, unfinished

    earlier = [finish(operation, lock.keeping()) for operation in unfinished(path)]
    for operation in earlier:
        if printer is not None:
            named = f"{escape(operation.verb)} {operation.id}"
            printer.line(f"{named} had been interrupted, and is {operation.state} now")
    return earlier


def _carry_out(path: str, plan: RollbackPlan, lock: WriterLock) -> Operation:
    from ckpttool.actions.journal.operations import carry_out

    return carry_out(path, "rollback", plan.actions, why=plan.why, progress=lock.keeping())


def _show(printer: Printer | None, plan: RollbackPlan) -> None:
    if printer is None:
        return
    printer.line(pointer_words(plan.directory.pointer))
    if not plan.actions:
        printer.line(f"right already: step {plan.target.step} is the latest")
        return
    show_actions(printer, plan.actions)


def _end(
    path: str,
    plan: RollbackPlan,
    operation: Operation | None,
    earlier: list[Operation],
    dry_run: bool,
    as_json: bool,
) -> ExitCode:
    if as_json:
        write_json(_document(path, plan, operation, earlier, dry_run))
    elif operation is not None:
        printer = Printer()
        show_end(printer, dry_run)
        undo = escape(command_line("undo", path))
        printer.line(f"step {plan.target.step} is the latest; `{undo}` takes that back")
    elif plan.actions:
        show_end(Printer(), dry_run)
    return ExitCode.OK


def _document(
    path: str,
    plan: RollbackPlan,
    operation: Operation | None,
    earlier: list[Operation],
    dry_run: bool,
) -> dict[str, Any]:
    return {
        "path": path,
        "dry_run": dry_run,
        "step": plan.target.step,
        "file": plan.target.name,
        "right_already": not plan.actions,
        "pointer_before": plan.directory.pointer.as_dict(),
        "finished_before": [one.id for one in earlier],
        "plan": [action.as_dict() for action in plan.actions],
        "operation": operation and operation.id,
        "done": operation is not None,
    }
