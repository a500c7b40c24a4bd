"""What one rank does under torchrun: `worker.py SCENARIO DIRECTORY`; writes what came of it as JSON.

Several ranks run it; each writes `<scenario>-<rank>.json` into the directory.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
import torch.distributed as dist

from tests.trainer_core.site import runs
from trainer_core import CheckpointManager

STEPS, CUT = 9, 6
ROOT = Path(sys.argv[2])


def interrupted(kind: str) -> dict[str, Any]:
    """The whole run, the run in two, the plain loop: by one world size, this one."""
    rank = dist.get_rank()
    found: dict[str, Any] = {"by hand": runs.by_hand(kind, STEPS)}
    whole = runs.trainer(kind, None)
    whole.fit(STEPS)
    found["whole"] = runs.end(whole)
    first = runs.trainer(kind, ROOT / kind)
    first.fit(CUT)
    found["at the cut"] = runs.end(first)
    torch.manual_seed(4242 + rank)
    exists, listdir = os.path.exists, os.scandir
    if rank == 1:  # a cache of a network file system that knows nothing yet

        def blind(path: Any = ".") -> Any:
            if "site-" in os.fspath(path) or str(ROOT) in os.fspath(path):
                raise FileNotFoundError(2, "not yet", path)
            return listdir(path)

        os.path.exists, os.scandir = lambda path: False, blind  # type: ignore[assignment]
    try:
        second = runs.trainer(kind, ROOT / kind, seed=99)
        with runs.heard() as said:
            second.fit(STEPS, resume="must")
    finally:
        os.path.exists, os.scandir = exists, listdir
    found["resumed"], found["said"] = runs.end(second), said
    return found


def asynchronous(kind: str) -> dict[str, Any]:
    """Saved beside training, with a directory of its own; the last save is waited for."""
    manager = CheckpointManager(ROOT / f"async-{kind}", every_steps=2, keep_last=2, async_save=True)
    one = runs.trainer(kind, None, manager=manager)
    one.fit(CUT)
    done = runs.end(one)
    two = runs.trainer(kind, None, seed=98, manager=CheckpointManager(ROOT / f"async-{kind}"))
    two.resume(two.checkpoint_manager.load_latest())
    return {"saved": done, "loaded": runs.end(two)}


def signalled(kind: str) -> dict[str, Any]:
    """One rank is told to stop, and all save the same step."""

    class Kill:
        def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
            if step == 4 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    one = runs.trainer(kind, ROOT / f"signal-{kind}", every=100, callbacks=[Kill()])
    result = one.fit(50)
    return {"steps": result.steps, "by": result.stopped_by, "code": result.exit_code}


def refused(kind: str) -> dict[str, Any]:
    """Rank 0 is refused the directory, then its disk is full; then another rank's is."""
    words = {}
    taken = ROOT / f"taken-{kind}"
    taken.mkdir(exist_ok=True)
    if dist.get_rank() == 0:
        (taken / "latest.json").mkdir(exist_ok=True)
    dist.barrier()
    words["pointer"] = _error(lambda: runs.trainer(kind, taken).fit(CUT))
    import trainer_core.saving.hashed as hashed

    write = hashed.HashedFile.write
    for full in range(2):

        def fail(self: Any, data: Any) -> Any:
            raise OSError(28, "No space left on device")

        if dist.get_rank() == full:
            hashed.HashedFile.write = fail  # type: ignore[method-assign]
        try:
            directory = ROOT / f"full-{full}-{kind}"
            words[f"full {full}"] = _error(lambda at=directory: runs.trainer(kind, at).fit(CUT))
        finally:
            hashed.HashedFile.write = write  # type: ignore[method-assign]
        dist.barrier()
        words[f"left {full}"] = sorted(os.listdir(directory))
        dist.barrier()
    return words


def _error(work: Any) -> list[str]:
    try:
        work()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


def other_size(kind: str) -> dict[str, Any]:
    """Goes on from what two ranks saved; also with the other way of having the model."""
    found: dict[str, Any] = {}
    for saved in ("ddp", "fsdp"):
        one = runs.trainer(kind, ROOT / saved, seed=50)
        with runs.heard() as said:
            one.resume(one.checkpoint_manager.load_latest())
        found[saved] = {**runs.end(one), "said": said}
        one.checkpoint_manager = None
        found[saved]["goes on"] = one.fit(STEPS + 2).steps
    return found


def clocks(kind: str) -> dict[str, Any]:
    """Saves by the clock, while the clocks of the ranks say different things: rank 0's counts."""
    import trainer_core.checkpoint as checkpoint

    saved = []
    manager = CheckpointManager(ROOT / "clocks", every_steps=1000, save_every_seconds=50)
    now = [0.0]

    class Clock:
        monotonic = staticmethod(lambda: now[0])

        def __getattr__(self, name: str) -> Any:
            return getattr(time, name)

    class Tick:
        def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
            now[0] += 20.0 if dist.get_rank() == 0 else 60.0

        def on_save(self, trainer: Any, step: int, path: Path) -> None:
            saved.append(step)

    checkpoint.time = Clock()  # type: ignore[assignment]
    try:
        runs.trainer(kind, None, manager=manager, callbacks=[Tick()]).fit(7)
    finally:
        checkpoint.time = time
    return {"saved": saved}


def locked(kind: str) -> dict[str, Any]:
    """Another process writes to the directory: here the one of rank 1."""
    from trainer_core.saving.directory_lock import Hold

    hold = Hold(ROOT / "locked", "another run") if dist.get_rank() == 1 else None
    dist.barrier()
    words = _error(lambda: runs.trainer(kind, ROOT / "locked").fit(CUT))
    if hold is not None:
        hold.release()
    dist.barrier()
    return {"words": words, "left": sorted(os.listdir(ROOT / "locked"))}


def again(kind: str) -> dict[str, Any]:
    """Saves a step that is there already, which another number of ranks has saved."""
    directory = ROOT / "again"
    if dist.get_rank() == 0 and not directory.exists():
        shutil.copytree(ROOT / "fsdp", directory)
    dist.barrier()
    one = runs.trainer(kind, directory, seed=51)
    manager = one.checkpoint_manager
    with runs.heard():
        one.resume(manager.load_latest())
    manager.save(one.step, one.state_dict())
    manager.close()
    return {**runs.end(one), "files": sorted(os.listdir(directory / "step_000000000009"))}


SCENARIOS = {
    "clocks": clocks,
    "locked": locked,
    "again": again,
    "interrupted": interrupted,
    "asynchronous": asynchronous,
    "signalled": signalled,
    "refused": refused,
    "other_size": other_size,
}


def main() -> int:
    runs.quiet()
    torch.set_num_threads(1)
    alone = "RANK" not in os.environ
    if not alone:
        dist.init_process_group("gloo")
    rank = 0 if alone else dist.get_rank()
    found = {}
    for name in sys.argv[1].split(","):
        scenario, _, kind = name.partition(":")
        if alone and kind == "fsdp":  # sharded over one
            store = dist.HashStore()
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            alone = False
        found[name] = SCENARIOS[scenario](kind)
        if not alone:
            dist.barrier()
    size = dist.get_world_size() if dist.is_initialized() else 1
    Path(ROOT, f"found-{size}-{rank}.json").write_text(json.dumps(found))
    if not alone:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
