"""The elements of tensors as words of bits, in pieces: memory never grows with the tensor.

A tensor whose elements lie in one block, in whatever order, is streamed; of any other only the part
of its storage between its first and its last element is read, at most `_GATHER_BYTES` at a time.
Nothing is mapped: a file that is cut meanwhile is an error, not a SIGBUS.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckpttool.errors import FormatError

if TYPE_CHECKING:
    from ckpttool.formats.container import Container
    from ckpttool.model.tensor import TensorRef

_CHUNK_BYTES = 4 << 20
_GATHER_BYTES = 64 << 20

Dimension = tuple[int, int]
"""Extent and stride, both in elements."""


def words(container: Container, tensor: TensorRef, size: int, parts: int) -> Iterator[Any]:
    """Arrays of unsigned words of `size` bytes, `parts` to an element (2 for complex numbers).

    Each is valid until the next is asked for. All elements come, in no special order; one that is
    repeated by a stride of 0 comes once (see `repeats`). Raises FormatError where one is not there.
    """
    dimensions = _distinct(tensor)
    if any(extent == 0 for extent, _ in dimensions):
        return
    dimensions.sort(key=lambda item: -item[1])
    yield from _Source(container, tensor, size, parts).block(tensor.offset, dimensions)


def repeats(tensor: TensorRef) -> int:
    """How often each stored element stands in the tensor: more than once in an expanded one."""
    count = 1
    for extent, stride in zip(tensor.shape or (), tensor.stride or (), strict=True):
        if stride == 0:
            count *= extent
    return count


def _distinct(tensor: TensorRef) -> list[Dimension]:
    pairs = zip(tensor.shape or (), tensor.stride or (), strict=True)
    return [(extent, stride) for extent, stride in pairs if extent != 1 and stride != 0]


def _is_dense(dimensions: list[Dimension]) -> bool:
    """Whether the elements fill one block without a gap; largest stride first."""
    expected = 1
    for extent, stride in reversed(dimensions):
        if stride != expected:
            return False
        expected *= extent
    return True


def _reach(dimensions: list[Dimension]) -> int:
    """Elements from the first to the last, both counted."""
    return 1 + sum((extent - 1) * stride for extent, stride in dimensions)


class _Source:
    """Reads runs of one storage's elements."""

    def __init__(self, container: Container, tensor: TensorRef, size: int, parts: int) -> None:
        import numpy as np

        self.container = container
        self.record = container.record(tensor.record or "")
        self.span = container.span(self.record)
        self.parts = parts
        self.width = size * parts
        self.dtype = np.dtype(f"{'>' if container.byteorder == 'big' else '<'}u{size}")
        self._content: bytes | None = None

    def block(self, start: int, dimensions: list[Dimension]) -> Iterator[Any]:
        """The elements of a block that begins at element `start`."""
        reach = _reach(dimensions)
        if _is_dense(dimensions):
            yield from self.run(start, reach)
        elif reach * self.width <= _GATHER_BYTES or len(dimensions) == 1:
            yield from self.gather(start, dimensions)
        else:
            (extent, stride), rest = dimensions[0], dimensions[1:]
            for index in range(extent):
                yield from self.block(start + index * stride, rest)

    def run(self, start: int, count: int) -> Iterator[Any]:
        """`count` neighbouring elements, in pieces."""
        import numpy as np

        offset, length = start * self.width, count * self.width
        if offset + length > self.record.size:
            raise FormatError("a tensor reaches past the end of its storage")
        if self.span is None:
            yield np.frombuffer(self.content()[offset : offset + length], self.dtype)
            return
        begin = self.span[0] + offset
        for chunk in self.container.reader.chunks(begin, length, chunk_bytes=_CHUNK_BYTES):
            yield np.frombuffer(chunk[: len(chunk) // self.width * self.width], self.dtype)

    def gather(self, start: int, dimensions: list[Dimension]) -> Iterator[Any]:
        """Elements with gaps between them, or such that overlap."""
        import numpy as np

        outer, inner = dimensions[0], dimensions[1:]
        step = max(1, _GATHER_BYTES // max(1, outer[1] * self.width))
        for index in range(0, outer[0], step):
            part = [(min(step, outer[0] - index), outer[1]), *inner]
            first = start + index * outer[1]
            flat = np.concatenate([piece.copy() for piece in self.run(first, _reach(part))])
            shape = [extent for extent, _ in part] + [self.parts]
            strides = [stride * self.width for _, stride in part] + [self.dtype.itemsize]
            yield np.lib.stride_tricks.as_strided(flat, shape, strides, writeable=False)

    def content(self) -> bytes:
        """The whole storage of a compressed record."""
        if self._content is None:
            self._content = self.container.read(self.record)
        return self._content
