"""`ckpttool latest`: the path of the newest valid step and nothing else, for job scripts."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from ckpttool.cli.common import (
    example,
    json_option,
    path_argument,
    say_no_step,
    show_passed_over,
    with_progress,
    write_json,
)
from ckpttool.exitcodes import ExitCode

if TYPE_CHECKING:
    from ckpttool.actions.newest import Newest


@click.command(
    epilog=example(
        "RESUME=$(ckpttool latest runs/a) || exit 1",
        "ckpttool latest --quick runs/a",
    )
)
@path_argument
@click.option("--quick", is_flag=True, help="Skip the checksums: flipped bits are not found.")
@json_option
def command(path: str, quick: bool, as_json: bool) -> ExitCode:
    """Print the path of the newest valid step in PATH, and nothing else.

    Steps are verified from the highest number down, until one is valid; newer ones that are not
    are named on standard error. Without a valid step nothing is printed, and the exit code is 1;
    it is 3 where a newer step could not be checked, so that nobody knows which is the newest.
    """
    from ckpttool.actions.newest import find_newest_valid, steps_at
    from ckpttool.render.text import Printer

    newest: Newest = with_progress(find_newest_valid, steps_at(path), quick=quick)
    if as_json:
        write_json(_document(path, quick, newest))
    if newest.sure is None:
        return say_no_step(path, newest, takes_step=False)
    show_passed_over(Printer(sys.stderr), newest.passed_over)
    if not as_json:
        _print_path(newest.sure.file.path)
    return ExitCode.OK


def _document(path: str, quick: bool, newest: Newest) -> dict[str, Any]:
    found = newest.sure
    return {
        "path": path,
        "quick": quick,
        "step": found and found.file.step,
        "file": found and found.file.path,
        "passed_over": [judged.as_dict() for judged in newest.passed_over],
    }


def _print_path(path: str) -> None:
    """The path's own bytes, whatever the locale: a script has to find the file under them."""
    if sys.stdout.isatty():
        from ckpttool.render.text import escape

        sys.stdout.write(escape(path) + "\n")
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(os.fsencode(path) + b"\n")
