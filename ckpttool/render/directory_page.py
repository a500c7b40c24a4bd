"""What `inspect` shows of a directory: a row for each step file, the pointer, and what is odd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.checks.base import plural
from ckpttool.render.report import show_finding
from ckpttool.render.text import escape, size_text
from ckpttool.render.words import LOAD_SHORT, pointer_words

if TYPE_CHECKING:
    from ckpttool.checks.glance import Row
    from ckpttool.findings import Finding
    from ckpttool.model.books import Books
    from ckpttool.model.directory import CheckpointDirectory
    from ckpttool.render.text import Printer

_SECTIONS = ("model", "optimizer", "coordinator")
_HEADERS = ("step", "size", "state", *_SECTIONS, "precision", "samples", "tokens", "load with")
_MOST_FINDINGS = 10
_LEFT = ("state", "precision", "load with")
_FOLDABLE = ("coordinator", "precision", "samples", "tokens", "load with")
_COLOURS = {
    "valid": "ok",
    "intact": "ok",
    "wrong-step": "error",
    "incomplete": "error",
    "not-as-recorded": "error",
    "damaged": "error",
    "dangerous": "error",
}


def show_directory(
    printer: Printer,
    directory: CheckpointDirectory,
    rows: list[Row],
    findings: list[Finding],
    books: Books,
    verify_command: str,
) -> None:
    """Prints the page of a directory."""
    printer.line(printer.colour(escape(directory.path), "bold"))
    if rows:
        _show_table(printer, [_cells(row) for row in rows])
        printer.line("state: at a glance, without checksums; `ckpttool verify` reads everything")
    else:
        printer.line("no step files")
    printer.line(pointer_words(directory.pointer))
    _show_books(printer, books)
    _show_others(printer, directory, told=bool(books.operations))
    _show_findings(printer, rows, findings, verify_command)


def _show_table(printer: Printer, cells: list[list[str]]) -> None:
    """The table; where a terminal is too narrow, columns that say the same all along go below."""
    columns = list(zip(_HEADERS, *cells, strict=True))
    needed = sum(max(map(len, column)) + 2 for column in columns)
    same = []
    if printer.width is not None and needed > printer.width and len(cells) > 1:
        same = [c for c in columns if c[0] in _FOLDABLE and len(set(c[1:])) == 1]
    shown = [column for column in columns if column not in same]
    right = [i for i, column in enumerate(shown) if column[0] not in _LEFT]
    rows = [
        [printer.colour(cell, _COLOURS[cell]) if cell in _COLOURS else cell for cell in row]
        for row in zip(*(column[1:] for column in shown), strict=True)
    ]
    printer.table([column[0] for column in shown], rows, right=right)
    told = ", ".join(f"{column[0]} {column[1]}" for column in same if column[1] != "-")
    if told:
        printer.wrapped(f"every step: {told}")


def _cells(row: Row) -> list[str]:
    file, facts = row.examined.entry, row.examined.facts
    sizes = [
        size_text(section.nbytes) if section is not None and section.tensors else "-"
        for section in map(row.sections.get, _SECTIONS)
    ]
    precision = facts.precision.mode if facts is not None and facts.precision else None
    counts = [None, None] if facts is None else [facts.samples, facts.tokens]
    state = row.examined.verdict.state
    return [
        str(file.step),
        size_text(file.size),
        state,
        *sizes,
        escape(precision or "-"),
        *("-" if count is None else f"{count:,}" for count in counts),
        LOAD_SHORT.get(row.load_need or "", row.load_need or "-"),
    ]


def _show_books(printer: Printer, books: Books) -> None:
    """Who writes here, and what can be taken back."""
    if (holder := books.holder) is not None:
        state = {"dead": ", which has ended", "stale": ", which seems to have ended"}
        held = "held by" if holder.is_held else "left by"
        printer.wrapped(f"lock: {held} {escape(holder.words())}{state.get(holder.state, '')}")
    if books.operations:
        count = plural(len(books.operations), "operation")
        printer.line(f"set aside by {count}: `ckpttool history` lists what can be taken back")


def _show_others(printer: Printer, directory: CheckpointDirectory, *, told: bool) -> None:
    """What else is there; `told` says that what lies in quarantine was told already."""
    kinds: dict[str, list[str]] = {}
    for other in directory.others:
        if other.kind in _TOLD_ELSEWHERE or (told and other.kind == "quarantine"):
            continue
        kinds.setdefault(other.kind, []).append(escape(other.name))
    for kind, names in kinds.items():
        label = _KINDS.get(kind, (kind, kind))
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        printer.wrapped(f"{plural(len(names), *label)}: {shown}", rest="  ")


_KINDS = {
    "temporary": ("leftover of a writer", "leftovers of writers"),
    "foreign": ("other file", "other files"),
    "directory": ("directory", "directories"),
    "link": ("link", "links"),
    "special": ("special file", "special files"),
    "quarantine": ("quarantine", "quarantines"),
}
_TOLD_ELSEWHERE = frozenset(("lock", "manifest"))


def _show_findings(
    printer: Printer, rows: list[Row], findings: list[Finding], verify_command: str
) -> None:
    told = [finding for finding in findings if finding.severity.rank > 0]
    for row in reversed(rows):  # the newest matter most
        told += [finding for finding in row.examined.findings if finding.severity.rank > 1]
    if not told:
        return
    printer.heading("wrong at a glance")
    path = None
    for finding in told[:_MOST_FINDINGS]:
        if finding.place.path != path:
            path = finding.place.path
            printer.line(f"  {escape(path)}")
        show_finding(printer, finding, indent="    ")
    if len(told) > _MOST_FINDINGS:
        printer.line(f"  and {len(told) - _MOST_FINDINGS:,} more")
    printer.line(f"  run: {escape(verify_command)}")


def directory_document(
    directory: CheckpointDirectory, rows: list[Row], findings: list[Finding], books: Books
) -> dict[str, Any]:
    """What `inspect --json` prints of a directory."""
    return {
        "path": directory.path,
        "kind": "directory",
        "steps": [_row_document(row) for row in rows],
        "pointer": directory.pointer.as_dict(),
        "others": [other.as_dict() for other in directory.others],
        "lock": books.holder and books.holder.as_dict(),
        "operations": [{"id": one.id, "state": one.state} for one in books.operations],
        "findings": [finding.as_dict() for finding in findings],
    }


def _row_document(row: Row) -> dict[str, Any]:
    facts = row.examined.facts
    return {
        **row.examined.entry.as_dict(),
        "state": row.examined.verdict.state,
        "sections": {
            name: {"type": s.type, "tensors": s.tensors, "nbytes": s.nbytes}
            for name, s in row.sections.items()
        },
        "precision": facts.precision._asdict() if facts and facts.precision else None,
        "samples": facts and facts.samples,
        "tokens": facts and facts.tokens,
        "load_need": row.load_need,
        "findings": [finding.as_dict() for finding in row.examined.findings],
    }
