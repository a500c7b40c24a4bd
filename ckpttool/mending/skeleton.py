"""What a pickle says that helps to find and to judge the records: storages, tensors, dangers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.errors import LimitError
from ckpttool.formats.globals import Trust, classify
from ckpttool.formats.static_pickle import PickleResult, read_pickle
from ckpttool.model.storages import Storages
from ckpttool.model.walk import Walk, find_tensors

if TYPE_CHECKING:
    from ckpttool.formats.limits import ReaderLimits
    from ckpttool.formats.values import TensorValue


class Skeleton:
    """The inert content of a pickle.

    `tree` is the content. `tensors` maps dotted names to tensors; `storages` maps keys to storages.
    `sizes` maps the names of their records (`data/0`) to sizes in bytes, in the pickle's order.
    `dangers` says in words why the pickle must not be carried over as it is; empty if it may.
    """

    __slots__ = ("dangers", "result", "sizes", "storages", "tensors", "tree")

    def __init__(self, result: PickleResult, length: int, limits: ReaderLimits) -> None:
        self.result = result
        self.tree: Any = result.value
        self.tensors: dict[str, TensorValue] = {}
        found = Storages()
        walk = Walk(limits)
        for name, value in find_tensors(self.tree, "", walk):
            self.tensors[self._unused(name)] = value
            found.add(value)
        for storage in walk.storages:
            found.add_whole(storage)
        if walk.stopped is not None:
            raise LimitError(walk.stopped, limit="depth")
        self.storages = found.refs
        self.sizes = {f"data/{key}": size for key, size, _ in found.declared()}
        self.dangers = _dangers(result, length)

    def _unused(self, name: str) -> str:
        """Two tensors can have one name: number the later ones, as `model.checkpoint` does."""
        count, free = 1, name
        while free in self.tensors:
            count += 1
            free = f"{name}#{count}"
        return free


def read_skeleton(data: bytes, limits: ReaderLimits) -> Skeleton | None:
    """What the pickle in `data` says; None if it cannot be read."""
    result = read_pickle(data, limits=limits)
    if result.error is not None:
        return None
    try:
        return Skeleton(result, len(data), limits)
    except LimitError:
        return None


def _dangers(result: PickleResult, length: int) -> list[str]:
    dangers = []
    for path, ref in sorted(result.globals.items()):
        if classify(ref.module, ref.name) is Trust.DANGEROUS:
            dangers.append(f"it names {path}, which can run code")
    if result.computed_calls:
        dangers.append("it calls what a call gave")
    if result.malformed_calls:
        dangers.append("it calls what is known with arguments that make no sense")
    if result.nested:
        dangers.append("it loads another file from inside itself")
    if result.end < length:
        dangers.append("something follows it")
    return dangers
