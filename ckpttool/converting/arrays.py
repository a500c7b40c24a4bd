"""numpy's arrays and scalars in plain form.

An array of numbers becomes a tensor of the same dtype, shape and bytes. What torch has no dtype for
becomes lists: of text and bytes, of dates as ISO 8601 text, of whatever objects there are. A
structured array becomes a dictionary of its columns. A scalar, and an array without dimensions,
becomes the Python number of the same value (each float16, bfloat16 and float32 is a float).
"""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any

from ckpttool.converting.terms import LEFT_OUT, NoPlainFormError, Steps, copy_tensor
from ckpttool.formats.values import NumpyArray, NumpyDtype, NumpyScalar, Opaque, TensorValue

if TYPE_CHECKING:
    import numpy as np

    from ckpttool.converting.plain import Plainer

# numpy's names of the dtypes that torch has under the same name.
_TORCH = frozenset(
    (
        *("float64", "float32", "float16", "int64", "int32", "int16", "int8"),
        *("uint64", "uint32", "uint16", "uint8", "bool", "complex128", "complex64"),
        *("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
        "float8_e8m0fnu",
    )
)
_ML_DTYPES = "ml_dtypes."
_SPEC = re.compile(r"[<>|=]?(?:[biufcSUVOMm?][0-9]*)\Z")
_UNIT = re.compile(r"[A-Za-z]{1,2}\Z")
_MOST_NESTING = 16


def array_form(plainer: Plainer, value: NumpyArray) -> Any:
    """A tensor, lists, a dictionary of columns, or a number; or the steps to it."""
    if isinstance(value.data, list):
        return _object_array(plainer, value)
    array = real_array(value)
    form = _form(plainer, array)
    plainer.note(_words(array.dtype, array.shape, value.subclass), form_words(form))
    return form


def scalar_form(plainer: Plainer, value: NumpyScalar) -> Any:
    """A Python number, text, bytes, or a dictionary of the fields."""
    if isinstance(value.value, (bool, int, float)):
        number = value.value
    else:
        number = _form(plainer, _from_bytes(real_dtype(value.dtype), (), _raw(value.data), False))
    plainer.note(f"numpy {str(real_dtype(value.dtype)).strip('<>|=')}", form_words(number))
    return number


def masked_array(plainer: Plainer, value: Opaque) -> Steps:
    """numpy.ma.core._mareconstruct: `{"data": …, "mask": …, "fill_value": …}`.

    Its state is (version, shape, dtype, Fortran order, data, mask, fill value).
    """
    if not isinstance(value.state, tuple) or len(value.state) != 7:
        raise NoPlainFormError("its state is not that of a masked array")
    _, shape, dtype, fortran, data, mask, fill = value.state
    result: dict[str, Any] = plainer.begin(value, {})
    for name, kind, content in (("data", dtype, data), ("mask", NumpyDtype("|b1"), mask)):
        array = _from_bytes(real_dtype(kind), _checked(shape), _raw(content), bool(fortran))
        result[name] = _form(plainer, array)
    plainer.note("numpy masked array", "dict")
    fill = yield "fill_value", fill
    result["fill_value"] = None if fill is LEFT_OUT else fill
    return result


def device_tensor(plainer: Plainer, value: TensorValue) -> TensorValue:
    """A tensor whose values lie in the pickle as an array (XLA and the like): one with a storage.

    torch makes it by `torch.from_numpy(array).to(dtype)`; so does this.
    """
    from ckpttool.model.tensor import numpy_dtype

    extra = dict(value.extra or {})
    array = real_array(extra.pop("array")).astype(numpy_dtype(value.dtype))
    extra.pop("device", None)
    plainer.note("tensor made of a numpy array", "tensor")
    tensor = copy_tensor(_tensor(plainer, array, value.dtype), None, extra)
    tensor.requires_grad = value.requires_grad
    return tensor


def real_array(value: NumpyArray) -> np.ndarray[Any, Any]:
    """The array that `value` describes, over its own bytes. Raises ValueError for nonsense."""
    shape = _checked(value.shape)
    return _from_bytes(real_dtype(value.dtype), shape, _raw(value.data), value.fortran_order)


def real_dtype(described: Any, depth: int = 0) -> np.dtype[Any]:
    """The numpy type that is described; NoPlainFormError for what is none, or not known here."""
    import numpy as np

    if not isinstance(described, NumpyDtype) or depth > _MOST_NESTING:
        raise NoPlainFormError("its dtype makes no sense")
    state = described.state or ()
    _, order, subarray, names, fields, itemsize = (*state, *(None,) * 6)[:6]
    if isinstance(subarray, tuple) and len(subarray) == 2:
        base, shape = subarray
        return np.dtype((real_dtype(base, depth + 1), _checked(shape)))
    if names:
        return _structured(names, fields, itemsize, depth)
    spec = described.spec
    if spec.startswith(_ML_DTYPES):
        kind = _ml_dtype(spec)
        swapped: np.dtype[Any] = kind.newbyteorder(order) if order in ("<", ">") else kind
        return swapped
    if not _SPEC.match(spec):
        raise NoPlainFormError(f"numpy's dtype {spec} is not known")
    if spec.lstrip("<>|=")[:1] in ("M", "m"):
        spec += _unit(state)
    try:
        return np.dtype(spec)
    except TypeError as error:
        raise NoPlainFormError(f"numpy has no dtype {spec}") from error


def form_words(form: Any) -> str:
    """What a form is, for the table of changes."""
    if isinstance(form, TensorValue):
        return f"tensor {form.dtype}"
    names = {str: "text", bytes: "bytes", bool: "bool", int: "int", float: "float"}
    return names.get(type(form), type(form).__name__)


def _structured(names: Any, fields: Any, itemsize: Any, depth: int) -> np.dtype[Any]:
    import numpy as np

    known = isinstance(names, tuple) and isinstance(fields, dict) and type(itemsize) is int
    if not known or not all(isinstance(name, str) and _is_field(fields, name) for name in names):
        raise NoPlainFormError("its dtype makes no sense")
    formats = [real_dtype(fields[name][0], depth + 1) for name in names]
    offsets = [fields[name][1] for name in names]
    spec: Any = {
        "names": list(names),
        "formats": formats,
        "offsets": offsets,
        "itemsize": itemsize,
    }
    try:
        dtype: np.dtype[Any] = np.dtype(spec)
    except (TypeError, ValueError, IndexError) as error:
        raise NoPlainFormError("its dtype makes no sense") from error
    # Each column is copied: fields that overlap could ask for any number of copies.
    if sum(kind.itemsize for kind in formats) > itemsize:
        raise NoPlainFormError("its fields overlap")
    return dtype


def _is_field(fields: dict[Any, Any], name: str) -> bool:
    """Whether there is a field of this name: (dtype, offset) or (dtype, offset, title)."""
    field = fields.get(name)
    return isinstance(field, tuple) and len(field) > 1 and type(field[1]) is int


def _ml_dtype(spec: str) -> np.dtype[Any]:
    import ml_dtypes
    import numpy as np

    name = spec[len(_ML_DTYPES) :]
    kind = getattr(ml_dtypes, name, None) if name in _TORCH else None
    if kind is None:
        raise NoPlainFormError(f"its dtype {spec} is not known")
    dtype: np.dtype[Any] = np.dtype(kind)
    return dtype


def _unit(state: tuple[Any, ...]) -> str:
    """The unit of dates, `[25s]`: (…, (metadata, (unit, count, divisor, events)))."""
    metadata = state[8] if len(state) > 8 else None
    if metadata is None:
        return ""
    facts = metadata[1] if isinstance(metadata, tuple) and len(metadata) == 2 else ()
    unit, count = facts[:2] if isinstance(facts, tuple) and len(facts) > 1 else (None, None)
    text = unit.decode("ascii", "replace") if isinstance(unit, bytes) else unit
    if not isinstance(text, str) or (not _UNIT.match(text) and text != "generic"):
        raise NoPlainFormError("its unit of time makes no sense")
    if type(count) is not int:
        raise NoPlainFormError("its unit of time makes no sense")
    return "" if text == "generic" else f"[{count}{text}]"


def _raw(data: Any) -> bytes:
    # Python 2 wrote bytes as strings, which are read as text wherever they could be text.
    if isinstance(data, str):
        return data.encode("utf-8")
    if not isinstance(data, (bytes, bytearray)):
        raise NoPlainFormError("its values are not bytes")
    return bytes(data)


def _checked(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, (tuple, list)):
        raise NoPlainFormError("its shape makes no sense")
    if any(type(extent) is not int or extent < 0 for extent in shape):
        raise NoPlainFormError("its shape makes no sense")
    return tuple(shape)


def _from_bytes(
    dtype: np.dtype[Any], shape: tuple[int, ...], raw: bytes, fortran: bool
) -> np.ndarray[Any, Any]:
    import numpy as np

    if dtype.hasobject:
        raise NoPlainFormError("its objects are not where they should be")
    if len(raw) != prod(shape) * dtype.itemsize:
        raise NoPlainFormError("its values are not as many bytes as its shape and dtype say")
    if not dtype.itemsize and 0 not in shape:
        raise NoPlainFormError("its elements have no bytes")
    if not raw:
        return np.zeros(shape, dtype)
    return np.frombuffer(raw, dtype).reshape(shape, order="F" if fortran else "C")


def _form(plainer: Plainer, array: np.ndarray[Any, Any]) -> Any:
    dtype = array.dtype
    if dtype.names is not None:
        columns: dict[str, Any] = {}
        for name in dtype.names:
            columns[name] = _form(plainer, array[name])
        return columns
    if dtype.name in _TORCH:
        return _number(array) if array.ndim == 0 else _tensor(plainer, array, dtype.name)
    if dtype.kind in "Mm":
        return array.astype("U").tolist()
    if dtype.kind == "U":
        return _text(array)
    if dtype.kind == "S":
        return array.tolist()
    if dtype.kind == "V":
        return _voids(array)
    raise NoPlainFormError(f"neither torch nor Python has numpy's {dtype.name}")


def _text(array: np.ndarray[Any, Any]) -> Any:
    """Texts, which numpy keeps as code points of four bytes: it crashes on some that are none."""
    import sys

    import numpy as np

    codes = np.ascontiguousarray(array).view(np.dtype("u4").newbyteorder(array.dtype.byteorder))
    if codes.size and int(codes.max()) > sys.maxunicode:
        raise NoPlainFormError("its text has characters that are none")
    return array.tolist()


def _voids(array: np.ndarray[Any, Any]) -> Any:
    """Bytes without a meaning, as they are; numpy's own S drops zeros at the end."""
    if array.ndim == 0:
        return array.tobytes()
    return [_voids(row) for row in array]


def _number(array: np.ndarray[Any, Any]) -> Any:
    number = array.item()
    # The scalars of ml_dtypes stay what they are.
    return number if isinstance(number, (bool, int, float, complex)) else float(number)


def _tensor(plainer: Plainer, array: np.ndarray[Any, Any], dtype: str) -> TensorValue:
    import sys

    import numpy as np

    fortran = array.ndim > 1 and array.flags.f_contiguous and not array.flags.c_contiguous
    if not fortran:
        array = np.ascontiguousarray(array)
    order = array.dtype.byteorder
    little = order == "<" or (order in "=|" and sys.byteorder == "little")
    if array.itemsize > 1 and little != (plainer.storages.byteorder == "little"):
        array = array.byteswap()
    data = array.tobytes("A")
    return plainer.storages.tensor(dtype, array.shape, data, fortran=fortran)


def _words(dtype: np.dtype[Any], shape: tuple[int, ...], subclass: str | None) -> str:
    name = dtype.name if dtype.names is None else "structured"
    return f"{subclass or 'numpy array'} {name} {list(shape)}"


def _object_array(plainer: Plainer, value: NumpyArray) -> Steps:
    """An array of Python objects: its values, plain, in nested lists."""
    if len(value.data) != prod(value.shape):
        raise NoPlainFormError("it has not as many values as its shape says")
    import numpy as np

    array = np.empty(len(value.data), object)
    for index, item in enumerate((yield from plainer.members(value.data))):
        array[index] = item
    plainer.note(f"numpy array object {list(value.shape)}", "list" if value.shape else "its value")
    # numpy pickles objects in C order, whatever the order in memory was.
    return array.reshape(value.shape).tolist()
