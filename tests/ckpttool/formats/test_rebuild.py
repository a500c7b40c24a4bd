"""The stand-ins for torch's and numpy's own functions: what they give, and what they refuse."""

from __future__ import annotations

import io
import pickle
import struct
from typing import Any

import numpy as np
import pytest

from ckpttool.formats.rebuild import REBUILDERS, storage_from_persistent_id
from ckpttool.formats.static_pickle import read_pickle
from ckpttool.formats.values import (
    GlobalRef,
    NumpyArray,
    NumpyDtype,
    NumpyScalar,
    Opaque,
    OrderedMap,
    StorageRef,
    TensorValue,
)
from tests.ckpttool.formats.streams import call, integer, name, storage, tensor, text

FLOAT = name("torch.float32")
SIZE = b"K\x02K\x03\x86"
PLAIN = tensor(storage(), 0, (2, 3), (3, 1))
INDICES = tensor(storage("1", 2, "LongStorage"), 0, (1, 2), (2, 1))
HOOKS = b"N"


def read(stream: bytes) -> Any:
    """What a call becomes; the stand-in must have taken it."""
    result = read_pickle(stream + b".")
    assert result.error is None
    assert result.malformed_calls == []
    return result.value


def facts(value: Any) -> tuple[Any, ...]:
    assert isinstance(value, TensorValue)
    return value.layout, value.dtype, value.shape, value.stride, value.offset, value.requires_grad


def utils(function: str, *arguments: bytes) -> bytes:
    return call(f"torch._utils.{function}", *arguments)


# Layouts of the real functions are compared with torch itself in tests/ckpttool/model; here each
# function's arguments, which some writers and versions of torch give in other forms.


def test_the_three_forms_of_a_dense_tensor() -> None:
    old = utils("_rebuild_tensor", storage(), b"K\x01", SIZE, SIZE)
    assert facts(read(old)) == ("strided", "float32", (2, 3), (2, 3), 1, False)
    second = utils("_rebuild_tensor_v2", storage(), b"K\x00", SIZE, SIZE, b"\x88", HOOKS)
    assert facts(read(second)) == ("strided", "float32", (2, 3), (2, 3), 0, True)
    bits = b"}" + text("conj") + b"\x88s"
    third = utils(
        "_rebuild_tensor_v3", storage("0", 24, "UntypedStorage"), b"K\x00", SIZE, SIZE, b"\x89",
        HOOKS, name("torch.float8_e5m2"), bits,
    )  # fmt: skip
    value = read(third)
    assert facts(value)[:3] == ("strided", "float8_e5m2", (2, 3))
    assert value.extra == {"metadata": {"conj": True}}
    assert value.storage.dtype == "uint8"


def test_shapes_may_come_as_torch_sizes_or_lists() -> None:
    for shape in (call("torch.Size", SIZE), b"](K\x02K\x03e"):
        value = read(utils("_rebuild_tensor_v2", storage(), b"K\x00", shape, shape, b"\x89", HOOKS))
        assert value.shape == (2, 3)
        assert type(value.shape) is tuple


def test_views_of_storages_move_the_offset() -> None:
    """Of the legacy stream: a view begins inside its storage, and offsets count from there."""
    view = b"(" + text("9") + b"K\x02K\x04t"
    parts = text("storage") + name("torch.FloatStorage") + text("0") + text("cpu") + b"K\x08"
    value = read(tensor(b"(" + parts + view + b"tQ", 1, (2,), (1,)))
    assert value.offset == 3
    value = read(tensor(b"(" + parts + b"NtQ", 1, (2,), (1,)))
    assert value.offset == 1


def test_quantized() -> None:
    per_tensor = b"(" + name("torch.per_tensor_affine") + b"G" + struct.pack(">d", 0.5) + b"K\x03t"
    value = read(
        utils("_rebuild_qtensor", storage(kind="QUInt8Storage"), b"K\x00", SIZE, SIZE, per_tensor,
              b"\x89", HOOKS)
    )  # fmt: skip
    assert facts(value)[:2] == ("quantized", "quint8")
    quantizer = {"scheme": "per_tensor_affine", "scale": 0.5, "zero_point": 3}
    assert (value.extra, value.parts) == ({"quantizer": quantizer}, {})
    per_channel = b"(" + name("torch.per_channel_affine") + PLAIN + PLAIN + b"K\x00t"
    value = read(
        utils("_rebuild_qtensor", storage(kind="QInt8Storage"), b"K\x00", SIZE, SIZE, per_channel,
              b"\x89", HOOKS)
    )  # fmt: skip
    assert sorted(value.parts) == ["scale", "zero_point"]
    assert value.extra["quantizer"]["axis"] == 0


@pytest.mark.parametrize(
    "layout",
    [
        call("torch.serialization._get_layout", text("torch.sparse_coo")),
        name("torch.sparse_coo"),
    ],
)
def test_sparse(layout: bytes) -> None:
    for more in (b"", b"\x88"):  # torch 2 adds whether it is coalesced
        data = b"(" + INDICES + PLAIN + SIZE + more + b"t"
        value = read(utils("_rebuild_sparse_tensor", layout, data))
        assert facts(value)[:4] == ("sparse_coo", "float32", (2, 3), None)
        assert list(value.parts) == ["indices", "values"]
        assert value.storage is None
        assert value.extra == ({"coalesced": True} if more else None)


def test_parameters_know_that_they_are_some() -> None:
    value = read(utils("_rebuild_parameter", PLAIN, b"\x88", HOOKS))
    assert (value.requires_grad, value.extra) == (True, {"parameter": True})
    state = b"}" + text("note") + b"K\x01s"
    value = read(utils("_rebuild_parameter_with_state", PLAIN, b"\x89", HOOKS, state))
    assert value.extra == {"parameter": True, "state": {"note": 1}}


def test_what_is_shared_through_the_memo_is_not_changed() -> None:
    twice = PLAIN + b"q\x09" + utils("_rebuild_parameter", b"h\x09", b"\x88", HOOKS)
    plain, parameter = read(b"](" + twice + b"e")
    assert plain.extra is None
    assert not plain.requires_grad
    assert parameter.requires_grad


def test_subclasses_are_named_and_not_imported() -> None:
    rebuilder, arguments = (
        name("torch._utils._rebuild_tensor_v2"),
        (b"(" + storage() + b"K\x00" + SIZE + SIZE + b"\x89Nt"),
    )
    for path in ("torch._tensor._rebuild_from_type_v2", "torch.tensor._rebuild_from_type"):
        value = read(call(path, rebuilder, name("my.Sub"), arguments, b"}"))
        assert (value.extra["subclass"], value.dtype) == ("my.Sub", "float32")
        value = read(call(path, rebuilder, name("torch.Tensor"), arguments, b"}"))
        assert "subclass" not in value.extra


def test_tensors_without_bytes() -> None:
    device = text("cpu")
    value = read(
        utils("_rebuild_wrapper_subclass", name("my.W"), FLOAT, SIZE, SIZE, b"K\x00",
              name("torch.strided"), device, b"\x88")
    )  # fmt: skip
    assert facts(value) == ("wrapper", "float32", (2, 3), (2, 3), 0, True)
    assert value.extra["subclass"] == value.extra["class"].path == "my.W"
    offset, layout, where = value.extra["wrapper"]
    assert (offset, layout.path, where) == (0, "torch.strided", "cpu")
    value = read(utils("_rebuild_meta_tensor_no_storage", FLOAT, SIZE, SIZE, b"\x89"))
    assert facts(value) == ("meta", "float32", (2, 3), (2, 3), 0, False)


def test_tensors_of_other_devices() -> None:
    value = read(
        utils("_rebuild_device_tensor_from_cpu_tensor", PLAIN, name("torch.float16"),
              text("xla:0"), b"\x89")
    )  # fmt: skip
    assert value.extra == {"device": "xla:0", "cast": "float16"}
    array = pickle.dumps(np.ones((2, 3), np.float32), 2)[2:-1]
    for function in ("_rebuild_device_tensor_from_numpy", "_rebuild_xla_tensor"):
        value = read(utils(function, array, FLOAT, text("xla:0"), b"\x89"))
        assert facts(value)[:3] == ("numpy", "float32", (2, 3))


# ---- numpy

ARRAYS = [
    np.arange(6, dtype="<i4").reshape(2, 3),
    np.arange(6, dtype=">f8").reshape(3, 2),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.array("2024-05-17", dtype="M8[D]"),
    np.array(["ab", "c"]),
    np.array([True, False]),
    np.zeros(0),
    np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: str(array.dtype))
@pytest.mark.parametrize("protocol", range(5))
def test_arrays(array: np.ndarray[Any, Any], protocol: int) -> None:
    value = read(pickle.dumps(array, protocol)[:-1])
    assert isinstance(value, NumpyArray)
    assert isinstance(value.dtype, NumpyDtype)
    assert value.shape == array.shape
    assert value.fortran_order == (array.flags.f_contiguous and not array.flags.c_contiguous)
    assert value.data == array.tobytes("A")
    if array.dtype.names is None and array.dtype.kind != "M":
        assert np.dtype(value.dtype.spec) == array.dtype


def test_arrays_of_objects_keep_them() -> None:
    value = read(pickle.dumps(np.array([None, {"a": 1}], dtype=object), 2)[:-1])
    assert value.data == [None, {"a": 1}]


@pytest.mark.parametrize(
    "number",
    [
        np.float64(1.5),
        np.float32(-2.5),
        np.float16(0.5),
        np.int64(-7),
        np.uint8(200),
        np.bool_(True),
    ],
)
def test_numbers(number: np.generic) -> None:
    value = read(pickle.dumps(number, 2)[:-1])
    assert isinstance(value, NumpyScalar)
    assert value.value == number.item()
    assert type(value.value) is type(number.item())


def test_numbers_that_python_has_not() -> None:
    value = read(pickle.dumps(np.complex64(1 + 2j), 2)[:-1])
    assert (value.dtype.spec, value.value) == ("<c8", None)


# ---- plain containers


def test_containers() -> None:
    assert isinstance(read(call("collections.OrderedDict")), OrderedMap)
    pairs = b"](" + b"](" + text("a") + b"K\x01e" + b"e"
    assert read(call("collections.OrderedDict", pairs)) == {"a": 1}
    assert read(call("torch.Size", SIZE)) == (2, 3)
    assert read(call("_codecs.encode", text("é"), text("latin1"))) == b"\xe9"
    assert read(call("builtins.complex", b"K\x01", b"K\x02")) == 1 + 2j
    assert read(call("__builtin__.set", b"](K\x01K\x02e")) == {1, 2}
    assert read(call("builtins.frozenset", b"](K\x01K\x02e")) == frozenset({1, 2})
    assert read(call("builtins.bytearray", text("é"), text("latin-1"))) == bytearray(b"\xe9")
    assert read(call("builtins.bytes")) == b""


# ---- arguments that make no sense: the call stays visible, and nothing is raised

NESTED = utils(
    "_rebuild_sparse_tensor", name("torch.sparse_coo"), b"(" + INDICES + PLAIN + SIZE + b"t"
)
HUGE = integer(1 << 63)
NONSENSE: dict[str, bytes] = {
    "no storage": utils("_rebuild_tensor_v2", b"N", b"K\x00", SIZE, SIZE, b"\x89", HOOKS),
    "too few": utils("_rebuild_tensor_v2", storage()),
    "too many": utils("_rebuild_tensor_v2", *[b"N"] * 12),
    "none": utils("_rebuild_tensor_v2"),
    "text for a shape": tensor(storage()).replace(b"K\x06\x85", text("ab"), 1),
    "a number for a shape": tensor(storage()).replace(b"K\x06\x85", b"K\x06", 1),
    "negative offset": tensor(storage(), -1),
    "negative shape": tensor(storage(), 0, (-1,)),
    "negative stride": tensor(storage(), 0, (2,), (-1,)),
    "shape without stride": tensor(storage(), 0, (2,), ()),
    "truth for a shape": tensor(storage()).replace(b"K\x06\x85", b"\x88\x85", 1),
    "half an element": tensor(storage()).replace(b"K\x06\x85", b"G\x3f\xe0" + bytes(6) + b"\x85", 1),
    "shape beyond 64 bits": tensor(storage(), 0, (1 << 63,), (1,)),
    "stride beyond 64 bits": tensor(storage(), 0, (1,), (1 << 63,)),
    "offset beyond 64 bits": tensor(storage(), 1 << 63),
    "300 dimensions": tensor(storage(), 0, (1,) * 300, (1,) * 300),
    "a dtype that is none": utils("_rebuild_meta_tensor_no_storage", name("torch.load"), SIZE, SIZE, b"\x89"),
    "a dtype of text": utils("_rebuild_meta_tensor_no_storage", text("float32"), SIZE, SIZE, b"\x89"),
    "a layout that is none": utils("_rebuild_sparse_tensor", text("x"), b"(" + INDICES + PLAIN + SIZE + b"t"),
    "sparse of numbers": utils("_rebuild_sparse_tensor", name("torch.sparse_coo"), b"(K\x01K\x02K\x03t"),
    "sparse of nothing": utils("_rebuild_sparse_tensor", name("torch.sparse_coo"), b")"),
    "sparse of sparse": utils(
        "_rebuild_sparse_tensor", name("torch.sparse_coo"), b"(" + INDICES + NESTED + SIZE + b"t"
    ),
    "sparse of another shape": utils(
        "_rebuild_sparse_tensor", name("torch.sparse_coo"), b"(" + INDICES + PLAIN + text("ab") + b"t"
    ),
    "nested of sparse": utils("_rebuild_nested_tensor", NESTED, INDICES, INDICES, INDICES),
    "quantized by nothing": utils("_rebuild_qtensor", storage(), b"K\x00", SIZE, SIZE, b")", b"\x89", HOOKS),
    "quantized by sparse": utils(
        "_rebuild_qtensor", storage(), b"K\x00", SIZE, SIZE,
        b"(" + name("torch.per_channel_affine") + NESTED + NESTED + b"K\x00t", b"\x89", HOOKS,
    ),
    "a parameter of nothing": utils("_rebuild_parameter", b"N", b"\x88", HOOKS),
    "a wrapper of text": utils("_rebuild_wrapper_subclass", text("x"), FLOAT, SIZE, SIZE, b"K\x00NNN"),
    "a device of numbers": utils("_rebuild_device_tensor_from_cpu_tensor", PLAIN, FLOAT, b"K\x01", b"\x89"),
    "an array that is none": utils("_rebuild_device_tensor_from_numpy", b"N", FLOAT, text("xla"), b"\x89"),
    "a type that is none": call("torch._tensor._rebuild_from_type_v2", text("x"), text("y"), b")", b"}"),
    "a rebuilder that is unknown": call(
        "torch._tensor._rebuild_from_type_v2", name("m.f"), name("m.C"), b")", b"}"
    ),
    "a rebuilder of something else": call(
        "torch._tensor._rebuild_from_type_v2", name("builtins.set"), name("m.C"), b")", b"}"
    ),
    "a set of numbers": call("builtins.set", b"K\x05"),
    "a set of two": call("builtins.set", b"]", b"]"),
    "a set of lists": call("builtins.set", b"](]e"),
    "bytes of a number": call("builtins.bytes", b"K\x05"),
    "a bytearray of a number": call("builtins.bytearray", integer(1 << 30)),
    "a bytearray of a list": call("builtins.bytearray", b"](K\x01e"),
    "complex of text": call("builtins.complex", text("1")),
    "complex of an integer without end": call("builtins.complex", integer(1 << 1200)),
    "a code that runs": call("_codecs.encode", text("x"), text("zip")),
    "code of a number": call("_codecs.encode", b"K\x05"),
    "a size of text": call("torch.Size", text("ab")),
    "a size of bytes": call("torch.Size", b"C\x02ab"),
    "an OrderedDict of a number": call("collections.OrderedDict", b"K\x05"),
    "a numpy dtype of numbers": call("numpy.dtype", b"K\x05"),
    "a numpy scalar of few bytes": call(
        "numpy.core.multiarray.scalar", call("numpy.dtype", text("f8")), b"C\x02ab"
    ),
}  # fmt: skip


def test_rebuilders_of_torch_that_are_unknown_are_no_nonsense() -> None:
    made = name("torch.nested._internal.nested_tensor._rebuild_njt")
    kind = name("torch.nested._internal.nested_tensor.NestedTensor")
    result = read_pickle(call("torch._tensor._rebuild_from_type_v2", made, kind, b")", b"}") + b".")
    assert isinstance(result.value, Opaque)
    assert result.malformed_calls == []
    assert "torch.nested._internal.nested_tensor._rebuild_njt" in result.called


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_nonsense_stays_opaque(nonsense: str) -> None:
    result = read_pickle(NONSENSE[nonsense] + b".")
    assert result.error is None
    assert isinstance(result.value, Opaque)
    assert len(result.malformed_calls) == 1
    path, reason = result.malformed_calls[0]
    assert path == result.value.path
    assert path in result.called
    assert reason


@pytest.mark.parametrize(
    "pid",
    [
        None,
        5,
        (),
        ("storage",),
        ("storage", "FloatStorage", "0", "cpu", 1),
        ("storage", GlobalRef("torch", "load"), "0", "cpu", 1),
        ("storage", GlobalRef("torch", "FloatStorage"), 0, "cpu", 1),
        ("storage", GlobalRef("torch", "FloatStorage"), "0", None, 1),
        ("storage", GlobalRef("torch", "FloatStorage"), "0", "cpu", "1"),
        ("storage", GlobalRef("torch", "FloatStorage"), "0", "cpu", True),
        ("storage", GlobalRef("torch", "FloatStorage"), "0", "cpu", -1),
        ("storage", GlobalRef("torch", "FloatStorage"), "0", "cpu", 1 << 63),
        ("storage", GlobalRef("torch", "FloatStorage"), "0", "cpu", 1, None, None),
        ("tensor", GlobalRef("torch", "FloatStorage"), "0", "cpu", 1),
        ["storage", GlobalRef("torch", "FloatStorage"), "0", "cpu", 1],
    ],
    ids=str,
)
def test_persistent_ids_that_are_none(pid: Any) -> None:
    with pytest.raises(ValueError, match="."):
        storage_from_persistent_id(pid)


def test_persistent_ids() -> None:
    kind = GlobalRef("torch", "HalfStorage")
    found = storage_from_persistent_id(("storage", kind, "a/b", "cuda:1", 0))
    assert isinstance(found, StorageRef)
    assert (found.dtype, found.key, found.device, found.numel, found.view) == (
        *("float16", "a/b", "cuda:1", 0, None),
    )
    # The legacy stream puts a module's source beside its class.
    assert storage_from_persistent_id(("module", kind, "net.py", "class Net: pass")) is kind


def test_states_that_are_none() -> None:
    array = call(
        "numpy.core.multiarray._reconstruct", name("numpy.ndarray"), b"K\x00\x85", b"C\x01b"
    )
    dtype = call("numpy.dtype", text("f8"))
    for target in (array, dtype):
        for state in (
            b"N",
            b")",
            b"K\x05",
            text("abcde"),
            b"](K\x01K\x02K\x03K\x04K\x05e",
            b"(" + b"N" * 40 + b"t",
        ):
            result = read_pickle(target + state + b"b.")
            assert result.error is not None, (target, state)


def test_every_stand_in_has_a_name_that_loaders_know() -> None:
    """Each is a function that CPython, torch or numpy really has, so that no invented name is let in."""
    import importlib
    import warnings

    invented = []
    for module, attribute in REBUILDERS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                getattr(
                    importlib.import_module(module.replace("__builtin__", "builtins")), attribute
                )
        except (ImportError, AttributeError):
            invented.append((module, attribute))
    # Names of older versions: torch 1.x had torch/tensor.py, and XLA its own rebuilder.
    assert set(invented) <= {("torch.tensor", "_rebuild_from_type")}


def test_pickletools_agrees_that_the_streams_here_are_pickles() -> None:
    import pickletools

    for stream in NONSENSE.values():
        pickletools.dis(stream + b".", out=io.StringIO(), memo={0: None, 9: None})
