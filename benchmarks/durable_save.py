"""Saving: against `torch.save` and fsync of the same state; what it stalls, and its memory.

On a RAM-backed file system, where there is one, the processor is the limit; elsewhere the disk is.
`CheckpointManager.save` also computes the SHA-256 of the file, and writes pointer and manifest.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.inputs import SIZE_GB, directory
from benchmarks.measure import TAKE_TURNS, Row, in_one_process

MOST_GB = 0.5
MEMORY = Path("/dev/shm")

SIDES = """
from pathlib import Path

import torch

from benchmarks.inputs import GB, real_state
from trainer_core import CheckpointManager, atomic_torch_save

where = Path(sys.argv[2])
state = real_state(float(sys.argv[1]) * GB)
state["step"] = 4

def durable():
    where.joinpath("durable.pt").unlink(missing_ok=True)
    atomic_torch_save(state, where / "durable.pt")

def managed():
    manager.path_for(4).unlink(missing_ok=True)
    manager.save(4, state)

def plain():
    path = where / "plain.pt"
    path.unlink(missing_ok=True)
    torch.save(state, path)
    descriptor = os.open(path, os.O_RDWR)
    os.fsync(descriptor)
    os.close(descriptor)
"""

SAVES = """
manager = CheckpointManager(where / "run")
take_turns(durable=durable, managed=managed, plain=plain)
"""

STALL = """
from trainer_core.saving.container import take_apart
from trainer_core.saving.staging import Staging

manager = CheckpointManager(where / "run", async_save=True)
parts = take_apart(state).storages
buffers = [torch.empty_like(part) for part in parts]

def copy():
    for buffer, part in zip(buffers, parts):
        buffer.copy_(part)

managed(); manager.wait(); copy()
stalls, copies = [], []
for _ in range(int(os.environ["CKPTTOOL_BENCH_REPEATS"])):
    for taken, side in ((stalls, managed), (copies, copy)):
        start = time.perf_counter()
        side()
        taken.append(time.perf_counter() - start)
        manager.wait()
manager.close()
print(json.dumps({"stall": statistics.median(stalls), "copy": statistics.median(copies)}))
"""

PEAK = """
def high_water():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))

manager = CheckpointManager(where / "run")
manager.save(2, {"step": 2})
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = high_water()
manager.save(4, state)
size = manager.path_for(4).stat().st_size
print(json.dumps({"peak": 1 + (high_water() - before) / size}))
"""


def run() -> list[Row]:
    """The rows of the table."""
    size = min(SIZE_GB, MOST_GB)
    rows = []
    with _in_memory() as memory:
        if memory is not None:
            rows += _saves(size, memory, "in memory", at_least=1.5)
    rows += _saves(size, directory() / "saves", "on disk", at_most=1.1)
    with _in_memory() as memory:
        where = memory or directory() / "stall"
        where.mkdir(exist_ok=True)
        times = in_one_process(TAKE_TURNS + SIDES + STALL, str(size), where)
        name = "stall of an asynchronous save / one plain copy of the state"
        rows.append(Row(name, times["stall"], times["copy"], at_most=1.3))
    if Path("/proc/self/clear_refs").exists():
        with _in_memory() as memory:
            where = memory or directory() / "peak"
            where.mkdir(exist_ok=True)
            peak = in_one_process(TAKE_TURNS + SIDES + PEAK, str(size), where)["peak"]
        rows.append(Row("peak memory of a save, in states", peak, None, "states", at_most=1.2))
    return rows


def _saves(
    size: float,
    where: Path,
    place: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> list[Row]:
    where.mkdir(exist_ok=True)
    times = in_one_process(TAKE_TURNS + SIDES + SAVES, str(size), where)
    what = f"of {size:g} GB {place} / torch.save + fsync"
    durable, managed, plain = times["durable"], times["managed"], times["plain"]
    return [
        Row(f"durable checked save {what}", durable, plain, at_least=at_least, at_most=at_most),
        Row(f"the same with SHA-256 and pointer {what}", managed, plain, at_most=1.2),
    ]


@contextmanager
def _in_memory() -> Iterator[Path | None]:
    """A directory on a RAM-backed file system, removed afterwards; None where there is none."""
    if not os.access(MEMORY, os.W_OK):
        yield None
        return
    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="ckpttool-bench-") as name:
        yield Path(name)
