"""Small questions to inert values: what is it, which number is it, how many bytes does it hold."""

from __future__ import annotations

from typing import Any

from ckpttool.formats.dtypes import storage_byte_count
from ckpttool.formats.values import (
    GlobalRef,
    NumpyArray,
    NumpyScalar,
    Opaque,
    StorageRef,
    TensorValue,
)

_WORDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (type(None), "None"),
    (bool, "a truth value"),
    (int, "an integer"),
    (float, "a floating-point number"),
    (str, "text"),
    ((bytes, bytearray), "bytes"),
    (dict, "a dictionary"),
    (list, "a list"),
    (tuple, "a tuple"),
    (TensorValue, "a tensor"),
    (StorageRef, "a storage"),
    (NumpyArray, "a numpy array"),
    (NumpyScalar, "a numpy number"),
)


_BEYOND = 1 << 63


def what(value: Any) -> str:
    """What `value` is, in words for a sentence: `"a list"`, `"an object of torch.nn.Linear"`."""
    if isinstance(value, int) and not -_BEYOND < value < _BEYOND:
        return f"an integer of {value.bit_length()} bits"
    for kind, words in _WORDS:
        if isinstance(value, kind):
            return words
    if isinstance(value, Opaque):
        return f"an object of {value.path}"
    if isinstance(value, GlobalRef):
        return f"the name {value.path}"
    return f"a {type(value).__name__}"


def integer(value: Any) -> int | None:
    """The integer that `value` is, a numpy one included, or None.

    True and False are no integers. One beyond 64 bits is nobody's counter, and costly to print.
    """
    if isinstance(value, NumpyScalar):
        value = value.value
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if -_BEYOND < value < _BEYOND else None


def key_text(key: Any) -> str:
    """A dictionary's key as part of a dotted name, at most 80 characters long."""
    if isinstance(key, str):
        return key[:80]
    number = integer(key)
    return f"({what(key)})" if number is None else str(number)


def is_floating(tensor: TensorValue) -> bool:
    """Whether the tensor's dtype is a real floating-point one."""
    return tensor.dtype.startswith(("float", "bfloat"))


def state_tensors(state: Any) -> dict[str, TensorValue]:
    """The tensors directly in a state dict, by name; other entries are left out."""
    if not isinstance(state, dict):
        return {}
    return {
        name: value
        for name, value in state.items()
        if isinstance(name, str) and isinstance(value, TensorValue)
    }


def stored_bytes(value: Any) -> int:
    """Bytes of all storages that `value` refers to at any depth, each counted once."""
    sizes: dict[str, int] = {}
    seen: set[int] = set()
    todo = [value]
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        if isinstance(item, TensorValue):
            if item.storage is not None:
                storage = item.storage
                sizes[storage.key] = storage_byte_count(storage.dtype, storage.numel)
            children: Any = (item.parts or {}).values()
        elif isinstance(item, dict):
            children = item.values()
        elif isinstance(item, (list, tuple)):
            children = item
        else:
            continue
        seen.add(id(item))
        todo.extend(children)
    return sum(sizes.values())
