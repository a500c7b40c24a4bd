"""`ckpttool purge`: deletes for good what operations have set aside."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckpttool.checks.base import plural
from ckpttool.cli.common import (
    confirm,
    dry_run_option,
    example,
    json_option,
    path_and_ids,
    path_argument,
    refuse_live_writer,
    require_directory,
    write_json,
    writer_lock,
)
from ckpttool.exitcodes import ExitCode
from ckpttool.render.text import Printer, escape, size_text

if TYPE_CHECKING:
    from ckpttool.actions.purge import PurgePlan


@click.command(
    epilog=example(
        "ckpttool purge runs/a --older-than 30 --dry-run",
        "ckpttool purge runs/a 20261129T194042Z --yes",
    )
)
@path_argument
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option(
    "--older-than",
    type=click.FloatRange(min=0),
    metavar="DAYS",
    help="Only operations that were begun at least this many days ago.",
)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@dry_run_option
@json_option
def command(
    path: str,
    ids: tuple[str, ...],
    older_than: float | None,
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> ExitCode:
    """Delete for good what the operations in the directory PATH have set aside.

    All of them, or those with an ID; "ckpttool history" lists them. They cannot be taken back any
    more. One that was left half-way stays; so does one whose journal cannot be read, unless its ID
    is given. It asks before it deletes; where there is nobody to
    ask, it wants --yes.
    """
    path, ids = path_and_ids(path, ids)
    require_directory(path)
    if dry_run:
        refuse_live_writer(path, "purge", dry_run)
        plan = _plan(path, ids, older_than, as_json)
    else:
        with writer_lock(path, "purge"):
            plan = _plan(path, ids, older_than, as_json)
            _purge(plan, yes)
    if as_json:
        write_json(_document(plan, dry_run))
    elif plan.going:
        words = "dry run: nothing was deleted" if dry_run else "done"
        Printer().line(words)
    return ExitCode.OK


def _plan(path: str, ids: tuple[str, ...], older_than: float | None, as_json: bool) -> PurgePlan:
    from ckpttool.actions.purge import plan_purge

    plan = plan_purge(path, ids, older_than_days=older_than)
    if not as_json:
        _show(Printer(), plan)
    return plan


def _purge(plan: PurgePlan, yes: bool) -> None:
    from ckpttool.actions.purge import purge

    if not plan.going:
        return
    if not yes:
        count = plural(len(plan.going), "operation")
        confirm(
            f"delete {count} for good?",
            unasked="--yes deletes unasked",
            refused="nothing was deleted",
        )
    for one in plan.going:
        purge(one.operation)


def _show(printer: Printer, plan: PurgePlan) -> None:
    from ckpttool.actions.purge import why_it_stays

    for operation in plan.staying:
        stays = printer.colour("stays", "warning")
        printer.line(f"{stays}  {operation.id}  {escape(why_it_stays(operation) or '')}")
    for one in plan.going:
        goes = printer.colour("goes", "error")
        files = plural(len(one.aside.names), "file")
        what = f"{escape(one.operation.verb)}, {one.operation.state}"
        printer.line(f"{goes}   {one.operation.id}  {what}: {files}, {size_text(one.aside.nbytes)}")
    if plan.going:
        count = plural(len(plan.going), "operation")
        printer.line(f"{count} to delete, which frees {size_text(plan.frees)}")
    else:
        printer.line("nothing to delete")


def _document(plan: PurgePlan, dry_run: bool) -> dict[str, object]:
    return {
        "path": plan.path,
        "dry_run": dry_run,
        "delete": [one.as_dict() for one in plan.going],
        "stay": [operation.id for operation in plan.staying],
        "frees": plan.frees,
        "done": bool(plan.going) and not dry_run,
    }
