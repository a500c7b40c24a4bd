"""Pages of harden, slim and export: what becomes what, what is left out, and what that saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpttool.checks.base import plural
from ckpttool.render.text import escape, size_text

if TYPE_CHECKING:
    from ckpttool.converting.checked import Written
    from ckpttool.converting.export import Exporting
    from ckpttool.converting.harden import Hardening
    from ckpttool.converting.slim import Saving, Slimming
    from ckpttool.converting.terms import Change, Refusal
    from ckpttool.render.text import Printer

MOST_ROWS = 40
_WHOLE = "(the whole)"


def show_hardening(printer: Printer, plan: Hardening, *, allow_loss: bool) -> None:
    """What becomes what, and what has no plain form."""
    if not plan.changes and not plan.refused:
        printer.line(f"{escape(plan.path)}: all of it is plain already")
    _show_changes(printer, plan.changes)
    _show_refused(printer, plan.refused, allow_loss)


def show_slimming(printer: Printer, plan: Slimming) -> None:
    """What the new file will not have, in bytes."""
    if not plan.savings:
        printer.line(f"{escape(plan.path)}: nothing to leave out: tensors use all that it stores")
        return
    rows = [[_kind(saving), _name(saving), size_text(saving.nbytes)] for saving in plan.savings]
    _table(printer, ["left out", "what", "saves"], rows, right=[2])
    printer.line(f"saves {size_text(plan.saved)} of tensors and records")


def show_exporting(printer: Printer, plan: Exporting, *, allow_loss: bool) -> None:
    """Which tensors go over, and what is not as it was."""
    where = "the whole content" if plan.section is None else f"section {escape(plan.section)}"
    count = plural(len(plan.tensors), "tensor")
    printer.line(f"{where}: {count}, {size_text(plan.nbytes)}")
    _show_changes(printer, plan.changes)
    renamed = [[escape(old), escape(new)] for old, new in plan.renamed.items() if old != new]
    if renamed:
        printer.heading("names")
        _table(printer, ["was", "is"], renamed)
    for prefix, taken in plan.stripped.items():
        if taken < plan.names:
            off = f"off {taken:,} of {plan.names:,} names" if taken else "off no name: none has it"
            printer.line(f"--strip-prefix {escape(prefix)} is taken {off}")
    if plan.prefixes:
        options = " ".join(f"--strip-prefix {escape(prefix)}" for prefix in plan.prefixes)
        printer.line(f"names have a wrapper's prefix, which stays; to take it off: {options}")
    if plan.aliases:
        printer.heading("shared memory, stored once; the file's metadata says so")
        rows = [[escape(name), escape(kept)] for name, kept in plan.aliases.items()]
        _table(printer, ["left out", "is in"], rows)
    if plan.made_contiguous:
        what = plural(len(plan.made_contiguous), "tensor")
        printer.line(f"{what} laid out anew, in C order: the format has no strides")
    _show_refused(printer, plan.refused, allow_loss)


def show_written(printer: Printer, before: int, written: Written | None, proof: str) -> None:
    """The last line: what was written and what it was proven to be."""
    if written is None:
        printer.line("dry run: nothing was written")
        return
    sizes = f"{size_text(before)} before, {size_text(written.size)} now"
    done = printer.colour("written", "ok")
    printer.line(f"{done} {escape(written.path)}: {sizes}; {proof}")


def _show_changes(printer: Printer, changes: Sequence[Change]) -> None:
    if not changes:
        return
    rows = [[_path(one.path), escape(one.was), escape(one.now)] for one in changes]
    _table(printer, ["where", "was", "is"], rows)


def _show_refused(printer: Printer, refused: Sequence[Refusal], allow_loss: bool) -> None:
    if not refused:
        return
    printer.heading("left out" if allow_loss else "cannot go over")
    rows = [[_path(one.path), escape(one.what), escape(one.why)] for one in refused]
    _table(printer, ["where", "what", "why"], rows)


def _table(
    printer: Printer, headers: list[str], rows: list[list[str]], right: Sequence[int] = ()
) -> None:
    printer.table(headers, rows[:MOST_ROWS], shrink=0, right=right)
    if len(rows) > MOST_ROWS:
        printer.line(f"and {len(rows) - MOST_ROWS:,} more; --json lists all")


def _path(path: str) -> str:
    return escape(path) or _WHOLE


def _kind(saving: Saving) -> str:
    words = {"section": "section", "cut": "unused bytes", "record": "unused record"}
    return words[saving.kind]


def _name(saving: Saving) -> str:
    name = escape(saving.name) or _WHOLE
    return f"of the storage of {name}" if saving.kind == "cut" else name
