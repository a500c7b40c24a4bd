"""Which bytes of the storages are reached by some tensor."""

from __future__ import annotations

from math import prod

from ckpttool.formats.dtypes import byte_count
from ckpttool.formats.values import StorageRef, TensorValue


def storage_bytes(storage: StorageRef) -> int:
    """The size of a storage in bytes, as the pickle declares it."""
    return byte_count(storage.dtype, storage.numel)


def count_and_reach(
    shape: tuple[int, ...] | None, stride: tuple[int, ...] | None
) -> tuple[int, int]:
    """How many elements a tensor has, and one past the farthest of them from its offset."""
    shape = shape or ()
    if 0 in shape:
        return 0, 0
    steps = zip(shape, stride or (), strict=False)
    return prod(shape), 1 + sum((extent - 1) * step for extent, step in steps)


class Extents:
    """Gathers, for each storage, the range of bytes from lowest to highest element of its tensors.

    Most storages have one tensor: more than one range is kept only where there are more.
    """

    def __init__(self) -> None:
        self._first: dict[str, tuple[int, int]] = {}
        self._more: dict[str, list[tuple[int, int]]] = {}
        self._known: dict[tuple[object, object], tuple[int, int]] = {}

    def of(self, value: TensorValue) -> tuple[int, int]:
        """`count_and_reach` of a tensor; worked out once for each shape and stride."""
        key = (value.shape, value.stride)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = count_and_reach(value.shape, value.stride)
        return known

    def add(self, value: TensorValue, reach: int) -> None:
        """Note the bytes that `value` reaches in its storage; `reach` counts elements."""
        storage = value.storage
        if storage is None:
            return
        start = byte_count(value.dtype, value.offset) if value.offset else 0
        extent = (start, byte_count(value.dtype, value.offset + reach) if reach else start)
        first = self._first.setdefault(storage.key, extent)
        if first is not extent:
            self._more.setdefault(storage.key, [first]).append(extent)

    def hull(self, key: str) -> tuple[int, int]:
        """First byte that any tensor reaches in the storage `key`, and one past the last."""
        ranges = self._more.get(key)
        if ranges is None:
            return self._first[key]
        return min(start for start, _ in ranges), max(stop for _, stop in ranges)

    def used(self) -> int:
        """Bytes that at least one tensor reaches, over all storages."""
        more = self._more
        alone = sum(stop - start for key, (start, stop) in self._first.items() if key not in more)
        return alone + sum(map(_covered, more.values()))


def _covered(ranges: list[tuple[int, int]]) -> int:
    """Length of the union of the ranges."""
    covered = reached = 0
    for start, stop in sorted(ranges):
        start = max(start, reached)
        if stop > start:
            covered += stop - start
            reached = stop
    return covered
