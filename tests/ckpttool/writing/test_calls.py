"""Objects and tensors as calls: they load as what they were, and what has no call is named."""

from __future__ import annotations

import argparse
import collections
import copy
import datetime
import decimal
import enum
import fractions
import io
import math
import pathlib
import pickle
import pickletools
import random
import uuid
from typing import Any

import numpy as np
import pytest

from ckpttool.errors import UnwritableError
from ckpttool.formats.rebuild import TorchSize
from ckpttool.formats.static_pickle import read_pickle
from ckpttool.formats.values import GlobalRef, Opaque, OrderedMap, StorageRef, TensorValue
from ckpttool.writing.pickled import pickled
from tests.ckpttool.formats.streams import canonical


class Colour(enum.Enum):
    RED = "red"


class Slots:
    __slots__ = ("x", "y")

    def __init__(self, x: Any) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slots) and self.x == other.x

    __hash__ = None  # type: ignore[assignment]


class WithKeywords(str):
    """Made with keywords: NEWOBJ_EX."""

    tag: str

    def __new__(cls, *, text: str) -> WithKeywords:
        return super().__new__(cls, text)

    def __getnewargs_ex__(self) -> Any:
        return (), {"text": str(self)}


class Shelf(list[Any]):
    """A list with attributes."""


class Outer:
    class Inner:
        """A name with a dot."""

        def __eq__(self, other: object) -> bool:
            return type(other) is Outer.Inner and vars(self) == vars(other)

        __hash__ = None  # type: ignore[assignment]


Point = collections.namedtuple("Point", "x y")


def shelf() -> Shelf:
    result = Shelf([1, [2]])
    result.label = "top"  # type: ignore[attr-defined]
    return result


def inner() -> Outer.Inner:
    result = Outer.Inner()
    result.x = 1  # type: ignore[attr-defined]
    return result


OBJECTS: dict[str, Any] = {
    "namespace": argparse.Namespace(lr=0.1, names=["a"]),
    "date": datetime.datetime(2026, 11, 29, 12, tzinfo=datetime.timezone.utc),
    "delta": datetime.timedelta(1, 2, 3),
    "decimal": decimal.Decimal("1.50"),
    "fraction": fractions.Fraction(1, 3),
    "path": pathlib.PurePosixPath("a/b"),
    "uuid": uuid.UUID(int=5),
    "enum": Colour.RED,
    "named tuple": Point(1, [2]),
    "slots": Slots([1, 2]),
    "keywords": WithKeywords(text="hello"),
    "list with attributes": shelf(),
    "nested class": inner(),
    "default dict": collections.defaultdict(list, {"a": [1]}),
    "counter": collections.Counter("abca"),
    "deque": collections.deque([1, 2, 3], 5),
    "ordered": collections.OrderedDict([("b", 1), ("a", [2])]),
    "range": range(1, 10, 2),
    "slice": slice(1, None, 2),
    "ellipsis": ...,
    "a class": int,
    "an error": ValueError("no", 1),
    "function": math.sqrt,
    "random": random.Random(1).getstate(),
    "array": np.arange(6, dtype=">f8").reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "structured": np.array([(1, [2.5, 3])], dtype=[("a", "i4"), ("b", "f8", 2)]),
    "texts": np.array(["ab", "c"]),
    "times": np.array(["2024-05-17"], "M8[D]"),
    "objects": np.array([None, {"a": 1}], dtype=object),
    "record array": np.rec.array([(1, 2.0)], dtype=[("x", "i4"), ("y", "f4")]),
    "masked": np.ma.array([1.0, 2.0], mask=[True, False]),
    "scalar": np.float32(2.5),
    "scalar of text": np.str_("x"),
    "number of time": np.datetime64("2024-05-17"),
    "numpy type": np.dtype("<i4"),
    "generator": np.random.default_rng(3).bit_generator.state,
}


def shown(value: Any) -> Any:
    """What Python's own pickle writes for it: the same for the same."""
    return pickle.dumps(value, 4)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", OBJECTS)
def test_objects_of_every_protocol(name: str, protocol: int) -> None:
    value = OBJECTS[name]
    try:
        source = pickle.dumps(value, protocol)
    except (TypeError, ValueError, AttributeError, pickle.PicklingError):
        pytest.skip("Python cannot write this in that protocol")
    if b"_reconstructor" in source and protocol < 2 and isinstance(value, WithKeywords):
        pytest.skip("protocol 0 and 1 forget the keywords")
    result = read_pickle(source)
    assert result.error is None
    again = pickled(result.value)
    assert shown(pickle.loads(again)) == shown(pickle.loads(source))
    assert canonical(read_pickle(again).value) == canonical(result.value)


def test_names_with_dots_need_protocol_4() -> None:
    value = read_pickle(pickle.dumps(inner(), 4)).value
    assert pickled(value)[:2] == b"\x80\x04"
    assert pickled([1])[:2] == b"\x80\x02"


def test_instances_of_protocol_0() -> None:
    source = b"(I1\nI2\nidatetime\ntimedelta\n."
    again = pickled(read_pickle(source).value)
    assert pickle.loads(again) == datetime.timedelta(1, 2)
    source = b"(cdatetime\ntimedelta\nI1\nI2\no."
    assert pickle.loads(pickled(read_pickle(source).value)) == datetime.timedelta(1, 2)


def test_persistent_ids_of_others() -> None:
    value = read_pickle(b"\x80\x02X\x03\0\0\0abcQ.").value

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            return ("loaded", pid)

    assert Unpickler(io.BytesIO(pickled([value, value]))).load() == [("loaded", "abc")] * 2


def test_extensions_keep_their_numbers() -> None:
    value = read_pickle(b"\x80\x02\x82\x05.").value
    opcode, argument, _ = list(pickletools.genops(pickled(value)))[1]
    assert (opcode.name, argument) == ("EXT4", 5)


def test_attributes_of_an_ordered_map() -> None:
    value = OrderedMap(a=1)
    value.attributes = {"_metadata": OrderedMap({"": {"version": 1}})}
    result = pickle.loads(pickled(value))
    assert result == {"a": 1}
    assert result._metadata == {"": {"version": 1}}
    assert canonical(read_pickle(pickled(value)).value) == canonical(value)


def test_globals_that_are_set_something_on() -> None:
    value = Opaque(GlobalRef("m", "C"), (), opcode="BUILD")
    value.state = {"a": 1}
    assert canonical(read_pickle(pickled(value)).value) == canonical(value)


class Unknown:
    pass


def broken(**facts: Any) -> TensorValue:
    storage = StorageRef("float32", "0", "cpu", 6)
    tensor = TensorValue(storage, 0, (2, 3), (3, 1), False, "float32")
    for name, value in facts.items():
        setattr(tensor, name, value)
    return tensor


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (broken(storage=None), "without a storage"),
        (broken(dtype="float7"), "float7"),
        (broken(storage=StorageRef("float7", "0", "cpu", 6)), "float7"),
        (broken(layout="woven"), "woven"),
        (broken(layout="quantized"), "quantizer"),
        (broken(layout="wrapper", extra={"subclass": "m.C"}), "offset, layout and device"),
        (broken(extra={"layers": True, "state": {}}), "attributes"),
        (broken(extra={"state": {"note": Unknown()}}), "Unknown"),
    ],
)
def test_tensors_without_a_form(tensor: TensorValue, words: str) -> None:
    with pytest.raises(UnwritableError, match=words) as caught:
        pickled({"model": {"weight": tensor}})
    assert caught.value.path.startswith("model.weight")


# ---- Tensors, where torch is not asked (`test_checkpoint.py` asks it).


def test_an_ordinary_tensor_is_read_back_in_one_stride() -> None:
    """As torch spells it, memo included, whatever stands around it."""
    tensors = [broken(storage=StorageRef("float32", str(i), "cuda:0", 6)) for i in range(400)]
    again = read_pickle(pickled(tensors)).value
    assert canonical(again) == canonical(tensors)
    assert pickled(again) == pickled(tensors)


def test_a_storage_that_is_a_view_of_another() -> None:
    """Tensors lie in the other one; alone it is a storage of its own."""
    view = StorageRef("float32", "7", "cpu", 10, ("8", 2, 3))
    result = read_pickle(pickled([broken(storage=view, offset=2), view, copy.copy(view)])).value
    tensor, alone, twin = result
    assert (tensor.storage.key, tensor.storage.numel, tensor.offset) == ("7", 10, 2)
    assert (alone.key, alone.numel, alone.view) == ("8", 3, None)
    assert (twin.key, twin.numel) == ("8", 3)


def test_a_torch_size() -> None:
    result = read_pickle(pickled([TorchSize((2, 3)), TorchSize()])).value
    assert result == [(2, 3), ()]
    assert [type(size) for size in result] == [TorchSize, TorchSize]
