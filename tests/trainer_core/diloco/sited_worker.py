"""What one rank of a site does in the outer loop, under torchrun: `sited_worker.py DIRECTORY`.

Writes what came of it as JSON, `found-<rank>.json`. Each Hub is `DIRECTORY/hub-<kind>-<run>`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
import torch.distributed as dist

from tests.trainer_core.site import runs
from trainer_core import Trainer
from trainer_core.diloco import SitedCoordinator, coordinator_for

STEPS, CUT = 7, 3
ROOT = Path(sys.argv[-1])
OPTIONS: dict[str, Any] = {"inner_steps": 2, "synchronous": True, "lease_seconds": 1000.0}
OPTIONS |= {"keep_commits": None}


def trainer(kind: str, run: str, seed: int = 7, **options: Any) -> Trainer:
    one = runs.trainer(kind, ROOT / f"{kind}-{run}", seed=seed, every=1)
    hub = ROOT / f"hub-{kind}-{run}"
    options = {"node_id": "m", "role": "master", "samples": lambda: one.samples, **options}
    one.coordinator = coordinator_for(one.model, hub, **OPTIONS | options)
    assert isinstance(one.coordinator, SitedCoordinator)
    return one


def end(one: Trainer) -> dict[str, Any]:
    """What a run has come to; the coordinator's part without what names this very process."""
    assert isinstance(one.coordinator, SitedCoordinator)
    state = one.coordinator.state_dict()
    kept = (
        None if state is None else {k: v for k, v in state.items() if k not in ("session", "fence")}
    )
    return {**runs.end(one), "coordinator": kept and runs.bits(kept)}


def gone_on(kind: str) -> dict[str, Any]:
    whole = trainer(kind, "whole")
    whole.fit(STEPS)
    trainer(kind, "parts", final_window="report").fit(CUT)
    second = trainer(kind, "parts", seed=99)
    second.fit(STEPS, resume="must")
    return {"whole": end(whole), "resumed": end(second)}


def failing(kind: str) -> list[str]:
    """Rank 0 meets something that nobody foresaw, on a lane, between two boundaries."""
    one = trainer(kind, "failing", synchronous=False, poll_seconds=0.0)
    assert isinstance(one.coordinator, SitedCoordinator)
    if one.coordinator.inner is not None:

        def fails() -> None:
            raise ValueError("on purpose")

        one.coordinator.inner._as_master = fails  # type: ignore[method-assign]
    try:
        one.fit(50)
    except Exception as error:
        return [
            type(error).__name__,
            str(error),
            "at a boundary" if one.step % 2 == 0 else "between",
        ]
    return ["nothing"]


def main() -> int:
    runs.quiet()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {kind: gone_on(kind) | {"failing": failing(kind)} for kind in ("ddp", "fsdp")}
    (ROOT / f"found-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
