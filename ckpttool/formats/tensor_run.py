"""One stride over the opcodes that `torch.save` writes for an ordinary tensor.

A checkpoint is little else than tens of thousands of calls of `torch._utils._rebuild_tensor_v2`,
each spelt with the same 33 opcodes. Where a stretch of the stream has that very spelling, one
regular expression reads it at once; the effect on memo and stack is the same as opcode by opcode,
and any other spelling is left to the general loop. The pattern fixes the types of all arguments, so
that nothing has to be checked again.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from struct import Struct
from typing import Any, NamedTuple

from ckpttool.formats.dtypes import STORAGE_DTYPES
from ckpttool.formats.values import GlobalRef, OrderedMap, StorageRef, TensorValue

_GET = rb"(h.|j....)"
_PUT = rb"r(....)"
_INT = rb"(?:K.|M..|J...[\0-\x7f])"
# Each TUPLE opcode takes as many as stand before it, no more and no fewer.
_FEW = _INT + rb"(?:\x85|" + _INT + rb"(?:\x86|" + _INT + rb"\x87))"
_EXTENT = rb"(\)|(?:" + _FEW + rb"|\(" + _INT + rb"{4,16}t)" + _PUT + rb")"

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
_U7 = Struct("<7I").unpack
_ONE_INT = re.compile(_INT, re.DOTALL).findall


class Memo(dict[int, Any]):
    """A pickle's memo. What a `TensorRun` leaves out of it is made up for when it is asked for.

    Of the seven things that the spelling of a tensor memoizes hardly one is ever used again by what
    torch writes (the key of a storage that two tensors share); making them costs more than reading
    the tensor. `runs` holds the tensors, in the order of their entries, with the class of their
    storage, and `firsts` the index of the first entry that belongs to each.
    """

    __slots__ = ("closed", "firsts", "runs")

    def __init__(self) -> None:
        super().__init__()
        self.closed = False
        self.firsts: list[int] = []
        self.runs: list[tuple[TensorValue, GlobalRef]] = []

    def __missing__(self, index: int) -> Any:
        """The entry at `index` after all, or KeyError."""
        place = bisect_right(self.firsts, index) - 1
        if place >= 0:
            self._make_up(place)
        if index in self:
            return self[index]
        raise KeyError(index)

    def close(self) -> None:
        """Put everything in its place, and leave nothing out from now on.

        For opcodes that count the entries, or set them in an order of their own.
        """
        self.closed = True
        for place in range(len(self.runs)):
            self._make_up(place)
        self.firsts, self.runs = [], []

    def _make_up(self, place: int) -> None:
        for index, value in enumerate(_left_out(*self.runs[place]), self.firsts[place]):
            self.setdefault(index, value)


def _left_out(tensor: TensorValue, storage_class: GlobalRef) -> list[Any]:
    """In their order: key, persistent id, shape and stride, hooks, arguments, the tensor."""
    storage, hooks = tensor.storage, OrderedMap()
    if storage is None:
        return []
    pid = ("storage", storage_class, storage.key, storage.device, storage.numel)
    # An empty tuple has an opcode of its own and is not memoized.
    extents = [tensor.shape, tensor.stride] if tensor.shape else []
    extent = (tensor.offset, tensor.shape, tensor.stride, tensor.requires_grad)
    return [storage.key, pid, *extents, hooks, (storage, *extent, hooks), tensor]


class Head(NamedTuple):
    """What the four memo entries say that the spelling of a tensor refers to.

    `highest` is the highest place among them.
    """

    highest: int
    storage_class: GlobalRef
    dtype: str
    device: str


class _Numbers(dict[bytes, int]):
    """Values of BININT1, BININT2 and BININT by their bytes, worked out when first asked for."""

    def __missing__(self, raw: bytes) -> int:
        number = self[raw] = int.from_bytes(raw[1:], "little")
        return number


class _Extents(dict[bytes, tuple[int, ...]]):
    """The tuples that runs of such opcodes leave on the stack, by their bytes without the put."""

    def __missing__(self, raw: bytes) -> tuple[int, ...]:
        ints = _ONE_INT(raw, raw[:1] == b"(")
        extent = self[raw] = tuple(int.from_bytes(one[1:], "little") for one in ints)
        return extent


class TensorRun:
    """Reads tensors in one stride each; keeps what it has decoded: heads and shapes repeat."""

    __slots__ = ("_data", "_extents", "_heads", "_limit", "_memo", "_numbers")

    def __init__(self, data: bytes, memo: Memo, memo_limit: int) -> None:
        self._data = data
        self._memo = memo
        self._limit = memo_limit
        self._extents = _Extents()
        self._heads: dict[tuple[bytes, ...], Head | None] = {}
        self._numbers = _Numbers()

    def forget_memo(self) -> None:
        """To be called when an entry of the memo may have changed that was there already."""
        self._heads.clear()

    def read(self, pos: int, highest: int) -> tuple[TensorValue, int, int] | None:
        """The tensor whose call begins with the MARK before `pos`, and the position after it.

        `highest` is the highest memo index so far, and what comes last in the result. None, with
        nothing changed, where the stretch is spelt in another way.
        """
        match = _TENSOR(self._data, pos)
        if match is None:
            return None
        length, key, numel, offset, shape, stride, grad = match.group(3, 4, 7, 9, 10, 12, 14)
        extent, strides = self._extents[shape[:-5]], self._extents[stride[:-5]]
        if len(extent) != len(strides) or len(key) != length[0]:
            return None
        if extent:
            puts = _U7(b"".join(match.group(5, 8, 11, 13, 16, 17, 18)))
        else:
            puts = _U5(b"".join(match.group(5, 8, 16, 17, 18)))
        first, last = puts[0], puts[-1]
        names = match.group(1, 2, 6, 15)
        head = self._heads[names] if names in self._heads else self._look_up(names)
        # New places one after the other, above all that are taken or read: so nothing is
        # overwritten, and the order of reading and writing makes no difference.
        if (
            head is None
            or last - first != len(puts) - 1
            or puts != tuple(range(first, first + len(puts)))
            or first <= highest
            or first <= head.highest
            or last > self._limit
        ):
            return None
        name = key.decode("ascii")
        storage = StorageRef(head.dtype, name, head.device, self._numbers[numel])
        start, needs_grad = self._numbers[offset], grad == b"\x88"
        tensor = TensorValue(storage, start, extent, strides, needs_grad, head.dtype)
        self._memo.firsts.append(first)
        self._memo.runs.append((tensor, head.storage_class))
        return tensor, match.end(), last

    def _look_up(self, names: tuple[bytes, ...]) -> Head | None:
        """The head that these four BINGETs stand for, or None if it is not a tensor's."""
        places = [raw[1] if len(raw) == 2 else int(_U4(raw, 1)[0]) for raw in names]
        word, storage_class, device, hooks = (self._memo.get(place) for place in places)
        head = None
        if (
            word == "storage"
            and type(storage_class) is GlobalRef
            and storage_class.name in STORAGE_DTYPES
            and type(device) is str
            and type(hooks) is GlobalRef
            and hooks.path == "collections.OrderedDict"
        ):
            dtype = STORAGE_DTYPES[storage_class.name]
            head = Head(max(places), storage_class, dtype, device)
        self._heads[names] = head
        return head
