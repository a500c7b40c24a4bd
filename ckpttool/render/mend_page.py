"""What `mend` found and did, for people: what is wrong, what each record is worth, what is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.checks.base import plural
from ckpttool.render.text import escape, size_text

if TYPE_CHECKING:
    from ckpttool.mending.plan import Mending, RecordState
    from ckpttool.mending.write import Written
    from ckpttool.render.text import Printer

_MOST_RECORDS = 40
_MOST_LOSSES = 40
_MOST_NAMES = 3
_COLOURS = {"lost": "error", "unproven": "warning"}


def show_mending(printer: Printer, mending: Mending) -> None:
    """The whole plan."""
    size = f"{mending.size:,} bytes"
    printer.line(f"{printer.colour(escape(mending.path), 'bold')}: {escape(mending.kind)}, {size}")
    _show_archives(printer, mending)
    if mending.healthy:
        printer.line(printer.colour("nothing to mend", "ok"))
        return
    _show_list(printer, "wrong with it", [*mending.structure, *mending.dangers])
    _show_records(printer, mending.records)
    _show_refused(printer, mending)
    _show_losses(printer, mending)
    _show_list(printer, "left out", mending.dropped)
    if mending.unproven:
        count = len(mending.unproven)
        named = ", ".join(map(escape, mending.unproven[:_MOST_NAMES]))
        more = f" and {count - _MOST_NAMES:,} more" if count > _MOST_NAMES else ""
        printer.line(f"there, but not proven: {plural(count, 'tensor')}: {named}{more}")
    _show_list(printer, "note", mending.notes)
    colour = "error" if mending.hopeless else "ok" if mending.lossless else "warning"
    printer.line(printer.colour(escape(mending.proof), colour))


def show_written(printer: Printer, written: Written) -> None:
    """What came of it."""
    if written.replaced:
        count = len(written.replaced)
        printer.line(f"taken from the other file: {plural(count, 'tensor')}")
    proven = ", as it is recorded: proven" if written.proven else ""
    path = printer.colour(escape(written.path), "bold")
    printer.line(f"written and verified: {path}, {written.size:,} bytes")
    printer.line(f"SHA-256 {written.sha256}{proven}")


def _show_archives(printer: Printer, mending: Mending) -> None:
    for archive in mending.archives:
        mark = "*" if archive.number == mending.archive else " "
        place = f"bytes {archive.begin:,} to {archive.stop:,}"
        printer.line(f" {mark} archive {archive.number}: {place}: {escape(archive.words)}")
    if mending.archives:
        printer.line(f"   archive {mending.archive} is taken (--archive N chooses)")


def _show_list(printer: Printer, title: str, items: list[str]) -> None:
    for item in items[:_MOST_RECORDS]:
        printer.wrapped(f"{title}: {escape(item)}", rest="  ")
    if len(items) > _MOST_RECORDS:
        printer.line(f"{title}: {len(items) - _MOST_RECORDS:,} more")


def _show_records(printer: Printer, records: list[RecordState]) -> None:
    states: dict[str, int] = {}
    for record in records:
        states[record.state] = states.get(record.state, 0) + 1
    counted = ", ".join(f"{count:,} {state}" for state, count in states.items())
    printer.line(f"records: {counted}" if records else "records: none")
    alike: dict[tuple[str, str], list[str]] = {}
    for record in records:
        if record.state not in ("whole", "unproven") or "doubtful" in record.facts:
            words = record.facts.get("words")
            said = f"{words}; {record.proof}" if words else record.proof
            alike.setdefault((record.state, said), []).append(record.name)
    for (state, said), names in list(alike.items())[:_MOST_RECORDS]:
        shown = ", ".join(names[:_MOST_NAMES])
        more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
        colour = printer.colour(state, _COLOURS.get(state, "info"))
        printer.wrapped(escape(f"{shown}{more}: {said}"), first=f"  {colour}  ", rest="      ")
    if len(alike) > _MOST_RECORDS:
        printer.line(f"  and {len(alike) - _MOST_RECORDS:,} more kinds")


def _show_refused(printer: Printer, mending: Mending) -> None:
    for mend in mending.refused:
        text = f"not mended: {mend['words']}: {mend['refused']}"
        printer.wrapped(escape(text), first="  ", rest="      ")


def _show_losses(printer: Printer, mending: Mending) -> None:
    if not mending.losses:
        return
    lost = mending.losses
    printer.line(printer.colour(f"lost: {plural(len(lost), 'tensor')}", "error"))
    rows = [
        [escape(loss.tensor), size_text(loss.nbytes), size_text(loss.survived), escape(loss.why)]
        for loss in lost[:_MOST_LOSSES]
    ]
    printer.table(["name", "size", "still there", "why"], rows, right=(1, 2), shrink=0, indent="  ")
    if len(lost) > _MOST_LOSSES:
        printer.line(f"  and {len(lost) - _MOST_LOSSES:,} more")
