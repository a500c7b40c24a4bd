"""The processes that train one model together: who is who, and how all of them agree.

Everything is said over groups of our own (gloo, on the CPU), so that it never mixes with what the
model says, and never waits for a device. Each method must be called by all ranks, in one order.
What one of them raises is raised by all, in the same words: nobody waits for those that have left.
"""

from __future__ import annotations

import itertools
import pickle
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch

from ckpttool.errors import WriteError
from trainer_core.loop.preemption import is_wrapped, told_to_all
from trainer_core.saving.savable import CheckpointError

T = TypeVar("T")


class RankError(RuntimeError):
    """Another rank has failed; the words say which one, and what it raised."""


PATIENCE = timedelta(hours=2)
"""How long ranks wait for each other; one of them may be writing a large file meanwhile.

A process that dies is noticed at once.
"""


class Site:
    """All ranks of the default process group, as one of them sees them.

    `rank` and `size` are global. `beside` is the same site for a thread that works beside training;
    what is said there does not mix with what is said here. `number`: of the sites that these ranks
    have made, one after the other. `fits`: how many were begun.
    """

    def __init__(
        self, rank: int, size: int, group: Any, beside: Site | None = None, number: int = 0
    ) -> None:
        self.rank, self.size, self._group = rank, size, group
        self.beside = self if beside is None else beside
        self.number, self.fits = number, 0

    @property
    def group(self) -> Any:
        """The group of processes; RuntimeError where this rank has left it: see `forget`."""
        if self._group is None:
            raise RuntimeError("this rank has left the others after a failure")
        return self._group

    def leave(self) -> None:
        """Lets the group go: whoever waits for this rank there, or comes to it, is refused."""
        group, self._group = self._group, None
        if group is not None:
            torch.distributed.destroy_process_group(group)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which alone decides about directories and writes to them."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The value of each rank, by rank, for all of them. Values are to be small and plain."""
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's value."""
        values: list[Any] = [value]
        torch.distributed.broadcast_object_list(values, src=0, group=self.group)
        known: T = values[0]
        return known

    def sum(self, *counts: int) -> list[int]:
        """The sums of these whole numbers over all ranks."""
        total = torch.tensor(counts, dtype=torch.int64)
        torch.distributed.all_reduce(total, group=self.group)
        return [int(count) for count in total.tolist()]

    def first(self, work: Callable[[], T]) -> T:
        """Rank 0 does `work`; all get its result (small and plain), or raise its error.

        An error of a kind that is not known to all is a RankError on the others.
        """
        result: Any = None
        if not self.leads:
            failure, result = self.broadcast((None, None))
            if failure is not None:
                raise told_to_all(failure.again(0))
            return result  # type: ignore[no-any-return]  # rank 0's, which is a T
        try:
            result = work()
            pickle.dumps(result)
        except BaseException as error:
            self.broadcast((_Failure.of(error), None))
            told_to_all(error)
            raise
        self.broadcast((None, result))
        return result  # type: ignore[no-any-return]  # that of `work`

    def every(self, work: Callable[[], T]) -> T:
        """Each rank does `work` and gets its own result; if any fails, all raise the same error.

        That is the error of the lowest rank which has one, and names that rank, unless it is 0. One
        of a kind that is not known to all is raised on its own rank, and a RankError on the others.
        """
        result, own = None, None
        try:
            result = work()
        except BaseException as error:
            own = error
        failures = self.gather(None if own is None else _Failure.of(own))
        for rank, failure in enumerate(failures):
            if failure is None:
                continue
            is_own = rank == self.rank and (rank == 0 or failure.kind == RankError.__name__)
            if own is not None and (is_own or not isinstance(own, Exception)):
                raise told_to_all(own)
            raise told_to_all(failure.again(rank)) from own
        return result  # type: ignore[return-value]  # without a failure it is what `work` gave

    def share(self, state: Any) -> Any:
        """Rank 0's state, tensors and all, as copies on the CPU of each rank. Costs no file."""
        tensors: list[torch.Tensor] = []
        skeleton = self.broadcast(_without_tensors(state, tensors, {}) if self.leads else None)
        if self.leads:
            for tensor in tensors:
                self._send(tensor.detach().cpu().contiguous())
            return state
        return self._fill(skeleton, {})

    def _send(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            data = tensor.reshape(-1).view(torch.uint8)
            torch.distributed.broadcast(data, src=0, group=self.group)

    def _fill(self, value: Any, known: dict[int, torch.Tensor]) -> Any:
        if isinstance(value, _Slot):
            if value.number not in known:
                tensor = torch.empty(value.shape, dtype=value.dtype)
                self._send(tensor)
                known[value.number] = tensor
            return known[value.number]
        if isinstance(value, dict):
            kind = type(value)
            return kind((key, self._fill(item, known)) for key, item in value.items())
        if type(value) in (list, tuple):
            return type(value)(self._fill(item, known) for item in value)
        return value


class _Slot(NamedTuple):
    """Stands for a tensor that is sent by itself."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def _without_tensors(value: Any, tensors: list[torch.Tensor], known: dict[int, _Slot]) -> Any:
    if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
        if id(value) not in known:
            known[id(value)] = _Slot(len(tensors), tuple(value.shape), value.dtype)
            tensors.append(value)
        return known[id(value)]
    if isinstance(value, dict):
        kind = OrderedDict if isinstance(value, OrderedDict) else dict
        return kind((key, _without_tensors(item, tensors, known)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(item, tensors, known) for item in value)
    return value


class _Failure(NamedTuple):
    """An error on its way to other ranks: an error of a known kind comes out as that kind."""

    kind: str
    words: str
    number: int | None
    path: str | None
    reason: str | None

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        """The error, as what can be sent."""
        kinds = (WriteError, CheckpointError, OSError, ValueError, TypeError)
        kind = next((kind.__name__ for kind in kinds if isinstance(error, kind)), "RankError")
        words = str(error)
        if kind == "RankError" and not isinstance(error, RankError):
            words = f"{type(error).__name__}: {words}" if words else type(error).__name__
        number = error.errno if isinstance(error, OSError) else None
        path = error.path if isinstance(error, WriteError) else None
        return cls(kind, words, number, path, getattr(error, "reason", None) if path else None)

    def again(self, rank: int) -> Exception:
        """The error of that rank, to be raised here."""
        is_named = rank or self.kind == "RankError"
        words = f"rank {rank}: {self.words}" if is_named else self.words
        if self.kind == "WriteError":
            failed = WriteError(self.path or "", f"{self.reason or ''}")
            failed.args, failed.errno = (words,), self.number
            return failed
        if self.kind == "OSError":
            refused = OSError(words)
            refused.errno = self.number
            return refused
        kinds = {"CheckpointError": CheckpointError, "ValueError": ValueError}
        kinds |= {"TypeError": TypeError}
        return kinds.get(self.kind, RankError)(words)


_sites: list[tuple[Any, Site]] = []
_numbers = itertools.count()


def site_of(model: torch.nn.Module) -> Site | None:
    """The site that trains `model`, or None where this process trains it alone.

    It is trained together where it is wrapped in DistributedDataParallel, in more than one process,
    or has parameters that are sharded (`fully_shard`), even in one. All ranks must call this.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    together = distributed.get_world_size() > 1 and is_wrapped(model)
    if not together and not has_shards(model):
        return None
    world = distributed.group.WORLD
    known = [site for group, site in _sites if group is world]
    if not known:
        _sites[:] = [(world, _new_site())]
        known = [_sites[0][1]]
    return known[0]


def forget(site: Site) -> None:
    """Leaves the others after a failure that only this rank has; the next trainer meets them anew.

    A save that is being written beside training goes on: it is of a step that all have done.
    """
    _sites[:] = [known for known in _sites if known[1] is not site]
    try:
        site.leave()
    except (RuntimeError, ValueError):  # the groups are gone already
        return


def has_shards(model: torch.nn.Module) -> bool:
    """Whether any parameter of a model is a DTensor."""
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters())


def _new_site() -> Site:
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    groups = [torch.distributed.new_group(backend="gloo", timeout=PATIENCE) for _ in range(2)]
    return Site(rank, size, groups[0], Site(rank, size, groups[1]), next(_numbers))
