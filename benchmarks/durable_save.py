"""Saving: against `torch.save` and fsync of the same state; what it stalls, and its memory.

On a RAM-backed file system, where there is one, the processor is the limit; elsewhere the disk is.
`CheckpointManager.save` also computes the SHA-256 of the file, and writes pointer and manifest. It
does so beside the writing, which needs a second core that is free: with one core it takes about as
long as `torch.save`. So what counts is the best round, the one that other programs disturbed least.

`python -m benchmarks.durable_save` also shows how fast this processor computes SHA-256, which no
save that records it can beat.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.inputs import GB, SIZE_GB, directory
from benchmarks.measure import Row, in_one_process

MOST_GB = 0.5
MEMORY = Path("/dev/shm")
ROUNDS = 9
START = f"import json, os, sys, time\nROUNDS = {ROUNDS}\n"

SIDES = """
from pathlib import Path

import torch

from benchmarks.inputs import GB, real_state
from trainer_core import CheckpointManager, atomic_torch_save

where = Path(sys.argv[2])
state = real_state(float(sys.argv[1]) * GB)
state["step"] = 4

def best(ready, **sides):
    for side in sides.values():
        ready()
        side()
    times = {name: [] for name in sides}
    for turn in range(ROUNDS):
        for name in sorted(sides, reverse=turn % 2):
            ready()
            start = time.perf_counter()
            sides[name]()
            times[name].append(time.perf_counter() - start)
    print(json.dumps({name: min(taken) for name, taken in times.items()}))
"""

SAVES = """
manager = CheckpointManager(where / "run")

def ready():
    os.sync()
    for path in (where / "durable.pt", where / "plain.pt", manager.path_for(4)):
        path.unlink(missing_ok=True)

def durable():
    atomic_torch_save(state, where / "durable.pt")

def managed():
    manager.save(4, state)

def plain():
    path = where / "plain.pt"
    torch.save(state, path)
    descriptor = os.open(path, os.O_RDWR)
    os.fsync(descriptor)
    os.close(descriptor)

best(ready, durable=durable, managed=managed, plain=plain)
"""

STALL = """
from trainer_core.saving.container import take_apart

manager = CheckpointManager(where / "run", async_save=True)
parts = take_apart(state).storages
buffers = [torch.empty_like(part) for part in parts]

def ready():
    manager.wait()
    manager.path_for(4).unlink(missing_ok=True)

def stall():
    manager.save(4, state)

def copy():
    for buffer, part in zip(buffers, parts):
        buffer.copy_(part)

best(ready, stall=stall, copy=copy)
manager.close()
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
    with _somewhere("saves") as (place, where):
        rows = _saves(size, where, place) if place == "in memory" else []
    on_disk = directory() / "saves"
    on_disk.mkdir(exist_ok=True)
    rows += _saves(size, on_disk, "on disk")
    with _somewhere("stall") as (place, where):
        times = in_one_process(START + SIDES + STALL, str(size), where)
        name = "stall of an asynchronous save / one plain copy of the state"
        rows.append(Row(name, times["stall"], times["copy"], at_most=1.25))
    if Path("/proc/self/clear_refs").exists():
        with _somewhere("peak") as (place, where):
            peak = in_one_process(START + SIDES + PEAK, str(size), where)["peak"]
        rows.append(Row("peak memory of a save, in states", peak, None, "states", at_most=1.2))
    return rows


def _saves(size: float, where: Path, place: str) -> list[Row]:
    times = in_one_process(START + SIDES + SAVES, str(size), where)
    what = f"of {size:g} GB {place} / torch.save + fsync"
    # Where the disk is the limit, nothing can be gained: equal, but for what a disk's times vary.
    bar = {"at_least": 1.5} if place == "in memory" else {"at_most": 1.1}
    plain = times["plain"]
    return [
        Row(f"durable checked save {what}", times["durable"], plain, **bar),
        Row(f"the same with SHA-256 and pointer {what}", times["managed"], plain, **bar),
    ]


@contextmanager
def _somewhere(name: str) -> Iterator[tuple[str, Path]]:
    """A directory on a RAM-backed file system where there is one, else on disk; and which it is."""
    if os.access(MEMORY, os.W_OK):
        with tempfile.TemporaryDirectory(dir=MEMORY, prefix="ckpttool-bench-") as made:
            yield "in memory", Path(made)
    else:
        where = directory() / name
        where.mkdir(exist_ok=True)
        yield "on disk", where


HASH = """
import hashlib, json, sys, time

piece = memoryview(bytes(range(256)) * 2048)
def seconds(count):
    digest = hashlib.sha256()
    start = time.perf_counter()
    for _ in range(count):
        digest.update(piece)
    return time.perf_counter() - start
print(json.dumps({"rate": max(200 * len(piece) / seconds(200) for _ in range(9))}))
"""


def main() -> None:
    for row in run():
        baseline = "" if row.baseline is None else f" / {row.baseline:.3f}"
        words = f"{row.ours:.3f}{baseline}"
        print(f"{row.name}: {words}, ratio {row.ratio:.2f}, {'met' if row.ok else 'NOT met'}")
    size, rate = min(SIZE_GB, MOST_GB), in_one_process(HASH)["rate"] / GB
    print(f"SHA-256 of what is in the cache: {rate:.2f} GB/s, {size / rate:.3f} s for {size:g} GB")


if __name__ == "__main__":
    main()
