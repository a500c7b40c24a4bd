"""Runs of bytes and the layout of storages, worked out by hand."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.converting.extents import LEAST_GAP, byte_range, lay_out, runs
from ckpttool.converting.storages import StorageBytes
from ckpttool.formats.values import StorageRef, TensorValue


class Bytes(StorageBytes):
    """Storages in memory alone."""

    def __init__(self, **storages: bytes) -> None:
        super().__init__(None, storages)


def tensor(
    key: str,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    *,
    dtype: str = "float32",
    numel: int = 1000,
) -> TensorValue:
    return TensorValue(StorageRef(dtype, key, "cpu", numel), offset, shape, stride, False, dtype)


@pytest.mark.parametrize(
    ("offset", "shape", "stride", "wanted"),
    [
        (3, (2, 5), (5, 1), (12, 52)),
        (0, (), (), (0, 4)),
        (2, (3,), (0,), (8, 12)),  # expanded: one element, three times
        (1, (2, 2), (1, 10), (4, 52)),
        (9, (0, 4), (4, 1), (36, 36)),
    ],
)
def test_the_range_that_a_tensor_reaches(offset: int, shape: Any, stride: Any, wanted: Any) -> None:
    assert byte_range(tensor("0", offset, shape, stride)) == wanted


RANGES = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)).map(lambda r: (r[0], sum(r))))


@given(RANGES, st.integers(0, 50))
def test_runs_cover_the_same_bytes_and_lie_apart(ranges: list[tuple[int, int]], gap: int) -> None:
    joined = runs(ranges, gap)
    for start, stop in ranges:
        assert sum(a <= start and stop <= b for a, b in joined) == 1
    for (_, stop), (start, _) in pairwise(joined):
        assert start - stop >= gap
    used = {byte for start, stop in ranges for byte in range(start, stop)}
    for start, stop in joined:
        assert {start, stop - 1} <= used
        holes = [byte in used for byte in range(start, stop)]
        assert longest(holes) < max(gap, 1)


def longest(used: list[bool]) -> int:
    run = most = 0
    for one in used:
        run = 0 if one else run + 1
        most = max(most, run)
    return most


def taken(pieces: list[Any], storages: StorageBytes) -> Iterator[bytes]:
    for piece in pieces:
        yield b"".join(bytes(chunk) for chunk in piece.source(storages).chunks())


def test_overlapping_tensors_stay_in_one_storage() -> None:
    storages = Bytes(a=bytes(i % 251 for i in range(4000)))
    first, second, far = (
        tensor("a", 100, (10,), (1,)),
        tensor("a", 105, (10,), (1,)),
        tensor("a", 900, (4,), (2,)),
    )
    pieces = lay_out({"x": first, "y": [second], "z": far}, storages, cut=True)
    assert [(piece.start, piece.length) for piece in pieces] == [(400, 60), (3600, 28)]
    assert [(t.storage.key, t.offset, t.storage.numel) for t in (first, second, far) if t.storage] == [
        ("0", 0, 15), ("0", 5, 15), ("1", 0, 7),
    ]  # fmt: skip
    content = bytes(i % 251 for i in range(4000))
    assert list(taken(pieces, storages)) == [content[400:460], content[3600:3628]]


def test_a_gap_that_costs_less_than_a_record_stays() -> None:
    storages = Bytes(a=bytes(4000))
    apart = LEAST_GAP // 4
    for distance, count in ((apart - 1, 1), (apart, 2)):
        tree = [tensor("a", 0, (4,), (1,)), tensor("a", 4 + distance, (4,), (1,))]
        assert len(lay_out(tree, storages, cut=True)) == count


def test_pieces_begin_at_whole_elements_for_every_dtype_on_them() -> None:
    """An int64 looks at the storage too, so that a piece must begin at a multiple of eight."""
    storages = Bytes(a=bytes(4000))
    narrow = tensor("a", 101, (4,), (1,))
    wide = TensorValue(StorageRef("float32", "a", "cpu", 1000), 52, (2,), (1,), False, "int64")
    pieces = lay_out([narrow, wide], storages, cut=True)
    assert [(piece.start, piece.length) for piece in pieces] == [(400, 32)]
    assert (narrow.offset, wide.offset) == (1, 2)


def test_without_cutting_storages_stay_whole_and_unused_ones_go() -> None:
    storages = Bytes(old=bytes(4000), unused=bytes(8))
    one = tensor("old", 900, (4,), (1,))
    pieces = lay_out((one,), storages, cut=False)
    assert [tuple(piece) for piece in pieces] == [("0", "old", 0, 4000)]
    assert (one.offset, one.storage and one.storage.numel) == (900, 1000)


def test_a_bare_storage_keeps_exactly_its_bytes() -> None:
    storages = Bytes(a=bytes(4000))
    bare, view = StorageRef("float32", "a", "cpu", 1000), tensor("a", 10, (4,), (1,))
    pieces = lay_out([view, bare], storages, cut=True)
    assert [tuple(piece) for piece in pieces] == [("0", "a", 0, 4000)]
    assert (bare.key, bare.numel, view.offset) == ("0", 1000, 10)


def test_a_view_of_the_legacy_stream_becomes_a_storage_by_itself() -> None:
    storages = Bytes(root=bytes(range(200)) * 20)
    view = StorageRef("float32", "root", "cpu", 1000, ("view", 25, 10))
    pieces = lay_out([view], storages, cut=False)
    assert list(taken(pieces, storages)) == [bytes(range(100, 140))]
    assert (view.key, view.numel, view.view) == ("0", 10, None)


def test_packed_elements_are_never_cut() -> None:
    storages = Bytes(a=bytes(1000))
    one = tensor("a", 3, (5,), (1,), dtype="quint4x2")
    assert [piece.length for piece in lay_out([one], storages, cut=True)] == [1000]
    assert one.offset == 3


def test_a_tensor_without_elements_needs_no_bytes() -> None:
    storages = Bytes(a=bytes(4000))
    one = tensor("a", 500, (0, 3), (3, 1))
    assert [piece.length for piece in lay_out([one], storages, cut=True)] == [0]
    assert one.offset == 0
