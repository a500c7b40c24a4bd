"""Lets one of two ranks fail: `failed.py DIRECTORY CASES`; writes what became of both.

A case is `kind:part:rank`: that part of that rank's run raises, where it is `ends` the loader ends.
The rank that has failed stays alive until the other has ended, which so cannot rest on that. Like
`killed.py`, this process imports torch once and forks the ranks.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
import torch.distributed as dist

from tests.trainer_core.site import runs
from tests.trainer_core.site.killed import PATIENCE_S, forked
from trainer_core import CheckpointManager
from trainer_core.site import failing

STEPS, DUE = 9, 4
failing.GRACE_S, failing._ALIKE_S = 3.0, 0.2
failing._EVERY_S = 0.1


class Failing:
    """Every part of a run that may raise: at the step after `DUE`, if it is the one that is to."""

    def __init__(self, part: str) -> None:
        self.part, self.calls = part, 0

    def __call__(self, part: str, *_: Any) -> None:
        """Called twice a step, once for each micro-batch, or once a step."""
        if part != self.part:
            return
        self.calls += 1
        calls = 2 * DUE + 1 if part in ("loader", "model", "ends") else DUE + 1
        if self.calls == calls:
            raise LookupError(f"no {part} any more\nand more words")

    # As coordinator and callback

    def start(self) -> None:
        pass

    def after_optimizer_step(self, model: Any, step: int) -> None:
        self("coordinator")

    def stop(self) -> None:
        pass

    def state_dict(self) -> None:
        return None

    def load_state_dict(self, state: Any) -> None:
        pass

    def batches(self) -> Iterator[Any]:
        """Over and over, like a loader that streams."""
        while True:
            for batch in runs.loader():
                try:
                    self("ends")
                except LookupError:
                    return
                self("loader")
                yield batch

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        self("model")
        return runs.loss(model, batch)


class OnSave:
    def on_save(self, trainer: Any, step: int, path: Path) -> None:
        if step == DUE and self.fails:
            raise LookupError("no on_save any more")

    def __init__(self, fails: bool) -> None:
        self.fails = fails


def rank_of_two(rank: int, case: str, directory: Path) -> None:
    kind, part, failed = case.split(":")
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    where = f"file://{directory}.store"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    os.symlink = None  # type: ignore[assignment]  # as on a file system that has none
    handler = logging.FileHandler(f"{directory}.log-{rank}")
    logger = logging.getLogger(f"rank {rank}")
    logger.addHandler(handler)
    is_failing = rank == int(failed)
    parts = Failing(part if is_failing else "")
    one = runs.trainer(
        kind,
        None,
        manager=CheckpointManager(directory, every_steps=2, keep_last=None),
        loss_fn=parts.loss,
        dataloader=parts.batches() if part in ("loader", "ends") else None,
        callbacks=[OnSave(is_failing and part == "on_save")],
        coordinator=parts,
        save_final=True,
        logger=logger,
    )
    step = one.optimizer.step
    one.optimizer.step = lambda *args, **kwargs: (parts("optimizer"), step(*args, **kwargs))[1]
    found: dict[str, Any] = {"raised": None, "at": 0}
    try:
        found["at"] = one.fit(STEPS).steps
    except Exception as error:
        found["raised"] = [type(error).__name__, str(error)]
    Path(f"{directory}.found-{rank}").write_text(json.dumps(found))
    if is_failing and found["raised"]:  # the one that forked it ends it
        time.sleep(PATIENCE_S)


def failed_case(case: str, directory: Path) -> list[Any]:
    """For each rank: what it has written (None if its process was ended), and its log."""
    directory.mkdir()
    directory = directory / "run"
    failed = int(case.split(":")[2])
    started = [forked(lambda rank=rank: rank_of_two(rank, case, directory)) for rank in range(2)]
    until = time.monotonic() + PATIENCE_S
    left = set(started)
    own = Path(f"{directory}.found-{failed}")
    # The other one has to end by itself, while the one that failed is still there.
    while left and time.monotonic() < until:
        for pid in list(left):
            if os.waitpid(pid, os.WNOHANG)[0]:
                left.discard(pid)
        if left == {started[failed]} and own.exists():
            break
        time.sleep(0.01)
    found: list[Any] = []
    for pid in left:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    for rank, pid in enumerate(started):
        path = Path(f"{directory}.found-{rank}")
        said = json.loads(path.read_text()) if path.exists() else {}
        hung = rank != failed and pid in left
        found.append({**said, "hung": hung, "log": Path(f"{directory}.log-{rank}").read_text()})
    return found


def main() -> int:
    runs.quiet()
    torch.set_num_threads(1)
    directory = Path(sys.argv[1])
    cases = sys.argv[2].split(",")
    found = {case: failed_case(case, directory / case.replace(":", "-")) for case in cases}
    (directory / "failed.json").write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
