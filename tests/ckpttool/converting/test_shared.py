"""Which tensors share memory, by safetensors' convention: pairs worked out by hand."""

from __future__ import annotations

from ckpttool.converting.shared import Shared, find_shared
from ckpttool.formats.values import StorageRef, TensorValue


def tensor(key: str, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> TensorValue:
    return TensorValue(
        StorageRef("float32", key, "cpu", 100), offset, shape, stride, False, "float32"
    )


WHOLE = tensor("a", 0, (4, 5), (5, 1))


def test_the_first_name_is_kept_of_equal_views() -> None:
    shared, unclear = find_shared({"z": WHOLE, "b": tensor("a", 0, (4, 5), (5, 1)), "c": WHOLE})
    assert shared == [Shared("c", "b", True), Shared("z", "b", True)]
    assert unclear == []


def test_a_name_that_has_no_room_in_the_metadata_is_kept_if_it_can_be() -> None:
    same = {"a": WHOLE, "format": WHOLE, "z": WHOLE}
    assert find_shared(same, ["format"]) == (
        [Shared("a", "format", True), Shared("z", "format", True)],
        [],
    )
    row = {"a": WHOLE, "format": tensor("a", 5, (5,), (1,))}
    assert find_shared(row, ["format"]) == ([Shared("format", "a", False)], [])


def test_a_slice_or_transpose_of_it_is_another_view() -> None:
    tensors = {"w": WHOLE, "row": tensor("a", 5, (5,), (1,)), "t": tensor("a", 0, (5, 4), (1, 5))}
    assert find_shared(tensors) == ([Shared("row", "t", False), Shared("w", "t", False)], [])


def test_disjoint_slices_are_not_shared() -> None:
    assert find_shared({"a": tensor("a", 0, (10,), (1,)), "b": tensor("a", 10, (10,), (1,))}) == (
        [],
        [],
    )
    assert find_shared({"a": WHOLE, "b": tensor("b", 0, (4, 5), (5, 1))}) == ([], [])
    assert find_shared({"a": WHOLE, "b": tensor("a", 3, (0,), (1,))}) == ([], [])


def test_overlaps_of_which_none_covers_the_other_are_unclear() -> None:
    tensors = {"a": tensor("a", 0, (10,), (1,)), "b": tensor("a", 5, (10,), (1,))}
    assert find_shared(tensors) == ([], [["a", "b"]])


def test_tied_views_in_the_middle_of_a_big_storage_cover_what_they_share() -> None:
    """The library would refuse: nothing covers the whole storage. Nothing else of it is written."""
    tied = tensor("a", 40, (2, 5), (5, 1))
    assert find_shared({"x": tied, "y": tied, "else": tensor("a", 0, (30,), (1,))}) == (
        [Shared("y", "x", True)],
        [],
    )
