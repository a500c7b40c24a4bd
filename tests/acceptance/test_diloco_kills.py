"""Nodes that are killed at random moments and started again: nothing is lost, nothing applied twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.diloco_kills import Plan, nodes_of, replay, run_with_kills, undisturbed, write_text
from benchmarks.diloco_nodes import Forks
from benchmarks.diloco_places import Place

PLAN = Plan(rounds=4, inner_steps=6, batch=2, every=2, seconds=300.0)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as running:
        yield running


@pytest.mark.parametrize("lockstep", [False, True], ids=["each by itself", "in lockstep"])
def test_six_kills(forks: Forks, tmp_path: Path, lockstep: bool) -> None:
    plan = PLAN._replace(lockstep=lockstep, seed=int(lockstep))
    place, text = Place(str(tmp_path / "hub")), write_text(tmp_path)
    nodes = nodes_of(forks, tmp_path / "nodes", place, text, plan)
    killed = run_with_kills(nodes, plan, 6, place)
    report = replay(place, nodes, tmp_path / "copy")
    assert killed.kills.total() == 6 and sum(node.lives for node in nodes) == 4 + 6
    assert (report["problems"], report["lost"], report["twice"]) == ([], [], [])
    # Each node delivers at each boundary, and what is delivered is applied; a boundary that finds
    # the upload before it unfinished leaves its steps to the next one.
    assert report["acknowledged"] > 0 and report["applied"] >= report["acknowledged"]
    assert report["waiting"] == report["refused"] == report["differing_values"] == 0
    if lockstep:
        assert report["outer_steps"] == plan.rounds and report["applied"] == 4 * plan.rounds
        calm = undisturbed(forks, tmp_path, text, plan)
        assert report["weights_sha256"] == calm["weights_sha256"]
