"""The coordinator under a real Trainer: order of calls, checkpoints, resuming, failures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data

from ckpttool.checks.verify import verify
from tests.trainer_core.diloco.faulty import FaultyStore
from tests.trainer_core.diloco.nodes import deltas_on, memory, new_model, replay
from trainer_core import CheckpointManager, Trainer
from trainer_core.diloco import DiLoCoError, DumbDiLoCoCoordinator, Store
from trainer_core.diloco.commits import CommitLog
from trainer_core.diloco.shards import node_sampler

DATA = torch.randn(40, 3, generator=torch.Generator().manual_seed(9))


def trainer(
    directory: Path, url: str | Store, *, node: str = "m", role: str = "master", **options: Any
) -> Trainer:
    model = new_model()
    usual: dict[str, Any] = {"inner_steps": 3, "synchronous": True, "lease_seconds": 1000.0}
    usual["keep_commits"] = None
    coordinator = DumbDiLoCoCoordinator(model, url, node_id=node, role=role, **usual | options)
    sampler = node_sampler(DATA, node, ["m", "w"])  # type: ignore[arg-type]
    return Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        torch.utils.data.DataLoader(DATA, batch_size=4, sampler=sampler),  # type: ignore[arg-type]
        device="cpu",
        coordinator=coordinator,
        checkpoint_manager=CheckpointManager(directory, every_steps=1, keep_last=20),
        loss_fn=lambda m, batch: m(batch).square().mean(),
    )


def coordinator_of(one: Trainer) -> DumbDiLoCoCoordinator:
    assert isinstance(one.coordinator, DumbDiLoCoCoordinator)
    return one.coordinator


def deltas(url: str) -> dict[str, tuple[dict[str, str], bytes]]:
    """Metadata and tensors of each delta; the order of the former in a file is chance."""
    store, found = Store.open(url), {}
    for node, step in sorted(deltas_on(store)):
        raw = store.read(f"nodes/{node}/delta_{step}.safetensors")
        length = int.from_bytes(raw[:8], "little")
        found[f"{node} {step}"] = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    return found


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 6])
def test_resumed_at_any_step_it_is_bit_for_bit_the_run_that_went_on(
    tmp_path: Path, at: int
) -> None:
    """Cases L01 to L03, L06 and L08: also in the midst of a window, with the place in the data."""
    whole_url, url = memory(), memory()
    whole = trainer(tmp_path / "whole", whole_url)
    whole.fit(8)
    # Stops after `at` steps without anything being sent at the end, as if it were killed there.
    first = trainer(tmp_path / "part", url, final_window="report")
    first.fit(at)
    second = trainer(tmp_path / "part", url)
    second.fit(8, resume="must")
    for name, expected in whole.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], expected)
    expected_state = coordinator_of(whole).state_dict()
    state = coordinator_of(second).state_dict()
    assert state is not None
    assert expected_state is not None
    for name, expected in expected_state["baseline"].items():
        assert torch.equal(state["baseline"][name], expected)
    for name, expected in expected_state["outer"]["momentum"].items():
        assert torch.equal(state["outer"]["momentum"][name], expected), "the outer momentum too"
    assert deltas(url) == deltas(whole_url)
    applied = replay(Store.open(url), new_model().state_dict())
    assert applied == [("m", 3), ("m", 6), ("m", 8)]
    assert state["local_step"] == 8


def test_a_window_sent_at_the_end_is_not_sent_again_by_who_goes_on(tmp_path: Path) -> None:
    """Case L11: steps that are no multiple of a window's are sent as well, and once."""
    url = memory()
    trainer(tmp_path / "m", url).fit(4)  # the checkpoint of step 4 is older than what `stop` sent
    trainer(tmp_path / "m", url).fit(6, resume="must")
    assert replay(Store.open(url), new_model().state_dict()) == [("m", 3), ("m", 4), ("m", 6)]
    shutil.rmtree(tmp_path / "m" / "step_000000000006.pt", ignore_errors=True)
    for step in (4, 5, 6):
        (tmp_path / "m" / f"step_{step:012d}.pt").unlink()
    pointer = {"step": 3, "file": "step_000000000003.pt"}
    (tmp_path / "m" / "latest.json").write_text(json.dumps(pointer))
    trainer(tmp_path / "m", url).fit(9, resume="must")  # from before what was delivered
    applied = replay(Store.open(url), new_model().state_dict())
    assert applied == [("m", 3), ("m", 4), ("m", 6), ("m", 9)]


def test_resumed_at_its_target_nothing_is_rewritten_or_lost(tmp_path: Path) -> None:
    url = memory()
    store = FaultyStore(Store.open(url))
    store.partitioned = True
    first = trainer(tmp_path / "w", store, node="w", role="worker", stop_seconds=5.0)
    first.fit(6)
    files = {path.name: path.read_bytes() for path in (tmp_path / "w").glob("*")}
    again = trainer(tmp_path / "w", url, node="w", role="worker")
    again.fit(6, resume="must")
    assert {path.name: path.read_bytes() for path in (tmp_path / "w").glob("*")} == files
    section = again.state_dict()["coordinator"]
    assert section["pending_upload"]["step"] == 3, "the job that could not be sent is still there"
    assert (section["last_dispatched_step"], section["last_skipped_step"]) == (3, 6)
    assert not deltas(url)
    again.fit(7)
    assert sorted(deltas_on(Store.open(url))) == [("w", 3), ("w", 7)]
    report = verify(tmp_path / "w" / "step_000000000007.pt")
    assert [f.id for f in report.findings if f.severity.value != "info"] == []


class Recording(DumbDiLoCoCoordinator):
    calls: list[str]
    fails_in = ""

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails_in:
            raise DiLoCoError(f"{name} fails on purpose")

    def start(self) -> None:
        self._note("start")
        super().start()

    def load_state_dict(self, state: Any) -> None:
        before = {name: t.clone() for name, t in self._model.state_dict().items()}
        self._note("load_state_dict")
        super().load_state_dict(state)
        after = self._model.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)

    def after_optimizer_step(self, model: torch.nn.Module, step: int) -> bool | None:
        self._note(f"after {step}")
        return super().after_optimizer_step(model, step)

    def state_dict(self) -> dict[str, Any] | None:
        self._note("state_dict")
        return super().state_dict()

    def stop(self) -> None:
        super().stop()
        self._note("stop")


def recording(directory: Path, url: str, fails_in: str = "") -> tuple[Trainer, list[str]]:
    one = trainer(directory, url)
    calls: list[str] = []
    options: dict[str, Any] = {"inner_steps": 2, "synchronous": True, "lease_seconds": 1000.0}
    coordinator = Recording(one.model, url, node_id="m", role="master", **options)
    coordinator.calls, coordinator.fails_in = calls, fails_in
    one.coordinator = coordinator
    return one, calls


def test_calls_come_in_order_and_a_start_leaves_a_resumed_model_alone(tmp_path: Path) -> None:
    url = memory()
    one, calls = recording(tmp_path / "m", url)
    one.fit(2)
    assert calls == ["start", "after 1", "state_dict", "after 2", "state_dict", "stop"]
    # Meanwhile another node has taken the place and moved the global model on.
    other = trainer(tmp_path / "w", url, node="w", inner_steps=1, standby=True)
    other.fit(5)
    resumed, calls = recording(tmp_path / "m", url)
    resumed.fit(4, resume="must")
    assert calls[:3] == ["start", "load_state_dict", "after 3"]
    assert coordinator_of(resumed).counters.last_global_step > 1, "installed at the boundary"


@pytest.mark.parametrize("fails_in", ["start", "after 2", "state_dict", "stop"])
def test_a_coordinator_that_fails_ends_the_fit_but_costs_no_checkpoint(
    tmp_path: Path, fails_in: str
) -> None:
    one, calls = recording(tmp_path / "m", memory(), fails_in)
    with pytest.raises(DiLoCoError, match=f"{fails_in} fails on purpose"):
        one.fit(3)
    assert calls[-1] == "stop"
    written = sorted(path.name for path in (tmp_path / "m").glob("step_*.pt"))
    count = {"start": 0, "after 2": 1, "state_dict": 0, "stop": 3}[fails_in]
    assert written == [f"step_{step:012d}.pt" for step in range(1, count + 1)]


def test_what_ends_within_a_step_is_not_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = memory()
    one = trainer(tmp_path / "m", url)
    optimizer_step, count = one.optimizer.step, 0

    def step(closure: Any = None) -> Any:
        nonlocal count
        count += 1
        done = optimizer_step(closure)
        if count == 5:
            raise RuntimeError("in the midst of step 5")
        return done

    one.optimizer.step = step  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="in the midst"):
        one.fit(9)
    assert "the fit ended within a step, so they are not sent" in caplog.text
    assert [step for _, step in sorted(deltas_on(Store.open(url)))] == [3]
    commit = CommitLog(Store.open(url)).latest()
    assert commit is not None
    assert commit.watermarks == {"m": 3}


def test_the_trainer_resets_its_optimizer_when_a_global_model_is_installed(tmp_path: Path) -> None:
    for choice, expected in (("installed", 1.0), ("never", 4.0)):
        one = trainer(tmp_path / choice, memory(), reset_inner=choice)
        one.fit(4)
        steps = {float(state["step"]) for state in one.optimizer.state.values()}
        assert steps == {expected}
