"""`ckpttool copy`: copies a valid step, durably and verified."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckpttool.cli.common import (
    PATH,
    dry_run_option,
    end_cleanly_when_terminated,
    example,
    json_option,
    say_no_step,
    show_end,
    show_passed_over,
    show_plan,
    with_progress,
    write_json,
)
from ckpttool.cli.sharded_paths import refuse_part
from ckpttool.exitcodes import ExitCode
from ckpttool.render.text import Printer

if TYPE_CHECKING:
    from ckpttool.actions.copy import CopyPlan


@click.command(
    epilog=example(
        "ckpttool copy runs/a /backup/a/ --with-pointer",
        "ckpttool copy runs/a best.pt --step 400",
    )
)
@click.argument("source", type=PATH, metavar="SRC", callback=refuse_part)
@click.argument("destination", type=PATH, metavar="DEST")
@click.option("--step", type=click.IntRange(min=0), help="Copy this step; it must be valid.")
@click.option("--with-pointer", is_flag=True, help="Write a latest.json beside the copy, last.")
@click.option("--force", is_flag=True, help="Overwrite what is at the destination.")
@dry_run_option
@json_option
def command(
    source: str,
    destination: str,
    step: int | None,
    with_pointer: bool,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> ExitCode:
    """Copy the newest valid step of SRC to DEST.

    SRC is a directory or a step file. DEST is a directory (one that does not exist yet ends in
    "/") or a new name. The source is verified first; the copy is read back before it gets its
    name, and keeps mode and time. Nothing is overwritten without --force, nor is a second file
    of one step made in a directory; a copy never has the pointer's name (exit code 4). Where a
    newer step could not be checked nothing is copied (exit code 3), except with --step.
    """
    from ckpttool.actions.copy import plan_copy

    copy: CopyPlan = with_progress(
        plan_copy, source, destination, step=step, with_pointer=with_pointer, force=force
    )
    if not as_json and copy.source:
        show_passed_over(Printer(), copy.newest.passed_over)
        show_plan(Printer(), copy.plan)
    if not dry_run:
        end_cleanly_when_terminated()
        with_progress(copy.plan.apply)
    if as_json:
        write_json(_document(source, copy, dry_run))
    if copy.source is None:
        return say_no_step(source, copy.newest, takes_step=True)
    if not as_json:
        show_end(Printer(), dry_run)
    return ExitCode.OK


def _document(source: str, copy: CopyPlan, dry_run: bool) -> dict[str, Any]:
    found = copy.newest.sure
    return {
        "path": source,
        "dry_run": dry_run,
        "step": found and found.file.step,
        "file": copy.source,
        "passed_over": [judged.as_dict() for judged in copy.newest.passed_over],
        "plan": copy.plan.as_list(),
        "done": bool(copy.plan.actions) and not dry_run,
    }
