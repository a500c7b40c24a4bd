"""Kills ranks in the midst of a save: `killed.py DIRECTORY KIND=POINTS …`; writes what was left.

This process imports torch once and forks the ranks for each point. A point `rank:number` is one
file operation of one rank, counted from its start; "dry" counts them all and kills nobody. With
`:all` behind it the other rank is killed, too; else it has to end by itself.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
import torch._dynamo  # which every optimizer imports
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp  # all of these are costly: once, for all that are forked off

from tests.trainer_core.site import runs
from trainer_core import CheckpointManager

SAVES = (2, 4, 6)
OPERATIONS = ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir")
PATIENCE_S = 120


def rank_of_two(rank: int, kind: str, directory: Path, point: str, act: Callable[[], Any]) -> None:
    """One rank's whole life, in a process of its own."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    where = f"file://{directory}.store"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    victim, _, number = point.removesuffix(":all").partition(":")
    _watch(directory, rank, int(number) if victim == str(rank) else None)
    acks = os.open(f"{directory}.acks-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    class Note:
        bits: dict[int, str] = {}  # noqa: RUF012 - one object, one process

        def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
            self.bits[step] = runs.weights(trainer)  # together: shards are put together for it

        def on_save(self, trainer: Any, step: int, path: Path) -> None:
            os.write(acks, f"{step} {self.bits[step]}\n".encode())

    manager = CheckpointManager(directory, every_steps=2, keep_last=2)
    one = runs.trainer(kind, None, manager=manager, callbacks=[Note()])
    one.fit(SAVES[-1])
    act()
    dist.destroy_process_group()


def _watch(directory: Path, rank: int, last: int | None) -> None:
    """Counts file operations, and kills this process before the one numbered `last`."""
    count = [0]

    def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            count[0] += 1
            Path(f"{directory}.count-{rank}").write_text(str(count[0]))
            if count[0] == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*arguments, **options)

        return call

    for name in OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))


def forked(work: Callable[[], Any], errors: Any = None) -> int:
    """The id of a process that does this and ends; `errors` is where it says why it could not."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        sys.stderr = errors or open(os.devnull, "w")  # noqa: SIM115 - until this process ends
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def killed_at(kind: str, directory: Path, point: str) -> dict[str, Any]:
    """Two ranks until the end; when one is gone the other has to end by itself."""
    shutil.rmtree(directory, ignore_errors=True)
    started = [
        forked(lambda rank=rank: rank_of_two(rank, kind, directory, point, lambda: None))
        for rank in range(2)
    ]
    ended: dict[int, int] = {}
    until = time.monotonic() + PATIENCE_S
    while len(ended) < 2 and time.monotonic() < until:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            ended[pid] = status
            if point.endswith(":all"):
                for other in set(started) - set(ended):
                    os.kill(other, signal.SIGKILL)
        else:
            time.sleep(0.01)
    for pid in set(started) - set(ended):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return {"ended": [ended.get(pid) for pid in started], **_what_is_left(kind, directory)}


def _what_is_left(kind: str, directory: Path) -> dict[str, Any]:
    """Resumed by a process alone, which then saves once more and tidies up."""
    acks = Path(f"{directory}.acks-0")
    told = acks.read_text().splitlines() if acks.exists() else []
    counts = [Path(f"{directory}.count-{rank}") for rank in range(2)]
    found: dict[str, Any] = {"acks": told}
    found["counts"] = [int(count.read_text()) if count.exists() else 0 for count in counts]
    for extra in [acks, *counts, Path(f"{directory}.acks-1"), Path(f"{directory}.store")]:
        extra.unlink(missing_ok=True)
    one = runs.trainer("plain", None, seed=30, manager=CheckpointManager(directory, keep_last=2))
    with runs.heard():
        state = one.checkpoint_manager.load_latest(fallback=True)
        if state is None:
            return {**found, "step": None}
        one.resume(state)
        found |= {"step": one.step, "bits": runs.weights(one)}
        one.fit(SAVES[-1] + 1)  # leftovers of later steps would stay
        one.checkpoint_manager.save(one.step, one.state_dict())
        one.checkpoint_manager.close()
    found["then"] = sorted(os.listdir(directory))
    return found


def main() -> int:
    runs.quiet()
    torch.set_num_threads(1)
    directory = Path(sys.argv[1])
    for run in sys.argv[2:]:
        kind, _, points = run.partition("=")
        found = {point: killed_at(kind, directory / kind, point) for point in points.split(",")}
        (directory / f"killed-{kind}.json").write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
