"""Lets one of two ranks stand still until the other has said so: `standing.py DIRECTORY`.

Like `killed.py`, this process imports torch once and forks the ranks. A case is `kind-how-rank`:
that rank is stopped by SIGSTOP in a callback, or its loader waits for a file.
"""

from __future__ import annotations

import json
import logging
import os
import signal
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
from trainer_core.site import failing
from trainer_core.site.waiting import VARIABLE

STEPS, AT = 6, 4
failing._EVERY_S = 0.05
CASES = ("ddp-stopped-1", "fsdp-loader-0")


def rank_of_two(rank: int, case: str, directory: Path) -> None:
    kind, how, number = case.split("-")
    stands = rank == int(number)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", VARIABLE: "1.5"}
    where = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    logger = logging.getLogger(f"rank {rank}")
    logger.addHandler(logging.FileHandler(directory / f"log-{rank}"))

    def stop(trainer: Any, step: int, metrics: Any) -> None:
        if stands and how == "stopped" and step == AT:
            os.kill(os.getpid(), signal.SIGSTOP)

    def batches() -> Iterator[Any]:
        for number in range(100):
            if stands and how == "loader" and number == runs.ACCUMULATION * AT:
                while not (directory / "go").exists():
                    time.sleep(0.01)
            yield torch.ones(4, runs.FEATURES), torch.ones(4, 1)

    one = runs.trainer(kind, None, dataloader=batches(), callbacks=[stop], logger=logger)
    (directory / f"steps-{rank}").write_text(str(one.fit(STEPS).steps))


def stood(case: str, directory: Path) -> dict[str, Any]:
    directory.mkdir()
    started = [forked(lambda rank=rank: rank_of_two(rank, case, directory)) for rank in range(2)]
    other = 1 - int(case[-1])
    until, codes = time.monotonic() + PATIENCE_S, [-1, -1]
    log = directory / f"log-{other}"
    while time.monotonic() < until and not (log.exists() and "waiting" in log.read_text()):
        time.sleep(0.01)
    (directory / "go").touch()
    left = dict(enumerate(started))
    while left and time.monotonic() < until:
        if 1 - other in left:  # again: on a slow machine it may have been slow before it stopped
            os.kill(started[1 - other], signal.SIGCONT)
        for rank, pid in list(left.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)
                del left[rank]
        time.sleep(0.01)
    for pid in left.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    logs = [(directory / f"log-{rank}").read_text().splitlines() for rank in range(2)]
    lines = [[line for line in log if "waiting" in line or "going on" in line] for log in logs]
    steps = [directory / f"steps-{rank}" for rank in range(2)]
    return {
        "codes": codes,
        "lines": lines,
        "steps": [int(path.read_text()) if path.exists() else None for path in steps],
    }


def main() -> int:
    runs.quiet()
    torch.set_num_threads(1)
    directory = Path(sys.argv[1])
    found = {case: stood(case, directory / case) for case in CASES}
    (directory / "standing.json").write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
