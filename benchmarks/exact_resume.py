"""How many bits differ between a run that was interrupted and one that never was.

Each feature is trained once without a stop, and then resumed after each of its steps in a new
trainer with other weights and other random numbers. Compared are everything that a checkpoint
holds at the end, and every batch in between. `python -m benchmarks.exact_resume` prints it as a
table for README.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import torch

from benchmarks.measure import Row
from benchmarks.resume_features import FEATURES, STEPS, Feature, Run, differing_bits


def run() -> list[Row]:
    """One row for each feature, with the sum over all steps that it was resumed at."""
    torch.set_num_threads(1)
    return [_row(feature) for feature in FEATURES]


def _row(feature: Feature) -> Row:
    name = f"exact resume, {feature.name}, after each of {STEPS - 1} steps"
    return Row(name, sum(bits_by_step(feature)), None, unit="differing bits", at_most=0)


def bits_by_step(feature: Feature) -> list[int]:
    """The number of differing bits for each step that the run was resumed at."""
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded")
        whole = Run(feature, 0, directory)
        whole.trainer.fit(STEPS)
        end, batches, path_for = whole.trainer.state_dict(), whole.batches, whole.manager.path_for
        return [_bits(feature, path_for(step), end, batches) for step in range(1, STEPS)]


def _bits(feature: Feature, path: Path, end: object, batches: list[torch.Tensor]) -> int:
    again = Run(feature, 99)
    again.trainer.resume(torch.load(path, weights_only=True))
    again.trainer.fit(STEPS)
    seen = again.batches
    assert seen, "nothing was trained"
    return differing_bits(again.trainer.state_dict(), end) + differing_bits(
        seen, batches[-len(seen) :]
    )


def table() -> str:
    """As README shows it."""
    torch.set_num_threads(1)
    lines = ["| feature | resumed after steps | differing bits |", "|---|---|---|"]
    for feature in FEATURES:
        bits = bits_by_step(feature)
        lines.append(f"| {feature.name} | 1 to {len(bits)}, each | {sum(bits)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
