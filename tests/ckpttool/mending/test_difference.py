from __future__ import annotations

import io
import pickle
import tracemalloc
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.formats.static_pickle import read_pickle
from ckpttool.mending.difference import Difference, first_difference
from tests import corrupt


def read(value: object, protocol: int = 2) -> Any:
    return read_pickle(pickle.dumps(value, protocol)).value


def of_torch(value: object) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return read_pickle(dict(corrupt.read_records(buffer.getvalue()))["archive/data.pkl"]).value


def with_metadata(version: int) -> OrderedDict[str, Any]:
    state: OrderedDict[str, Any] = OrderedDict(w=1)
    state._metadata = {"": {"version": version}}  # type: ignore[attr-defined]
    return state


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"a": [1, 2.0]}, {"a": [1, 2.5]}, ("a.1", "2.0", "2.5")),
        ({"a": 1}, {"b": 1}, ("", "key 'a'", "key 'b'")),
        ([1, 2], [1], ("", "2 items", "1 items")),
        ({"a": {3: (1, "x")}}, {"a": {3: (1, "y")}}, ("a.3.1", "'x'", "'y'")),
        (1, True, ("", "1", "True")),
        ([1, []], [1, {}], ("1", "a list", "a dict")),
        (0.0, -0.0, ("", "0.0", "-0.0")),
        (b"a" * 100, b"a" * 99 + b"b", ("", "b'" + "a" * 57 + "…", "b'" + "a" * 57 + "…")),
        ({"s": {1, 2}}, {"s": {1, 3}}, ("s.1", "2", "3")),
        (np.float64(1.5), np.float64(2.5), ("data", None, None)),
        (with_metadata(1), with_metadata(2), ("(attributes)._metadata..version", "1", "2")),
    ],
)
def test_where_two_trees_differ_first(one: Any, other: Any, expected: Any) -> None:
    found = first_difference(read(one), read(other))
    assert found is not None
    assert found.path == expected[0]
    if expected[1] is not None:
        assert found == expected


def test_tensors_differ_in_what_the_file_says_of_them() -> None:
    one, other = of_torch({"w": torch.zeros(2, 3)}), of_torch({"w": torch.zeros(3, 2)})
    assert first_difference(one, other) == ("w.shape.0", "2", "3")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
        max_leaves=20,
    )
)
def test_equal_trees_have_no_difference(value: Any) -> None:
    assert first_difference(read(value), read(value)) is None


def test_neither_depth_nor_sharing_nor_cycles_hurt() -> None:
    deep: Any = 1
    for _ in range(50_000):
        deep = [deep]
    doubled: Any = [1]
    for _ in range(64):
        doubled = [doubled, doubled]
    cycle: list[Any] = []
    cycle.append(cycle)
    nested: Any = ()
    for _ in range(5000):
        nested = frozenset((nested,))
    for value in (deep, doubled, cycle, {nested}):
        assert first_difference(value, value) is None


def test_memory_follows_the_depth_and_not_its_square() -> None:
    """The path of the deepest place has 40,000 characters; those of all levels 400 million."""
    first: Any = 1
    second: Any = 2
    for _ in range(20_000):
        first, second = [first], [second]
    tracemalloc.start()
    found = first_difference(first, second)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == Difference(".".join(["0"] * 20_000), "1", "2")
    assert peak < 40 << 20
