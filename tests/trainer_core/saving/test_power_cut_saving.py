"""A power cut at any moment of a save: no acknowledged step is lost, and training goes on exactly.

See `tests/power_cut.py` for what a cut may leave. A part of the states is tried here, all of them
by `python -m benchmarks.power_cut`.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crash import CrashRig
from tests.power_cut import ORDERED, PRESETS, STRICT, Counted, State, look_at_states
from tests.trainer_core.saving.power_cut_program import WRONG, Whole, faults

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

PROGRAM = "tests.trainer_core.saving.power_cut_program:main"
EVERY = {("sync", STRICT): 48, ("sync", ORDERED): 9, ("async", STRICT): 96, ("async", ORDERED): 14}


def survey(
    how: str, preset: str, root: Path, rig: CrashRig, whole: Whole, **options: Any
) -> Counted:
    """Looks at the states of one way of saving; `benchmarks.power_cut` counts these."""
    run, acks = root / "run", root / "acks"
    done = rig.run(run, acks, how, record=True)
    assert done.code == 0, done.output

    def check(directory: Path, state: State) -> list[str]:
        return faults(directory, state.marks, whole)

    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return look_at_states(done.ops, run, preset, check, acks=acks, **options)
    finally:
        logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def rig() -> Iterator[CrashRig]:
    with CrashRig(PROGRAM, preload=["ckpttool.checks.verify"]) as made:
        yield made


@pytest.fixture(scope="module")
def whole() -> Whole:
    return Whole()


@pytest.mark.parametrize(("how", "preset"), EVERY)
def test_nothing_that_was_acknowledged_is_lost(
    rig: CrashRig, whole: Whole, tmp_path: Path, how: str, preset: str
) -> None:
    counted = survey(how, preset, tmp_path, rig, whole, every=EVERY[how, preset])
    assert counted.faults == []
    assert counted.sampled == 0  # every cut's states are known, one by one
    assert counted.looked_at >= 20


@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_order_is_found_out(rig: CrashRig, whole: Whole, tmp_path: Path, how: str) -> None:
    found = survey(how, STRICT, tmp_path, rig, whole, most_faults=1, every=20)
    assert found.faults != []


@pytest.mark.parametrize("preset", PRESETS)
def test_json_is_old_or_new(rig: CrashRig, tmp_path: Path, preset: str) -> None:
    run, acks = tmp_path / "run", tmp_path / "acks"

    def check(directory: Path, state: State) -> list[str]:
        path = directory / "a.json"
        found = json.loads(path.read_bytes())["version"] if path.exists() else 0
        return [] if found >= len(state.marks) else [f"version {found} after {state.marks}"]

    done = rig.run(run, acks, "json", record=True)
    assert done.code == 0, done.output
    counted = look_at_states(done.ops, run, preset, check, acks=acks)
    assert counted.faults == []
    assert counted.distinct > 10
