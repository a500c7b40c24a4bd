"""What a power cut may leave of a save, or of a repair, counted: `python -m benchmarks.power_cut`.

Each line is one recorded program under one model of a file system (see `tests/power_cut.py`):
the operations on files that it did, the different states that a cut at any moment may leave, how
many of them were put on a disk and looked at, and in how many something was lost. The ways of
saving that are wrong on purpose show that a loss is found.

`--every N` looks at one state of N. All of them take about ten minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from tabulate import tabulate

from tests.acceptance import test_power_cut_tools as tools
from tests.crash import CrashRig
from tests.power_cut import PRESETS, Counted
from tests.trainer_core.saving import power_cut_program as program
from tests.trainer_core.saving import test_power_cut_saving as saving

HEADERS = ["what", "file system", "operations", "cuts", "states", "different", "tried", "lost"]


def lines(every: int) -> Iterator[list[object]]:
    """One line for each program and model."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        yield from _saving(root / "saving", every)
        yield from _tools(root / "tools", every)


def _saving(root: Path, every: int) -> Iterator[list[object]]:
    whole = program.Whole()
    with CrashRig(saving.PROGRAM) as rig:
        for how in (*program.RIGHT, *program.WRONG):
            for preset in PRESETS:
                place = root / how / preset
                place.mkdir(parents=True)
                most = 1 if how in program.WRONG else None
                step = 1 if how in program.WRONG else every
                counted = saving.survey(
                    how, preset, place, rig, whole, every=step, most_faults=most
                )
                kind = "a save" if how in program.RIGHT else "wrong on purpose"
                yield _line(f"{kind}: {how}", preset, counted)


def _tools(root: Path, every: int) -> Iterator[list[object]]:
    with CrashRig("ckpttool.cli.main:main", preload=tools.PRELOAD) as rig:
        for case in tools.CASES:
            for preset in PRESETS:
                place = root / case / preset
                place.mkdir(parents=True)
                yield _line(
                    f"ckpttool {case}", preset, tools.survey(case, preset, place, rig, every)
                )


def _line(what: str, preset: str, counted: Counted) -> list[object]:
    print(f"{what}, {preset} …", file=sys.stderr, flush=True)
    for fault in counted.faults[:5]:
        print(f"    {fault}", file=sys.stderr)
    found = "found" if what.startswith("wrong") and counted.faults else counted.lossy
    numbers = counted.operations, counted.cuts, counted.states, counted.distinct, counted.looked_at
    return [what, preset, *numbers, found]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, metavar="N", help="try one state of N")
    torch.set_num_threads(1)
    print(tabulate(lines(parser.parse_args().every), HEADERS, tablefmt="github"))


if __name__ == "__main__":
    main()
