"""The pickle writer against Python's own pickle: what it writes loads as what went in."""

from __future__ import annotations

import collections
import pickle
import pickletools
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.errors import UnwritableError
from ckpttool.formats.static_pickle import read_pickle
from ckpttool.formats.values import GlobalRef, Opaque
from ckpttool.writing.pickled import pickled
from tests.ckpttool.formats.streams import canonical

# ---- Plain data.

EDGES = [0, 255, 256, 65535, 65536, -1, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**70]


def trees(least: int) -> st.SearchStrategy[Any]:
    """Plain data of every kind; no text and no bytes shorter than `least`."""
    words = st.text(min_size=least) | st.binary(min_size=least)
    small = st.none() | st.booleans() | st.integers() | st.sampled_from(EDGES)
    keys = st.recursive(
        small | words,
        lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
        max_leaves=5,
    )
    more = st.floats() | st.complex_numbers() | st.binary(min_size=least).map(bytearray)
    return st.recursive(
        small | words | more,
        lambda inner: (
            st.lists(inner, max_size=5)
            | st.lists(inner, max_size=5).map(tuple)
            | st.dictionaries(keys, inner, max_size=5)
            | st.sets(keys, max_size=4)
            | st.frozensets(keys, max_size=4)
            | st.tuples(inner, inner).map(lambda pair: [pair[0], pair[0], [pair[1], pair]])
        ),
        max_leaves=30,
    )


@given(trees(0))
def test_plain_data(tree: Any) -> None:
    stream = pickled(tree)
    assert canonical(pickle.loads(stream)) == canonical(tree)
    assert canonical(read_pickle(stream).value) == canonical(tree)


@given(trees(2))
def test_it_spells_as_python_does(tree: Any) -> None:
    """Byte for byte. Texts of one letter are left out: Python has each of them only once."""
    assert pickled(copied(tree)) == pickle.dumps(copied(tree), 2)


def copied(tree: Any) -> Any:
    """The same with no texts in common: which of them Python shares is its own business."""
    return read_pickle(pickle.dumps(tree, 2)).value


@pytest.mark.parametrize("kind", [list, dict, set, collections.OrderedDict])
@pytest.mark.parametrize("size", [0, 1, 2, 999, 1000, 1001, 1999, 2000, 2001, 3000])
def test_batches_are_those_of_python(kind: Any, size: int) -> None:
    items = [(i * 300, i) for i in range(size)] if kind not in (list, set) else range(size)
    expected = pickle.dumps(kind(items), 2)
    assert pickled(copied(kind(items))) == expected


def test_only_opcodes_of_protocol_2() -> None:
    stream = pickled({"a": [b"x", {1}, (1, 2, 3, 4), 2**100, 1j, bytearray(b"y")]})
    assert max(opcode.proto for opcode, _, _ in pickletools.genops(stream)) == 2
    assert stream[:2] == b"\x80\x02"


# ---- Sharing, cycles, depth.


def test_what_is_one_object_stays_one() -> None:
    shared, text = [1], "".join(["te", "xt"])
    tree = {"a": shared, "b": [shared, (shared, text)], "c": text}
    result = pickle.loads(pickled(tree))
    assert result["a"] is result["b"][0] is result["b"][1][0]
    assert result["c"] is result["b"][1][1]
    result["a"].append(2)
    assert result["b"][0] == [1, 2]


def test_equal_objects_stay_two() -> None:
    result = pickle.loads(pickled([[1], [1], {}, {}]))
    assert result[0] is not result[1]
    assert result[2] is not result[3]


def test_cycles() -> None:
    ring: list[Any] = []
    ring.append(ring)
    assert (result := pickle.loads(pickled(ring)))[0] is result
    loop: dict[str, Any] = {}
    loop["self"] = (loop, [loop])
    result = pickle.loads(pickled(loop))
    assert result["self"][0] is result["self"][1][0] is result


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_a_tuple_that_holds_itself_by_way_of_lists(size: int) -> None:
    lists: list[list[Any]] = [[] for _ in range(size)]
    knot = tuple(lists)
    for one in lists:
        one.append(knot)
    result = pickle.loads(pickled(knot))
    assert len(result) == size
    assert all(one[0] is result for one in result)
    assert pickled(knot) == pickle.dumps(knot, 2)


def test_a_frozen_set_that_holds_itself_by_way_of_an_object() -> None:
    thing = Opaque(GlobalRef(__name__, "Unknown"), (), opcode="NEWOBJ")
    knot = frozenset((thing,))
    thing.state = {"home": knot}
    result = pickle.loads(pickled(knot))
    assert next(iter(result)).home is result


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: (x,), lambda x: {"a": x}])
def test_nesting_does_not_exhaust_the_stack(wrap: Callable[[Any], Any]) -> None:
    tree: Any = None
    for _ in range(200_000):
        tree = wrap(tree)
    stream = pickled(tree)
    assert len(stream) > 200_000
    assert read_pickle(stream).error is None
    while tree is not None:  # take it apart slowly: Python's own freeing is not as careful
        tree = tree["a"] if isinstance(tree, dict) else tree[0]


def test_a_knot_of_tuples_costs_no_more_than_is_allowed() -> None:
    """Each list in the tuple holds the tuple: Python's pickle would write it 5,000 times."""
    lists: list[list[Any]] = [[] for _ in range(5_000)]
    knot = tuple(lists)
    for one in lists:
        one.append(knot)
    start = time.monotonic()
    with pytest.raises(UnwritableError, match="holds itself"):
        pickled({"model": knot})
    assert time.monotonic() - start < 60


def test_a_call_with_itself_among_its_arguments() -> None:
    inner: list[Any] = []
    call = Opaque(GlobalRef("m", "f"), (inner,), opcode="REDUCE")
    inner.append(call)  # by way of a list there is an end to it
    assert canonical(read_pickle(pickled(call)).value) == canonical(call)
    endless = Opaque(GlobalRef("m", "f"), (), opcode="REDUCE")
    endless.args = (endless,)
    with pytest.raises(UnwritableError, match="holds itself") as caught:
        pickled([endless])
    assert len(caught.value.path) < 1000


def test_doubling_structures_are_written_once() -> None:
    tree: Any = []
    for _ in range(60):
        tree = [tree, tree]
    assert len(pickled(tree)) < 2000
    fixed: Any = ()
    for _ in range(60):
        fixed = (fixed, fixed, 1)
    assert len(pickled(fixed)) < 2000


# ---- What has no form.


class Unknown:
    pass


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        (Unknown(), ""),
        ({"model": {"layer.0": [1, Unknown()]}}, "model.layer.0.1"),
        ({"a": (1, {2: Unknown()})}, "a.1.2"),
        ({(1, 2): Unknown()}, "(tuple)"),
        ({Unknown(): 1}, "(key Unknown)"),
        ([{1, Unknown()}], "0.args.0"),
        (Opaque("out-of-band buffer", opcode="BUFFER"), ""),
        ([GlobalRef("a\nb", "c")], "0"),
        ([collections.OrderedDict(a=1)], "0"),
        (Opaque(GlobalRef("m", "f"), (Unknown(),), opcode="REDUCE"), "args.0"),
    ],
)
def test_the_path_to_what_has_no_form(tree: Any, path: str) -> None:
    with pytest.raises(UnwritableError) as caught:
        pickled(tree)
    place = caught.value.path
    assert place == path or (path.startswith("0.args") and place.startswith("0.args"))
    assert caught.value.reason
    assert isinstance(caught.value, ValueError)
