"""Where the tensors of some content lie in their storages, and how these are laid out anew.

A new file has a storage for each run of bytes that tensors use. Tensors whose ranges overlap stay
in one storage, and so go on sharing it; runs that nothing lies between, or hardly anything, stay
together as they were. Keys are numbered in the order in which the content comes to them, as
`torch.save` numbers them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from math import lcm
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.converting.contents import storage_users
from ckpttool.formats.dtypes import BITS, STORAGE_BITS, storage_byte_count
from ckpttool.formats.values import StorageRef, TensorValue
from ckpttool.model.storages import count_and_reach

if TYPE_CHECKING:
    from ckpttool.converting.storages import StorageBytes
    from ckpttool.writing.checkpoint import StorageSource

Range = tuple[int, int]

# About what one more record costs in headers and pickle: a smaller gap is not worth cutting out.
LEAST_GAP = 256


class Piece(NamedTuple):
    """A storage of the new file: `length` bytes from `start` on in the old storage `old`."""

    key: str
    old: str
    start: int
    length: int

    def source(self, storages: StorageBytes) -> StorageSource:
        """Its bytes, for the writer."""
        return storages.source(self.old, self.key, self.start, self.length)


def byte_range(tensor: TensorValue) -> Range:
    """First and one past the last byte that the tensor reaches in its storage."""
    bits = BITS.get(tensor.dtype, 8)
    reach = count_and_reach(tensor.shape, tensor.stride)[1]
    start = tensor.offset * bits // 8
    return start, -(-(tensor.offset + reach) * bits // 8) if reach else start


def runs(ranges: Iterable[Range], gap: int) -> list[Range]:
    """The ranges, joined where less than `gap` bytes lie between; with 0, where they overlap."""
    joined: list[Range] = []
    for start, stop in sorted(ranges):
        if joined and start - joined[-1][1] < gap:
            joined[-1] = joined[-1][0], max(joined[-1][1], stop)
        else:
            joined.append((start, stop))
    return joined


def lay_out(tree: Any, storages: StorageBytes, *, cut: bool) -> list[Piece]:
    """Lays the storages of `tree` out anew, and makes its tensors refer to the new ones, in place.

    With `cut` they are cut to what tensors use; else each stays whole. Storages that nothing in
    `tree` uses are gone either way. Gives the new storages in the order of their keys.
    """
    by_key: dict[str, list[TensorValue]] = {}
    layout = _Layout(storages)
    order = list(storage_users(tree))
    for one in order:
        if isinstance(one, TensorValue) and one.storage is not None:
            by_key.setdefault(one.storage.key, []).append(one)
        elif isinstance(one, StorageRef):
            layout.whole.setdefault(one.key, []).append(_bare_range(one))
    for key in by_key:
        layout.plan(key, by_key[key], cut)
    for one in order:
        if isinstance(one, TensorValue):
            layout.move(one)
        else:
            layout.move_bare(one)
    return layout.pieces


def _bare_range(storage: StorageRef) -> Range:
    """The bytes that a storage has which stands by itself; the legacy stream has views of them."""
    start, numel = (0, storage.numel) if storage.view is None else storage.view[1:]
    begin = storage_byte_count(storage.dtype, start)
    return begin, begin + storage_byte_count(storage.dtype, numel)


class _Layout:
    """The new storages of one file while they are being found."""

    def __init__(self, storages: StorageBytes) -> None:
        self.storages = storages
        self.whole: dict[str, list[Range]] = {}
        self.pieces: list[Piece] = []
        self._runs: dict[str, list[Range]] = {}
        self._keys: dict[tuple[str, Range], str] = {}
        self._refs: dict[tuple[str, str], StorageRef] = {}

    def plan(self, key: str, tensors: list[TensorValue], cut: bool) -> None:
        """Decides into which runs of bytes an old storage goes."""
        size = self.storages.size(key)
        widths = {BITS.get(tensor.dtype, 8) for tensor in tensors}
        widths |= {STORAGE_BITS.get(t.storage.dtype, 8) for t in tensors if t.storage is not None}
        # Several elements in a byte, or a compressed record, of which parts cost as much as all.
        if not cut or min(widths) < 8 or not self.storages.is_plain(key):
            self._runs[key] = [(0, size)]
            return
        ranges = [r for r in map(byte_range, tensors) if r[0] < r[1]] + self.whole.get(key, [])
        # The beginning of a piece must be a whole number of elements for each that looks at it.
        unit = lcm(*(width // 8 for width in widths))
        joined = runs(ranges, LEAST_GAP)
        aligned = ((start - start % unit, min(size, stop + -stop % unit)) for start, stop in joined)
        self._runs[key] = runs(aligned, 1) or [(0, 0)]

    def move(self, tensor: TensorValue) -> None:
        """Makes a tensor refer to its new storage."""
        storage = tensor.storage
        if storage is None:
            return
        found = self._runs[storage.key]
        start, stop = byte_range(tensor)
        if start == stop:  # no elements: any storage does
            run = found[0]
            if run != (0, self.storages.size(storage.key)):
                tensor.offset = 0
        else:
            run = found[bisect_right(found, start, key=_start) - 1]
            tensor.offset -= run[0] * 8 // BITS.get(tensor.dtype, 8)
        tensor.storage = self._ref(storage, run)

    def move_bare(self, storage: StorageRef) -> None:
        """The same for a storage by itself, which has exactly its own bytes."""
        start, stop = _bare_range(storage)
        storage.key = self._key(storage.key, (start, stop))
        storage.numel = (stop - start) * 8 // STORAGE_BITS.get(storage.dtype, 8)
        storage.view = None

    def _ref(self, storage: StorageRef, run: Range) -> StorageRef:
        key = self._key(storage.key, run)
        known = self._refs.get((key, storage.dtype))
        if known is None:
            numel = (run[1] - run[0]) * 8 // STORAGE_BITS.get(storage.dtype, 8)
            known = StorageRef(storage.dtype, key, storage.device, numel)
            self._refs[key, storage.dtype] = known
        return known

    def _key(self, old: str, run: Range) -> str:
        known = self._keys.get((old, run))
        if known is None:
            known = self._keys[old, run] = str(len(self.pieces))
            self.pieces.append(Piece(known, old, run[0], run[1] - run[0]))
        return known


def _start(run: Range) -> int:
    return run[0]
