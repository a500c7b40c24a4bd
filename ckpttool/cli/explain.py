"""`ckpttool explain`: the catalogue of findings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckpttool.cli.common import example, json_option, write_json
from ckpttool.exitcodes import ExitCode
from ckpttool.render.text import Printer, escape

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from ckpttool.checks.base import Check


def _complete_id(ctx: click.Context, _: click.Parameter, start: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    from ckpttool.checks.catalogue import CATALOGUE

    wanted = start.upper()
    return [
        CompletionItem(id, help=check.title)
        for id, check in sorted(CATALOGUE.items())
        if id.startswith(wanted)
    ]


@click.command(epilog=example("ckpttool explain PTR104", "ckpttool explain"))
@click.argument("id", required=False, shell_complete=_complete_id)
@json_option
def command(id: str | None, as_json: bool) -> ExitCode:
    """Explain the finding ID: what it means, why it matters, what mends it.

    Without ID, list all of them.
    """
    from ckpttool.checks.catalogue import CATALOGUE

    entries = [_entry(id)] if id is not None else [check for _, check in sorted(CATALOGUE.items())]
    if as_json:
        write_json({"findings": [_plain(check) for check in entries]})
    elif id is not None:
        _show_entry(Printer(), entries[0])
    else:
        _show_list(Printer(), entries)
    return ExitCode.OK


def _entry(id: str) -> type[Check]:
    from ckpttool.checks.catalogue import CATALOGUE, entry

    found = entry(id)
    if found is None:
        from difflib import get_close_matches

        close = get_close_matches(id.upper(), CATALOGUE, n=3)
        hint = f"; did you mean {', '.join(close)}?" if close else "; `ckpttool explain` lists all"
        raise click.BadParameter(f"there is no finding {escape(id)}{hint}", param_hint="ID")
    return found


def _show_entry(printer: Printer, check: type[Check]) -> None:
    severity = check.severity.value
    printer.line(f"{printer.colour(check.id, 'bold')}  {printer.colour(severity, severity)}")
    printer.wrapped(check.title)
    for label, words in (("meaning", check.meaning), ("why", check.why), ("mends", check.mends)):
        if words:
            printer.line()
            printer.wrapped(words, first=label.ljust(9), rest=" " * 9)


def _show_list(printer: Printer, entries: list[type[Check]]) -> None:
    from ckpttool.checks.catalogue import FAMILIES

    for index, check in enumerate(entries):
        family = check.id[:3]
        if index == 0 or family != entries[index - 1].id[:3]:
            if index:
                printer.line()
            printer.line(printer.colour(f"{family}  {FAMILIES[family]}", "bold"))
        severity = check.severity.value
        label = printer.colour(severity, severity) + " " * (7 - len(severity))
        printer.wrapped(check.title, first=f"  {check.id}  {label}  ", rest=" " * 19)


def _plain(check: type[Check]) -> dict[str, Any]:
    return {
        "id": check.id,
        "severity": check.severity.value,
        "title": check.title,
        "meaning": check.meaning,
        "why": check.why,
        "mends": check.mends,
    }
