"""What `verify` found, for people: findings by file, what mends each, and the verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.checks.base import command, plural
from ckpttool.render.text import escape

if TYPE_CHECKING:
    from ckpttool.checks.verify import Report
    from ckpttool.findings import Finding, Place
    from ckpttool.render.text import Printer

_MOST_TENSORS = 3


def show_report(printer: Printer, report: Report) -> None:
    """Prints a whole report."""
    notes = [finding for finding in report.findings if finding.severity.rank == 0]
    told = [finding for finding in report.findings if finding.severity.rank > 0]
    for path, findings in _by_path(told).items():
        printer.line(printer.colour(escape(path), "bold"))
        show_findings(printer, findings)
        printer.line()
    for same in _alike(notes):
        _show_notes(printer, same)
    if notes:
        printer.line()
    _show_coordinator(printer, report)
    for line in verdict_lines(report):
        printer.line(line)
    if one_verb := _one_verb_for_all(report):
        printer.line(escape(one_verb))


def _show_coordinator(printer: Printer, report: Report) -> None:
    """Of one file with a coordinator: where it stands, as far as that could be checked."""
    facts = report.facts
    if facts is None or facts.coordinator is None:
        return
    from ckpttool.render.words import coordinator_words

    whole = not report.quick and report.files[0].checksums == "checked"
    printer.line("coordinator")
    proof = "byte for byte" if whole else "by checksums"
    printer.facts(coordinator_words(facts.coordinator, facts.copies, proof), indent="  ")
    printer.line()


def _one_verb_for_all(report: Report) -> str | None:
    """What to run where several things are to be mended, in several ways."""
    repair = command("repair", report.path)
    remedies = {finding.remedy for finding in report.findings if finding.severity.rank > 0}
    ours = {remedy for remedy in remedies if remedy and remedy.startswith("ckpttool ")}
    if len(ours) < 2 or not any(remedy.startswith("ckpttool repair ") for remedy in ours):
        return None
    return f"all of it at once: {repair}"


def show_findings(printer: Printer, findings: list[Finding], indent: str = "  ") -> None:
    """Findings about one file; what mends several in a row alike is said once, after the last."""
    for finding, following in zip(findings, [*findings[1:], None], strict=True):
        told_later = following is not None and following.remedy == finding.remedy
        show_finding(printer, finding, indent, with_remedy=not told_later)


def show_finding(
    printer: Printer, finding: Finding, indent: str = "  ", *, with_remedy: bool = True
) -> None:
    """Severity, id, place and words; below them what mends it."""
    severity = finding.severity.value
    label = printer.colour(severity, severity) + " " * (7 - len(severity))
    place = _place_unless_said(finding)
    first = f"{indent}{label}  {finding.id}  "
    margin = len(indent) + 7 + 2 + len(finding.id) + 2
    printer.wrapped(f"{place}{escape(finding.words)}", first=first, rest=" " * margin)
    if finding.remedy and with_remedy:
        # Never broken into lines: half a command, copied from a terminal, is another command.
        printer.line(" " * margin + "mend: " + escape(finding.remedy))


def _show_notes(printer: Printer, same: list[Finding]) -> None:
    """The same remark on any number of files, once."""
    paths = [escape(finding.place.path) for finding in same]
    where = paths[0] if len(paths) == 1 else f"{plural(len(paths), 'file')}, {paths[0]} …"
    printer.line(f"{printer.colour('info', 'info')}  {same[0].id}  {where}")
    words = f"{_place_unless_said(same[0])}{escape(same[0].words)}"
    printer.wrapped(words, first=" " * 6, rest=" " * 6)
    if same[0].remedy and len(same) == 1:
        printer.line("      mend: " + escape(same[0].remedy))


def _place_unless_said(finding: Finding) -> str:
    """The place in front of the words, where these do not begin with it themselves."""
    where = finding.place.record or finding.place.key
    said = where is not None and finding.words.startswith(where)
    return "" if said else place_words(finding.place)


def place_words(place: Place) -> str:
    """Where inside the file, with a colon, or nothing: `data/7 (model.0.weight): `."""
    where = escape(place.record or place.key or "")
    if place.tensors:
        names = ", ".join(map(escape, place.tensors[:_MOST_TENSORS]))
        more = len(place.tensors) - _MOST_TENSORS
        names += f" and {more:,} more" if more > 0 else ""
        where = f"{where} ({names})" if where else names
    return f"{where}: " if where else ""


def verdict_lines(report: Report) -> list[str]:
    """The last lines: how many files are what, how many findings, and the newest valid step."""
    states: dict[str, int] = {}
    for file in report.files:
        states[file.state] = states.get(file.state, 0) + 1
    counted = ", ".join(f"{count:,} {escape(state)}" for state, count in states.items())
    lines = [f"{plural(len(report.files), 'file')} checked" + (f": {counted}" if counted else "")]
    lines.append(_findings_counted(report))
    if report.quick:
        lines.append("quick look: checksums were not checked, so flipped bits were not looked for")
    lines.append(_newest_line(report))
    return lines


def _findings_counted(report: Report) -> str:
    kinds = [finding.severity.value for finding in report.findings]
    if not kinds:
        return "no findings"
    named = (("error", "error"), ("warning", "warning"), ("info", "note"))
    return ", ".join(plural(kinds.count(k), noun) for k, noun in named if kinds.count(k))


def _newest_line(report: Report) -> str:
    if report.newest_valid is None:
        return "newest valid step: none"
    return f"newest valid step: {report.newest_valid} ({escape(report.newest_valid_path or '')})"


def _alike(findings: list[Finding]) -> list[list[Finding]]:
    grouped: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        grouped.setdefault((finding.id, finding.words), []).append(finding)
    return list(grouped.values())


def _by_path(findings: list[Finding]) -> dict[str, list[Finding]]:
    grouped: dict[str, list[Finding]] = {}
    for finding in findings:
        grouped.setdefault(finding.place.path, []).append(finding)
    return grouped
