"""What a repair will do, or has done, for people."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ckpttool.checks.base import command, plural
from ckpttool.model.names import POINTER_NAME, QUARANTINE_NAME
from ckpttool.render.report import show_findings, verdict_lines
from ckpttool.render.text import escape

if TYPE_CHECKING:
    from ckpttool.actions.journal.operations import Operation
    from ckpttool.actions.repair.deeds import Deed
    from ckpttool.actions.repair.plan import RepairPlan
    from ckpttool.actions.repair.run import Repair
    from ckpttool.render.text import Printer

_MOST_LINES = 20


def show_earlier(printer: Printer, repair: Repair, apply: bool) -> None:
    """What was left of a writer that was killed, and what becomes of it."""
    if repair.dead_lock is not None:
        then = "it is cleared" if apply else "--apply clears it"
        printer.line(escape(f"the lock of {repair.dead_lock.words()} was left: {then}"))
    for operation in repair.earlier:
        then = "it is finished first" if apply else "--apply finishes it first"
        if operation.state == "taking-back":
            words = f"{operation.verb} {operation.id} was taken back in part only: {then}"
        else:
            undo = command("undo", repair.path, operation.id)
            words = f"{operation.verb} {operation.id} was not finished: {then}"
            words += f"; `{undo}` takes it back"
        printer.line(escape(words))


def show_plan(printer: Printer, plan: RepairPlan) -> None:
    """Each deed with its reasons and losses, what is left alone, and what comes of it all."""
    if plan.deeds:
        printer.line("plan:")
        for number, deed in enumerate(plan.deeds, 1):
            _show_deed(printer, number, deed)
    if plan.left:
        printer.line("left alone:")
        for left in plan.left:
            printer.wrapped(f"{escape(left.path)}: {escape(left.words)}", first="  ", rest="    ")
    if rest := plan.unaddressed():
        printer.line("not mended by this:")
        show_findings(printer, rest)
    if plan.deeds:
        for line in _afterwards(plan).splitlines():
            printer.line(line)


def _show_deed(printer: Printer, number: int, deed: Deed) -> None:
    indent = " " * (len(str(number)) + 4)
    printer.line(f"  {number}. {printer.colour(escape(deed.words), 'bold')}")
    for label, lines in (("why", deed.why), ("how", deed.notes)):
        _show_lines(printer, f"{indent}{label}:   ", lines)
    if deed.verb == "set-aside" and deed.mending is not None:
        _show_lines(
            printer, f"{indent}or:    ", (f"get what is left of it: {_salvage(deed.path)}",)
        )
    losses = tuple(printer.colour(escape(line), "error") for line in deed.loses)
    if losses or deed.verb != "set-aside":  # what that costs is said at the end
        _show_lines(printer, f"{indent}loses: ", losses or ("nothing",), escaped=True)


def _salvage(path: str) -> str:
    return command("mend", path, "-o", "OUT.pt", "--allow-loss")


def _salvageable(plan: RepairPlan | None, operation: Operation) -> list[str]:
    """Where those files lie now that were set aside and of which something is left."""
    deeds = [] if plan is None else plan.deeds
    wanted = {d.path for d in deeds if d.verb == "set-aside" and d.mending is not None}
    actions = [action for action in operation.actions if action.path in wanted]
    return [os.path.join(operation.folder, str(one.note().get("lies_in"))) for one in actions]


def _show_lines(
    printer: Printer, first: str, lines: tuple[str, ...], *, escaped: bool = False
) -> None:
    shown = lines[:_MOST_LINES]
    for line in shown:
        printer.wrapped(line if escaped else escape(line), first=first, rest=" " * len(first))
        first = " " * len(first)
    if len(shown) < len(lines):
        printer.line(f"{first}and {len(lines) - len(shown):,} more")


def _afterwards(plan: RepairPlan) -> str:
    if plan.newest is None:
        return "afterwards: no step is valid"
    words = f"afterwards: newest valid step {plan.newest.step} ({escape(plan.newest.name)})"
    moves = any(deed.verb == "point" for deed in plan.deeds)
    words += f", {POINTER_NAME} {'names it' if moves else 'stays as it is'}"
    before = plan.goes_back_from
    return words if before is None else f"{words}\n{_goes_back(before, plan.newest.step)}"


def _goes_back(before: int, after: int) -> str:
    return f"training goes back from step {before} to step {after}"


def show_end(printer: Printer, repair: Repair, apply: bool) -> None:
    """What became of the plan, or how to carry it out."""
    plan = repair.plan
    assert plan is not None
    if not (plan.deeds or repair.earlier or repair.dead_lock):
        printer.line(_nothing(repair))
    elif not apply:
        words = "nothing was changed; to do it: "
        loss = ["--allow-loss"] if repair.needs_permission else []
        printer.line(words + escape(command("repair", repair.path, *loss, "--apply")))
    else:
        _show_done(printer, repair)


def _nothing(repair: Repair) -> str:
    """Why nothing is done."""
    plan = repair.plan
    assert plan is not None
    if plan.could_not_check:
        return "nothing was done, as nobody knows what is in the files that could not be checked"
    if all(finding.severity.rank < 2 for finding in plan.look.report.findings):
        return "nothing to repair"
    why = command("verify", repair.path)
    return f"nothing that can be repaired here; what would help: {escape(why)}"


def _show_done(printer: Printer, repair: Repair) -> None:
    if repair.replanned and repair.plan is not None:
        printer.line("what was mended did not come out valid, so the plan was made anew:")
        show_plan(printer, repair.plan)
    if repair.cleared:
        printer.line("cleared the dead writer's lock")
    for operation in repair.finished:
        printer.line(escape(f"finished {operation.verb} {operation.id}"))
    if repair.operation is not None:
        id = repair.operation.id
        folder = os.path.join(repair.path, QUARANTINE_NAME, id)
        count = plural(len(repair.operation.actions), "action")
        printer.line(f"{printer.colour('done', 'ok')}: {count}, recorded in {escape(folder)}")
        printer.line("to take it back: " + escape(command("undo", repair.path, id)))
        for path in _salvageable(repair.plan, repair.operation):
            printer.line("to get the rest of it: " + escape(_salvage(path)))
    printer.line()
    for line in verdict_lines(repair.last_report):
        printer.line(line)
