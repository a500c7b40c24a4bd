"""Seeds for what worker processes draw, one for each batch.

Workers draw random numbers of their own (augmentation in a dataset), and how far theirs have come
depends on all batches before. So each index that goes to a worker takes a seed with it, made of the
pass and the batch's number: whatever the worker did before, the batch comes out the same.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.utils.data

from trainer_core.data import watching
from trainer_core.data.generators import held_generators, reseed, words_of

SEED_BYTES = 16


def digest(data: bytes) -> bytes:
    """16 bytes that depend on all of `data` (BLAKE2b, RFC 7693)."""
    return hashlib.blake2b(data, digest_size=SEED_BYTES).digest()


def new_seed(state: torch.Tensor, epoch: int) -> str:
    """A pass's seed, from the state of torch's generator when pass `epoch` begins.

    Nothing is drawn for it: a run with these seeds draws what one without them would.
    """
    return digest(state.numpy().tobytes() + str(epoch).encode()).hex()


def batch_seed(seed: str, number: int) -> bytes:
    """The seed of batch `number` (from 0) of the pass whose seed this is."""
    return digest(f"{seed}/{number}".encode())


class Seeded:
    """An index on its way to a worker. On arrival it is the plain index, and the seed is set."""

    __slots__ = ("_index", "_seed")

    def __init__(self, index: Any, seed: bytes) -> None:
        self._index, self._seed = index, seed

    def __reduce__(self) -> tuple[Any, ...]:
        return arrive, (self._index, self._seed)


def arrive(index: Any, seed: bytes) -> Any:
    """Called where an index is unpickled: in the worker, just before it reads that batch."""
    # One for each: from one and the same, Python's and numpy's generator would draw alike.
    random.seed(digest(b"python" + seed))
    # Not torch.manual_seed: a worker has no business with the GPU's generators.
    reseed(torch.default_generator, digest(b"torch" + seed))
    try:
        import numpy
    except ImportError:
        pass
    else:
        numpy.random.seed(words_of(digest(b"numpy" + seed)))
    _reseed_dataset(seed)
    watching.look()
    return index


_held_by_dataset: dict[str, Any] | None = None


def _reseed_dataset(seed: bytes) -> None:
    """Also the generators that this worker's dataset holds, whatever they were seeded with."""
    global _held_by_dataset
    worker = torch.utils.data.get_worker_info()
    if worker is None:
        return
    if _held_by_dataset is None:
        _held_by_dataset = held_generators({"dataset": worker.dataset})
    for path, generator in _held_by_dataset.items():
        reseed(generator, digest(path.encode() + seed))


def give_seeds(loader: Any) -> Any:
    """Makes torchdata's loader send its workers seeds; gives what holds `seed`, None without them.

    torchdata keeps the state of a loader, but not that of its workers' random numbers. An index
    sampler that numbers what it passes on is put before the loader's own, and nothing else changes.
    """
    is_loader = isinstance(loader, torch.utils.data.DataLoader) and loader.num_workers > 0
    place = "batch_sampler" if getattr(loader, "batch_sampler", None) is not None else "sampler"
    sampler: Any = getattr(loader, place, None)
    if isinstance(sampler, SeededIndices):
        return sampler
    if not is_loader or (place == "sampler" and _is_stream(loader.dataset)):
        return None  # torchdata looks at the class of a stream's own sampler
    speaks = callable(getattr(sampler, "state_dict", None))
    seeded = (StatefulSeededIndices if speaks else SeededIndices)(sampler)
    loader.__dict__[place] = seeded  # torch forbids it by the front
    return seeded


def _is_stream(dataset: Any) -> bool:
    return isinstance(dataset, torch.utils.data.IterableDataset)


class SeededIndices(torch.utils.data.Sampler[Any]):
    """Passes on what `sampler` gives, each with the seed of its number."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.seed = ""
        self.number = 0
        self._sampler: Any = sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        first, self.number = self.number, 0
        inner = iter(self._sampler)
        speaks = callable(getattr(inner, "state_dict", None))
        return (_StatefulIterator if speaks else _Iterator)(self, inner, first)


class StatefulSeededIndices(SeededIndices):
    """The same for a sampler that says itself where it is."""

    latest: _Iterator | None = None

    def __iter__(self) -> Iterator[Any]:
        self.latest = super().__iter__()  # type: ignore[assignment]
        assert self.latest is not None
        return self.latest

    def state_dict(self) -> dict[str, Any]:
        """The sampler's own state, with the number of the next index."""
        number = 0 if self.latest is None else self.latest.number
        return {"number": number, "sampler": self._sampler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave, or from what the sampler's own gave."""
        self.number, inner = _number_and_rest(state)
        self._sampler.load_state_dict(inner)


class _Iterator:
    def __init__(self, owner: SeededIndices, inner: Iterator[Any], number: int) -> None:
        self._owner, self._inner, self.number = owner, inner, number

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        index = next(self._inner)
        self.number += 1
        return Seeded(index, batch_seed(self._owner.seed, self.number - 1))


class _StatefulIterator(_Iterator):
    def state_dict(self) -> dict[str, Any]:
        inner: Any = self._inner
        return {"number": self.number, "sampler": inner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        inner: Any = self._inner
        self.number, rest = _number_and_rest(state)
        inner.load_state_dict(rest)


def _number_and_rest(state: Mapping[str, Any]) -> tuple[int, Any]:
    if state.keys() == {"number", "sampler"}:
        return state["number"], state["sampler"]
    return 0, state
