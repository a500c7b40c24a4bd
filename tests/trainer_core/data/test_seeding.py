"""Seeds for worker processes: one for each batch, whatever the worker did before."""

from __future__ import annotations

import hashlib
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from trainer_core.data.feed import Feed
from trainer_core.data.seeding import Seeded, SeededIndices, batch_seed, give_seeds, new_seed
from trainer_core.rng import capture_rng_state, restore_rng_state

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


class Drawing(Dataset[Any]):
    """Each sample is what it drew: from three libraries, and from a generator of its own."""

    def __init__(self) -> None:
        self.rng = random.Random(0)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [float(torch.rand(())), random.random(), float(np.random.random())]
        return torch.tensor([*drawn, self.rng.random()], dtype=torch.float64)


def batches(workers: int, seed: int = 0, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    feed = Feed(DataLoader(Drawing(), batch_size=3, num_workers=workers, **options))
    generator = feed.batches()
    found = [next(generator) for _ in range(8)]
    generator.close()
    return found


def test_no_pass_is_like_another() -> None:
    # Nothing at all is drawn in this process between two passes of persistent workers.
    flat = torch.cat(batches(1, persistent_workers=True)).flatten().tolist()
    assert len(set(flat)) == len(flat)


def test_a_batch_does_not_hang_on_the_number_of_workers() -> None:
    one, two = batches(1), batches(2)
    assert all(map(torch.equal, one, two))
    flat = torch.cat(one).flatten().tolist()
    assert len(set(flat)) == len(flat)  # no number is drawn twice, not in the second pass either
    assert not torch.equal(one[0], batches(1, seed=1)[0])


def test_an_index_arrives_plain_with_its_seed_set() -> None:
    before = capture_rng_state()
    try:
        sent = pickle.dumps((0, Seeded([3, 4], batch_seed("ab", 7))))
        drawn = []
        for _ in range(2):
            assert pickle.loads(sent) == (0, [3, 4])
            drawn.append([random.random(), np.random.random(), float(torch.rand(()))])
        assert drawn[0] == drawn[1]
    finally:
        restore_rng_state(before)


def test_seeds_are_those_of_blake2b() -> None:
    assert batch_seed("ab", 7) == hashlib.blake2b(b"ab/7", digest_size=16).digest()
    state = torch.arange(4, dtype=torch.uint8)
    expected = hashlib.blake2b(bytes(range(4)) + b"2", digest_size=16).hexdigest()
    assert new_seed(state, 2) == expected


def test_only_loaders_with_workers_are_given_seeds() -> None:
    data = TensorDataset(torch.arange(4.0))
    assert give_seeds(DataLoader(data)) is None
    assert give_seeds([1, 2]) is None
    loader = DataLoader(data, batch_size=2, num_workers=1)
    seeds = give_seeds(loader)
    assert isinstance(seeds, SeededIndices) and give_seeds(loader) is seeds
    assert len(loader) == 2
