"""Several nodes in one process: what they exchange, install, refuse and report."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from tests.trainer_core.diloco.faulty import FaultyStore
from tests.trainer_core.diloco.nodes import (
    Node,
    last_round,
    memory,
    new_model,
    replay,
    run,
    train_step,
)
from trainer_core import SyncCoordinator
from trainer_core.diloco import BadNameError, DiLoCoError, DumbDiLoCoCoordinator, Store
from trainer_core.diloco.commits import CommitLog
from trainer_core.diloco.deltas import ALGORITHM, Job, metadata_of
from trainer_core.diloco.fingerprint import Spec
from trainer_core.diloco.lease import LeaseError
from trainer_core.diloco.tensorfile import tensors_sha256


def opener(url: str) -> Callable[[], Store]:
    return lambda: Store.open(url)


def test_nodes_in_lockstep_do_what_the_paper_says() -> None:
    url = memory()
    options = {"await_global": True, "quorum": 3, "sync_seconds": 120.0}
    nodes = [Node("m", "master", opener(url), steps=6, **options)]
    nodes += [Node(name, "worker", opener(url), steps=6, **options) for name in ("a", "b")]
    threads = [threading.Thread(target=lambda n=node: list(n.life())) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    outer = [torch.nn.Parameter(p.detach().clone()) for p in new_model().parameters()]
    outer_optimizer = torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)
    inner: dict[str, Any] = {}
    for node in nodes:
        model = new_model()
        inner[node.node_id] = model, torch.optim.SGD(model.parameters(), lr=0.1)
    for window in range(3):
        before = [p.detach().clone() for p in outer]
        sums = [torch.zeros_like(p) for p in before]
        for name in sorted(inner):
            model, optimizer = inner[name]
            for step in (2 * window, 2 * window + 1):
                train_step(model, optimizer, name, step)
            for total, start, now in zip(sums, before, model.parameters(), strict=True):
                total += start - now.detach()
        for parameter, total in zip(outer, sums, strict=True):
            parameter.grad = total / 3
        outer_optimizer.step()
        for model, _ in inner.values():
            for mine, new in zip(model.parameters(), outer, strict=True):
                mine.data.copy_(new)
    for node in nodes:
        assert node.coordinator is not None
        assert node.coordinator.counters.last_global_step == 3
        for mine, expected in zip(node.model.parameters(), outer, strict=True):
            assert torch.equal(mine, expected)
    assert len(replay(Store.open(url), new_model().state_dict())) == 9


class Gate(FaultyStore):
    """A store whose uploads of deltas wait until `open` is set."""

    def __init__(self, url: str) -> None:
        super().__init__(Store.open(url))
        self.open_gate = threading.Event()

    def put(self, path: Any, name: str) -> None:
        assert not name.startswith("nodes/") or self.open_gate.wait(120)
        super().put(path, name)


def test_a_boundary_never_waits_skips_and_the_next_delta_is_cumulative(
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = memory()
    gate = Gate(url)
    node = Node("w", "worker", lambda: gate, steps=8, synchronous=False)
    life = node.life()
    for expected in range(1, 5):
        assert next(life) == expected  # the upload of step 2 hangs meanwhile
    coordinator = node.coordinator
    assert coordinator is not None
    counters = coordinator.counters
    assert (counters.last_dispatched_step, counters.last_skipped_step) == (2, 4)
    assert counters.last_uploaded_step is None
    assert "the upload of step 2 is still under way; this boundary is skipped" in caplog.text
    state = coordinator.state_dict()
    assert state is not None
    job = state["pending_upload"]
    for name, delta in job["delta"].items():
        assert torch.equal(delta, state["baseline"][name] - job["target_state"][name])
    gate.open_gate.set()
    assert coordinator._uploads.wait(120)
    assert next(life) == 5
    assert counters.last_uploaded_step == 2
    assert next(life) == 6
    assert coordinator._uploads.wait(120)
    list(life)
    store = Store.open(url)
    first, second = (
        safetensors.torch.load(store.read(f"nodes/w/delta_{step}.safetensors")) for step in (2, 6)
    )
    reference = new_model()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    at = {0: {k: v.clone() for k, v in reference.state_dict().items()}}
    for step in range(6):
        train_step(reference, optimizer, "w", step)
        at[step + 1] = {k: v.clone() for k, v in reference.state_dict().items()}
    for name in first:
        assert torch.equal(first[name], at[0][name] - at[2][name])
        assert torch.equal(second[name], at[2][name] - at[6][name]), "steps 3 to 6 in one"


@pytest.mark.parametrize("merge", ["carry", "replace"])
def test_progress_that_is_in_no_job_stays_on_top_of_a_new_global_model(merge: str) -> None:
    url = memory()
    master = Node("m", "master", opener(url), steps=2)
    gate = Gate(url)
    worker = Node(
        "w", "worker", lambda: gate, steps=5, synchronous=False, merge=merge, poll_seconds=1e6
    )
    life = worker.life()
    for _ in range(3):
        next(life)  # the upload of step 2 hangs
    run([master])
    assert worker.coordinator is not None
    worker.coordinator._submit_poll()
    assert worker.coordinator._polls.wait(120)
    at_2 = worker.coordinator._worker.pending
    assert at_2 is not None
    reference = new_model()
    reference.load_state_dict(worker.model.state_dict())
    train_step(reference, torch.optim.SGD(reference.parameters(), lr=0.1), "w", 3)
    next(life)  # step 4 is skipped, and the global model installed
    log = CommitLog(Store.open(url))
    commit = log.latest()
    assert commit is not None
    weights = safetensors.torch.load(Store.open(url).read(commit.model.name))
    for name, value in worker.model.state_dict().items():
        progress = reference.state_dict()[name] - at_2.target_state[name]
        expected = weights[name] + progress if merge == "carry" else weights[name]
        assert torch.equal(value, expected)
    state = worker.coordinator.state_dict()
    assert state is not None
    assert (state["baseline_generation"], state["pending_upload"]["generation"]) == (1, 0)
    assert all(torch.equal(state["baseline"][name], weights[name]) for name in weights)
    gate.open_gate.set()
    list(life)
    assert worker.coordinator.counters.last_uploaded_step == 5
    last_round(master)
    store = Store.open(url)
    applied = replay(store, new_model().state_dict())
    assert sorted(applied) == [("m", 2), ("w", 2), ("w", 5)]
    carried = safetensors.torch.load(store.read("nodes/w/delta_5.safetensors"))
    for name, delta in carried.items():
        moved = weights[name] - worker.model.state_dict()[name]
        assert torch.equal(delta, moved), "what was carried is sent, once"


def test_a_hub_that_cannot_be_reached_is_said_and_training_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = memory()
    store = FaultyStore(Store.open(url))
    store.partitioned = True
    node = Node("m", "master", lambda: store, steps=6)
    life = node.life()
    for _ in range(4):
        next(life)
    assert "training goes on alone" in caplog.text
    assert node.coordinator is not None
    counters = node.coordinator.counters
    assert (counters.last_dispatched_step, counters.last_skipped_step) == (2, 4)
    store.partitioned = False
    list(life)
    assert counters.last_uploaded_step == 6
    # The old job first, unchanged, and then all that came after it.
    assert replay(Store.open(url), new_model().state_dict()) == [("m", 2), ("m", 6)]
    node = Node("m", "master", lambda: store, steps=6, require_hub=True)
    store.partitioned = True
    with pytest.raises(DiLoCoError, match="can't be reached, and require_hub is set"):
        next(node.life())


def put_delta(store: Store, node: str, step: int, value: Any, **metadata: str | None) -> None:
    """A delta as any other program may write it."""
    model = new_model()
    spec = Spec.of(model.state_dict())
    delta = {k: torch.full_like(v, 0.0) + value for k, v in model.state_dict().items()}
    job = Job(step, 0, 0, delta, {}, max(0, step - 2), 4)
    said = metadata_of(job, node, -1, spec, tensors_sha256(delta)) | metadata
    kept = {key: text for key, text in said.items() if text is not None}
    content = safetensors.torch.save(delta, kept)
    store.write(f"nodes/{node}/delta_{step}.safetensors", content)


def refusals(url: str, **options: Any) -> dict[tuple[str, int], str]:
    """Runs a master for two windows and gives what it refused, and why."""
    run([Node("m", "master", opener(url), steps=4, **options)])
    store = Store.open(url)
    log = CommitLog(store)
    commits = [log.read(step) for step in log.steps()]
    return {(r.node_id, r.local_step): r.reason for c in commits for r in c.refused}


def test_what_does_not_fit_is_refused_with_its_reason_and_never_averaged() -> None:
    url = memory()
    store = Store.open(url)
    put_delta(store, "good", 2, 0.01)
    put_delta(store, "nan", 2, float("nan"))
    put_delta(store, "inf", 2, float("inf"))
    put_delta(store, "huge", 2, 1e6)
    put_delta(store, "hash", 2, 0.01, sha256="0" * 64)
    put_delta(store, "print", 2, 0.01, fingerprint="0" * 32)
    put_delta(store, "algo", 2, 0.01, algorithm="other")
    put_delta(store, "who", 2, 0.01, node_id="good")
    put_delta(store, "number", 2, 0.01, base_outer_step="many")
    put_delta(store, "future", 2, 0.01, base_outer_step="99")
    put_delta(store, "old", 2, 0.01, previous_step=None, samples=None, fingerprint=None)
    put_delta(store, "gap", 4, 0.01, previous_step="2")
    tensors = {"weight": torch.zeros(2, 4), "bias": torch.zeros(2)}
    said = {"algorithm": ALGORITHM, "node_id": "shape", "local_step": "2", "base_outer_step": "0"}
    shape = safetensors.torch.save(tensors, said)
    store.write("nodes/shape/delta_2.safetensors", shape)
    half = {"weight": torch.zeros(2, 3).half(), "bias": torch.zeros(2)}
    store.write(
        "nodes/half/delta_2.safetensors", safetensors.torch.save(half, said | {"node_id": "half"})
    )
    store.write(
        "nodes/keys/delta_2.safetensors",
        safetensors.torch.save({"x": torch.ones(1)}, said | {"node_id": "keys"}),
    )
    store.write("nodes/cut/delta_2.safetensors", shape[:-5])
    store.write("nodes/rubbish/delta_2.safetensors", b"\xff" * 200)
    store.write("nodes/empty/delta_2.safetensors", b"")
    store.write("nodes/UPPER/delta_2.safetensors", b"passed over")
    store.write("nodes/good/delta_03.safetensors", b"no name of ours")
    found = refusals(url, max_norm=100.0)
    words = {
        "nan": "not finite",
        "inf": "not finite",
        "huge": "above 100",
        "hash": "SHA-256",
        "print": "fingerprint",
        "algo": "algorithm 'other'",
        "who": "lies elsewhere",
        "number": "no number as base",
        "future": "99",
        "shape": "[2, 4]",
        "half": "F16",
        "keys": "lacks 2",
        "cut": "its header says",
        "rubbish": "can't be",
        "empty": "shorter",
    }
    assert {node for node, _ in found} == {*words, "gap"}
    for node, part in words.items():
        assert part in found[node, 2], (node, found[node, 2])
    assert found["gap", 2] == "is gone, although it was delivered"
    applied = replay(store, new_model().state_dict())
    assert {("good", 2), ("old", 2), ("gap", 4), ("m", 2), ("m", 4)} == set(applied)
    before = Store.open(url)
    last_round(Node("m", "master", lambda: before, steps=4))
    assert not any("nan" in str(one) for one in before.requests), "never looked at again"


def test_staleness_ratio_and_samples() -> None:
    url = memory()
    store = Store.open(url)
    run([Node("m", "master", opener(url), steps=6)])
    for node, base in (("late", "0"), ("never", "-1"), ("fresh", "2")):
        put_delta(store, node, 2, 0.01, base_outer_step=base)
    put_delta(store, "wild", 2, 50.0, base_outer_step="3")
    put_delta(store, "calm", 2, 0.01, base_outer_step="3")
    put_delta(store, "silent", 2, 0.01, base_outer_step="3", samples=None)
    options = {"max_staleness": 1, "max_norm_ratio": 30.0, "weighting": "samples", "samples": 8}
    run([Node("m", "master", opener(url), steps=10, **options)])
    log = CommitLog(store)
    commits = [log.read(step) for step in log.steps()]
    reasons = {r.node_id: r.reason for c in commits for r in c.refused}
    assert reasons.keys() == {"late", "never", "wild", "silent"}
    assert "measured from 3 outer steps ago, above 1" in reasons["never"]
    assert "times the median" in reasons["wild"]
    weights = {(a.node_id, a.local_step): a.weight for c in commits for a in c.applied}
    assert weights["fresh", 2] == 4.0
    assert weights["m", 8] == 16.0
    replay(store, new_model().state_dict())


def test_quorum_waits_and_no_more_than_it_was_told(caplog: pytest.LogCaptureFixture) -> None:
    url = memory()
    store = Store.open(url)
    run([Node("m", "master", opener(url), steps=4, quorum=3)])
    assert CommitLog(store).steps() == [0]
    words = "a round waits for its quorum of 3 nodes, but only 1 have ever sent anything"
    assert [one.getMessage() for one in caplog.records].count(words) == 1
    for name in ("a", "b"):
        put_delta(store, name, 2, 0.01)
    node = Node("m", "master", opener(url), steps=6, quorum=3)
    run([node])
    commit = CommitLog(store).latest()
    assert commit is not None
    assert {one.node_id for one in commit.applied} <= {"a", "b", "m"}
    assert commit.watermarks.keys() == {"a", "b", "m"}
    put_delta(store, "a", 4, 0.01)
    run([Node("m", "master", opener(url), steps=8, quorum=9, quorum_seconds=1e-6)])
    latest = CommitLog(store).latest()
    assert latest is not None
    assert latest.watermarks["a"] == 4


def test_a_second_living_master_is_refused_by_name_and_may_stand_by() -> None:
    url = memory()
    first = Node("m", "master", opener(url), steps=100, lease_seconds=0.3)
    life = first.life()
    next(life)
    second = Node("x", "master", opener(url), steps=4, lease_seconds=60.0)
    with pytest.raises(LeaseError, match=r"m \(fencing number 1\) is the master and alive"):
        next(second.life())
    assert second.coordinator is not None
    second.coordinator.stop()
    standing_by = Node("x", "master", opener(url), steps=6, standby=True)
    other = standing_by.life()
    for _ in range(4):
        next(other)
        next(life)
    assert standing_by.coordinator is not None
    assert not standing_by.coordinator.is_master
    assert first.coordinator is not None
    first.coordinator.stop()
    list(other)
    assert standing_by.coordinator.outer_step is not None, "the place was free"
    commit = CommitLog(Store.open(url)).latest()
    assert commit is not None
    assert (commit.master, commit.fence) == ("x", 2)
    replay(Store.open(url), new_model().state_dict())


def test_a_master_that_slept_finds_out_and_becomes_a_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = memory()
    sleeper = Node("m", "master", opener(url), steps=8)
    life = sleeper.life()
    for _ in range(3):
        next(life)
    store = Store.open(url)
    store.write("global/lease/000000000002.json", b"{}")  # somebody took the next number
    run([Node("x", "worker", opener(url), steps=2)])
    for _ in range(3):
        next(life)
    assert sleeper.coordinator is not None
    assert not sleeper.coordinator.is_master
    assert "m is no longer the master" in caplog.text
    assert "this node goes on as a worker" in caplog.text
    assert CommitLog(store).steps() == [0, 1]
    list(life)


def test_what_is_dealt_with_is_removed_and_the_rest_is_bounded() -> None:
    """Case L10: over twenty rounds nothing grows."""
    url = memory()
    store = Store.open(url)
    nodes = [Node("m", "master", opener(url), steps=40, keep_commits=2)]
    nodes += [Node(n, "worker", opener(url), steps=40) for n in ("a", "b")]
    run(nodes)
    last_round(nodes[0])
    log = CommitLog(store)
    assert len(log.steps()) == 2
    assert len(store.entries("global")) == 2 * 2 + 1
    assert len(store.entries("global/lease")) == 1
    for node in ("m", "a", "b"):
        assert len(store.entries(f"nodes/{node}")) <= 3
    state = nodes[0].coordinator and nodes[0].coordinator.state_dict()
    assert state
    assert len(state["outer"]["processed_deltas"]) <= 3


def test_a_poll_without_news_costs_one_small_request_and_a_round_no_body() -> None:
    url = memory()
    node = Node("m", "master", opener(url), steps=4)
    run([node])
    coordinator = node.coordinator
    assert coordinator is not None
    store = coordinator._store
    before, read = store.requests.total(), store.bytes_read
    latest = coordinator._log.latest()
    assert latest is not None
    before, read = store.requests.total(), store.bytes_read
    assert coordinator._reader.newer_than(latest.outer_step) is None
    assert store.requests.total() - before == 1
    assert store.bytes_read - read < 400
    put_delta(store, "a", 2, 0.01)
    for name, expected in (("a", 1), ("b", 0)):
        before = store.requests.total(), store.requests["fetch"]
        current = coordinator._master.current
        assert current is not None
        found, _ = coordinator._master._collector.collect(current)
        assert [one.facts.node_id for one in found] == ["a"], name
        # One listing of all nodes, and a header only where there is a new delta.
        assert store.requests.total() - before[0] == 1 + expected
        assert store.requests["fetch"] == before[1]


def test_node_ids_options_and_models_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    model, url = new_model(), memory()
    for bad in ("", "..", "a/b", "A", "x" * 65, ".hidden", "a\n"):
        with pytest.raises(BadNameError):
            DumbDiLoCoCoordinator(model, url, node_id=bad)
        monkeypatch.setenv("DILOCO_NODE_ID", bad.replace("\0", ""))
        with pytest.raises(BadNameError):
            DumbDiLoCoCoordinator(model, url)
    monkeypatch.setenv("DILOCO_NODE_ID", "w7")
    coordinator = DumbDiLoCoCoordinator(model, url)
    assert coordinator.node_id == "w7"
    assert isinstance(coordinator, SyncCoordinator)
    assert coordinator.state_dict() is None
    coordinator.stop()
    with pytest.raises(DiLoCoError, match="not started"):
        coordinator.after_optimizer_step(model, 1)
    for option in (
        *({"inner_steps": 0}, {"merge": "x"}, {"quorum": 0}, {"outer_momentum": 1.0}),
        *({"keep_commits": 0}, {"max_norm": 0.0}, {"accept_other": {"x"}}, {"role": "king"}),
    ):
        with pytest.raises(ValueError, match=next(iter(option))):
            DumbDiLoCoCoordinator(model, url, **option)  # type: ignore[arg-type]
    for given, words in BAD_OPTIONS:
        with pytest.raises((TypeError, ValueError)) as raised:
            DumbDiLoCoCoordinator(model, url, **given)
        assert str(raised.value) == words
    for given in ({"quorum": np.int64(2)}, {"outer_lr": 1}, {"quorum_seconds": np.float32(0.5)}):
        node = DumbDiLoCoCoordinator(model, url, **given)
        name, value = next(iter(given.items()))
        assert type(getattr(node.settings, name)) is type(value.item() if name[0] == "q" else 1.0)
    odd = torch.nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(TypeError, match="complex64 can't be exchanged"):
        DumbDiLoCoCoordinator(odd, url)


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"inner_step": 5}, "there is no option inner_step: did you mean inner_steps?"),
    ({"node": "w"}, "there is no option node: did you mean node_id?"),
    ({"inner_steps": 2.5}, "inner_steps must be a whole number, not 2.5"),
    ({"inner_steps": True}, "inner_steps must be a whole number, not True"),
    ({"quorum": "3"}, "quorum must be a whole number, not '3'"),
    ({"quorum": None}, "quorum must be a whole number, not None"),
    ({"quorum": 10**12}, "quorum must be at most 1,000,000,000, not 1000000000000"),
    ({"max_norm": "big"}, "max_norm must be a number or None, not 'big'"),
    ({"outer_lr": float("inf")}, "outer_lr must be finite, not inf"),
    ({"sync_seconds": float("nan")}, "sync_seconds must be finite, not nan"),
    ({"stop_seconds": 1e12}, "stop_seconds must be at most 1,000,000,000, not 1000000000000.0"),
    ({"standby": "no"}, "standby must be True or False, not 'no'"),
    ({"merge": 3}, "merge must be text, not 3"),
    ({"accept_other": "role"}, "accept_other must be a set of texts, not 'role'"),
    ({"accept_other": [1]}, "accept_other must be a set of texts, not [1]"),
    ({"samples": 0}, "samples must be a count from 1 up or a function, not 0"),
]


def test_tied_and_integer_tensors_and_bfloat16() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(5, 4)
            self.head = torch.nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("count", torch.tensor(7))

    url, models = memory(), [Tied(), Tied().bfloat16()]
    options: dict[str, Any] = {"inner_steps": 1, "synchronous": True, "lease_seconds": 1000.0}
    nodes = [
        DumbDiLoCoCoordinator(models[0], url, node_id="m", role="master", **options),
        DumbDiLoCoCoordinator(models[1], url, node_id="w", **options),
    ]
    for node in nodes:
        node.start()
    for step, (node, model) in itertools.product((1, 2, 3), zip(nodes, models, strict=True)):
        with torch.no_grad():
            model.embed.weight.sub_(0.25)
            model.count.add_(1)
        node.after_optimizer_step(model, step)
    for node, model in zip(nodes, models, strict=True):
        node.stop()
        assert model.head.weight is model.embed.weight
        assert model.count == 10, "integers stay a node's own"
    store = Store.open(url)
    commit = CommitLog(store).latest()
    assert commit is not None
    state = safetensors.torch.load(store.read(commit.model.name))
    assert {t.dtype for t in state.values()} == {torch.float32, torch.int64}
    assert torch.equal(state["embed.weight"], state["head.weight"])
    assert state["count"] == 10
