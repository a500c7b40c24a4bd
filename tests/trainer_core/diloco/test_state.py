"""The coordinator's part of a checkpoint: what is kept, what is looked at, and files of others."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.model.coordinator_state import coordinator_facts
from tests.trainer_core.diloco.nodes import Node, memory, replay, run
from trainer_core.diloco import DumbDiLoCoCoordinator, Store
from trainer_core.diloco.commits import CommitLog
from trainer_core.diloco.fingerprint import is_float
from trainer_core.diloco.mastering import HubError
from trainer_core.diloco.state import StateError

SEED_RUNS = Path(__file__).parents[3] / "fixtures" / "corpus" / "seed-runs"


class SeedModel(torch.nn.Module):
    """A model with the tensors of a checkpoint that another program wrote."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in state.items():
            self.register_parameter(name.replace(".", "/"), torch.nn.Parameter(tensor.clone()))

    def state_dict(self, *_: Any, **__: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {name.replace("/", "."): p.detach() for name, p in self.named_parameters()}


def seed_checkpoint(name: str) -> dict[str, Any]:
    path = SEED_RUNS / name / "step_000000000006.pt"
    loaded: dict[str, Any] = torch.load(path, weights_only=False)  # numpy's random state is in it
    return loaded


def resumed(name: str, url: str, **options: Any) -> tuple[SeedModel, DumbDiLoCoCoordinator]:
    saved = seed_checkpoint(name)
    model = SeedModel(saved["model"])
    node, role = saved["coordinator"]["node_id"], saved["coordinator"]["role"]
    usual: dict[str, Any] = {"inner_steps": 2, "synchronous": True, "lease_seconds": 1000.0}
    coordinator = DumbDiLoCoCoordinator(model, url, node_id=node, role=role, **usual | options)
    coordinator.start()
    coordinator.load_state_dict(saved["coordinator"])
    return model, coordinator


def step(model: torch.nn.Module, coordinator: DumbDiLoCoCoordinator, number: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.99)
    coordinator.after_optimizer_step(model, number)


def test_checkpoints_of_the_seed_system_load_and_go_on() -> None:
    url = memory()
    master, coordinator = resumed("master", url)
    saved = seed_checkpoint("master")["coordinator"]
    saved_outer = coordinator._saved_outer
    assert saved_outer is not None
    assert saved_outer["processed_deltas"] == saved["outer"]["processed_deltas"]
    state = coordinator.state_dict()
    assert state is not None
    assert state["outer"] is saved_outer, "kept as it is while the Hub has none"
    for key in ("baseline", "pending_upload"):
        parts = saved[key] if key == "baseline" else saved[key]["delta"]
        mine = state[key] if key == "baseline" else state[key]["delta"]
        assert parts.keys() == mine.keys()
        assert all(torch.equal(parts[name], mine[name]) for name in parts)
    for number in (7, 8):
        step(master, coordinator, number)
    commit = CommitLog(Store.open(url)).latest()
    assert commit is not None
    assert commit.outer_step == 3, "after the 2 in the file"
    applied = [(one.node_id, one.local_step) for one in commit.applied]
    assert applied == [("m1", 6), ("m1", 8)], "the pending upload, and the window after it"
    assert coordinator.counters.last_global_step == 3
    assert CommitLog(Store.open(url)).read(2).watermarks == {"m1": 4}, "the file's own ledger"
    coordinator.stop()

    other, pending = resumed("pending", url)
    before = seed_checkpoint("pending")["coordinator"]["pending_upload"]
    assert pending.counters.last_skipped_step == 6
    step(other, pending, 7)
    step(other, pending, 8)
    names = [entry.name for entry in Store.open(url).entries("nodes/w2")]
    assert names == ["delta_2.safetensors", "delta_8.safetensors"], "the old job, then the rest"
    assert before["step"] == 2
    pending.stop()
    worker, third = resumed("worker", url)
    step(worker, third, 7)
    step(worker, third, 8)
    third.stop()
    assert third.counters.last_uploaded_step == 8


def test_a_state_is_plain_and_of_what_the_checker_knows(tmp_path: Path) -> None:
    url = memory()
    nodes = [
        Node(n, r, lambda: Store.open(url), steps=5) for n, r in (("m", "master"), ("w", "worker"))
    ]
    run(nodes)
    for node in nodes:
        assert node.checkpoint is not None
        state, buffer = node.checkpoint["coordinator"], io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=True)
        assert loaded.keys() == state.keys()
        for key in (
            "node_id",
            "role",
            "local_step",
            "last_global_step",
            "last_uploaded_step",
            "last_dispatched_step",
            "last_skipped_step",
            "baseline",
            "pending_upload",
            "baseline_generation",
            "pending_delta",
            "pending_delta_step",
            "outer",
        ):
            assert key in loaded
        assert loaded["local_step"] == 5
        facts = coordinator_facts(state)
        assert facts is not None
        assert facts.role == node.role
        assert (state["outer"] is None) == (node.role == "worker")


def test_what_is_of_another_node_role_or_model_is_refused_with_the_way_out() -> None:
    url = memory()
    node = Node("w", "worker", lambda: Store.open(url), steps=3)
    run([node])
    assert node.checkpoint is not None
    state = node.checkpoint["coordinator"]

    def load(model: torch.nn.Module, state: Any, **options: Any) -> DumbDiLoCoCoordinator:
        usual = {"node_id": "w", "role": "worker", "lease_seconds": 0.05}
        coordinator = DumbDiLoCoCoordinator(model, memory(), **usual | options)
        coordinator.start()
        try:
            coordinator.load_state_dict(state)
        finally:
            coordinator.stop()
        return coordinator

    model = torch.nn.Linear(3, 2)
    load(model, state)
    for options, words in (
        ({"node_id": "v"}, "the node_id 'w', this run has 'v'; .*accept_other={'node_id'}"),
        ({"role": "master"}, "the role 'worker', this run has 'master'; .*{'role'}"),
    ):
        with pytest.raises(StateError, match=words):
            load(model, state, **options)
    with pytest.raises(StateError, match="of the fingerprint '.*{'fingerprint'}"):
        load(torch.nn.Linear(3, 3), state)
    without = {key: value for key, value in state.items() if key != "fingerprint"}
    with pytest.raises(StateError, match="of the fingerprint"):
        load(torch.nn.Linear(3, 3), without)
    with pytest.raises(StateError, match=r"baseline: has bias as F32 \[2\] where F32 \[3\]"):
        load(torch.nn.Linear(3, 3), state, accept_other={"fingerprint"})
    other = load(model, state, node_id="v", accept_other={"node_id"})
    kept = other.state_dict()
    assert kept is not None
    assert (kept["node_id"], kept["pending_upload"], kept["since"]) == ("v", None, 3)
    assert all(torch.equal(kept["baseline"][k], v) for k, v in model.state_dict().items())
    load(model, state, role="master", accept_other={"role"})


DELTA = {name: torch.zeros(shape) for name, shape in (("weight", (2, 3)), ("bias", (2,)))}
PENDING = {"step": 0, "base_outer_step": -1, "generation": 0, "since": 0}
PENDING |= {"delta": DELTA, "target_state": DELTA}  # type: ignore[dict-item]  # any state


def broken() -> list[tuple[str, Any]]:
    return [
        *(("node_id", "../x"), ("role", 3), ("local_step", -1), ("local_step", True)),
        *(("last_global_step", None), ("last_uploaded_step", "6"), ("baseline", [])),
        *(("baseline", {"weight": 3}), ("baseline", {}), ("baseline_generation", None)),
        *(("pending_upload", 3), ("pending_upload", {}), ("outer", 3), ("outer", {})),
        *(("outer", {"outer_step": 1, "global_state": {}}), ("since", -1)),
        *((name, 10**15) for name in ("local_step", "since", "fence", "baseline_generation")),
        ("last_global_step", 10**15),
        *(("pending_upload", {**PENDING, name: 10**15}) for name in PENDING),
    ]


@pytest.mark.parametrize(("key", "value"), broken())
def test_a_state_that_is_none_is_an_error_of_ours(key: str, value: Any) -> None:
    model = torch.nn.Linear(3, 2)
    coordinator = DumbDiLoCoCoordinator(model, memory(), node_id="w", lease_seconds=0.05)
    coordinator.start()
    state = coordinator.state_dict()
    assert state is not None
    coordinator.load_state_dict(copy.deepcopy(state))
    coordinator.load_state_dict({**state, "pending_upload": {**PENDING, "samples": 1}})
    with pytest.raises(StateError):
        coordinator.load_state_dict({**state, key: value})
    coordinator.stop()


def test_a_delta_that_a_first_version_left_pending_is_taken() -> None:
    saved = seed_checkpoint("pending")["coordinator"]
    job = saved["pending_upload"]
    model = SeedModel(seed_checkpoint("pending")["model"])
    for older in (
        {"pending_delta": job, "pending_delta_step": job["step"]},
        {"pending_delta": job["delta"], "pending_delta_step": job["step"]},
    ):
        coordinator = DumbDiLoCoCoordinator(model, memory(), node_id="w2")
        coordinator.start()
        coordinator.load_state_dict({**saved, "pending_upload": None, **older})
        state = coordinator.state_dict()
        assert state is not None
        pending = state["pending_upload"]
        assert (pending["step"], state["pending_delta"]) == (2, None)
        for name, delta in job["delta"].items():
            assert torch.equal(pending["delta"][name], delta)
            assert is_float(pending["target_state"][name])
        coordinator.stop()


def test_a_master_does_not_go_on_from_an_older_copy_of_its_hub() -> None:
    url, older = memory(), memory()
    node = Node("m", "master", lambda: Store.open(url), steps=6)
    run([node])
    run([Node("m", "master", lambda: Store.open(older), steps=2)])
    strays = Node("m", "master", lambda: Store.open(older), steps=8)
    strays.checkpoint = node.checkpoint
    with pytest.raises(HubError, match="newest outer step is 1, the checkpoint has 3"):
        run([strays])
    assert strays.coordinator is not None
    strays.coordinator.stop()
    moved = Node("m", "master", lambda: Store.open(empty), steps=8)
    empty, moved.checkpoint = memory(), node.checkpoint
    run([moved])  # an empty one may be a mount that is missing
    log = CommitLog(Store.open(empty))
    assert log.steps() == [] and Store.open(empty).entries("global") == []
    begins = Node("m", "master", lambda: Store.open(empty), steps=8, accept_other={"hub"})
    begins.checkpoint = node.checkpoint
    run([begins])  # where that is asked for, it begins with what the checkpoint has
    assert log.steps() == [3, 4]
    assert log.read(4).watermarks == {"m": 8}
    first = log.read(3)
    assert first.model.sha256 == CommitLog(Store.open(url)).read(3).model.sha256
    replay(Store.open(url), _genesis())


def _genesis() -> dict[str, torch.Tensor]:
    from tests.trainer_core.diloco.nodes import new_model

    return dict(new_model().state_dict())
