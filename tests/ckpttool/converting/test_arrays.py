"""numpy's arrays in plain form: against numpy itself, and hostile descriptions of arrays."""

from __future__ import annotations

import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ckpttool.converting.plain import Plainer
from ckpttool.converting.storages import NewStorages
from ckpttool.converting.terms import LEFT_OUT
from ckpttool.formats.static_pickle import read_pickle
from ckpttool.formats.values import NumpyArray, NumpyDtype, NumpyScalar, TensorValue

NUMBERS = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]


def plain(value: Any, *, protocol: int = 2, byteorder: str = "little") -> tuple[Any, Plainer]:
    """The plain form of a Python object, by way of its pickle."""
    plainer = Plainer(NewStorages((), byteorder))
    return plainer.plain(read_pickle(pickle.dumps(value, protocol)).value), plainer


def back(tensor: TensorValue, plainer: Plainer) -> np.ndarray[Any, Any]:
    """The array that a tensor holds, worked out from its bytes alone."""
    assert tensor.storage is not None and tensor.shape is not None and tensor.stride is not None
    name = tensor.dtype
    dtype = np.dtype(getattr(ml_dtypes, name) if name.startswith(("bfloat", "float8")) else name)
    order = ">" if plainer.storages.byteorder == "big" else "<"
    raw = np.frombuffer(plainer.storages.added[tensor.storage.key], f"V{dtype.itemsize}")
    steps = tuple(step * dtype.itemsize for step in tensor.stride)
    array = np.lib.stride_tricks.as_strided(raw[tensor.offset :], tensor.shape, steps)
    return array.view(dtype if dtype.itemsize == 1 else dtype.newbyteorder(order))


@given(
    st.sampled_from(NUMBERS).flatmap(
        lambda code: hnp.arrays(code, hnp.array_shapes(min_dims=1, max_dims=3, min_side=0))
    ),
    st.sampled_from(["C", "F", "sliced", "swapped"]),
    st.sampled_from([2, 4, 5]),
    st.sampled_from(["little", "big"]),
)
def test_arrays_of_numbers_keep_every_bit(
    array: np.ndarray[Any, Any], layout: str, protocol: int, byteorder: str
) -> None:
    if layout == "F":
        array = np.asfortranarray(array)
    elif layout == "sliced":
        array = array[::2]
    elif layout == "swapped":
        array = array.astype(array.dtype.newbyteorder(">"))
    form, plainer = plain(array, protocol=protocol, byteorder=byteorder)
    assert form.dtype == array.dtype.name
    found = back(form, plainer)
    assert found.shape == array.shape
    native = array.dtype.newbyteorder("=")
    assert found.astype(native).tobytes() == array.astype(native).tobytes()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_the_types_of_ml_dtypes(name: str) -> None:
    array = np.array([[1, 2, -0.5]], getattr(ml_dtypes, name))
    form, plainer = plain(array)
    assert form.dtype == name
    assert back(form, plainer).tobytes() == array.tobytes()
    number, _ = plain(array[0, 2])
    assert (type(number), number) == (float, -0.5)


@pytest.mark.parametrize("code", NUMBERS)
def test_scalars_and_arrays_without_dimensions_are_numbers(code: str) -> None:
    scalar = np.array([3]).astype(code)[0]
    for value in (scalar, np.asarray(scalar), np.asarray(scalar).astype(f">{code}")):
        number, plainer = plain(value)
        assert (type(number), number) == (type(scalar.item()), scalar.item())
        assert not plainer.storages.added


def test_columns_of_structured_arrays() -> None:
    kind = np.dtype(
        [("a", ">i4"), ("b", "f4", (2, 2)), ("c", [("d", "S3"), ("e", "M8[25s]")])], align=True
    )
    array = np.zeros(3, kind)
    array["a"] = [1, 2, 3]
    array["b"][1] = 7
    array["c"]["d"] = [b"x", b"yz", b""]
    form, plainer = plain(array)
    assert list(form) == ["a", "b", "c"]
    assert back(form["a"], plainer).tolist() == [1, 2, 3]
    assert back(form["b"], plainer).tolist() == array["b"].tolist()
    assert form["c"] == {"d": [b"x", b"yz", b""], "e": ["1970-01-01T00:00:00"] * 3}


NONSENSE = {
    "too few bytes": (NumpyDtype("<f4"), (3,), b"1234"),
    "a shape without end": (NumpyDtype("<f4"), (1 << 62, 1 << 62), b""),
    "elements without bytes": (NumpyDtype("|V0"), (1 << 40,), b""),
    "many dimensions": (NumpyDtype("|i1"), (1,) * 200, b"x"),
    "a negative extent": (NumpyDtype("|i1"), (-1,), b""),
    "a truth value as extent": (NumpyDtype("|i1"), (True,), b"x"),
    "no dtype": (None, (1,), b"x"),
    "an unknown dtype": (NumpyDtype("numpy.dtypes.StringDType"), (1,), b"x"),
    "a dtype that is code": (NumpyDtype("i4,(2,)f8,__import__"), (1,), b"x"),
    "objects as bytes": (NumpyDtype("|O8"), (1,), b"12345678"),
    "a long double": (NumpyDtype("<f16"), (1,), bytes(16)),
    "too few objects": (NumpyDtype("|O8"), (3,), [1]),
    "fields that overlap": (
        NumpyDtype("|V4", (3, "|", None, ("a", "b"), {"a": (NumpyDtype("<f4"), 0), "b": (NumpyDtype("<f4"), 0)}, 4, 1, 16)),
        (1,),
        b"1234",
    ),
    "fields outside": (
        NumpyDtype("|V4", (3, "|", None, ("a",), {"a": (NumpyDtype("<f4"), 2)}, 4, 1, 16)),
        (1,),
        b"1234",
    ),
    "fields that are none": (NumpyDtype("|V4", (3, "|", None, ("a",), None, 4, 1, 16)), (1,), b"1234"),
    "a unit that is none": (
        NumpyDtype("<M8", (4, "<", None, None, None, -1, -1, 0, (None, (b"[]", 1, 1, 1)))),
        (1,),
        bytes(8),
    ),
    "text beyond Unicode": (NumpyDtype("<U1"), (1,), b"\xff\xff\xff\xff"),
}  # fmt: skip


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_is_refused_and_never_raised(what: str) -> None:
    array = NumpyArray()
    array.dtype, array.shape, array.data = NONSENSE[what]
    plainer = Plainer(NewStorages())
    assert plainer.plain({"x": array}) == {}
    assert [refusal.path for refusal in plainer.refused] == ["x"]
    assert not plainer.storages.added


def test_a_dtype_that_holds_itself_is_refused() -> None:
    kind = NumpyDtype("|V4")
    kind.state = (3, "|", None, ("a",), {"a": (kind, 0)}, 4, 1, 16)
    plainer = Plainer(NewStorages())
    assert plainer.plain(NumpyScalar(kind, b"1234", None)) is LEFT_OUT
