"""Nodes that are configured alike don't see alike, and a resumed one sees what it would have."""

from __future__ import annotations

import pytest
import torch
import torch.utils.data

from trainer_core.data.feed import Feed
from trainer_core.diloco import BadNameError
from trainer_core.diloco.shards import node_sampler, seed_for, shard_for

NODES = ["w2", "m", "w1"]


def test_parts_are_by_name_whatever_the_order() -> None:
    assert [shard_for(node, NODES) for node in ("m", "w1", "w2")] == [(0, 3), (1, 3), (2, 3)]
    with pytest.raises(ValueError, match="x is none of the nodes"):
        shard_for("x", NODES)
    with pytest.raises(ValueError, match="named twice"):
        shard_for("m", ["m", "m"])
    with pytest.raises(BadNameError):
        shard_for("m", ["m", "../x"])


def test_seeds_are_fixed_and_apart() -> None:
    # Worked out by `printf 7/w1 | b2sum -l 64`, its bytes reversed, without the lowest bit.
    seeds = {seed_for(f"w{i}", seed) for i in range(50) for seed in range(50)}
    assert len(seeds) == 2500
    assert seed_for("w1", 7) == SEED_OF_W1_7
    assert all(0 <= seed < 2**63 for seed in seeds)


SEED_OF_W1_7 = int.from_bytes(bytes.fromhex("6de94f482ac73b36"), "little") >> 1


@pytest.mark.parametrize("nodes", [NODES, None])
def test_each_node_has_its_own_samples_and_a_resumed_one_goes_on(nodes: list[str] | None) -> None:
    data = torch.arange(30)

    def loader(node: str) -> torch.utils.data.DataLoader[torch.Tensor]:
        sampler = node_sampler(data, node, nodes, seed=3)  # type: ignore[arg-type]
        return torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)  # type: ignore[arg-type]

    def take(feed: Feed, count: int) -> list[int]:
        feed.start()
        batches = feed.batches()
        seen = [int(x) for _ in range(count) for x in next(batches)]
        batches.close()
        return seen

    first = {node: take(Feed(loader(node)), 5) for node in NODES}
    if nodes is not None:
        assert sorted(x for seen in first.values() for x in seen) == list(range(30)), "once each"
    assert len({tuple(seen) for seen in first.values()}) == 3
    whole = take(Feed(loader("w1")), 8)
    feed = Feed(loader("w1"))
    begun = take(feed, 3)
    again = Feed(loader("w1"))
    again.load_state_dict(feed.state_dict())
    assert begun + take(again, 5) == whole
