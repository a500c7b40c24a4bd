"""The one element of a tensor that a byte belongs to: where it stands, and what value it has."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.formats.dtypes import BITS
from ckpttool.model.storages import count_and_reach

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckpttool.mending.damaged import DamagedRecord
    from ckpttool.model.tensor import TensorRef

# Strides can be such that many indices have to be tried; after so many it isn't worth it.
_MOST_TRIES = 10_000


class Element(NamedTuple):
    """An element of the tensor `name`, at `indices`: its bits in the record from bit `start` on."""

    name: str
    dtype: str
    indices: tuple[int, ...]
    start: int
    bits: int
    tensor: TensorRef

    @property
    def place(self) -> str:
        """Name and index as one writes them: `model.weight[3, 5]`."""
        numbers = ", ".join(map(str, self.indices))
        return f"{self.name}[{numbers}]" if self.indices else self.name


class Value(NamedTuple):
    """An element's value: a number, a bool, or the plain integer of its bits; and as text."""

    number: Any
    text: str


def elements_at(tensors: Iterable[TensorRef], record: DamagedRecord, bit: int) -> Iterator[Element]:
    """Every tensor's element that the record's bit `bit` belongs to, parts of tensors included."""
    for tensor in tensors:
        if tensor.value.parts:
            yield from elements_at(tensor.parts.values(), record, bit)
        if tensor.storage is None or record.name != (tensor.record or f"data/{tensor.storage}"):
            continue
        width = BITS.get(tensor.dtype, 0)
        if not width:
            continue
        number = bit // width
        index = index_of(number - tensor.offset, tensor.shape or (), tensor.stride or ())
        if index is not None:
            yield Element(tensor.name, tensor.dtype, index, number * width, width, tensor)


def index_of(
    position: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The index of the element that lies `position` elements behind a tensor's first.

    None if the tensor steps over it. Where several indices lead there, one of them.
    """
    if len(shape) != len(stride) or min(stride, default=0) < 0:
        return None
    if not 0 <= position < count_and_reach(shape, stride)[1]:
        return None
    moving = [axis for axis in range(len(shape)) if shape[axis] > 1 and stride[axis] > 0]
    moving.sort(key=lambda axis: -stride[axis])
    numbers = _solve(position, [(shape[axis], stride[axis]) for axis in moving])
    if numbers is None:
        return None
    index = [0] * len(shape)
    for axis, number in zip(moving, numbers, strict=True):
        index[axis] = number
    return tuple(index)


def _solve(position: int, axes: list[tuple[int, int]]) -> tuple[int, ...] | None:
    """Numbers below each axis's extent whose steps add up to `position`; largest stride first."""
    beyond = [0]  # what the axes behind each can reach together
    for extent, step in reversed(axes):
        beyond.append(beyond[-1] + (extent - 1) * step)
    beyond.reverse()
    todo: list[tuple[int, tuple[int, ...]]] = [(position, ())]
    for _ in range(_MOST_TRIES):
        if not todo:
            break
        left, numbers = todo.pop()
        if len(numbers) == len(axes):
            if left == 0:
                return numbers
            continue
        extent, step = axes[len(numbers)]
        most = min(left // step, extent - 1)
        least = max(0, -(-(left - beyond[len(numbers) + 1]) // step), most - _MOST_TRIES)
        # The largest on top: where nothing overlaps, no other fits.
        todo += [(left - number * step, (*numbers, number)) for number in range(least, most + 1)]
    return None


def read_value(content: bytes, element: Element, byteorder: str) -> Value:
    """The value that `content` has: the bytes from the element's first to its last."""
    shift = element.start % 8
    if element.bits < 8:
        number = content[0] >> shift & ((1 << element.bits) - 1)
        return Value(number, str(number))
    if element.dtype == "bool":
        return _bool(content[0])
    return _number(content, element, byteorder)


def change_in_words(before: Value, after: Value) -> str:
    """`3.1e+36 -> 0.0123, 2.5e+38 times smaller`; without the ratio where there is none."""
    words = f"{before.text} -> {after.text}"
    old, new = before.number, after.number
    if not isinstance(old, float) or not isinstance(new, float):
        return words
    if not isfinite(old) or not isfinite(new) or 0.0 in (old, new):
        return words
    if old == -new:
        return f"{words}, its sign turned"
    return words + _ratio(abs(old), abs(new))


def _ratio(old: float, new: float) -> str:
    large, small = max(old, new), min(old, new)
    ratio = large / small
    direction = "larger" if new > old else "smaller"
    if not isfinite(ratio):
        return f", more than 1e+308 times {direction}"
    if ratio >= 2:
        return f", {ratio:.2g} times {direction}"
    return f", {100 * (large - small) / old:.2g} % {direction}"


def _bool(byte: int) -> Value:
    if byte > 1:
        return Value(byte, f"{byte} (no bool)")
    return Value(bool(byte), str(bool(byte)))


def _number(content: bytes, element: Element, byteorder: str) -> Value:
    import numpy as np

    raw = np.frombuffer(content, np.uint8)
    complex_half = element.dtype == "complex32"
    try:
        kind = _numpy_kind("float16" if complex_half else element.dtype)
    except ValueError:
        return Value(int.from_bytes(content, "little"), f"0x{content.hex()}")
    if byteorder == "big":
        width = kind.itemsize // 2 if kind.kind == "c" else kind.itemsize
        raw = raw.view(f"u{width}").byteswap().view(np.uint8)
    items = raw.view(kind)
    if complex_half:
        return Value(complex(float(items[0]), float(items[1])), f"({items[0]}, {items[1]}j)")
    item = items[0]
    if kind.kind in "iu":
        return Value(int(item), str(item) + _dequantized(int(item), element))
    if kind.kind == "c":
        return Value(complex(item), str(item))
    return Value(float(item), str(item))


def _numpy_kind(dtype: str) -> Any:
    from ckpttool.model.tensor import numpy_dtype

    return numpy_dtype(dtype)


def _dequantized(number: int, element: Element) -> str:
    """What a quantized integer stands for, where one scale holds for the whole tensor."""
    facts = (element.tensor.value.extra or {}).get("quantizer")
    if element.tensor.layout != "quantized" or not isinstance(facts, dict):
        return ""
    scale, zero = facts.get("scale"), facts.get("zero_point")
    if isinstance(scale, float) and isinstance(zero, int):
        return f" (= {(number - zero) * scale:.6g})"
    return ""
