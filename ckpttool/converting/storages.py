"""The bytes behind tensors: storages of an open file, and new ones made of arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckpttool.errors import FormatError
from ckpttool.formats.dtypes import STORAGE_DTYPES, byte_count
from ckpttool.formats.values import StorageRef, TensorValue
from ckpttool.writing.checkpoint import StorageSource

if TYPE_CHECKING:
    from collections.abc import Collection

    from ckpttool.formats.container import Container

Chunk = bytes | memoryview

# Storages of all other dtypes are untyped: they count bytes.
_TYPED = frozenset(STORAGE_DTYPES.values())


class NewStorages:
    """Storages that are made of arrays. `added` maps their keys to their bytes.

    `taken` are the keys that the file has already. `byteorder` is the one that the new file will
    have, `little` or `big`: bytes that are added must be in it.
    """

    def __init__(self, taken: Collection[str] = (), byteorder: str = "little") -> None:
        self.added: dict[str, bytes] = {}
        self.byteorder = byteorder
        self._taken = taken
        self._next = len(taken)

    def tensor(
        self, dtype: str, shape: tuple[int, ...], data: bytes, *, fortran: bool = False
    ) -> TensorValue:
        """A tensor over a new storage of `data`, whose elements lie in C or in Fortran order."""
        numel = len(data) * 8 // (byte_count(dtype, 1) * 8)
        if dtype in _TYPED:
            storage = StorageRef(dtype, self._key(), "cpu", numel)
        else:
            storage = StorageRef("uint8", self._key(), "cpu", len(data))
        self.added[storage.key] = data
        stride = contiguous_stride(shape[::-1])[::-1] if fortran else contiguous_stride(shape)
        return TensorValue(storage, 0, shape, stride, False, dtype)

    def _key(self) -> str:
        while str(self._next) in self._taken:
            self._next += 1
        self._next += 1
        return str(self._next - 1)


class StorageBytes:
    """Reads storages by key: records of `container`, or bytes in memory (`added`)."""

    def __init__(self, container: Container | None, added: dict[str, bytes] | None = None) -> None:
        self._container = container
        self._added = added or {}

    def size(self, key: str) -> int:
        """Bytes of the storage. Raises FormatError if there is none."""
        if key in self._added:
            return len(self._added[key])
        container = self._need()
        return container.record(container.storage_record(key)).size

    def is_plain(self, key: str) -> bool:
        """Whether any part of it can be read by itself: compressed records are read from their
        beginning.
        """
        return key in self._added or self._span(key) is not None

    def chunks(self, key: str, start: int = 0, length: int | None = None) -> Iterator[Chunk]:
        """`length` bytes from `start` on, in pieces; each is valid until the next is asked for.

        Raises FormatError where the file has fewer.
        """
        length = self.size(key) - start if length is None else length
        done = 0
        for chunk in self._pieces(key, start, length):
            done += len(chunk)
            yield chunk
        if done != length:
            raise FormatError(f"storage {key!r} ends after {start + done:,} bytes")

    def source(
        self, key: str, new_key: str, start: int = 0, length: int | None = None
    ) -> StorageSource:
        """The same bytes for a writer, under the key `new_key`."""
        length = self.size(key) - start if length is None else length
        return StorageSource(new_key, length, lambda: self.chunks(key, start, length))

    def _pieces(self, key: str, start: int, length: int) -> Iterator[Chunk]:
        if key in self._added:
            yield memoryview(self._added[key])[start : start + length]
            return
        container = self._need()
        span = self._span(key)
        if span is not None:
            # What the container declares ends the storage, whatever follows it in the file.
            yield from container.reader.chunks(span[0] + start, min(length, span[1] - start))
            return
        for chunk in container.chunks(container.storage_record(key)):
            piece = memoryview(chunk)[start : start + length]
            start = max(0, start - len(chunk))
            length -= len(piece)
            if piece:
                yield piece
            if not length:
                return

    def _span(self, key: str) -> tuple[int, int] | None:
        container = self._need()
        return container.span(container.storage_record(key))

    def _need(self) -> Container:
        if self._container is None:
            raise FormatError("the file has no storages")
        return self._container


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in elements, that torch gives to a contiguous tensor of this shape."""
    strides = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))
