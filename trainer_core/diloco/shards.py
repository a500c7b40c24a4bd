"""Which part of the data a node sees, and its seed: nodes configured alike don't see alike.

Where the nodes are known, each takes its own part of one permutation (`node_sampler` with
`nodes`); where they come and go, each draws its own from all data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sized
from typing import Any

import torch
import torch.utils.data
from torch.utils.data.distributed import DistributedSampler

from trainer_core.diloco.names import check_node_id


def shard_for(node_id: str, nodes: Iterable[str]) -> tuple[int, int]:
    """The part of this node and the number of parts: `(1, 3)` for the second of three, by name.

    Every node must name the same nodes. Raises ValueError for a node that isn't among them, or is
    twice, and BadNameError (a ValueError) for what is no node id.
    """
    ordered = sorted(check_node_id(node) for node in nodes)
    if len(set(ordered)) < len(ordered):
        raise ValueError("a node is named twice")
    if check_node_id(node_id) not in ordered:
        raise ValueError(f"{node_id} is none of the nodes: {', '.join(ordered)[:200]}")
    return ordered.index(node_id), len(ordered)


def seed_for(node_id: str, seed: int = 0) -> int:
    """A seed from 0 to 2**63 - 1 of the run's seed and the node; the same after a restart.

    BLAKE2b (RFC 7693), so that seeds of any two nodes have nothing to do with each other.
    """
    text = f"{seed}/{check_node_id(node_id)}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def node_sampler(
    dataset: Sized, node_id: str, nodes: Iterable[str] | None = None, *, seed: int = 0
) -> torch.utils.data.Sampler[Any]:
    """A sampler for this node's DataLoader; its place is kept in checkpoints like any other's.

    With `nodes`: torch's DistributedSampler over them, so that in each pass no two nodes see the
    same sample (but for the few that fill up where the data can't be divided evenly). Without:
    every sample in each pass, in an order of this node's own.
    """
    if nodes is not None:
        index, count = shard_for(node_id, nodes)
        return DistributedSampler(
            dataset,  # type: ignore[arg-type]  # only its length is asked for
            num_replicas=count,
            rank=index,
            seed=seed,
        )
    generator = torch.Generator().manual_seed(seed_for(node_id, seed))
    return torch.utils.data.RandomSampler(dataset, generator=generator)
