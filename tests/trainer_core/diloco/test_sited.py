"""A site of two ranks as one node, by torchrun: DDP and FSDP2, one launch for all of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.checks.verify import verify
from tests.trainer_core.diloco.nodes import replay
from tests.trainer_core.site import runs
from trainer_core.diloco import (
    DiLoCoError,
    DumbDiLoCoCoordinator,
    SitedCoordinator,
    Store,
    coordinator_for,
)
from trainer_core.diloco.commits import CommitLog
from trainer_core.diloco.fingerprint import Spec
from trainer_core.diloco.published import fetch_tensors

WORKER = Path(__file__).with_name("sited_worker.py")
LONE: dict[str, Any] = {"inner_steps": 2, "synchronous": True}


def lone_site(hub: Path, node: str, steps: int) -> torch.nn.Module:
    """A second site, of one process: takes its steps alone, and sends what they changed."""
    model = runs.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    coordinator = DumbDiLoCoCoordinator(model, hub, node_id=node, **LONE)
    coordinator.start()
    for step, (inputs, targets) in zip(range(1, steps + 1), runs.loader(), strict=False):
        optimizer.zero_grad()
        runs.loss(model, (inputs, targets)).backward()
        optimizer.step()
        coordinator.after_optimizer_step(model, step)
    coordinator.stop()
    return model


def genesis() -> dict[str, torch.Tensor]:
    return {name: t for name, t in runs.net().state_dict().items() if t.is_floating_point()}


def test_two_ranks_are_one_node(tmp_path: Path) -> None:
    hubs = {
        (kind, run): tmp_path / f"hub-{kind}-{run}"
        for kind in ("ddp", "fsdp")
        for run in ("whole", "parts")
    }
    for hub in hubs.values():
        lone_site(hub, "w", 4)
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(WORKER), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-5000:]
    first, second = (json.loads((tmp_path / f"found-{r}.json").read_text()) for r in (0, 1))
    for kind in ("ddp", "fsdp"):
        one, other = first[kind], second[kind]
        for run in ("whole", "resumed"):
            assert one[run]["weights"] == other[run]["weights"], "the same on both ranks"
            assert one[run]["coordinator"] is not None
            assert other[run]["coordinator"] is None, "kept once"
        assert one["resumed"] == one["whole"]
        assert other["resumed"] == other["whole"]
        assert one["failing"] == ["ValueError", "on purpose", "at a boundary"]
        assert other["failing"] == one["failing"]
    for (kind, run), hub in hubs.items():
        store = Store.open(hub)
        applied = replay(store, genesis())
        assert sorted(applied) == [("m", 2), ("m", 4), ("m", 6), ("m", 7), ("w", 2), ("w", 4)]
        check_model(store, hub)
        report = verify(tmp_path / f"{kind}-{run}")
        assert [one for one in report.findings if one.severity.value != "info"] == []


def check_model(store: Store, hub: Path) -> None:
    """A node that comes later begins with what the site has made."""
    commit = CommitLog(store).latest()
    assert commit is not None
    state = fetch_tensors(store, commit.model, Spec.of(runs.net().state_dict()), only_floats=False)
    model = lone_site(hub, "late", 0)
    coordinator = DumbDiLoCoCoordinator(model, hub, node_id="later", **LONE)
    coordinator.start()
    coordinator.after_optimizer_step(model, 1)
    coordinator.stop()
    for name, tensor in model.state_dict().items():
        assert not tensor.is_floating_point() or torch.equal(tensor, state[name])


def test_one_process_needs_no_site(tmp_path: Path) -> None:
    model = runs.net()
    assert type(coordinator_for(model, tmp_path, node_id="w")) is DumbDiLoCoCoordinator
    with pytest.raises(DiLoCoError, match="trained by one process alone"):
        SitedCoordinator(model, tmp_path, node_id="w")
