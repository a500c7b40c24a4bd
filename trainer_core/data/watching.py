"""Whether a dataset remembers something within worker processes, where nobody can keep it.

A worker has a copy of the dataset, and that copy's attributes cannot be had from outside. So the
worker itself looks now and then whether reading changes them, and says so through a few bytes of
shared memory. What only fills up (a cache) or is opened when needed (a file) is no state.
"""

from __future__ import annotations

import multiprocessing.sharedctypes
from typing import Any

import torch.utils.data

from trainer_core.census.census import Census
from trainer_core.census.marks import Container, Mark, was_nothing

_MOST_BYTES = 200


class WorkerWatch:
    """Stands in for a loader's `worker_init_fn`, which it calls; it crosses to new processes."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._told: Any = multiprocessing.sharedctypes.RawArray("c", _MOST_BYTES)

    def __call__(self, worker_id: int) -> None:
        """In a worker, before it reads anything."""
        if self._inner is not None:
            self._inner(worker_id)
        global _here
        worker = torch.utils.data.get_worker_info()
        if worker is not None:
            _here = _Looker(self, worker.dataset)

    def tell(self, path: str) -> None:
        """In a worker: this changes."""
        self._told.value = path.encode()[: _MOST_BYTES - 1]

    def found(self) -> str:
        """What changes in workers, as far as one has noticed; empty if nothing does."""
        return bytes(self._told.value).decode(errors="replace")


class _Looker:
    def __init__(self, watch: WorkerWatch, dataset: Any) -> None:
        self._watch = watch
        self._batches = 0
        self._census = Census({"dataset": dataset}, generators=False, caches=True)

    def look(self) -> None:
        """Before each batch: looks before the 2nd, 4th, 8th, …"""
        count = self._batches
        self._batches += 1
        if count and not count & (count - 1):
            for change in self._census.changes():
                if not only_gained(change.before, change.value):
                    self._watch.tell(change.words)
                    return


_here: _Looker | None = None


def look() -> None:
    """Called in a worker before it reads a batch."""
    if _here is not None:
        _here.look()


def only_gained(before: Mark, value: Any) -> bool:
    """Whether all that was there is still the same, and the rest has been filled in since."""
    if was_nothing(before) or before.same(value):
        return True
    if not isinstance(before, Container) or before.kind is not type(value):
        return False
    if len(value) < len(before.marks):
        return False
    if before.keys is not None:
        return all(key in value and only_gained(before.of(key), value[key]) for key in before.keys)
    if not isinstance(value, (list, tuple)):
        return before.kind in (set, frozenset)
    return all(only_gained(mark, value[i]) for i, mark in enumerate(before.marks))
