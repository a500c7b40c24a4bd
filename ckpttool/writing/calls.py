"""Each inert value as the call that makes it when it is loaded, in the words of pickle protocol 2.

What a pickle has no opcode for is spelt as a call: a tensor is `torch._utils._rebuild_tensor_v2(…)`
and bytes are `_codecs.encode(text, 'latin1')`. The calls are those that torch's, numpy's and
Python's own `__reduce_ex__(2)` give (torch/_tensor.py, torch/nn/parameter.py, numpy's
methods.c, CPython's _pickle.c), so that every loader that takes theirs takes these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckpttool.formats.dtypes import BITS, STORAGE_DTYPES
from ckpttool.formats.rebuild import TorchSize
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

# The dtype under which a storage goes that has none itself: its elements are bytes.
UNTYPED = "untyped"
STORAGE_CLASSES = {
    **{dtype: GlobalRef("torch", name) for name, dtype in STORAGE_DTYPES.items()},
    "uint8": GlobalRef("torch", "ByteStorage"),
    UNTYPED: GlobalRef("torch.storage", "UntypedStorage"),
}
REBUILD_TENSOR = GlobalRef("torch._utils", "_rebuild_tensor_v2")
ORDERED_DICT = GlobalRef("collections", "OrderedDict")
_TENSOR_CLASS = GlobalRef("torch", "Tensor")
_FROM_TYPE = GlobalRef("torch._tensor", "_rebuild_from_type_v2")
ENCODE = GlobalRef("_codecs", "encode")
_SIZE = GlobalRef("torch", "Size")
_NDARRAY = GlobalRef("numpy", "ndarray")
_DTYPE = GlobalRef("numpy", "dtype")
_BUILTINS = {
    kind: GlobalRef("__builtin__", kind.__name__) for kind in (set, frozenset, bytearray, complex)
}
# One call for each, which all tensors of a file share, as they share the layout itself.
_LAYOUTS = {
    name: Opaque(
        GlobalRef("torch.serialization", "_get_layout"), (f"torch.{name}",), opcode="REDUCE"
    )
    for name in ("sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")
}
_ONE_BYTE = b"b"


class Unwritable(Exception):  # noqa: N818 - never seen outside this package
    """A value has no form in a pickle; the text says why, the caller knows where."""


def call_of(value: Any) -> Opaque | None:
    """The call that stands for an inert value; None for what is no such value.

    Raises Unwritable for one of whose kind there is no call.
    """
    maker = _MAKERS.get(type(value))
    return None if maker is None else maker(value)


def untyped(storage: StorageRef) -> StorageRef:
    """The same storage, written as one of bytes."""
    return StorageRef(UNTYPED, storage.key, storage.device, storage.numel)


def _reduce(target: GlobalRef, *args: Any) -> Opaque:
    return Opaque(target, args, opcode="REDUCE")


def _split(path: str) -> GlobalRef:
    module, _, name = path.rpartition(".")
    return GlobalRef(module, name)


def _utils(name: str) -> GlobalRef:
    return GlobalRef("torch._utils", name)


def _torch_dtype(name: str) -> GlobalRef:
    if name not in BITS:
        raise Unwritable(f"torch has no dtype {name!r}")
    return GlobalRef("torch", name)


# Tensors: one layer for the elements, and others around it for what else the tensor is.


def _tensor(value: TensorValue) -> Opaque:
    extra = value.extra or {}
    if extra.get("layers"):
        raise Unwritable("a tensor with attributes inside of another with attributes")
    maker = _LAYOUT_MAKERS.get(value.layout)
    if maker is None:
        raise Unwritable(f"a tensor of the unknown layout {value.layout!r}")
    moved, parameter = "cast" in extra, bool(extra.get("parameter"))
    call = maker(value, extra, value.requires_grad and not (moved or parameter))
    if moved:
        place = (_torch_dtype(extra["cast"]), extra["device"])
        grad = value.requires_grad and not parameter
        call = _reduce(_utils("_rebuild_device_tensor_from_cpu_tensor"), call, *place, grad)
    subclass = extra.get("subclass") if value.layout != "wrapper" or "state" in extra else None
    if parameter:
        call = _parameter(value, call, extra, subclass)
        if subclass is None:
            return call
    if subclass is None and "state" not in extra:
        return call
    kind = extra.get("class") or (_split(subclass) if subclass else _TENSOR_CLASS)
    return _reduce(_FROM_TYPE, call.target, kind, call.args, extra.get("state", {}))


def _parameter(
    value: TensorValue, data: Opaque, extra: dict[str, Any], subclass: str | None
) -> Opaque:
    """torch.nn.Parameter.__reduce_ex__; the state of a subclass goes with the subclass."""
    args = (data, value.requires_grad, OrderedMap())
    if "state" in extra and subclass is None:
        return _reduce(_utils("_rebuild_parameter_with_state"), *args, extra["state"])
    return _reduce(_utils("_rebuild_parameter"), *args)


def _strided(value: TensorValue, extra: dict[str, Any], grad: bool) -> Opaque:
    """`_rebuild_tensor_v2`, or v3 for a dtype that has no class of storages."""
    storage = _storage(value)
    metadata = (extra["metadata"],) if extra.get("metadata") else ()
    place = (*_place(value), grad, OrderedMap())
    if has_storage_class(value):
        return _reduce(REBUILD_TENSOR, storage, *place, *metadata)
    if storage.dtype == "uint8":
        storage = untyped(storage)
    dtype = _torch_dtype(value.dtype)
    return _reduce(_utils("_rebuild_tensor_v3"), storage, *place, dtype, *metadata)


def has_storage_class(value: TensorValue) -> bool:
    """Whether the class of its storage says what its elements are, as all of them once did."""
    storage = value.storage
    return storage is not None and storage.dtype == value.dtype and value.dtype in STORAGE_CLASSES


def _storage(value: TensorValue) -> StorageRef:
    """Its storage; where that is a view of another one, the other: the offset begins there."""
    storage = value.storage
    if storage is None:
        raise Unwritable("a tensor without a storage")
    if storage.view is None:
        return storage
    return StorageRef(storage.dtype, storage.key, storage.device, storage.numel)


def _place(value: TensorValue) -> tuple[Any, ...]:
    """Offset, shape and stride; new tuples, since torch makes new ones for each tensor too."""
    return value.offset, (*(value.shape or ()),), (*(value.stride or ()),)


def _quantized(value: TensorValue, extra: dict[str, Any], grad: bool) -> Opaque:
    facts = extra.get("quantizer") or {}
    if "scheme" not in facts:
        raise Unwritable("a quantized tensor without its quantizer")
    scheme = GlobalRef("torch", facts["scheme"])
    quantizer = (scheme, *(fact for name, fact in facts.items() if name != "scheme"))
    args = (_storage(value), *_place(value), quantizer, grad, OrderedMap())
    return _reduce(_utils("_rebuild_qtensor"), *args)


def _sparse(value: TensorValue, extra: dict[str, Any], grad: bool) -> Opaque:
    data: tuple[Any, ...] = (*(value.parts or {}).values(), TorchSize(value.shape or ()))
    if "coalesced" in extra:
        data = (*data, extra["coalesced"])
    return _reduce(_utils("_rebuild_sparse_tensor"), _LAYOUTS[value.layout], data)


def _nested(value: TensorValue, extra: dict[str, Any], grad: bool) -> Opaque:
    parts = list((value.parts or {}).values())
    if len(parts) == 3:
        parts.append(extra.get("storage_offsets"))
    return _reduce(_utils("_rebuild_nested_tensor"), *parts)


def _wrapper(value: TensorValue, extra: dict[str, Any], grad: bool) -> Opaque:
    kind = extra.get("class") or _split(extra["subclass"])
    if "wrapper" not in extra:
        raise Unwritable("a tensor subclass of which offset, layout and device are not known")
    _, shape, stride = _place(value)
    args = (kind, _torch_dtype(value.dtype), shape, stride, *extra["wrapper"], grad)
    return _reduce(_utils("_rebuild_wrapper_subclass"), *args)


def _meta(value: TensorValue, extra: dict[str, Any], grad: bool) -> Opaque:
    _, shape, stride = _place(value)
    args = (_torch_dtype(value.dtype), shape, stride, grad)
    return _reduce(_utils("_rebuild_meta_tensor_no_storage"), *args)


def _from_numpy(value: TensorValue, extra: dict[str, Any], grad: bool) -> Opaque:
    args = (extra["array"], _torch_dtype(value.dtype), extra["device"], grad)
    return _reduce(_utils("_rebuild_device_tensor_from_numpy"), *args)


_LAYOUT_MAKERS: dict[str, Callable[[TensorValue, dict[str, Any], bool], Opaque]] = {
    "strided": _strided,
    "quantized": _quantized,
    **dict.fromkeys(_LAYOUTS, _sparse),
    "nested": _nested,
    "wrapper": _wrapper,
    "meta": _meta,
    "numpy": _from_numpy,
}


# numpy. Old and new versions name the module of these two functions in two ways.


def _numpy_array(value: NumpyArray) -> Opaque:
    kind = _NDARRAY if value.subclass is None else _split(value.subclass)
    # A new tuple for each, as numpy makes one: what is one object is written once.
    start = tuple([0])  # noqa: C409
    call = _reduce(GlobalRef(value.module, "_reconstruct"), kind, start, _ONE_BYTE)
    if value.dtype is not None or value.data is not None:
        call.state = (1, value.shape, value.dtype, value.fortran_order, value.data)
    return call


def _numpy_dtype(value: NumpyDtype) -> Opaque:
    """The byte order is in the state; a dot tells the name of a class."""
    spec: Any = value.spec
    if "." in value.spec:
        spec = _split(value.spec)
    elif value.state is not None:
        spec = value.spec.lstrip("<>|=")
    call = _reduce(_DTYPE, spec, False, True)
    call.state = value.state
    return call


def _numpy_scalar(value: NumpyScalar) -> Opaque:
    args = (value.dtype,) if value.data is None else (value.dtype, value.data)
    return _reduce(GlobalRef(value.module, "scalar"), *args)


# Python's own.


def _bytearray(value: bytearray) -> Opaque:
    return _reduce(_BUILTINS[bytearray], *((bytes(value),) if value else ()))


def _set(value: set[Any] | frozenset[Any]) -> Opaque:
    return _reduce(_BUILTINS[type(value)], list(value))


def _complex(value: complex) -> Opaque:
    return _reduce(_BUILTINS[complex], value.real, value.imag)


def _torch_size(value: TorchSize) -> Opaque:
    return _reduce(_SIZE, tuple(value))


def _ordered(value: OrderedMap) -> Opaque:
    """A state that is no dictionary stands under an empty name; see the reader."""
    call = _reduce(ORDERED_DICT)
    attributes = value.attributes
    if attributes:
        call.state = attributes[""] if attributes.keys() == {""} else attributes
    return call


_MAKERS: dict[type, Callable[[Any], Opaque]] = {
    TensorValue: _tensor,
    NumpyArray: _numpy_array,
    NumpyDtype: _numpy_dtype,
    NumpyScalar: _numpy_scalar,
    bytearray: _bytearray,
    set: _set,
    frozenset: _set,
    complex: _complex,
    TorchSize: _torch_size,
    OrderedMap: _ordered,
}
