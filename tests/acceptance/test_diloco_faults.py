"""What the outer loop promises when store, network, other masters or clocks misbehave; docs/many-machines.md.

Each local step of a node changes each weight by one `STEP`, a power of two, and the outer optimizer
has lr 1 and no momentum. So all sums are exact, and what a node's deltas in the ledger add up to
says how many of its steps the global model has in it: none may be missing, none be there twice.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.diloco_replay import audited, commit_files, replayed
from tests.trainer_core.diloco.faulty import Faults, FaultyStore, History
from tests.trainer_core.diloco.threads import (
    heartbeats_end_with_their_test,  # noqa: F401 - used by every test here
)
from trainer_core.diloco import DumbDiLoCoCoordinator, Store
from trainer_core.diloco.lease import LeaseError

STEP = 2.0**-8
INNER = 2
OPTIONS: dict[str, Any] = {
    "inner_steps": INNER,
    "synchronous": True,
    "poll_seconds": 0.0,
    "sync_seconds": 20.0,
    "outer_lr": 1.0,
    "outer_momentum": 0.0,
    "keep_commits": None,
    "lease_seconds": 0.2,
}


class Node:
    """A node whose steps can be counted; `dropped`: those from before it joined a run under way."""

    def __init__(self, store: Store, name: str, role: str = "worker", **options: Any) -> None:
        self.store, self.name, self.role, self.options = store, name, role, {**OPTIONS, **options}
        self.step, self.dropped, self.saved = 0, 0, b""
        self.begin()

    def begin(self) -> None:
        self.model = torch.nn.Linear(3, 2)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        self.coordinator = DumbDiLoCoCoordinator(
            self.model, self.store, node_id=self.name, role=self.role, **self.options
        )

    def start(self) -> Node:
        self.coordinator.start()
        return self

    def train(self, steps: int) -> None:
        for _ in range(steps):
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.sub_(STEP)
            self.step += 1
            self.coordinator.after_optimizer_step(self.model, self.step)

    def sleep(self) -> None:
        """As under SIGSTOP: its lease is renewed no longer, and it knows nothing of it."""
        keeper = self.coordinator._keeper
        assert keeper is not None
        keeper.stop()
        keeper._thread.join()

    def save(self) -> None:
        state = {"model": self.model.state_dict(), "coordinator": self.coordinator.state_dict()}
        buffer = io.BytesIO()
        torch.save({**state, "step": self.step}, buffer)
        self.saved = buffer.getvalue()

    def again(self) -> None:
        """A new process: from the saved state, everything since is forgotten."""
        state = torch.load(io.BytesIO(self.saved), weights_only=True)
        self.begin()
        self.model.load_state_dict(state["model"])
        self.step = state["step"]
        self.start()
        self.coordinator.load_state_dict(state["coordinator"])

    def stop(self) -> None:
        self.coordinator.stop()


def ledger(hub: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_bytes()) for path in commit_files(hub)]


def steps_in_ledger(hub: Path) -> dict[str, float]:
    """How many steps of each node the applied deltas add up to."""
    sums: dict[str, float] = {}
    for commit in ledger(hub):
        for entry in commit["applied"]:
            values = torch.cat([t.flatten() for t in load_file(hub / entry["name"]).values()])
            assert torch.equal(values, values[:1].expand_as(values))
            sums[entry["node_id"]] = sums.get(entry["node_id"], 0.0) + values[0].item() / STEP
    return sums


def assert_exactly_once(hub: Path, nodes: list[Node]) -> None:
    """Every step of every node is in the global model once, and the ledger gives its very bits."""
    commits = ledger(hub)
    report = replayed(hub, commits) | audited(hub, commits, [])
    assert report["problems"] == [] and report["twice"] == [], report
    assert steps_in_ledger(hub) == {node.name: node.step - node.dropped for node in nodes}


@contextlib.contextmanager
def running(*nodes: Node) -> Iterator[None]:
    for node in nodes:
        node.start()
    try:
        yield
    finally:
        for node in reversed(nodes):
            node.stop()


def by_turns(nodes: list[Node], boundaries: int) -> None:
    for _ in range(boundaries):
        for node in nodes:
            node.train(INNER)


def end_calmly(nodes: list[Node], stores: list[FaultyStore]) -> None:
    """The store works again: what is left comes in, workers first, the master's round last."""
    for store in stores:
        store.calm()
    by_turns(nodes[1:], 2)
    nodes[0].train(2 * INNER)


@pytest.mark.parametrize(
    "faults",
    [
        Faults(passing=0.25),
        Faults(unknown=0.25),
        Faults(passing=0.1, unknown=0.1, delay_s=0.004),
        Faults(stale=6),
        Faults(stale=6, passing=0.1, unknown=0.1),
    ],
    ids=["fails", "outcome not known", "slow too", "old listings", "all of it"],
)
def test_a_store_that_misbehaves_costs_time_and_no_step(tmp_path: Path, faults: Faults) -> None:
    hub, history = tmp_path / "hub", History()
    # More tries than one, as by default, but not so many that nothing ever gets through to us.
    stores = [
        FaultyStore(Store.open(hub), faults, seed=seed, history=history, attempts=2)
        for seed in range(2)
    ]
    nodes = [Node(stores[0], "m", "master"), Node(stores[1], "w")]
    with running(*nodes):
        by_turns(nodes, 12)
        end_calmly(nodes, stores)
        assert_exactly_once(hub, nodes)
    befallen = [fault for store in stores for *_, fault in store.log if fault]
    assert befallen or faults.stale, "nothing befell it"


def test_restarts_in_the_midst_of_it_cost_nothing_either(tmp_path: Path) -> None:
    hub, history = tmp_path / "hub", History()
    faults = Faults(passing=0.1, unknown=0.15)
    stores = [
        FaultyStore(Store.open(hub), faults, seed=seed, history=history, attempts=2)
        for seed in range(2)
    ]
    nodes = [Node(stores[0], "m", "master"), Node(stores[1], "w")]
    draw = torch.Generator().manual_seed(5)
    with running(*nodes):
        for node in nodes:
            node.save()
        for _ in range(30):
            node = nodes[int(torch.randint(2, (), generator=draw))]
            node.train(int(torch.randint(1, 4, (), generator=draw)))
            if torch.rand((), generator=draw) < 0.4:
                node.save()
            if torch.rand((), generator=draw) < 0.3:
                with contextlib.suppress(LeaseError):
                    node.again()
        for node in nodes:  # to a boundary, so that all is delivered
            node.train(-node.step % INNER)
        end_calmly(nodes, stores)
        assert_exactly_once(hub, nodes)


def test_a_node_that_is_cut_off_trains_on_and_brings_all_of_it_later(tmp_path: Path) -> None:
    hub, history = tmp_path / "hub", History()
    stores = [FaultyStore(Store.open(hub), history=history) for _ in range(2)]
    nodes = [Node(stores[0], "m", "master"), Node(stores[1], "w")]
    with running(*nodes):
        by_turns(nodes, 2)
        stores[1].partitioned = True
        by_turns(nodes, 6)  # both go on, each by itself
        assert nodes[1].step == nodes[0].step
        sent = steps_in_ledger(hub)
        assert sent["w"] < nodes[1].step and sent["m"] == nodes[0].step
        stores[1].partitioned = False
        stores[0].partitioned = True  # and now the master
        by_turns(nodes, 3)
        end_calmly(nodes, stores)
        assert_exactly_once(hub, nodes)


def test_a_second_master_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    first = Node(Store.open(hub), "m", "master", synchronous=False, poll_seconds=0.01)
    second = Node(Store.open(hub), "n", "master", lease_seconds=10.0)
    with running(first):
        first.train(INNER)
        wait_for(lambda: (hub / "global" / "step_count.json").exists(), first)
        with pytest.raises(LeaseError, match=r"m .*is the master and alive"):
            second.start()
        second.stop()


def wait_for(condition: Callable[[], bool], node: Node) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        node.train(INNER)
        time.sleep(0.01)


def test_a_master_that_slept_finds_that_it_is_none(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    nodes = [Node(Store.open(hub), name, "master") for name in ("m", "n")]
    nodes[0].start()
    nodes[0].train(4)
    nodes[0].sleep()
    nodes[1].dropped = 1  # the step at whose end the global model is installed, as it joins
    with running(nodes[1]):  # m says nothing for longer than its lease, so n takes its place
        nodes[1].train(4)
        nodes[0].train(4)  # and m, awake again, goes on as a worker
        assert nodes[1].coordinator.is_master and not nodes[0].coordinator.is_master
        nodes[1].train(4)
        assert_exactly_once(hub, nodes)
        assert {commit["master"] for commit in ledger(hub)} == {"m", "n"}
        nodes[0].stop()


@pytest.mark.parametrize("moment", ["create global/commits", "write global/step_count"])
def test_a_master_that_sleeps_within_a_commit_does_no_harm(tmp_path: Path, moment: str) -> None:
    hub, history = tmp_path / "hub", History()
    other = Node(FaultyStore(Store.open(hub), history=history), "n", "master")
    other.dropped = 1  # the step at whose end the global model is installed, as it joins
    armed = [False]

    def rule(number: int, method: str, name: str) -> None:
        if armed[0] and f"{method} {name}".startswith(moment):
            armed[0] = False
            sleeper.sleep()
            other.start()
            other.train(4)

    sleeper = Node(FaultyStore(Store.open(hub), rule=rule, history=history), "m", "master")
    sleeper.start()
    sleeper.train(4)
    armed[0] = True
    sleeper.train(4)
    assert not armed[0], "it was never woken in between"
    for _ in range(2):
        sleeper.train(2)
        other.train(2)
    assert other.coordinator.is_master and not sleeper.coordinator.is_master
    assert_exactly_once(hub, [other, sleeper])
    newest = ledger(hub)[-1]["outer_step"]
    assert json.loads((hub / "global" / "step_count.json").read_bytes())["outer_step"] == newest
    sleeper.stop()
    other.stop()


@pytest.mark.parametrize("jump", [3600.0, -3600.0 * 24 * 365])
def test_clocks_that_jump_decide_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    """The wall clock anywhere; the monotonic clock forward, as after a machine was suspended."""
    hub, real, offset = tmp_path / "hub", (time.time, time.monotonic), [0.0, 0.0]
    monkeypatch.setattr(time, "time", lambda: real[0]() + offset[0])
    monkeypatch.setattr(time, "monotonic", lambda: real[1]() + offset[1])
    nodes = [Node(Store.open(hub), "m", "master"), Node(Store.open(hub), "w")]
    with running(*nodes):
        for _ in range(6):
            offset[0] += jump
            offset[1] += max(0.0, jump)
            by_turns(nodes, 1)
        nodes[0].train(INNER)
        assert nodes[0].coordinator.is_master
        assert_exactly_once(hub, nodes)


def test_a_candidate_whose_clock_races_takes_the_place_and_no_delta_twice(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    nodes = [Node(Store.open(hub), name, "master", lease_seconds=3600.0) for name in ("m", "n")]
    nodes[1].options["standby"] = True
    nodes[1].begin()
    now = [0.0]
    nodes[1].coordinator._lease._clock = lambda: now[0]
    with running(*nodes):
        by_turns(nodes, 2)
        assert nodes[0].coordinator.is_master and not nodes[1].coordinator.is_master
        now[0] += 1e6
        nodes[1].train(INNER)  # m's counter has moved since: that is looked at again
        now[0] += 1e6
        nodes[1].train(INNER)
        assert nodes[1].coordinator.is_master
        by_turns(nodes, 2)
        nodes[1].train(INNER)
        assert not nodes[0].coordinator.is_master
        assert_exactly_once(hub, nodes)


def test_half_of_a_delta_is_never_averaged_in_and_its_node_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub, history = tmp_path / "hub", History()
    torn = [True]

    def rule(number: int, method: str, name: str) -> str | None:
        if method == "write" and name.startswith("nodes/w/") and torn[0]:
            torn[0] = False
            return "half"
        return None

    stores = [
        FaultyStore(Store.open(hub), history=history),
        FaultyStore(Store.open(hub), rule=rule, history=history),  # type: ignore[arg-type]
    ]
    nodes = [Node(stores[0], "m", "master"), Node(stores[1], "w")]
    with running(*nodes):
        nodes[1].train(INNER)  # half of it lies there, and w was told that it failed
        assert not torn[0]
        by_turns(nodes, 3)
        nodes[0].train(INNER)
        commits = ledger(hub)
        report = replayed(hub, commits) | audited(hub, commits, [])
        assert report["problems"] == [] and report["twice"] == []
        refused = [entry for commit in commits for entry in commit["refused"]]
        assert [(one["node_id"], one["local_step"]) for one in refused] == [("w", INNER)]
        steps = {"m": nodes[0].step, "w": nodes[1].step - INNER}
        assert steps_in_ledger(hub) == steps
    assert f"the delta of step {INNER} of this node was refused" in caplog.text


@pytest.mark.parametrize("folder", ["global/commits", "global/lease"])
def test_half_of_a_file_that_was_to_be_exclusive(tmp_path: Path, folder: str) -> None:
    """Where the store has no links, `create` may leave half of a file, if its process dies then."""
    hub, history = tmp_path / "hub", History()
    torn = [0]

    def rule(number: int, method: str, name: str) -> str | None:
        if method == "create" and name.startswith(folder):
            torn[0] += 1
            return "half" if torn[0] == 2 else None
        return None

    stores = [
        FaultyStore(Store.open(hub), rule=rule, history=history),  # type: ignore[arg-type]
        FaultyStore(Store.open(hub), history=history),
    ]
    nodes = [Node(stores[0], "m", "master"), Node(stores[1], "w")]
    with running(*nodes):
        by_turns(nodes, 2)
        for node in nodes:
            node.save()
        if folder == "global/lease":
            nodes[0].again()  # takes a new number, and only half of it gets there
        by_turns(nodes, 3)
        deadline = time.monotonic() + 600
        while len(list((hub / "global" / "commits").glob("*.json"))) < 4:
            assert time.monotonic() < deadline, "it never went on"
            by_turns(nodes, 1)
        nodes[0].save()
        nodes[0].again()
        end_calmly(nodes, stores)
        assert torn[0] >= 2
        assert_exactly_once(hub, nodes)
