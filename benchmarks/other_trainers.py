"""Our Trainer against Lightning Fabric and Hugging Face Trainer: step, save and resume.

One process measures them all, each new and in random order, many times. A step is processor time
on one thread, from batch to batch, the first ones of each training left out. Saving and resuming
are real time, on a RAM-backed file system where there is one: fsync, which only ours does, costs
nothing there, and what is compared is the work. Ours also reads the file back and computes its
SHA-256, beside the writing where a second core is free. Resuming ends where the model is first
called. What counts is the best round, the one that other programs disturbed least.

`pip install -e ".[train,bench]"` installs what it needs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.inputs import directory
from benchmarks.measure import Row, in_one_process
from benchmarks.trainer_sides import SIDES, Bare, Fabric, Ours, Side, Size, missing

STEPS, ROUNDS = 16, 7
WARM_UP = 4
SMALL = Size(width=128, layers=4, batch=8)
TINY = Size(width=32, layers=1, batch=1)
LARGE = Size(width=768, layers=4, batch=1)
SAVED_AT = 3

Times = dict[str, float]


def run() -> list[Row]:
    """The rows of the table; without those of a package that is missing, which is said."""
    for side in SIDES:
        if names := missing(side):
            words = f"{side.name} is left out, not installed: {', '.join(names)}"
            print(f"{words} (pip install -e '.[train,bench]')", file=sys.stderr)
    if all(missing(side) for side in SIDES if side not in (Bare, Ours)):
        return []
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK) else directory()
    with tempfile.TemporaryDirectory(dir=parent, prefix="ckpttool-bench-") as where:
        code = "from benchmarks.other_trainers import measure; measure()"
        times = in_one_process(f"import sys; {code}", where)
    return [row for what, taken in times.items() for row in _rows(what, taken)]


def _rows(what: str, times: Times) -> list[Row]:
    names = [name for name in times if name != Ours.name]
    return [
        Row(f"{what} / {name}", times[Ours.name], times[name], at_most=_bar(what, name))
        for name in names
    ]


def _bar(what: str, name: str) -> float | None:
    """Ours may take this many times as long; None where it does more than the other.

    Only ours looks at every byte before it resumes from it, and Hugging Face Trainer writes the
    weights without any checksum.
    """
    if name == Bare.name:
        return None
    if what.startswith("training step"):
        return 1.03
    return 1.0 if what.startswith("save") and name == Fabric.name else None


def measure() -> None:
    """Prints the best times of each side as JSON. The directory to use is the first argument."""
    where = Path(sys.argv[1])
    torch.set_num_threads(1)
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(sys.stderr):  # one of them prints
        sides = [side for side in SIDES if not missing(side)]
        times = {
            f"training step, {SMALL.layers} layers of width {SMALL.width}": _steps(
                sides, SMALL, where
            ),
            f"training step, {TINY.layers} layer of width {TINY.width}": _steps(
                sides, TINY, where, times=4
            ),
            **_saves(sides, where),
        }
    print(json.dumps(times))


def _steps(sides: list[type[Side]], size: Size, where: Path, times: int = 1) -> Times:
    """Seconds a step: the median of a training, the best training."""
    taken: dict[str, list[float]] = {side.name: [] for side in sides}
    for turn in range(ROUNDS + 1):  # the first one warms up
        losses = {}
        for side in random.Random(turn).sample(sides, len(sides)):
            one = side(size, where)
            one.remove()
            one.train(times * STEPS)
            at = one.clock.times[WARM_UP : times * STEPS]
            losses[side.name] = one.model.loss.item()
            if turn:
                steps = [after - before for before, after in pairwise(at)]
                taken[side.name].append(statistics.median(steps))
        _check_same(losses)
    return {name: min(values) for name, values in taken.items()}


def _saves(sides: list[type[Side]], where: Path) -> dict[str, Times]:
    """Seconds for a save, and from a new model to its first call after resuming."""
    trained = [side(LARGE, where / side.__name__) for side in sides]
    for one in trained:
        one.remove()
        one.train(SAVED_AT)
    saves: dict[str, list[float]] = {one.name: [] for one in trained}
    resumes: dict[str, list[float]] = {one.name: [] for one in trained}
    for turn in range(ROUNDS + 1):
        losses = {}
        for one in random.Random(turn).sample(trained, len(trained)):
            one.remove()
            start = time.perf_counter()
            one.save()
            saves[one.name].append(time.perf_counter() - start)
            if isinstance(one, Ours):
                one.manager.close()  # gives back the directory's lock
            again = type(one)(LARGE, one.where)
            start = time.perf_counter()
            again.resume(SAVED_AT)
            assert again.first_used is not None
            resumes[one.name].append(again.first_used - start)
            losses[one.name] = again.model.loss.item()
            one.remove()
        _check_same(losses)
    size = sum(value.nbytes for value in trained[0].model.state_dict().values()) * 3 / 1e9
    return {
        f"save of {size:.2f} GB": {name: min(values[1:]) for name, values in saves.items()},
        f"resume from {size:.2f} GB": {name: min(values[1:]) for name, values in resumes.items()},
    }


def _check_same(losses: Times) -> None:
    """Raises SystemExit unless all sides did the same arithmetic."""
    expected = losses[Bare.name]
    if not all(math.isclose(loss, expected, rel_tol=1e-5) for loss in losses.values()):
        raise SystemExit(f"not the same arithmetic: {losses}")


def main() -> None:
    rows = run()
    if not rows:
        raise SystemExit(1)
    for row in rows:
        assert row.baseline is not None
        ours, theirs = row.ours * 1e3, row.baseline * 1e3
        verdict = "" if row.at_most is None else f" ({'meets' if row.ok else 'MISSES'} its bar)"
        print(f"{row.name}: {ours:.3f} ms / {theirs:.3f} ms = {row.ratio:.3f}{verdict}")


if __name__ == "__main__":
    main()
