"""A master and two workers over real servers, and over a store that misbehaves on top of them."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest

from tests.trainer_core.diloco.faulty import Fault, Faults, FaultyStore, History
from tests.trainer_core.diloco.nodes import (
    Node,
    deltas_on,
    last_round,
    new_model,
    replay,
    run,
)
from tests.trainer_core.diloco.servers import Server
from trainer_core.diloco import Store

FAULTS = {"well": Faults(), "badly": Faults(stale=4, unknown=0.06)}


def three_nodes(open_store: Callable[[int], Store], steps: int) -> list[Node]:
    roles = {"m": "master", "a": "worker", "b": "worker"}
    return [
        Node(name, role, lambda number=number: open_store(number), steps=steps, lease_seconds=3.0)
        for number, (name, role) in enumerate(roles.items())
    ]


def half_once() -> Callable[[int, str, str], Fault | None]:
    """The first try of each node's first delta leaves half of it behind."""
    tried: set[str] = set()

    def rule(_: int, method: str, name: str) -> Fault | None:
        is_first = method == "write" and name.endswith("/delta_2.safetensors") and not tried
        tried.update([name] if is_first else [])
        return "half" if is_first else None

    return rule


@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize("kind", ["s3", "sftp"])
def test_outer_state_is_what_the_ledger_says(
    request: pytest.FixtureRequest, kind: str, faults: str
) -> None:
    server: Server = request.getfixturevalue(kind)
    url, history = f"{server.url}/{uuid.uuid4().hex}", History()
    plain = Store.open(
        url, options=server.options
    )  # one for all: to open one costs a second of CPU
    faulty = [
        FaultyStore(
            plain, FAULTS[faults], seed=number, history=history, attempts=3, rule=half_once()
        )
        for number in range(3)
    ]
    nodes = three_nodes(lambda number: plain if faults == "well" else faulty[number], steps=2)
    run(nodes)
    for store in faulty:
        store.calm()
    for node in nodes:
        node.steps = 4
    run(nodes)
    last_round(nodes[0])
    applied = replay(plain, new_model().state_dict())
    assert set(applied) == deltas_on(plain)
    assert {node for node, _ in applied} == {"m", "a", "b"}
    assert all(max(s for n, s in applied if n == node) == 4 for node in ("m", "a", "b"))
