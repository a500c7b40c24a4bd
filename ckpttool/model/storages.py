"""The storages that a file's tensors lie in, and which of their bytes some tensor reaches."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from ckpttool.formats.dtypes import BITS, STORAGE_BITS, storage_byte_count
from ckpttool.formats.values import StorageRef, TensorValue


def storage_bytes(storage: StorageRef) -> int:
    """The size of a storage in bytes, as the pickle declares it."""
    return storage_byte_count(storage.dtype, storage.numel)


def count_and_reach(
    shape: tuple[int, ...] | None, stride: tuple[int, ...] | None
) -> tuple[int, int]:
    """How many elements a tensor has, and one past the farthest of them from its offset."""
    shape = shape or ()
    if 0 in shape:
        return 0, 0
    steps = zip(shape, stride or (), strict=False)
    return prod(shape), 1 + sum((extent - 1) * step for extent, step in steps)


class Storages:
    """Gathers the storages by key, and the range of bytes that each tensor reaches in its own.

    `refs` maps keys to storages. Most storages have one tensor: more than one range is kept only
    where there are more.
    """

    def __init__(self) -> None:
        self.refs: dict[str, StorageRef] = {}
        self._first: dict[str, tuple[int, int]] = {}
        self._more: dict[str, list[tuple[int, int]]] = {}
        self._known: dict[tuple[object, object], tuple[int, int]] = {}

    def add(self, value: TensorValue) -> int:
        """Notes where a tensor and its parts lie; gives the bytes of their elements."""
        if value.parts:
            size = sum(map(self.add, value.parts.values()))
            if value.layout != "quantized":
                return size
        known = self._known.get((value.shape, value.stride))
        if known is None:
            known = self._measure(value)
        numel, reach = known
        bits, storage = BITS.get(value.dtype, 0), value.storage
        if storage is not None:
            start = -(-value.offset * bits // 8)
            extent = (start, -(-(value.offset + reach) * bits // 8) if reach else start)
            key = storage.key
            if key in self.refs:
                self._add_another(storage, extent)
            else:
                self.refs[key] = storage
                self._first[key] = extent
        return -(-numel * bits // 8)

    def add_whole(self, storage: StorageRef) -> None:
        """Notes a storage that is saved as such, without a tensor."""
        extent = (0, storage_bytes(storage))
        if storage.key in self.refs:
            self._add_another(storage, extent)
        else:
            self.refs[storage.key], self._first[storage.key] = storage, extent

    def _measure(self, value: TensorValue) -> tuple[int, int]:
        """`count_and_reach`, worked out once for each shape and stride."""
        known = count_and_reach(value.shape, value.stride)
        self._known[value.shape, value.stride] = known
        return known

    def _add_another(self, storage: StorageRef, extent: tuple[int, int]) -> None:
        """A storage that has been seen: files can state its size more than once."""
        key = storage.key
        if storage_bytes(self.refs[key]) < storage_bytes(storage):
            self.refs[key] = storage
        self._more.setdefault(key, [self._first[key]]).append(extent)

    def declared(self) -> Iterator[tuple[str, int, int]]:
        """(key, bytes that the pickle declares, one past the last byte that a tensor reaches)."""
        first, more = self._first, self._more
        for key, storage in self.refs.items():
            size = storage.numel * STORAGE_BITS.get(storage.dtype, 0) // 8
            ranges = more.get(key)
            yield key, size, first[key][1] if ranges is None else max(stop for _, stop in ranges)

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
