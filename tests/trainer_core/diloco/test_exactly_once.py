"""Killed before each operation on the store and after each change: no delta is lost, none twice.

Case L07.
"""

from __future__ import annotations

import pytest

from tests.trainer_core.diloco.faulty import Fault, FaultyStore
from tests.trainer_core.diloco.nodes import (
    Node,
    deltas_on,
    last_round,
    memory,
    new_model,
    replay,
    run,
)
from trainer_core.diloco import Store

STEPS, EVERY = 5, 3  # a last window that isn't whole, and checkpoints that lag behind deliveries
CHANGES = ("write", "create", "remove")


class Killing:
    """The killed node's stores, one for each life; operations are counted over all of them."""

    def __init__(self, url: str, number: int | None, fault: Fault) -> None:
        self.url, self.count, self.methods = url, 0, list[str]()
        self.number, self.fault = number, fault

    def open(self) -> FaultyStore:
        return FaultyStore(Store.open(self.url), rule=self._rule)

    def _rule(self, _: int, method: str, name: str) -> Fault | None:
        self.count += 1
        self.methods.append(method)
        return self.fault if self.count == self.number else None


def two_nodes(killed: str, killing: Killing) -> list[Node]:
    def opener(node_id: str) -> object:
        return killing.open if node_id == killed else lambda: Store.open(killing.url)

    return [
        Node(node_id, role, opener(node_id), steps=STEPS, every=EVERY)  # type: ignore[arg-type]
        for node_id, role in (("m", "master"), ("w", "worker"))
    ]


@pytest.mark.parametrize("killed", ["m", "w"])
def test_a_node_killed_after_any_change_loses_and_doubles_nothing(killed: str) -> None:
    """After each change to the store, which gives every state that a death can leave it in."""
    methods = quiet_run(killed)
    assert "create" in methods or killed == "w"
    cases: list[tuple[int, Fault]] = [
        (n, "die after") for n, m in enumerate(methods, 1) if m in CHANGES
    ]
    check(killed, [(1, "die"), *cases])


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["m", "w"])
def test_a_node_killed_before_any_operation_loses_and_doubles_nothing(killed: str) -> None:
    check(killed, [(n, "die") for n in range(1, len(quiet_run(killed)) + 1)])


def quiet_run(killed: str) -> list[str]:
    """What the node that is to be killed asks of its store, if it is not."""
    quiet = Killing(memory(), None, "die")
    assert run(two_nodes(killed, quiet)) == 0
    return quiet.methods


def check(killed: str, cases: list[tuple[int, Fault]]) -> None:
    for number, fault in cases:
        killing = Killing(memory(), number, fault)
        nodes = two_nodes(killed, killing)
        assert run(nodes) == 1, (number, fault)
        killing.number = None
        last_round(nodes[0])
        store = Store.open(killing.url)
        applied = replay(store, new_model().state_dict())
        assert set(applied) == deltas_on(store), (number, fault)
        assert {step for node, step in applied if node == killed} == {2, 4, 5}, (number, fault)
