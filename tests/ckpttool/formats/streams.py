"""Pickle streams written out opcode by opcode, and inert values made comparable.

The spelling of tensors is that of torch 2.13, taken from its files with `pickletools.dis`.
"""

from __future__ import annotations

import struct
from typing import Any

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

PROTO_2 = b"\x80\x02"
STOP = b"."


def name(path: str) -> bytes:
    """GLOBAL of a dotted path."""
    module, _, attribute = path.rpartition(".")
    return f"c{module}\n{attribute}\n".encode()


def text(value: str) -> bytes:
    """BINUNICODE."""
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def integer(value: int) -> bytes:
    """BININT1, BININT2 or BININT, as the C pickler chooses; LONG1 beyond."""
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if 0 <= value < 65536:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def put(index: int) -> bytes:
    """BINPUT or LONG_BINPUT."""
    return b"q" + bytes([index]) if index < 256 else b"r" + struct.pack("<I", index)


def get(index: int) -> bytes:
    """BINGET or LONG_BINGET."""
    return b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index)


def call(path: str, *arguments: bytes) -> bytes:
    """GLOBAL, its arguments as a tuple, REDUCE."""
    return name(path) + b"(" + b"".join(arguments) + b"tR"


def listed(*values: bytes) -> bytes:
    """A list of what the pieces push."""
    return b"](" + b"".join(values) + b"e"


def storage(
    key: str = "0", numel: int = 6, kind: str = "FloatStorage", device: str = "cpu"
) -> bytes:
    """A persistent id of torch's, and BINPERSID."""
    parts = text("storage") + name(f"torch.{kind}") + text(key) + text(device)
    return b"(" + parts + integer(numel) + b"tQ"


def extent(sizes: tuple[int, ...]) -> bytes:
    """A tuple of integers."""
    body = b"".join(map(integer, sizes))
    if len(sizes) > 3:
        return b"(" + body + b"t"
    return body + (b")", b"\x85", b"\x86", b"\x87")[len(sizes)]


def tensor(
    source: bytes, offset: int = 0, shape: tuple[int, ...] = (6,), stride: tuple[int, ...] = (1,)
) -> bytes:
    """`torch._utils._rebuild_tensor_v2(storage, offset, shape, stride, False, OrderedDict())`."""
    hooks = call("collections.OrderedDict")
    arguments = (integer(offset), extent(shape), extent(stride), b"\x89", hooks)
    return call("torch._utils._rebuild_tensor_v2", source, *arguments)


def canonical(root: Any) -> list[Any]:
    """A value as a flat list in which shared and cyclic objects are numbered: fit for `==`.

    Tuples and leaves count by value; whatever can be changed counts by identity, too.
    """
    numbers: dict[int, int] = {}
    flat: list[Any] = []
    todo = [root]
    while todo:
        value = todo.pop()
        kind = type(value)
        parts = _parts(value)
        if parts is None:
            flat.append((kind.__name__, repr(value)))
            continue
        if kind not in (tuple, frozenset):
            if id(value) in numbers:
                flat.append(("seen", numbers[id(value)]))
                continue
            numbers[id(value)] = len(numbers)
        flat.append((kind.__name__, len(parts)))
        todo.extend(reversed(parts))
    return flat


def _parts(value: Any) -> list[Any] | None:
    """What a value is made of, in a fixed order; None for a leaf."""
    if isinstance(value, OrderedMap):
        return [item for pair in value.items() for item in pair] + [value.attributes or None]
    if isinstance(value, dict):
        return [item for pair in value.items() for item in pair]
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, (set, frozenset)):
        # Not by `repr` alone: equal sets may list what is in them in another order.
        return sorted(value, key=lambda part: repr(canonical(part)))
    if isinstance(value, GlobalRef):
        return [value.path]
    if isinstance(value, (Opaque, StorageRef, TensorValue, NumpyArray, NumpyDtype, NumpyScalar)):
        return [getattr(value, slot) for slot in sorted(type(value).__slots__)]
    return None
