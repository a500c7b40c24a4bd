"""`trainer_core.atomic_torch_save` against `torch.save` and an fsync of the same state."""

from __future__ import annotations

from benchmarks.inputs import SIZE_GB, directory
from benchmarks.measure import TAKE_TURNS, Row, in_one_process

MOST_GB = 0.5

INSIDE = """
from pathlib import Path

import torch

from benchmarks.inputs import GB, real_state
from trainer_core import atomic_torch_save

state = real_state(float(sys.argv[1]) * GB)
ours, theirs = Path(sys.argv[2], "durable.pt"), Path(sys.argv[2], "plain.pt")

def durable():
    ours.unlink(missing_ok=True)
    atomic_torch_save(state, ours)

def plain():
    theirs.unlink(missing_ok=True)
    torch.save(state, theirs)
    descriptor = os.open(theirs, os.O_RDWR)
    os.fsync(descriptor)
    os.close(descriptor)

take_turns(ours=durable, baseline=plain)
"""


def run() -> list[Row]:
    size = min(SIZE_GB, MOST_GB)
    times = in_one_process(TAKE_TURNS + INSIDE, str(size), directory())
    name = f"durable save of {size:g} GB / torch.save + fsync"
    return [Row(name, times["ours"], times["baseline"], at_most=1.1)]
