"""A power cut during what changes a directory: nothing is lost, and repair and undo still work.

See `tests/power_cut.py` for what a cut may leave. Every state is tried where the file system keeps
a journal; of those that POSIX alone would allow, a part here and all by
`python -m benchmarks.power_cut`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ckpttool
from tests import corrupt
from tests.acceptance.test_killed_repair import (
    assert_mended,
    contents,
    make_troubled,
    repair,
    sha256,
    tree_of,
    undo_all,
)
from tests.ckpttool.checks.builders import name, point, put, step_bytes
from tests.crash import CrashRig, Op
from tests.power_cut import ORDERED, PRESETS, STRICT, Counted, State, look_at_states, snapshot

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

EVERY = {("repair", STRICT): 14, ("repair", ORDERED): 3, ("undo", STRICT): 6, ("undo", ORDERED): 3}
PRELOAD = [f"ckpttool.cli.{verb}" for verb in ("repair", "undo", "copy", "prune", "mend")]
Check = Callable[[Path, State], list[str]]


class Case:
    """One command, the directory that it is recorded in, and what must hold after a cut."""

    def __init__(
        self, root: Path, rig: CrashRig, prepare: Callable[[Path], object], *words: str
    ) -> None:
        self.run = root / "run"
        prepare(self.run)
        self.whole = root / "whole"
        shutil.copytree(self.run, self.whole, symlinks=True)
        self.before = snapshot(self.run)
        self.first = tree_of(self.whole)
        done = rig.run([word.replace("RUN", str(self.run)) for word in words], record=True)
        assert done.code == 0, done.output
        self.log: list[Op] = done.ops

    def look(self, preset: str, check: Check, every: int) -> Counted:
        """The states, each looked at by `check`."""
        return look_at_states(self.log, self.run, preset, check, every=every, before=self.before)


@pytest.fixture(scope="module")
def rig() -> Iterator[CrashRig]:
    with CrashRig("ckpttool.cli.main:main", preload=PRELOAD) as made:
        yield made


def troubles(run: Path) -> None:
    """One of each trouble."""
    make_troubled(run)


def repaired(run: Path) -> None:
    """The same, mended."""
    make_troubled(run)
    repair(run)


def healthy(run: Path) -> None:
    """Three good steps, a pointer that is behind, and a file with a flipped bit beside them."""
    run.mkdir()
    for step in (2, 4, 6):
        put(run, step, step_bytes(step))
    point(run, 4)
    place = corrupt.content_range(step_bytes(6), "data/0")
    (run / "broken").write_bytes(corrupt.flip_bit(step_bytes(6), place.start + 5, 3))


def nothing_lost_and_mended(case: Case) -> Check:
    """What `repair`, `undo` and `rollback` promise."""

    def check(run: Path, state: State) -> list[str]:
        when = f"cut {state.cut}"
        try:
            assert before <= contents(run), "a file is lost at once"
            repair(run)
            assert before <= contents(run), "a file is lost by repair"
            assert_mended(run, when)
            undo_all(run)
            back = {k: v for k, v in tree_of(run).items() if k != "."}
            assert back == undone, f"undo left {set(back.items()) ^ set(undone.items())}"
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]
        return []

    first = untroubled(case)
    undone = {k: v for k, v in tree_of(first).items() if k != "."}
    before = contents(first) - {sha256(path) for path in first.glob(".quarantine/*/*.json*")}
    return check


def untroubled(case: Case) -> Path:
    """The directory as it was before anything was done to it."""
    first = case.whole.with_name("first")
    shutil.copytree(case.whole, first, symlinks=True)
    undo_all(first)
    return first


def still_healthy(case: Case) -> Check:
    """What a change of a healthy directory promises: what was there is there, whatever is new."""

    def check(run: Path, state: State) -> list[str]:
        there = {path.name: sha256(path) for path in run.glob("step_*.pt")}
        lost = [path.name for path in case.whole.glob("step_*.pt") if path.name not in there]
        pruned = [name(2)] if any(op.target == name(2) for op in case.log) else []
        found = [f"{one} is gone" for one in lost if one not in pruned]
        wrong = [p for p, digest in there.items() if digest != sha256(case.whole / p)]
        found += [f"{one} is not what it was" for one in wrong if (case.whole / one).exists()]
        if ckpttool.verify(run).newest_valid != 6:
            found.append("the newest step is not valid")
        pointer = json.loads((run / "latest.json").read_text())
        if pointer["step"] not in (4, 6):
            found.append("the pointer is neither old nor new")
        others = [p for p in run.iterdir() if p.name == "out"]
        found += [f"{p.name} is in part" for p in others if p.read_bytes() != step_bytes(6)]
        return found

    return check


CASES: dict[str, tuple[Callable[[Path], object], tuple[str, ...], Callable[[Case], Check]]] = {
    "repair": (troubles, ("repair", "RUN", "--apply"), nothing_lost_and_mended),
    "undo": (repaired, ("undo", "RUN"), nothing_lost_and_mended),
    "fix-pointer": (healthy, ("fix-pointer", "RUN"), still_healthy),
    "prune": (healthy, ("prune", "RUN", "--keep-last", "2", "--yes"), still_healthy),
    "copy": (healthy, ("copy", f"RUN/{name(6)}", "RUN/out"), still_healthy),
    "mend": (healthy, ("mend", "RUN/broken", "-o", "RUN/out"), still_healthy),
}


def survey(case: str, preset: str, root: Path, rig: CrashRig, every: int = 1) -> Counted:
    """One case under one preset; `benchmarks.power_cut` counts these."""
    prepare, words, make_check = CASES[case]
    made = Case(root, rig, prepare, *words)
    return made.look(preset, make_check(made), every)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_lost(rig: CrashRig, tmp_path: Path, case: str, preset: str) -> None:
    counted = survey(case, preset, tmp_path, rig, EVERY.get((case, preset), 1))
    assert counted.faults == []
    assert counted.looked_at > 2
