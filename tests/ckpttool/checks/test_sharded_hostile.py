"""Sharded steps under random damage: never an exception, and never called valid unseen."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from ckpttool.checks.verify import verify
from tests.corrupt import cut_out, flip_bit, keep_first, zero_range


@pytest.mark.parametrize("file", [".metadata", "__1_0.distcp", "trainer.pt", "rank_00001.pt"])
def test_random_damage_is_found_and_raises_nothing(
    fixtures: Path, tmp_path: Path, file: str
) -> None:
    step = Path(
        shutil.copytree(fixtures / "sharded" / "step_000000000004", tmp_path / "step_000000000004")
    )
    data = (step / file).read_bytes()
    dice = random.Random(file)
    for _ in range(25):
        at = dice.randrange(len(data))
        damaged = dice.choice(
            [
                flip_bit(data, at, dice.randrange(8)),
                zero_range(data, at, min(40, len(data) - at)),
                cut_out(data, at, 30),
                keep_first(data, at),
            ]
        )
        (step / file).write_bytes(damaged)
        report = verify(step)
        verify(step, quick=True)
        if file != ".metadata" and len(damaged) != len(data):
            assert report.files[0].state != "valid"
    (step / file).write_bytes(data)
    assert verify(step).files[0].state == "valid"
