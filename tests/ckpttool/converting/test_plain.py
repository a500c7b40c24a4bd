"""The walk to the plain form: sharing, cycles, depth, keys, and pickles that make no sense."""

from __future__ import annotations

import datetime
import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest

from ckpttool.converting.plain import Plainer
from ckpttool.converting.storages import NewStorages
from ckpttool.converting.terms import LEFT_OUT
from ckpttool.errors import CkptToolError
from ckpttool.formats.static_pickle import read_pickle
from ckpttool.formats.values import GlobalRef, Opaque, OrderedMap, StorageRef, TensorValue
from ckpttool.writing.pickled import pickled

CORPUS = Path(__file__).parents[3] / "fixtures" / "corpus"


def plainer() -> Plainer:
    return Plainer(NewStorages())


def call(path: str, *args: Any, state: Any = None, opcode: str = "REDUCE") -> Opaque:
    module, _, name = path.rpartition(".")
    made = Opaque(GlobalRef(module, name), args, opcode=opcode)
    made.state = state
    return made


def test_one_object_stays_one_object() -> None:
    tensor = TensorValue(StorageRef("float32", "0", "cpu", 4), 0, (4,), (1,), False, "float32")
    config = call("argparse.Namespace", state={"t": tensor}, opcode="NEWOBJ")
    found = plainer().plain({"a": config, "b": [config, tensor]})
    assert found["a"] is found["b"][0]
    assert found["a"]["t"] is found["b"][1] is tensor


def test_what_is_refused_is_named_in_each_of_its_places() -> None:
    bad = call("mine.make", 1)
    walk = plainer()
    assert walk.plain([bad, {"x": bad}, (bad,)]) == [None, {}, (None,)]
    assert [one.path for one in walk.refused] == ["0", "1.x", "2.0"]


def test_a_tuple_that_holds_itself_is_refused_where_it_does() -> None:
    inner: list[Any] = []
    outer = (1, inner)
    inner.append(outer)
    walk = plainer()
    assert walk.plain(outer) == (1, [None])
    assert [(one.path, one.why) for one in walk.refused] == [("1.0", "it contains itself")]


def test_depth_is_no_matter_of_recursion() -> None:
    deep: Any = 1
    for level in range(50_000):
        deep = (
            [deep] if level % 2 else call("argparse.Namespace", state={"x": deep}, opcode="NEWOBJ")
        )
    found = plainer().plain(deep)
    for _ in range(50_000):
        found = found[0] if isinstance(found, list) else found["x"]
    assert found == 1


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ([frozenset({2, 1}), (frozenset({"a"}), 1)], [(1, 2), (("a",), 1)]),
        ([call("mine.Color", "red"), b"x", None, 1.5], ["red", b"x", None, 1.5]),
        ([call("pathlib.PosixPath", "/", "a")], ["/a"]),
    ],
)
def test_keys_stay_keys(keys: list[Any], wanted: list[Any]) -> None:
    walk = plainer()
    assert list(walk.plain(dict.fromkeys(keys, 0))) == wanted
    assert walk.refused == []


def test_two_keys_that_become_one_are_refused() -> None:
    walk = plainer()
    assert walk.plain({"x": {"red": 0, call("mine.Color", "red"): 1}}) == {}
    assert [one.why for one in walk.refused] == ["two of its keys become 'red'"]


def test_a_key_without_a_plain_form_goes_with_its_value() -> None:
    walk = plainer()
    assert walk.plain({call("mine.make", 1): 2, "b": 3}) == {"b": 3}
    assert [one.path for one in walk.refused] == ["(key)"]
    assert walk.plain({(call("argparse.Namespace", state={}, opcode="NEWOBJ"), 1): 2}) is LEFT_OUT


def test_integers_that_weights_only_does_not_take() -> None:
    walk = plainer()
    for number in (1 << 2039, -(1 << 2039) - 1):
        assert walk.plain({"n": number}) == {}
    for number in ((1 << 2039) - 1, -(1 << 2039)):
        assert walk.plain({"n": number}) == {"n": number}


def test_attributes_of_an_ordered_dictionary_are_made_plain() -> None:
    ordered = OrderedMap({"w": 1})
    ordered.attributes = {"_metadata": {"version": call("mine.Level", 2)}}
    found = plainer().plain(ordered)
    assert type(found) is OrderedMap
    assert found.attributes == {"_metadata": {"version": 2}}


OBJECTS = [
    (call("mine.Config", state={"a": 1}, opcode="NEWOBJ"), {"a": 1}),
    (call("mine.Slots", state=(None, {"a": 1}), opcode="NEWOBJ"), {"a": 1}),
    (call("mine.Both", state=({"a": 1}, {"b": 2}), opcode="NEWOBJ"), {"a": 1, "b": 2}),
    (call("mine.Empty", opcode="NEWOBJ"), {}),
    (call("mine.Name", "x", opcode="NEWOBJ"), "x"),
    (call("mine.Point", 1, 2, opcode="NEWOBJ"), (1, 2)),
    (call("copyreg._reconstructor", GlobalRef("mine", "Old"), GlobalRef("__builtin__", "object"), None, state={"a": 1}), {"a": 1}),
    (call("copy_reg._reconstructor", GlobalRef("mine", "Int"), GlobalRef("__builtin__", "int"), 5), 5),
    (call("UserDict.IterableUserDict", state={"data": {"a": 1}}, opcode="NEWOBJ"), {"a": 1}),
    (call("collections.UserString", "x", state={"data": "x"}, opcode="NEWOBJ"), "x"),
    (call("collections.deque", (1, 2), 5), [1, 2]),
    (call("types.SimpleNamespace", {"a": 1}), {"a": 1}),
    (call("pathlib._local.PurePosixPath", "a", "b"), "a/b"),
    (call("pathlib.PureWindowsPath", "C:\\", "a"), "C:\\a"),
    (call("fractions.Fraction", "1/3"), "1/3"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "wanted"), OBJECTS)
def test_objects_become_what_they_are_made_of(value: Opaque, wanted: Any) -> None:
    walk = plainer()
    assert walk.plain(value) == wanted
    assert walk.refused == []
    assert len(walk.changes) == 1


def test_subclasses_of_list_and_dict() -> None:
    listing = call("mine.List", opcode="NEWOBJ")
    listing.items = [1, call("mine.Level", 2)]
    mapping = call("mine.Dict", state={"a": 1, "note": "x"}, opcode="NEWOBJ")
    mapping.pairs = [("a", mapping.state["a"]), ("b", 2)]
    easy = call("easydict.EasyDict", state={"a": 1}, opcode="NEWOBJ")
    easy.pairs = [("a", 1)]
    found = plainer().plain({"l": listing, "m": mapping, "e": easy})
    assert found == {
        "l": [1, 2],
        "m": {"items": {"a": 1, "b": 2}, "attributes": {"note": "x"}},
        "e": {"a": 1},
    }


def test_the_second_time_that_a_clock_shows_an_hour() -> None:
    """`fold` is in pickles from protocol 4 on, and in no ISO 8601 text."""
    first = datetime.datetime(2020, 10, 25, 2, 30)
    packed = [first.replace(fold=fold).__reduce_ex__(4)[1][0] for fold in (0, 1)]
    time = datetime.time(2, 30, fold=1).__reduce_ex__(4)[1][0]
    days = {"first": call("datetime.datetime", packed[0])}
    days |= {"again": call("datetime.datetime", packed[1]), "time": call("datetime.time", time)}
    assert plainer().plain(days) == {
        "first": "2020-10-25T02:30:00",
        "again": {"isoformat": "2020-10-25T02:30:00", "fold": 1},
        "time": {"isoformat": "02:30:00", "fold": 1},
    }


WITHOUT = [
    call("mine.make", 1),
    call("mine.make"),
    call("mine.Odd", state=("a", "b", "c"), opcode="NEWOBJ"),
    call("mine.Both", "x", state={"a": 1}, opcode="NEWOBJ"),
    Opaque(call("mine.Factory"), (1,), opcode="REDUCE"),
    Opaque("out-of-band buffer", opcode="BUFFER"),
    call("os.system", "x"),
    call("builtins.getattr", GlobalRef("mine", "Color"), "RED"),
    GlobalRef("os", "system"),
    call("datetime.datetime", b"short"),
    call("datetime.datetime", 5),
    call("datetime.date", b"\x07\xe8\x0d\x01"),
    call("datetime.timezone", 5),
    call("uuid.UUID", state={"int": 1 << 200}, opcode="NEWOBJ"),
    call("uuid.UUID", state=5, opcode="NEWOBJ"),
    call("decimal.Decimal", 5),
    call("pathlib.PosixPath", 5),
    call("builtins.slice", 1),
    call("torch.device", "cpu", state={"a": 1}),
    call("torch._utils._rebuild_tensor_v2", 1),
    call("numpy.random._pickle.__generator_ctor", "PCG64"),
    call("numpy._core.numeric._frombuffer", "text", 1, 2, 3),
    call("numpy.ma.core._mareconstruct", 1),
    call("omegaconf.dictconfig.DictConfig", state={}, opcode="NEWOBJ"),
    TensorValue(None, 0, (2,), (1,), False, "float32", "wrapper", extra={"subclass": "mine.T"}),
    object(),
]


@pytest.mark.parametrize("value", WITHOUT, ids=range(len(WITHOUT)))
def test_what_has_no_plain_form(value: Any) -> None:
    walk = plainer()
    assert walk.plain([value]) == [None]
    assert len(walk.refused) == 1


def test_no_pickle_makes_it_fail() -> None:
    """Real pickles with a few bytes changed: many still parse, into content that makes no sense."""
    chance = random.Random(7)
    sources = []
    for name in (
        "numpy_objects",
        "py_objects",
        "whole_module_sequential",
        "tensor_subclass",
        "sparse",
    ):
        with zipfile.ZipFile(CORPUS / "torch-2.13.0" / f"{name}.pt") as archive:
            sources.append(archive.read(f"{name}/data.pkl"))
    parsed = 0
    for _ in range(3000):
        data = bytearray(chance.choice(sources))
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        result = read_pickle(bytes(data))
        if result.error is not None:
            continue
        parsed += 1
        try:
            found = plainer().plain(result.value)
            if found is not LEFT_OUT:
                again = read_pickle(pickled(found))
                assert again.error is None
                assert not again.refused_opcodes
        except CkptToolError:
            pass
    assert parsed > 100


def test_pickles_of_python_itself_come_back_equal() -> None:
    content = {"a": [1, (2.5, None)], "b": {True: b"x"}, "c": {1, 2}, "d": "é"}
    for protocol in range(6):
        found = plainer().plain(read_pickle(pickle.dumps(content, protocol)).value)
        assert found == content
        assert pickle.loads(pickled(found)) == content
