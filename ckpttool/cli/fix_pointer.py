"""`ckpttool fix-pointer`: points latest.json at the newest valid step."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from ckpttool.cli.common import (
    dry_run_option,
    example,
    json_option,
    path_argument,
    refuse_half_done,
    refuse_live_writer,
    say_no_step,
    show_end,
    show_passed_over,
    show_plan,
    with_progress,
    write_json,
    writer_lock,
)
from ckpttool.exitcodes import ExitCode
from ckpttool.model.names import parse_step_name
from ckpttool.render.text import Printer, escape
from ckpttool.render.words import pointer_words

if TYPE_CHECKING:
    from ckpttool.actions.fix_pointer import PointerFix


@click.command(
    "fix-pointer",
    epilog=example(
        "ckpttool fix-pointer runs/a --dry-run",
        "ckpttool fix-pointer runs/a",
        "ckpttool fix-pointer runs/a --step 400",
    ),
)
@path_argument
@click.option("--step", type=click.IntRange(min=0), help="Point at this step; it must be valid.")
@dry_run_option
@json_option
def command(path: str, step: int | None, dry_run: bool, as_json: bool) -> ExitCode:
    """Point latest.json in PATH at the newest valid step.

    Steps are verified from the highest number down, until one is valid. The pointer is written
    durably and read again. Without a valid step nothing is written, and the exit code is 1.
    Nor is anything where a newer step could not be checked (exit code 3), except with --step.
    """
    from ckpttool.actions.fix_pointer import plan_fix_pointer

    if step is None and parse_step_name(os.path.basename(os.path.normpath(path))) is not None:
        # Of one file alone the newest step is its own, and newer ones beside it would not count.
        hint = "give its directory, and --step N to point at one step among those in it"
        raise click.UsageError(f"PATH is a step: {hint}")
    refuse_live_writer(path, "fix-pointer", dry_run)
    refuse_half_done(path, "fix-pointer", dry_run)
    fix: PointerFix = with_progress(plan_fix_pointer, path, step=step)
    if not as_json:
        _show(Printer(), fix)
    if fix.plan.actions and not dry_run:
        with writer_lock(fix.directory.path, "fix-pointer"):
            fix.plan.apply()
    if as_json:
        write_json(_document(path, fix, dry_run))
    elif fix.plan.actions:
        show_end(Printer(), dry_run)
    if fix.target is None:
        return say_no_step(path, fix.newest, takes_step=True)
    return ExitCode.OK


def _show(printer: Printer, fix: PointerFix) -> None:
    printer.line(pointer_words(fix.directory.pointer))
    if fix.target is None:
        return
    show_passed_over(printer, fix.newest.passed_over)
    if fix.right_already:
        printer.line(f"right already: nothing to do for step {fix.target.step}")
        return
    if fix.directory.pointer.extra:
        names = ", ".join(map(escape, fix.directory.pointer.extra))
        printer.line(f"other keys of the old pointer are dropped: {names}")
    show_plan(printer, fix.plan)


def _document(path: str, fix: PointerFix, dry_run: bool) -> dict[str, Any]:
    target = fix.target
    return {
        "path": path,
        "dry_run": dry_run,
        "right_already": fix.right_already,
        "step": target and target.step,
        "file": target and target.name,
        "pointer_before": fix.directory.pointer.as_dict(),
        "passed_over": [judged.as_dict() for judged in fix.newest.passed_over],
        "plan": fix.plan.as_list(),
        "done": bool(fix.plan.actions) and not dry_run,
    }
