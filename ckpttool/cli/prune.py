"""`ckpttool prune`: deletes old step files, and shows what goes before it goes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import click

from ckpttool.checks.base import plural
from ckpttool.cli.common import (
    confirm,
    dry_run_option,
    example,
    json_option,
    path_argument,
    refuse_half_done,
    refuse_live_writer,
    show_unchecked,
    with_progress,
    write_json,
    writer_lock,
)
from ckpttool.errors import WriteError
from ckpttool.exitcodes import ExitCode
from ckpttool.render.text import Printer, escape, size_text

if TYPE_CHECKING:
    from ckpttool.actions.prune import PrunePlan


@click.command(
    epilog=example(
        "ckpttool prune runs/a --keep-last 3 --dry-run",
        "ckpttool prune runs/a --keep-last 3 --keep-every 1000 --keep 250 --yes",
    )
)
@path_argument
@click.option(
    "--keep-last",
    type=click.IntRange(min=1),
    required=True,
    help="Keep this many of the newest valid steps.",
)
@click.option("--keep-every", type=click.IntRange(min=1), help="Keep multiples of this step too.")
@click.option("--keep", type=click.IntRange(min=0), multiple=True, help="Keep this step too.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@dry_run_option
@json_option
def command(
    path: str,
    keep_last: int,
    keep_every: int | None,
    keep: tuple[int, ...],
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> ExitCode:
    """Delete the valid step files in PATH that no rule keeps.

    Every step file is verified first. Damaged ones neither count nor go. While any could not be
    checked, nothing is deleted, and the exit code is 3. What the pointer names and the newest
    valid step always stay, and nothing but step files is ever touched. It asks before it deletes;
    where there is nobody to ask, it wants --yes.
    """
    from ckpttool.actions.prune import carry_out, plan_prune

    refuse_live_writer(path, "prune", dry_run)
    refuse_half_done(path, "prune", dry_run)
    prune: PrunePlan = with_progress(
        plan_prune, path, keep_last=keep_last, keep_every=keep_every, keep=keep
    )
    going = bool(prune.deletions) and not dry_run
    if not as_json and not prune.unchecked:
        _show(Printer(), prune)
    if going and not yes:
        confirm(
            f"delete {plural(len(prune.deletions), 'file')}?",
            unasked="--yes deletes unasked",
            refused="nothing was deleted",
        )
    if going:
        with _lock(path):
            carry_out(prune)
    if as_json:
        write_json(_document(path, prune, dry_run))
    elif prune.deletions:
        _show_end(Printer(), prune, dry_run)
    return _code(path, prune)


@contextmanager
def _lock(path: str) -> Iterator[None]:
    """Holds the directory's lock, where the disk has room for one at all.

    Whoever frees a disk that is full must be able to; nobody was at work when the plan was made.
    """
    from ckpttool.io.durable import FULL

    with ExitStack() as stack:
        try:
            stack.enter_context(writer_lock(path, "prune"))
        except WriteError as error:
            if error.errno not in FULL:
                raise
            refuse_live_writer(path, "prune", dry_run=False)
        yield


def _code(path: str, prune: PrunePlan) -> ExitCode:
    printer = Printer(sys.stderr)
    if prune.unchecked:
        show_unchecked(printer, prune.unchecked)
        words = "nothing was deleted: make the file readable or move it away, then prune again"
        code = ExitCode.COULD_NOT_FINISH
    elif prune.newest_valid is not None:
        return ExitCode.OK
    else:
        any_steps = bool(prune.passed_over)
        words = (
            "no step is valid, so nothing is deleted"
            if any_steps
            else "no step files, so nothing to delete"
        )
        code = ExitCode.FINDINGS
    printer.line(f"ckpttool: {escape(path)}: {words}")
    return code


def _show(printer: Printer, prune: PrunePlan) -> None:
    for judged in prune.passed_over:
        name = escape(judged.file.name)
        stays = printer.colour("stays, not counted", "warning")
        printer.line(f"{stays}  {name}: {escape(judged.why())}")
    for kept in prune.kept:
        printer.line(f"stays   {escape(kept.file.name)}  ({', '.join(kept.reasons)})")
    for action in prune.deletions:
        goes = printer.colour("goes", "error")
        printer.line(f"{goes}    {escape(action.file.name)}  {size_text(action.file.size)}")
    if prune.deletions:
        count = plural(len(prune.deletions), "file")
        printer.line(f"{count} to delete, which frees {size_text(prune.frees)}")
    elif prune.kept:
        printer.line("nothing to delete")


_OUTCOMES = {
    "gone": "was gone already",
    "changed": "has changed since it was verified, and stays",
    "pointed-at": "is what the pointer names by now, and stays",
}


def _show_end(printer: Printer, prune: PrunePlan, dry_run: bool) -> None:
    if dry_run:
        printer.line("dry run: nothing was deleted")
        return
    for action in prune.deletions:
        if action.outcome in _OUTCOMES:
            printer.line(f"{escape(action.file.name)} {_OUTCOMES[action.outcome]}")
    deleted = [action.file for action in prune.deletions if action.outcome == "deleted"]
    freed = size_text(sum(file.size for file in deleted))
    printer.line(f"{printer.colour('done', 'ok')}: {plural(len(deleted), 'file')} deleted, {freed}")


def _document(path: str, prune: PrunePlan, dry_run: bool) -> dict[str, Any]:
    return {
        "path": path,
        "dry_run": dry_run,
        "newest_valid": prune.newest_valid and prune.newest_valid.step,
        "delete": [action.as_dict() for action in prune.deletions],
        "keep": [kept.as_dict() for kept in prune.kept],
        "passed_over": [judged.as_dict() for judged in prune.passed_over],
        "frees": prune.frees,
        "done": bool(prune.deletions) and not dry_run,
    }
