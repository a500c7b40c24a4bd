"""How things are measured: medians of several runs, the two sides taking turns."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

REPEATS = 5
LAUNCHER = Path(__file__).with_name("launch.py")
CKPTTOOL = Path(sys.executable).with_name("ckpttool")


class Row(NamedTuple):
    """One line of the table: `ours` and `baseline` in `unit`, and the bar that the ratio must meet.

    `at_most`: ours / baseline may be this much. `at_least`: baseline / ours must be this much.
    Without either, the row is only shown. Where `baseline` is None, the bar is on `ours` itself.
    """

    name: str
    ours: float
    baseline: float | None
    unit: str = "s"
    at_most: float | None = None
    at_least: float | None = None

    @property
    def ratio(self) -> float:
        """What is compared with the bar."""
        if self.baseline is None:
            return self.ours
        return self.baseline / self.ours if self.at_least is not None else self.ours / self.baseline

    @property
    def ok(self) -> bool:
        """Whether the bar is met."""
        if self.at_least is not None:
            return self.ratio >= self.at_least
        return self.at_most is None or self.ratio <= self.at_most


class Process(NamedTuple):
    """What one whole process took: wall time in seconds, peak resident memory in MB (10**6)."""

    seconds: float
    peak_mb: float


def process(*command: str | Path) -> Process:
    """Runs a command to its end, output thrown away. Raises RuntimeError unless it exits with 0.

    A small launcher starts it, since the kernel counts the memory of whoever starts a process as
    the peak of that process too.
    """
    launcher = [sys.executable, "-I", "-S", str(LAUNCHER), *map(str, command)]
    done = subprocess.run(launcher, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stderr}")
    plain = json.loads(done.stdout)
    return Process(plain["seconds"], plain["peak_kib"] * 1024 / 1e6)


def python(code: str, *arguments: str | Path) -> Process:
    """`python -c CODE ARGUMENTS`, as a whole process."""
    return process(sys.executable, "-c", code, *arguments)


def interleaved(*sides: Callable[[], Process], repeats: int = REPEATS) -> list[Process]:
    """The median of each side (of time and of memory), each run once before as a warm-up."""
    for side in sides:
        side()
    rounds = [[side() for side in sides] for _ in range(repeats)]
    return [_median([one[i] for one in rounds]) for i in range(len(sides))]


def _median(runs: Sequence[Process]) -> Process:
    seconds = statistics.median(run.seconds for run in runs)
    return Process(seconds, statistics.median(run.peak_mb for run in runs))


def in_one_process(code: str, *arguments: str | Path) -> dict[str, Any]:
    """What a fresh Python process prints as JSON: for sides that are timed from within."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = {**os.environ, "CKPTTOOL_BENCH_REPEATS": str(REPEATS)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


TAKE_TURNS = """
import json, os, statistics, sys, time

def take_turns(**sides):
    for side in sides.values():
        side()
    times = {name: [] for name in sides}
    for _ in range(int(os.environ["CKPTTOOL_BENCH_REPEATS"])):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            times[name].append(time.perf_counter() - start)
    print(json.dumps({name: statistics.median(taken) for name, taken in times.items()}))
"""
"""Put before code for `in_one_process`: `take_turns(ours=…, baseline=…)` prints the medians."""
