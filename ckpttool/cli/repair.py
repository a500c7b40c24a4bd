"""`ckpttool repair`: brings a directory back to the newest state that can be proven good."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from ckpttool.actions.repair.deeds import KINDS, MEND
from ckpttool.cli.common import (
    end_cleanly_when_terminated,
    example,
    json_option,
    path_argument,
    with_progress,
    write_json,
)
from ckpttool.cli.verify import exit_code
from ckpttool.exitcodes import ExitCode
from ckpttool.render.text import Printer

if TYPE_CHECKING:
    from ckpttool.actions.repair.run import Repair


def _parse_only(ctx: click.Context, _: click.Parameter, value: str | None) -> frozenset[str]:
    if value is None:
        return frozenset(KINDS)
    kinds = frozenset(part.strip() for part in value.split(","))
    if unknown := sorted(kinds - set(KINDS)):
        raise click.BadParameter(f"{unknown[0] or 'nothing'} is none of {', '.join(KINDS)}")
    return kinds


@click.command(
    epilog=example(
        "ckpttool repair runs/a",
        "ckpttool repair runs/a --apply",
        "ckpttool repair runs/a --only temporaries,pointer --apply",
        "ckpttool repair runs/a --allow-loss --from 400 --apply",
    )
)
@path_argument
@click.option("--apply", is_flag=True, help="Do it; else the plan is shown and nothing is done.")
@click.option(
    "--only",
    metavar="KIND[,KIND]",
    callback=_parse_only,
    help=f"Do nothing but this: {', '.join(KINDS)}.",
)
@click.option("--allow-loss", is_flag=True, help="Mend with loss where no step comes back whole.")
@click.option(
    "--missing",
    type=click.Choice(["drop", "zeros"]),
    help="Lost tensors: left out of their dictionaries (default), or zeros.",
)
@click.option(
    "--from",
    "source_step",
    type=click.IntRange(min=0),
    metavar="STEP",
    help="Take lost tensors from this step: those of the same name, shape and type.",
)
@click.option(
    "--bit-odds",
    type=click.FloatRange(0, 1),
    default=0.01,
    show_default=True,
    help="Turn a bit back only where other damage would look like it at most this often.",
)
@json_option
def command(
    path: str,
    apply: bool,
    only: frozenset[str],
    allow_loss: bool,
    missing: str | None,
    source_step: int | None,
    bit_odds: float,
    as_json: bool,
) -> ExitCode:
    """Bring the checkpoint directory PATH back to the newest state that can be proven good.

    Verifies everything and shows a plan: put files of sharded steps back in their places, publish
    whole temporaries of writers that died, mend what comes back without loss, set aside what does
    not, make modes alike, move the pointer. With
    --apply the plan is carried out under a journal, and everything verified again. Nothing is
    deleted: what goes out of the way lies in .quarantine, and "ckpttool undo" takes all of it back.

    The exit code is that of "ckpttool verify", with --apply that of the second look; 4 where a
    writer is at work, or where data would be given up without --allow-loss.
    """
    _refuse_conflicts(path, only, allow_loss, missing, source_step, bit_odds)
    from ckpttool.actions.repair.deeds import Options
    from ckpttool.actions.repair.run import Repair

    if apply:
        end_cleanly_when_terminated()
    missing = missing or ("drop" if source_step is None else "from")
    repair = Repair(path, Options(only, allow_loss, missing, source_step, bit_odds))
    _run(repair, apply, None if as_json else Printer())
    if as_json:
        write_json(repair.as_dict())
    if repair.plan is not None and repair.plan.could_not_check:
        return ExitCode.COULD_NOT_FINISH  # of a temporary, which verify looks at only quickly
    return exit_code(repair.last_report, strict=False)


def _refuse_conflicts(
    path: str,
    only: frozenset[str],
    allow_loss: bool,
    missing: str | None,
    source_step: int | None,
    bit_odds: float,
) -> None:
    """Options that contradict each other are wrong usage, said before anything is looked at."""
    if os.path.isfile(path):
        hint = "give its directory; for one file: ckpttool mend FILE -o OUT"
        raise click.UsageError(f"PATH is a file: {hint}")
    if allow_loss and MEND not in only:
        raise click.UsageError("--allow-loss mends with loss, and --only leaves mending out")
    for option, given in (("--missing", missing), ("--from", source_step)):
        if given is not None and not allow_loss:
            raise click.UsageError(f"{option} says what becomes of losses: it wants --allow-loss")
    if bit_odds != bit_odds:  # what is no number is in no range, and not out of it either
        raise click.UsageError("--bit-odds wants a number from 0 to 1")
    if missing is not None and source_step is not None:
        raise click.UsageError("--missing and --from both say what becomes of losses: choose one")


def _run(repair: Repair, apply: bool, printer: Printer | None) -> None:
    """Takes the repair as far as it is to go; shows it where there is a printer."""
    from ckpttool.render import repair_page

    if printer is not None:
        repair_page.show_earlier(printer, repair, apply)
    if apply:
        with_progress(repair.finish_earlier)
    plan = with_progress(repair.make_plan)
    if printer is not None:
        repair_page.show_plan(printer, plan)
    if apply and plan.deeds:
        if printer is None and repair.needs_permission:
            write_json(repair.as_dict())  # the plan that is refused has to be seen
        with_progress(repair.carry_out)
    if printer is not None:
        repair_page.show_end(printer, repair, apply)
