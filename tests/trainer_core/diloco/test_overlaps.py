"""No local step is applied twice, whatever a node that started again was told of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.trainer_core.diloco.faulty import FaultyStore
from tests.trainer_core.diloco.nodes import Node, last_round, memory, new_model, replay, run
from trainer_core.diloco import Store
from trainer_core.diloco.commits import POINTER, CommitLog
from trainer_core.diloco.deltas import Job, metadata_of
from trainer_core.diloco.fingerprint import Spec
from trainer_core.diloco.tensorfile import tensors_sha256
from trainer_core.diloco.worker import Sender


def put(store: Store, step: int, since: int, value: float = 2.0**-8) -> None:
    """A delta of the node w that says which steps are in it: `value` for each."""
    state = new_model().state_dict()
    delta = {name: torch.full_like(t, value * (step - since)) for name, t in state.items()}
    job = Job(step, 0, 0, delta, {}, since, 4)
    said = metadata_of(job, "w", since or -1, Spec.of(state), tensors_sha256(delta))
    store.write(f"nodes/w/delta_{step}.safetensors", safetensors.torch.save(delta, said))


def judged(store: Store) -> tuple[list[int], dict[int, str]]:
    """Steps of w's applied deltas, and what was refused, after a master has looked."""
    log = CommitLog(store)
    commits = [log.read(step) for step in log.steps()]
    applied = [one.local_step for c in commits for one in c.applied if one.node_id == "w"]
    return applied, {one.local_step: one.reason for c in commits for one in c.refused}


def master(store: Store, steps: int) -> None:
    run([Node("m", "master", lambda: store, steps=steps)])


# By (since, step): what is on the store at once, and which of it is to count.
CASES: dict[str, tuple[list[tuple[int, int]], list[int]]] = {
    "one in another": ([(0, 2), (2, 4), (2, 6)], [2, 6]),
    "two in another": ([(0, 2), (2, 4), (4, 5), (2, 6), (6, 8)], [2, 6, 8]),
    "across": ([(0, 2), (0, 4), (2, 6)], [2, 6]),
    "none": ([(0, 2), (2, 3), (3, 6)], [2, 3, 6]),
}


@pytest.mark.parametrize("case", CASES)
def test_of_two_deltas_that_share_steps_the_one_that_goes_further_counts(case: str) -> None:
    deltas, expected = CASES[case]
    store = Store.open(memory())
    for since, step in deltas:
        put(store, step, since)
    master(store, 2)
    applied, refused = judged(store)
    assert applied == expected
    assert refused.keys() == {step for _, step in deltas} - set(expected)
    assert all("has steps that are part of delta_6" in words for words in refused.values())
    replay(store, new_model().state_dict())


def test_what_reaches_back_behind_what_was_dealt_with_is_refused() -> None:
    store = Store.open(memory())
    put(store, 4, 0)
    master(store, 2)
    put(store, 6, 2)
    put(store, 8, 6)
    master(store, 4)
    applied, refused = judged(store)
    assert applied == [4, 8]
    assert refused == {6: "begins after step 2, but up to step 4 all was dealt with"}


def test_what_was_left_out_has_its_turn_if_the_other_one_is_refused() -> None:
    store = Store.open(memory())
    put(store, 2, 0)
    put(store, 4, 2)
    put(store, 6, 2, float("nan"))
    master(store, 2)
    last_round(Node("m", "master", lambda: store, steps=2))
    applied, refused = judged(store)
    assert applied == [2, 4]
    assert refused == {6: "has values that are not finite"}


class OldListing(FaultyStore):
    """Does not know yet of the newest delta of w, as a store may that lists what was."""

    is_old = False

    def entries(self, folder: str) -> Any:
        found = super().entries(folder)
        return found[:-1] if self.is_old and folder == "nodes/w" else found


@pytest.mark.parametrize("is_old", [False, True])
def test_a_node_that_was_shown_an_old_listing_of_itself_sends_no_step_twice(is_old: bool) -> None:
    """Its first life skips the boundary at 4; the checkpoint of step 3 knows nothing of that."""
    url = memory()
    cut = [False]

    def rule(_: int, method: str, name: str) -> Any:
        return "passing" if cut[0] and method == "write" else None

    node = Node("w", "worker", lambda: FaultyStore(Store.open(url), rule=rule), steps=12, every=3)
    life = node.life()
    for _ in range(3):
        next(life)
    cut[0] = True
    next(life)
    cut[0] = False
    assert node.coordinator is not None
    # The job of step 4 waits; given up here, so that the next one holds both windows.
    node.coordinator._worker.pending = None
    for _ in range(2):
        next(life)
    store = Store.open(url)
    assert [entry.name for entry in store.entries("nodes/w")] == [
        *("delta_2.safetensors", "delta_6.safetensors")
    ]
    again = Node("w", "worker", lambda: forgetful, steps=10)
    forgetful = OldListing(Store.open(url))
    forgetful.is_old = is_old
    again.checkpoint = checkpoint_of_3(node)
    run([again])
    master(store, 2)
    applied, refused = judged(store)
    assert applied == [2, 6, 8, 10]
    assert refused.keys() == ({4} if is_old else set())
    replay(store, new_model().state_dict())


def checkpoint_of_3(node: Node) -> dict[str, Any]:
    """As it was saved at step 3 (that of step 6 has replaced it)."""
    twin = Node("w", "worker", lambda: Store.open(memory()), steps=3, every=3)
    life = twin.life()
    for _ in range(3):
        next(life)
    assert twin.checkpoint is not None
    return twin.checkpoint


def test_a_pointer_that_goes_back_takes_nobody_back_and_is_put_right(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    one = Node("m", "master", lambda: store, steps=100)
    life = one.life()
    for _ in range(2):
        next(life)
    old = store.read(POINTER)
    for _ in range(2):
        next(life)
    worker = Node("w", "worker", lambda: store, steps=100)
    other = worker.life()
    next(other)
    assert worker.coordinator is not None
    assert worker.coordinator.counters.last_global_step == 2
    store.write(POINTER, old)  # a write that was given up long ago lands
    for _ in range(3):
        next(other)
    assert worker.coordinator.counters.last_global_step == 2
    put(store, 2, 0)
    assert one.coordinator is not None
    one.coordinator._master.round()
    store.write(POINTER, old)
    assert one.coordinator._master.round() is None  # a look that finds nothing new
    pointer = CommitLog(store).pointer()
    newest = one.coordinator.outer_step
    assert pointer is not None and pointer.outer_step == newest
    list(zip(range(2), other, strict=False))
    assert worker.coordinator.counters.last_global_step == newest


@pytest.mark.parametrize("ends", [6, 20])
def test_steps_that_reach_back_into_a_delivery_are_given_up_aloud(
    ends: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Up to step 8 all is delivered. What ends before is no loss, what ends behind it is."""
    store = Store.open(memory())
    put(store, 8, 4)
    state = new_model().state_dict()
    sender = Sender(store, "w", Spec.of(state), CommitLog(store))
    sender.deliver(Job(ends, 0, 0, {}, {}, 4, ends - 4))
    assert [entry.name for entry in store.entries("nodes/w")] == ["delta_8.safetensors"]
    said = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    begins = f"steps 4 to {ends} of w are not sent: up to step 8 all is delivered"
    assert [words.startswith(begins) for words in said] == ([True] if ends > 8 else [])
