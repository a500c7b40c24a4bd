"""Stand-ins for the few calls that the static reader knows: torch's tensor rebuilders, numpy's,
containers.

Each takes the arguments that the real function would get and gives an inert value. One that finds
its arguments off raises ValueError (or what Python raises by itself); the reader then keeps the
call as an `Opaque`. Signatures follow torch/_utils.py, torch/_tensor.py and
numpy/_core/multiarray.py.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import Any

from ckpttool.formats.dtypes import BITS, STORAGE_DTYPES
from ckpttool.formats.keys import KeyGuard
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

Rebuild = Callable[..., Any]

_INTS = {int}
# torch itself has at most 64; what has more is nothing to spend time on.
_MOST_DIMENSIONS = 256
_BEYOND = 1 << 63


class UnknownRebuilderError(ValueError):
    """A call is to make its tensor by a function of torch's that has no stand-in here, `path`.

    There is nothing wrong with it: torch has more of these than are known here.
    """

    def __init__(self, path: str) -> None:
        super().__init__(f"unknown rebuilder {path}")
        self.path = path


class TorchSize(tuple[Any, ...]):
    """A `torch.Size`."""

    __slots__ = ()


def _dtype_name(value: Any) -> str:
    """The short name of a `torch.float32`-like global."""
    if isinstance(value, GlobalRef) and value.module == "torch" and value.name in BITS:
        return value.name
    raise ValueError(f"not a torch dtype: {type(value).__name__}")


def _check_extent(offset: Any, shape: Any, stride: Any) -> None:
    """Offset, shape and stride must be plain integers, in tuples of one length."""
    if len(shape) != len(stride) or len(shape) > _MOST_DIMENSIONS:
        raise ValueError("shape and stride must have the same few dimensions")
    kinds = {type(offset), *map(type, shape), *map(type, stride)}
    if kinds != _INTS or not 0 <= offset < _BEYOND:
        raise ValueError("offset, shape and stride must be integers")
    if shape and (min(*shape, *stride) < 0 or max(*shape, *stride) >= _BEYOND):
        raise ValueError("negative or impossible shape or stride")


def _view_start(view: Any) -> int:
    """Where a view of a storage begins in it: (key, offset, numel), in elements."""
    _, start, _ = view
    if type(start) is not int or not 0 <= start < _BEYOND:
        raise ValueError("no view of a storage")
    return start


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any) -> TensorValue:
    """torch._utils._rebuild_tensor(storage, offset, size, stride)."""
    return _tensor_v2(storage, offset, shape, stride, False, None)


def _tensor_v2(
    storage: Any,
    offset: Any,
    shape: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
    metadata: Any = None,
) -> TensorValue:
    """torch._utils._rebuild_tensor_v2. `metadata` carries the conj and neg bits."""
    if type(storage) is not StorageRef:
        raise ValueError("no storage")
    _check_extent(offset, shape, stride)
    if storage.view is not None:
        offset += _view_start(storage.view)
    tensor = TensorValue(
        storage, offset, tuple(shape), tuple(stride), bool(requires_grad), storage.dtype
    )
    if metadata:
        tensor.extra = {"metadata": metadata}
    return tensor


def _tensor_v3(
    storage: Any,
    offset: Any,
    shape: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> TensorValue:
    """torch._utils._rebuild_tensor_v3: as v2, with the dtype beside an untyped storage."""
    tensor = _tensor_v2(storage, offset, shape, stride, requires_grad, hooks, metadata)
    tensor.dtype = _dtype_name(dtype)
    return tensor


def _quantizer(parameters: tuple[Any, ...]) -> dict[str, Any]:
    names = ("scheme", "scale", "zero_point", "axis")
    facts = dict(zip(names, parameters, strict=False))
    scheme = facts["scheme"]
    if not isinstance(scheme, GlobalRef):
        raise ValueError("no quantization scheme")
    facts["scheme"] = scheme.name
    return facts


def _qtensor(
    storage: Any, offset: Any, shape: Any, stride: Any, quantizer: Any, grad: Any, hooks: Any
) -> TensorValue:
    """torch._utils._rebuild_qtensor. A channel's scales and zero points are tensors too."""
    tensor = _tensor_v2(storage, offset, shape, stride, grad, hooks)
    tensor.layout = "quantized"
    facts = _quantizer(quantizer)
    tensor.parts = {name: v for name, v in facts.items() if isinstance(v, TensorValue)}
    _check_parts(tensor.parts)
    tensor.extra = {"quantizer": facts}
    return tensor


_COMPRESSED = {
    "sparse_csr": ("crow_indices", "col_indices"),
    "sparse_bsr": ("crow_indices", "col_indices"),
    "sparse_csc": ("ccol_indices", "row_indices"),
    "sparse_bsc": ("ccol_indices", "row_indices"),
}


def _layout_name(layout: Any) -> str:
    """`torch.sparse_coo`, as `_get_layout('torch.sparse_coo')` or as a global."""
    if isinstance(layout, Opaque) and layout.args:
        layout = layout.args[0]
    name = layout.name if isinstance(layout, GlobalRef) else layout
    if not isinstance(name, str):
        raise ValueError("no layout")
    return name.rpartition(".")[2]


def _sparse(layout: Any, data: Any) -> TensorValue:
    """torch._utils._rebuild_sparse_tensor(layout, (indices…, values, size[, is_coalesced]))."""
    name = _layout_name(layout)
    extra = None
    if name == "sparse_coo":
        parts = {"indices": data[0], "values": data[1]}
        shape = data[2]
        extra = {"coalesced": data[3]} if len(data) > 3 else None
    else:
        first, second = _COMPRESSED[name]
        parts = {first: data[0], second: data[1], "values": data[2]}
        shape = data[3]
    _check_extent(0, shape, shape)
    tensor = _composed(name, parts, tuple(shape), parts["values"])
    tensor.extra = extra
    return tensor


def _check_parts(parts: dict[str, Any]) -> None:
    """Each must be a plain tensor: no file can build a tower of parts of parts."""
    for part in parts.values():
        if not isinstance(part, TensorValue) or part.parts:
            raise ValueError("not built from plain tensors")


def _composed(
    layout: str, parts: dict[str, Any], shape: tuple[int, ...] | None, values: Any
) -> TensorValue:
    _check_parts(parts)
    grad = bool(values.requires_grad)
    return TensorValue(None, 0, shape, None, grad, values.dtype, layout, parts)


def _nested(buffer: Any, sizes: Any, strides: Any, offsets: Any) -> TensorValue:
    """torch._utils._rebuild_nested_tensor: a ragged tensor over one buffer; it has no one shape."""
    parts = {"buffer": buffer, "sizes": sizes, "strides": strides}
    if isinstance(offsets, TensorValue):
        parts["storage_offsets"] = offsets
    tensor = _composed("nested", parts, None, buffer)
    if "storage_offsets" not in parts:
        tensor.extra = {"storage_offsets": offsets}  # a list of numbers, before torch 2.1
    return tensor


def _parameter(data: Any, requires_grad: Any, hooks: Any, state: Any = None) -> Any:
    """torch._utils._rebuild_parameter[_with_state](data, requires_grad, hooks[, state])."""
    if not isinstance(data, TensorValue):
        raise ValueError("a parameter without a tensor")
    facts = {"parameter": True} if state is None else {"parameter": True, "state": state}
    parameter = data.with_extra(**facts)
    parameter.requires_grad = bool(requires_grad)
    return parameter


def _from_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """torch._tensor._rebuild_from_type_v2(func, type, args, state): a tensor subclass."""
    if not isinstance(function, GlobalRef) or not isinstance(kind, GlobalRef):
        raise ValueError("not a function and a class")
    if function.rebuild is None:
        if function.module.partition(".")[0] == "torch":
            raise UnknownRebuilderError(function.path)
        raise ValueError(f"unknown rebuilder {function.path}")
    base = function.rebuild(*args)
    if not isinstance(base, TensorValue):
        raise ValueError("the rebuilder gives no tensor")
    if kind.path in ("torch.Tensor", "torch._tensor.Tensor"):
        return base.with_extra(state=state)
    return base.with_extra(**{"subclass": kind.path, "class": kind}, state=state)


def _wrapper(
    kind: Any, dtype: Any, shape: Any, stride: Any, offset: Any, layout: Any, device: Any, grad: Any
) -> TensorValue:
    """torch._utils._rebuild_wrapper_subclass: a tensor without bytes of its own."""
    _check_extent(offset, shape, stride)
    if not isinstance(kind, GlobalRef):
        raise ValueError("no class")
    extra = {"subclass": kind.path, "class": kind, "wrapper": (offset, layout, device)}
    name = _dtype_name(dtype)
    return TensorValue(
        None, 0, tuple(shape), tuple(stride), bool(grad), name, "wrapper", extra=extra
    )


def _meta(dtype: Any, shape: Any, stride: Any, requires_grad: Any) -> TensorValue:
    """torch._utils._rebuild_meta_tensor_no_storage: a tensor on the meta device."""
    _check_extent(0, shape, stride)
    grad = bool(requires_grad)
    return TensorValue(None, 0, tuple(shape), tuple(stride), grad, _dtype_name(dtype), "meta")


def _device_text(device: Any) -> str:
    if not isinstance(device, str):
        raise ValueError("no device")
    return device


def _from_cpu(data: Any, dtype: Any, device: Any, requires_grad: Any) -> Any:
    """torch._utils._rebuild_device_tensor_from_cpu_tensor."""
    if not isinstance(data, TensorValue):
        raise ValueError("no tensor")
    moved = data.with_extra(device=_device_text(device), cast=_dtype_name(dtype))
    moved.requires_grad = bool(requires_grad)
    return moved


def _from_numpy(data: Any, dtype: Any, device: Any, requires_grad: Any) -> TensorValue:
    """torch._utils._rebuild_device_tensor_from_numpy: the values lie in the pickle itself."""
    if not isinstance(data, NumpyArray):
        raise ValueError("no array")
    extra = {"device": _device_text(device), "array": data}
    name = _dtype_name(dtype)
    return TensorValue(None, 0, data.shape, None, bool(requires_grad), name, "numpy", extra=extra)


def _ordered(*args: Any) -> OrderedMap:
    """collections.OrderedDict(), or of pairs (protocols 0 and 1)."""
    return OrderedMap(*args) if args else OrderedMap()


def _bytes_of_text(text: Any, encoding: Any = "utf-8") -> bytes:
    """_codecs.encode(text, 'latin1'): how protocol 2 spells bytes."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1", "utf-8", "ascii"):
        raise ValueError("not text in a plain encoding")
    return text.encode(encoding)


def _items(*args: Any) -> list[Any]:
    if len(args) > 1 or (args and not isinstance(args[0], (list, tuple, set, frozenset))):
        raise ValueError("not one collection")
    items = list(args[0]) if args else []
    KeyGuard().check(items, items)
    return items


def _set(*args: Any) -> set[Any]:
    return set(_items(*args))


def _frozenset(*args: Any) -> frozenset[Any]:
    return frozenset(_items(*args))


def _size(shape: Any = ()) -> TorchSize:
    """torch.Size((2, 3))."""
    if not isinstance(shape, (list, tuple)):
        raise ValueError("no shape")
    return TorchSize(shape)


def _empty_bytes() -> bytes:
    """bytes(): how protocols 0 to 2 spell bytes of no length."""
    return b""


def _bytearray(*args: Any) -> bytearray:
    """bytearray(bytes) or bytearray(text, 'latin-1'); never bytearray(count)."""
    if args and isinstance(args[0], str):
        return bytearray(_bytes_of_text(*args))
    if len(args) > 1 or not isinstance(args[0] if args else b"", bytes):
        raise ValueError("not bytes")
    return bytearray(*args)


def _complex(*args: Any) -> complex:
    if not all(type(part) in (int, float) for part in args):
        raise ValueError("not numbers")
    return complex(*args)


def _numpy_dtype(spec: Any, align: Any = False, copy: Any = True) -> NumpyDtype:
    """numpy.dtype('f8', align, copy), or of a class; its byte order follows by BUILD."""
    if isinstance(spec, GlobalRef):
        spec = spec.path  # numpy.record
    if not isinstance(spec, str) or len(spec) > 64:
        raise ValueError("no dtype")
    return NumpyDtype(spec)


def _numpy_array(module: str, subclass: Any, shape: Any, typecode: Any) -> NumpyArray:
    """numpy._core.multiarray._reconstruct(cls, (0,), b'b'); the content follows by BUILD."""
    path = subclass.path if isinstance(subclass, GlobalRef) else ""
    return NumpyArray(None if path == "numpy.ndarray" else path, module)


_STRUCT_CODES = {"f2": "e", "f4": "f", "f8": "d", "b1": "?", "i1": "b", "u1": "B"}
_STRUCT_CODES |= {"i2": "h", "u2": "H", "i4": "i", "u4": "I", "i8": "q", "u8": "Q"}


def _numpy_scalar(module: str, dtype: Any, data: Any = None) -> NumpyScalar:
    """numpy._core.multiarray.scalar(dtype, bytes): decoded where Python has such a number."""
    spec = dtype.spec if isinstance(dtype, NumpyDtype) else ""
    order, code = (spec[0], spec[1:]) if spec[:1] in ("<", ">", "|", "=") else ("<", spec)
    kind = _STRUCT_CODES.get(code)
    value = None
    if kind and isinstance(data, bytes):
        value = struct.unpack((">" if order == ">" else "<") + kind, data)[0]
    return NumpyScalar(dtype, data, value, module)


def build_numpy_array(array: NumpyArray, state: Any) -> None:
    """BUILD on an array: (version, shape, dtype, fortran order, data)."""
    _, shape, dtype, fortran, data = state
    _check_extent(0, shape, shape)
    array.shape, array.dtype, array.data = tuple(shape), dtype, data
    array.fortran_order = bool(fortran)


_MOST_DTYPE_STATE = 16


def build_numpy_dtype(dtype: NumpyDtype, state: Any) -> None:
    """BUILD on a dtype: (version, byte order, subdtype, names, fields, size, alignment, flags…)."""
    if not isinstance(state, tuple) or not 2 <= len(state) <= _MOST_DTYPE_STATE:
        raise ValueError("no state of a dtype")
    order = state[1]
    if order in ("<", ">", "|") and "." not in dtype.spec:
        dtype.spec = order + dtype.spec.lstrip("<>|=")
    dtype.state = state


_UTILS: dict[str, Rebuild] = {
    "_rebuild_tensor": _tensor,
    "_rebuild_tensor_v2": _tensor_v2,
    "_rebuild_tensor_v3": _tensor_v3,
    "_rebuild_qtensor": _qtensor,
    "_rebuild_sparse_tensor": _sparse,
    "_rebuild_nested_tensor": _nested,
    "_rebuild_parameter": _parameter,
    "_rebuild_parameter_with_state": _parameter,
    "_rebuild_wrapper_subclass": _wrapper,
    "_rebuild_meta_tensor_no_storage": _meta,
    "_rebuild_device_tensor_from_cpu_tensor": _from_cpu,
    "_rebuild_device_tensor_from_numpy": _from_numpy,
    "_rebuild_xla_tensor": _from_numpy,
}

REBUILDERS: dict[tuple[str, str], Rebuild] = {
    **{("torch._utils", name): function for name, function in _UTILS.items()},
    ("torch._tensor", "_rebuild_from_type"): _from_type,
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    ("torch.tensor", "_rebuild_from_type"): _from_type,
    ("torch", "Size"): _size,
    ("collections", "OrderedDict"): _ordered,
    ("_codecs", "encode"): _bytes_of_text,
    **{(m, "set"): _set for m in ("builtins", "__builtin__")},
    **{(m, "frozenset"): _frozenset for m in ("builtins", "__builtin__")},
    **{(m, "bytearray"): _bytearray for m in ("builtins", "__builtin__")},
    **{(m, "complex"): _complex for m in ("builtins", "__builtin__")},
    **{(m, "bytes"): _empty_bytes for m in ("builtins", "__builtin__")},
    ("numpy", "dtype"): _numpy_dtype,
    **{
        (module, name): partial(function, module)
        for module in ("numpy.core.multiarray", "numpy._core.multiarray")
        for name, function in (("_reconstruct", _numpy_array), ("scalar", _numpy_scalar))
    },
}


# These copy what they are given, so that the reader has to count it.
COPIERS: frozenset[Rebuild] = frozenset(
    (_size, _ordered, _bytes_of_text, _set, _frozenset, _bytearray)
)


def storage_from_persistent_id(pid: Any) -> Any:
    """torch's persistent ids: ('storage', class, key, location, numel[, view metadata]).

    The legacy stream also has ('module', class, source file, source): it stands for the class.
    Raises ValueError for anything else.
    """
    if not isinstance(pid, tuple) or not pid:
        raise ValueError("an unknown persistent id")
    if pid[0] == "module" and len(pid) == 4:
        return pid[1]
    tag, kind, key, device, numel = pid[:5]
    if tag != "storage" or not isinstance(kind, GlobalRef) or len(pid) > 6:
        raise ValueError("an unknown persistent id")
    dtype = STORAGE_DTYPES.get(kind.name)
    if type(numel) is int and not 0 <= numel < _BEYOND:
        raise ValueError("an impossible number of elements")
    if dtype is None or type(key) is not str or type(numel) is not int or type(device) is not str:
        raise ValueError(f"not a storage: {kind.path}")
    return StorageRef(dtype, key, device, numel, pid[5] if len(pid) == 6 else None)
