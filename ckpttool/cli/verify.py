"""`ckpttool verify`: every check there is, as findings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckpttool.cli.common import example, json_option, path_argument, with_progress, write_json
from ckpttool.exitcodes import ExitCode
from ckpttool.render.text import Printer

if TYPE_CHECKING:
    from ckpttool.checks.verify import Report


@click.command(
    epilog=example(
        "ckpttool verify runs/a",
        "ckpttool verify runs/a --strict --json | jq .newest_valid",
        "ckpttool verify --quick runs/a/step_000000000400.pt",
    )
)
@path_argument
@click.option("--quick", is_flag=True, help="Skip the checksums: flipped bits are not found.")
@click.option("--strict", is_flag=True, help="Let warnings, too, end in exit code 1.")
@click.option("--finite", is_flag=True, help="Also look for NaN and infinity in every tensor.")
@click.option("--jobs", type=click.IntRange(min=1), help="Read with this many threads.")
@json_option
def command(
    path: str, quick: bool, strict: bool, finite: bool, jobs: int | None, as_json: bool
) -> ExitCode:
    """Check everything about PATH, a directory or a file, that can be checked.

    Checksums of every record, sizes, the pointer, counters, the training schema, RNG and
    coordinator state, trust, leftovers. Nothing that a file holds is run, and nothing is changed.
    "ckpttool explain ID" tells more about a finding.
    """
    from ckpttool.checks.verify import verify

    report: Report = with_progress(verify, path, quick=quick, finite=finite, jobs=jobs)
    if as_json:
        write_json(report.as_dict())
    else:
        from ckpttool.render.report import show_report

        show_report(Printer(), report)
    return exit_code(report, strict)


def exit_code(report: Report, strict: bool) -> ExitCode:
    """3 if something could not be checked, 1 for errors (strict: warnings), else 0."""
    if report.could_not_check:
        return ExitCode.COULD_NOT_FINISH
    worst = max((finding.severity.rank for finding in report.findings), default=0)
    return ExitCode.FINDINGS if worst >= (1 if strict else 2) else ExitCode.OK
