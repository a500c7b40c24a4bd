"""Names of tensors: the walk over inert content, and how it ends whatever the content is."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from ckpttool.formats.limits import DEFAULT_LIMITS
from ckpttool.formats.values import (
    GlobalRef,
    NumpyArray,
    Opaque,
    OrderedMap,
    StorageRef,
    TensorValue,
)
from ckpttool.model.walk import Walk, find_tensors, key_text
from tests.timing import processor_seconds_below


def tensor(key: str = "0", **extra: Any) -> TensorValue:
    storage = StorageRef("float32", key, "cpu", 6)
    return TensorValue(storage, 0, (6,), (1,), False, "float32", extra=extra or None)


T = tensor()


def names(tree: Any, walk: Walk | None = None) -> list[str]:
    return [name for name, _ in find_tensors(tree, "", walk)]


def test_names_are_paths() -> None:
    tree = {
        "model": {"layers.0.weight": T, "layers": [T, (T, {"x": T})]},
        7: T,
        "none": [None, 1, "text", b"", 1.5, GlobalRef("a", "b")],
        (1, 2): {None: T, True: T, 1.5: T},
        "set": {T},
    }
    assert names(tree) == [
        *("model.layers.0.weight", "model.layers.0", "model.layers.1.0", "model.layers.1.1.x"),
        *("7", "(tuple).None", "(tuple).True", "(tuple).1.5", "set.(0)"),
    ]


def test_a_bare_tensor_has_no_name() -> None:
    assert names(T) == [""]
    assert names([[T]]) == ["0.0"]


def test_attributes_of_an_ordered_dict_come_behind_its_items() -> None:
    mapping = OrderedMap({"w": T})
    mapping.attributes = {"_buffer": T}
    assert names({"m": mapping}) == ["m.w", "m._buffer"]


def test_objects_go_by_their_attributes() -> None:
    net = Opaque(GlobalRef("m", "Net"), (T,), opcode="NEWOBJ", kwargs={"bias": T})
    net.state = {"weight": T}
    net.items, net.pairs = [T], [("k", T)]
    assert names({"net": net}) == ["net.args.0", "net.bias", "net.weight", "net.0", "net.k"]


def test_slots_are_attributes_and_other_states_are_not() -> None:
    with_slots = Opaque(GlobalRef("m", "S"), opcode="NEWOBJ")
    with_slots.state = (None, {"x": T})
    both = Opaque(GlobalRef("m", "S"), opcode="NEWOBJ")
    both.state = ({"a": T}, {"x": T})
    other = Opaque(GlobalRef("m", "S"), opcode="NEWOBJ")
    other.state = (T, [T])
    assert names([with_slots, both, other]) == ["0.x", "1.a", "1.x", "2.state.0", "2.state.1.0"]


def test_tensors_in_the_attributes_of_tensors() -> None:
    outer = tensor("1", subclass="m.W", state={"inner": T, "note": 1})
    assert names({"w": outer, "v": tensor(state=({"x": T}, {"y": T}))}) == [
        *("w", "w.inner", "v", "v.x", "v.y"),
    ]


def test_arrays_of_objects() -> None:
    array = NumpyArray()
    array.data = [None, T]
    assert names({"a": array}) == ["a.1"]


def test_what_is_shared() -> None:
    """A tensor has all its names; a container is entered once."""
    shared = {"w": T}
    assert names({"a": shared, "b": shared, "c": T}) == ["a.w", "c"]


def test_cycles_end() -> None:
    cycle: list[Any] = [T]
    cycle.append(cycle)
    mapping: dict[str, Any] = {"w": T}
    mapping["self"] = mapping
    thing = Opaque(GlobalRef("m", "C"), opcode="NEWOBJ")
    thing.state = {"me": thing, "w": T}
    assert names([cycle, mapping, thing]) == ["0.0", "1.w", "2.w"]


def test_doubling_is_walked_once() -> None:
    tree: Any = [T]
    for _ in range(200):
        tree = (tree, tree)
    assert len(names(tree)) == 1


def test_storages_that_stand_by_themselves() -> None:
    walk, bare = Walk(), StorageRef("uint8", "9", "cpu", 4)
    assert names({"a": bare, "t": T}, walk) == ["t"]
    assert walk.storages == [bare]


def nested(depth: int) -> Any:
    tree: Any = T
    for _ in range(depth):
        tree = [tree]
    return tree


def test_depth_is_bounded() -> None:
    walk = Walk(DEFAULT_LIMITS._replace(depth=10))
    assert len(names([nested(9), nested(10), T], walk)) == 2
    assert walk.stopped == "its content is nested more than 10 deep"
    walk = Walk(DEFAULT_LIMITS._replace(depth=10))
    assert len(names([nested(9), T], walk)) == 2
    assert walk.stopped is None


def test_a_hundred_thousand_levels_cost_little() -> None:
    tree = nested(100_000)
    tracemalloc.start()
    walk = Walk()
    assert names(tree, walk) == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert walk.stopped
    assert peak < 5 << 20


def test_long_keys_above_many_tensors_do_not_fill_the_memory() -> None:
    key = "k" * 1_000_000
    tree = {key: {key: [T] * 10_000}}
    walk = Walk(DEFAULT_LIMITS._replace(pickle_bytes=20_000_000))
    with processor_seconds_below(10):
        found = names(tree, walk)
        assert 5 < len(found) < 20
        assert walk.stopped == "the names of its tensors are too long"


def test_names_of_one_walk_count_together() -> None:
    walk = Walk(DEFAULT_LIMITS._replace(pickle_bytes=50))
    tree = [{"a" * 10: T}, {"b" * 100: T}]
    first = list(find_tensors(tree[0], "first", walk))
    second = list(find_tensors(tree[1], "second", walk))
    assert (len(first), len(second)) == (1, 0)
    assert walk.stopped is not None


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (0, "0"),
        (-3, "-3"),
        (True, "True"),
        (None, "None"),
        (2.5, "2.5"),
        ((1, 2), "(tuple)"),
        (b"x", "(bytes)"),
        (1 << 300, "(int of 301 bits)"),
        (-(1 << 20_000), "(int of 20001 bits)"),
        (GlobalRef("a", "b"), "(GlobalRef)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_keys_as_text(key: Any, text: str) -> None:
    assert key_text(key) == text
