"""One stride over the opcodes that `torch.save` writes for an ordinary tensor.

A checkpoint is little else than tens of thousands of calls of `torch._utils._rebuild_tensor_v2`, each spelt with
the same 33 opcodes. Where a stretch of the stream has that very spelling, one regular expression reads it at
once; the effect on memo and stack is the same as opcode by opcode, and any other spelling is left to the
general loop. The pattern fixes the types of all arguments, so that nothing has to be checked again.
"""

from __future__ import annotations

import re
from struct import Struct
from typing import Any

from ckpttool.formats.dtypes import STORAGE_DTYPES
from ckpttool.formats.values import GlobalRef, OrderedMap, StorageRef, TensorValue

_GET = rb"(h.|j....)"
_PUT = rb"r(....)"
_INT = rb"(?:K.|M..|J...[\0-\x7f])"
_EXTENT = rb"(\)|(?:" + _INT + rb"{1,3}[\x85-\x87]|\(" + _INT + rb"{4,16}t)" + _PUT + rb")"

_TENSOR = re.compile(
    rb"\("  # the second of two MARKs; the first one is read already
    + _GET  # 'storage'
    + _GET  # the storage class
    + rb"X(.)\0\0\0([0-9]{1,18})"  # the key
    + _PUT
    + _GET  # the device
    + rb"("
    + _INT  # how many elements
    + rb")t"
    + _PUT
    + rb"Q("
    + _INT  # offset
    + rb")"
    + _EXTENT  # shape
    + _EXTENT  # stride
    + rb"([\x88\x89])"  # requires_grad
    + _GET  # collections.OrderedDict
    + rb"\)R"
    + _PUT
    + rb"t"
    + _PUT
    + rb"R"
    + _PUT,
    re.DOTALL,
).match

_U4 = Struct("<I").unpack_from
_U5 = Struct("<5I").unpack
_ONE_INT = re.compile(_INT, re.DOTALL).findall


class TensorRun:
    """Reads tensors in one stride each; keeps what it has decoded, since shapes repeat."""

    __slots__ = ("_data", "_extents", "_limit", "_memo", "_numbers")

    def __init__(self, data: bytes, memo: dict[int, Any], memo_limit: int) -> None:
        self._data = data
        self._memo = memo
        self._limit = memo_limit
        self._extents: dict[bytes, tuple[int, ...]] = {}
        self._numbers: dict[bytes, int] = {}

    def read(self, target: GlobalRef, pos: int) -> tuple[TensorValue, int] | None:
        """The tensor whose call begins with the MARK before `pos`, and the position after it.

        None, with nothing changed, where the stretch is spelt in another way.
        """
        match = _TENSOR(self._data, pos)
        if match is None:
            return None
        tag, kind, length, key, put_key, device, numel, *others = match.groups()
        put_pid, offset, shape, put_shape, stride, put_stride, grad, hooks, *puts = others
        gets = [_index(tag), _index(kind), _index(device), _index(hooks)]
        at_key, at_pid, at_hooks, at_args, at_tensor = _U5(put_key + put_pid + b"".join(puts))
        # Ever rising places, above all that is read: then the order of reading and writing is free.
        if not (max(gets) < at_key < at_pid < at_hooks < at_args < at_tensor <= self._limit):
            return None
        memo = self._memo
        word, storage_class, where, ordered = map(memo.get, gets)
        if (
            word != "storage"
            or type(storage_class) is not GlobalRef
            or storage_class.name not in STORAGE_DTYPES
            or type(where) is not str
            or type(ordered) is not GlobalRef
            or ordered.path != "collections.OrderedDict"
            or len(key) != length[0]
        ):
            return None
        start, extent, strides = self._number(offset), self._extent(shape), self._extent(stride)
        if len(extent) != len(strides):
            return None
        name, count, needs_grad = key.decode("ascii"), self._number(numel), grad == b"\x88"
        storage = StorageRef(STORAGE_DTYPES[storage_class.name], name, where, count)
        tensor = TensorValue(storage, start, extent, strides, needs_grad, storage.dtype)
        if put_shape is not None:
            memo[_U4(put_shape)[0]] = extent
        if put_stride is not None:
            memo[_U4(put_stride)[0]] = strides
        memo[at_key] = name
        memo[at_pid] = (word, storage_class, name, where, count)
        memo[at_hooks] = no_hooks = OrderedMap()
        memo[at_args] = (storage, start, extent, strides, needs_grad, no_hooks)
        memo[at_tensor] = tensor
        return tensor, match.end()

    def _number(self, raw: bytes) -> int:
        """The value of a BININT1, BININT2 or BININT."""
        number = self._numbers.get(raw)
        if number is None:
            number = self._numbers[raw] = int.from_bytes(raw[1:], "little")
        return number

    def _extent(self, raw: bytes) -> tuple[int, ...]:
        """The tuple that these opcodes, the last of them its put, leave on the stack."""
        key = raw[:-5]
        extent = self._extents.get(key)
        if extent is None:
            extent = self._extents[key] = _decode_extent(key)
        return extent


def _index(raw: bytes) -> int:
    """The memo index in a BINGET or LONG_BINGET."""
    return raw[1] if len(raw) == 2 else int(_U4(raw, 1)[0])


def _decode_extent(raw: bytes) -> tuple[int, ...]:
    """`(`? BININT1/BININT2/BININT … TUPLE*: the integers."""
    return tuple(int.from_bytes(one[1:], "little") for one in _ONE_INT(raw.lstrip(b"(")))
