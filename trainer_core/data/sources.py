"""Loaders, by what can be known of their place in the data; `source_of` picks the kind.

A source begins passes over its loader, says what it takes to find a place in a pass again, and goes
there. What cannot be found exactly it says in words, and goes as near as it can.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from trainer_core.callbacks import has_state
from trainer_core.data.generators import Moment, held_generators, return_to, set_states, states_of
from trainer_core.data.indices import Indices
from trainer_core.data.seeding import give_seeds, new_seed
from trainer_core.data.watching import WorkerWatch
from trainer_core.rng import host_rng_state, is_same_state

_DRAWS = (
    "batches were read again, and that drew random numbers of this process, of which the model "
    "had drawn some in between (a loader that keeps nothing in hand says so with a state_dict() "
    "that gives {}: then none is read again, and it is exact)"
)


class Place(NamedTuple):
    """A pass to go on with, and what makes its place uncertain, in words."""

    iterator: Iterator[Any]
    doubts: list[str]


class Source(Protocol):
    """One kind of loader. `once`: it can be gone through only once. `has_workers`: processes."""

    kind: str
    once: bool
    has_workers: bool

    def begin(self, epoch: int) -> Iterator[Any]:
        """Pass number `epoch`, from 0, from its beginning."""

    def state(self, batch: int) -> dict[str, Any]:
        """What `resume` needs, after `batch` batches of the pass that is under way."""

    def resume(self, state: Mapping[str, Any], epoch: int, batch: int) -> Place:
        """The pass in which `state` was taken, from its place on. Changes random states."""


def source_of(loader: Iterable[Any]) -> Source:
    """The source for a loader: by its own protocol where it has one, else by what it is."""
    if has_state(loader):
        return StatefulSource(loader)
    if _is_plain_dataloader(loader):
        return DataLoaderSource(loader)
    if type(loader) in (list, tuple):
        return ListSource(loader)
    if callable(getattr(loader, "__next__", None)):
        return IteratorSource(loader)
    return IterableSource(loader)


def _is_plain_dataloader(loader: Any) -> bool:
    """A subclass may iterate in its own way: then its index sampler says nothing.

    Nor does that of a data pipe (of older versions of torch), which draws before it is asked.
    """
    kind = type(loader)
    if not isinstance(loader, DataLoader) or hasattr(loader.dataset, "_datapipe"):
        return False
    return all(
        getattr(kind, name) is getattr(DataLoader, name)
        for name in ("__iter__", "_get_iterator", "_index_sampler", "_auto_collation")
    )


# What the methods are for, the protocol says.
# ruff: noqa: D102


class StatefulSource:
    """Says itself where it is (`state_dict`, `load_state_dict`), as torchdata's loaders do."""

    kind = "stateful"

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.once = False
        self.has_workers = getattr(loader, "num_workers", 0) > 0
        self._seeds: Any = None
        self._begins: Moment | None = None

    def begin(self, epoch: int) -> Iterator[Any]:
        stream = isinstance(getattr(self._loader, "dataset", None), IterableDataset)
        self._begins = Moment({}) if stream else None
        return self._iterate(epoch, new_seed(torch.get_rng_state(), epoch))

    def state(self, batch: int) -> dict[str, Any]:
        state = {"loader": copy.deepcopy(self._loader.state_dict())}
        if self._begins is not None:
            state["begins"] = self._begins.plain()
        if self._seeds is not None:
            state["seed"] = self._seeds.seed
        return state

    def resume(self, state: Mapping[str, Any], epoch: int, batch: int) -> Place:
        seed = str(state.get("seed", ""))
        if "begins" in state and _would_be_read_again(state["loader"]):
            # By ourselves: torchdata counts what it reads so, and is wrong the next time.
            saved = host_rng_state()
            doubts = return_to(state["begins"], {})
            self._begins = Moment({})
            iterator = self._iterate(epoch, seed)
            return Place(iterator, doubts + read_past(iterator, batch, saved))
        self._loader.load_state_dict(copy.deepcopy(state["loader"]))
        return Place(self._iterate(epoch, seed), [])

    def _iterate(self, epoch: int, seed: str) -> Iterator[Any]:
        _set_epoch(self._loader, epoch)
        self._seeds = give_seeds(self._loader)
        if self._seeds is not None:
            self._seeds.seed = seed
        iterator: Iterator[Any] = iter(self._loader)
        self.once = iterator is self._loader
        return iterator


def _would_be_read_again(state: Any) -> bool:
    """Whether this is torchdata's state of a stream that doesn't say itself where it is."""
    try:
        parts = [state]
        if "_snapshot" in state:
            parts = list(state["_snapshot"]["_worker_snapshots"].values())
        return all(
            part["dataset_state"] is None and part["fetcher_state"]["dataset_iter_state"] is None
            for part in parts
        )
    except (KeyError, TypeError, AttributeError):
        return False  # another version's format, or a loader of another kind


class ListSource:
    """A list or tuple of batches."""

    kind = "list"
    once = False
    has_workers = False

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def begin(self, epoch: int) -> Iterator[Any]:
        return iter(self._batches)

    def state(self, batch: int) -> dict[str, Any]:
        return {"length": len(self._batches)}

    def resume(self, state: Mapping[str, Any], epoch: int, batch: int) -> Place:
        doubts = []
        if state.get("length", len(self._batches)) != len(self._batches):
            doubts.append(f"the list had {state['length']} batches, here {len(self._batches)}")
        return Place(itertools.islice(iter(self._batches), batch, None), doubts)


class IteratorSource:
    """Where it stands only its maker knows."""

    kind = "iterator"
    once = True
    has_workers = False

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    def begin(self, epoch: int) -> Iterator[Any]:
        return iter(self._iterator)

    def state(self, batch: int) -> dict[str, Any]:
        return {}

    def resume(self, state: Mapping[str, Any], epoch: int, batch: int) -> Place:
        return Place(iter(self._iterator), [])


class IterableSource:
    """Whatever else can be gone through: the batches that were used are read again."""

    kind = "iterable"
    once = False
    has_workers = False

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._begins: Moment | None = None

    def begin(self, epoch: int) -> Iterator[Any]:
        self._begins = Moment(held_generators({"loader": self._loader}))
        return self._iterate()

    def state(self, batch: int) -> dict[str, Any]:
        return {} if self._begins is None else {"begins": self._begins.plain()}

    def resume(self, state: Mapping[str, Any], epoch: int, batch: int) -> Place:
        saved = host_rng_state()
        held = held_generators({"loader": self._loader})
        doubts = return_to(state.get("begins"), held)
        self._begins = Moment(held)
        iterator = self._iterate()
        return Place(iterator, doubts + read_past(iterator, batch, saved))

    def _iterate(self) -> Iterator[Any]:
        iterator = iter(self._loader)
        self.once = iterator is self._loader
        return iterator


class DataLoaderSource:
    """A DataLoader of torch's: the indices are known, so nothing is read to be thrown away.

    That is so for datasets with indices. An IterableDataset says itself where it is, if it has the
    two methods and lives in this process; else what was used is read again.
    """

    kind = "DataLoader"
    once = False

    def __init__(self, loader: Any) -> None:
        self.has_workers = loader.num_workers > 0
        self._iterable = isinstance(loader.dataset, IterableDataset)
        self._speaks = self._iterable and not self.has_workers and has_state(loader.dataset)
        # A copy, so that the caller's own stays as it is. torch forbids to set these by the front.
        self._loader = copy.copy(loader)
        place = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._indices = Indices(
            getattr(loader, place),
            seeded=self.has_workers,
            generator=loader.generator,
            ahead=loader.num_workers * (loader.prefetch_factor or 0),
            dataset=loader.dataset,
        )
        self._loader.__dict__[place] = self._indices
        self._loader.__dict__["_iterator"] = None
        self.watch = self._watched()
        self._began_with: dict[str, Any] = {}

    def _watched(self) -> WorkerWatch | None:
        """Where workers may remember what a new one will not know.

        A stream's begin each pass with the dataset of this process, unless they persist.
        """
        loader = self._loader
        if not self.has_workers or (self._iterable and not loader.persistent_workers):
            return None
        watch = WorkerWatch(loader.worker_init_fn)
        loader.__dict__["worker_init_fn"] = watch
        return watch

    def begin(self, epoch: int) -> Iterator[Any]:
        _set_epoch(self._loader, epoch)
        self._indices.epoch = epoch
        self._began_with = states_of(self._data_generators()) if self._iterable else {}
        return iter(self._loader)

    def state(self, batch: int) -> dict[str, Any]:
        state: dict[str, Any] = {
            "workers": self._loader.num_workers,
            "in_order": bool(getattr(self._loader, "in_order", True)),
            "generators": states_of(self._data_generators()),
        }
        if self._speaks:
            return {**state, "dataset": copy.deepcopy(self._loader.dataset.state_dict())}
        state |= self._indices.state(batch)
        if self._iterable:
            state["began_with"] = self._began_with
            state.pop("begun", None)
        return state

    def resume(self, state: Mapping[str, Any], epoch: int, batch: int) -> Place:
        _set_epoch(self._loader, epoch)
        doubts = self._other_workers(state)
        if not self._iterable:
            doubts += self._indices.go_to(state, batch)
            iterator = iter(self._loader)
        else:
            iterator, more = self._resume_stream(state, batch)
            doubts += more
        doubts += set_states(self._data_generators(), state.get("generators"))
        return Place(iterator, doubts)

    def _resume_stream(self, state: Mapping[str, Any], batch: int) -> Place:
        if self._speaks and "dataset" in state:
            self._loader.dataset.load_state_dict(copy.deepcopy(state["dataset"]))
            return Place(iter(self._loader), [])
        saved = host_rng_state()
        doubts = self._indices.replay(state)
        doubts += set_states(self._data_generators(), state.get("began_with"))
        self._began_with = states_of(self._data_generators())
        iterator = iter(self._loader)
        return Place(iterator, doubts + read_past(iterator, batch, saved))

    def _other_workers(self, state: Mapping[str, Any]) -> list[str]:
        then, now = state.get("workers"), self._loader.num_workers
        if not state.get("in_order", True):
            return ["workers gave their batches in no fixed order (in_order=False)"]
        if then != now and (self._iterable or not (then and now)):
            return [f"{then} worker processes made the batches, here {now} do"]
        return []

    def _data_generators(self) -> dict[str, Any]:
        """What dataset and collate function draw from; workers have copies of their own."""
        if self.has_workers:
            return {}
        loader = self._loader
        roots = {"dataset": loader.dataset, "collate_fn": loader.collate_fn}
        return held_generators(roots, but=[loader.generator])


def read_past(iterator: Iterator[Any], batches: int, saved: Any) -> list[str]:
    """Reads so many batches and lets them go; gives what makes the place uncertain, in words.

    `saved` are the random numbers of the checkpoint: where reading alone comes to them, nobody else
    had drawn any.
    """
    after_first = None
    for _ in range(batches):
        try:
            next(iterator)
        except StopIteration:
            return ["the pass is shorter here than the place in it that was saved"]
        if after_first is None:
            after_first = host_rng_state()
    now = host_rng_state()
    has_drawn = after_first is not None and not is_same_state(after_first, now)
    return [_DRAWS] if has_drawn and not is_same_state(saved, now) else []


def _set_epoch(loader: Any, epoch: int) -> None:
    """Tells what shuffles by the number of the pass (a DistributedSampler) which one begins."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = [batch_sampler, getattr(loader, "sampler", None), getattr(loader, "dataset", None)]
    for part in {id(part): part for part in parts}.values():
        set_epoch = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
