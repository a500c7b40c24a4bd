"""What each rank does: `worker.py DIRECTORY SCENARIOS`, under torchrun.

Or `worker.py DIRECTORY 3=SCENARIOS 1=SCENARIOS`: then this process imports torch once, and forks
the ranks of one run after the other. Each rank writes what came of it to `found-<size>-<rank>.json`.
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
import torch._dynamo  # which every optimizer imports
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp  # all of these are costly: once, for all that are forked off
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.trainer_core.site import runs
from tests.trainer_core.site.killed import forked
from trainer_core import CheckpointManager
from trainer_core.precision import PrecisionPlan
from trainer_core.saving.retention import delete
from trainer_core.site.ranks import site_of

STEPS, CUT = 9, 6
ROOT = Path(sys.argv[1])


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


def failing(kind: str) -> dict[str, Any]:
    """A callback raises on rank 1 alone, at a step that is to be saved; then on rank 0."""
    import logging

    class Lines(logging.Handler):
        def __init__(self) -> None:
            super().__init__()
            self.lines: list[str] = []

        def emit(self, record: logging.LogRecord) -> None:
            self.lines.append(record.getMessage())

    class Fail:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
            if step == 3 and dist.get_rank() == self.rank:
                raise LookupError(f"no words for rank {self.rank}")

    found: dict[str, Any] = {}
    for rank in (1, 0):
        heard = Lines()
        logger = logging.getLogger(f"failing-{kind}-{rank}")
        logger.setLevel(logging.INFO)
        logger.addHandler(heard)
        directory = ROOT / f"failing-{kind}-{rank}"
        options: dict[str, Any] = {"logger": logger, "save_on_exception": True}
        one = runs.trainer(kind, directory, callbacks=[Fail(rank)], **options)
        words = _error(lambda one=one: one.fit(CUT))
        dist.barrier()
        found[str(rank)] = {
            "words": words,
            "lines": heard.lines,
            "left": sorted(os.listdir(directory)),
        }
        dist.barrier()
    site = site_of(one.model)  # anew: the one before was left after the failure
    assert site is not None
    works = {"every": (site.every, 1), "first": (site.first, 0)}
    for name, (together, failed) in works.items():

        def work(failed: int = failed) -> None:
            if dist.get_rank() == failed:
                raise LookupError("no words")

        found[name] = {"words": _error(lambda do=together, work=work: do(work))}
    return found


def averaged(kind: str) -> dict[str, Any]:
    """Averaged weights, sharded like the model: saved, gone on from, and used in its place."""

    def make(directory: Path | None, seed: int = 7) -> Any:
        model = runs.net(seed)
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        runs.wrapped(ema.module, kind)
        return runs.trainer(kind, directory, seed=seed, model=model, ema=ema)

    whole = make(None)
    whole.fit(CUT)
    make(ROOT / f"averaged-{kind}").fit(3)
    second = make(ROOT / f"averaged-{kind}", seed=77)
    second.fit(CUT, resume="must")
    found = {
        name: runs.bits(one.ema.state_dict())
        for name, one in (("whole", whole), ("resumed", second))
    }
    second.model.eval(), second.ema.module.eval()
    given = torch.ones(3, runs.FEATURES)

    def answers(model: torch.nn.Module) -> list[list[float]]:
        with torch.no_grad():
            result: list[list[float]] = model(given).tolist()
        return result

    found |= {"model": answers(second.model), "average": answers(second.ema.module)}
    with second.averaged_weights():
        found["within"] = answers(second.model)
    found["after"] = answers(second.model)
    alike = lambda: runs.trainer(kind, None, ema=AveragedModel(runs.net()))  # noqa: E731
    return {**found, "not sharded": _error(alike)}


def scaled(kind: str) -> dict[str, Any]:
    """Rank 1 alone meets an infinite loss: all ranks skip that step, and the scale is kept."""
    calls = [0]

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        calls[0] += 1
        is_bad = calls[0] == 3 and dist.get_rank() == 1
        return runs.loss(model, batch) * (float("inf") if is_bad else 1.0)

    plan = PrecisionPlan("fp16", autocast_enabled=False, use_scaler=True)
    directory = ROOT / f"scaled-{kind}"
    one = runs.trainer(kind, directory, loss_fn=loss, precision=plan)
    one.fit(3)
    two = runs.trainer(kind, directory, seed=76, precision=plan)
    two.resume(two.checkpoint_manager.load_latest())
    scales = [each.state_dict()["scaler"]["scale"] for each in (one, two)]
    return {"calls": calls[0], "scales": scales, "weights": [runs.weights(one), runs.weights(two)]}


def deleting(kind: str) -> dict[str, Any]:
    """Two processes delete the same steps at once."""
    directory = ROOT / "deleting"
    if dist.get_rank() == 0:
        for step in range(40):
            sharded = directory / f"step_{step:012d}"
            sharded.mkdir(parents=True)
            for name in ("__0_0.distcp", "__1_0.distcp", "trainer.pt", ".metadata"):
                (sharded / name).write_bytes(b"some bytes")
            (directory / f"step_{step + 100:012d}.pt").write_bytes(b"some bytes")
    dist.barrier()
    paths = sorted(directory.glob("step_*"))
    dist.barrier()
    deleted = len(delete(paths))
    dist.barrier()
    return {"known": len(paths), "deleted": deleted, "left": os.listdir(directory)}


SCENARIOS = {
    "averaged": averaged,
    "deleting": deleting,
    "failing": failing,
    "scaled": scaled,
    "clocks": clocks,
    "locked": locked,
    "again": again,
    "interrupted": interrupted,
    "asynchronous": asynchronous,
    "signalled": signalled,
    "refused": refused,
    "other_size": other_size,
}


def rank_of(size: int, rank: int, names: list[str]) -> None:
    """One rank's whole life. Without a group, it is a process alone."""
    found = {}
    for name in names:
        scenario, _, kind = name.partition(":")
        if kind == "fsdp" and not dist.is_initialized():  # sharded over one
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        found[name] = SCENARIOS[scenario](kind)
        if dist.is_initialized():
            dist.barrier()
    Path(ROOT, f"found-{size}-{rank}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


def fork_ranks(size: int, names: list[str]) -> int:
    """All ranks of a run, in processes of their own. The first exit code that is not 0."""

    def rank(number: int) -> None:
        os.environ |= {"RANK": str(number), "WORLD_SIZE": str(size)}
        if size > 1:
            where = f"file://{ROOT}/.store-{size}"
            dist.init_process_group("gloo", init_method=where, rank=number, world_size=size)
        rank_of(size, number, names)

    started = [forked(lambda number=number: rank(number), sys.stderr) for number in range(size)]
    ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in started]
    return next((code for code in ended if code), 0)


def main() -> int:
    runs.quiet()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        rank_of(dist.get_world_size(), dist.get_rank(), sys.argv[2].split(","))
        return 0
    for run in sys.argv[2:]:
        size, _, names = run.partition("=")
        code = fork_ranks(int(size), names.split(","))
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
