"""Where the bytes of a mended record come from, streamed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckpttool.errors import FormatError
from ckpttool.formats.container import DEFLATED, Record, cut_short
from ckpttool.mending.damaged import patched as patched_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ckpttool.formats.container import Container
    from ckpttool.formats.limits import ReaderLimits
    from ckpttool.io.reading import FileReader
    from ckpttool.mending.found import Found

    Pieces = Iterable[bytes | memoryview]

_ZEROS = bytes(1 << 16)


class Content(NamedTuple):
    """`size` bytes; `chunks()` gives them anew each time, a piece valid until the next."""

    size: int
    chunks: Callable[[], Pieces]

    def read(self) -> bytes:
        """All of it at once."""
        # Each piece is copied: the next one may be read into the same buffer.
        return b"".join([bytes(piece) for piece in self.chunks()])


def of_bytes(data: bytes) -> Content:
    """Bytes in memory."""
    return Content(len(data), lambda: (data,))


def of_span(reader: FileReader, start: int, length: int) -> Content:
    """A range of a file."""
    return Content(length, lambda: reader.chunks(start, length))


def of_record(container: Container, record: Record) -> Content:
    """A record of another file that is open."""
    return Content(record.size, lambda: container.chunks(record))


def content_of(reader: FileReader, found: Found, limits: ReaderLimits) -> Content:
    """The content of a record as it stands in the file. Reading raises FormatError if it is cut."""
    if found.method != DEFLATED:

        def stored() -> Pieces:
            if found.is_cut:
                raise cut_short(_record(found), found.stored, found.present)
            return reader.chunks(found.start, found.stored)

        return Content(found.size, stored)
    growth = max(limits.inflated_bytes, 16 * found.stored)

    def inflate() -> Pieces:
        from ckpttool.formats.inflate import inflated

        return inflated(reader.chunks(found.start, found.stored), _record(found), growth)

    return Content(found.size, inflate)


def patched(content: Content, offset: int, mask: bytes) -> Content:
    """The same with the bytes from `offset` on exclusive-ored with `mask`."""
    return Content(content.size, lambda: patched_chunks(content.chunks(), offset, mask))


def joined(*parts: Content) -> Content:
    """Several contents, one behind another."""

    def chunks() -> Iterator[bytes | memoryview]:
        for part in parts:
            yield from part.chunks()

    return Content(sum(part.size for part in parts), chunks)


def first(content: Content, size: int) -> Content:
    """Its first `size` bytes."""

    def chunks() -> Iterator[bytes | memoryview]:
        left = size
        for chunk in content.chunks():
            if left <= 0:
                return
            yield chunk[:left]
            left -= len(chunk)

    return Content(min(size, content.size), chunks)


def zeros(size: int) -> Content:
    """Nothing but zero bytes."""

    def chunks() -> Iterator[bytes | memoryview]:
        left = size
        while left > 0:
            yield _ZEROS if left >= len(_ZEROS) else _ZEROS[:left]
            left -= len(_ZEROS)

    return Content(size, chunks)


def checksum(content: Content) -> tuple[int, int]:
    """CRC-32 and number of the bytes that really come. Raises FormatError."""
    from ckpttool.io.checksum import crc32_function

    update, crc, size = crc32_function(), 0, 0
    for chunk in content.chunks():
        crc = update(chunk, crc)
        size += len(chunk)
    return crc, size


def require(content: Content, crc: int | None) -> Content:
    """The same, but what is read must have this size and checksum, else FormatError."""

    def chunks() -> Iterator[bytes | memoryview]:
        from ckpttool.io.checksum import crc32_function

        update, found, size = crc32_function(), 0, 0
        for chunk in content.chunks():
            found = update(chunk, found)
            size += len(chunk)
            yield chunk
        if size != content.size or (crc is not None and found != crc):
            raise FormatError("a record changed while it was being copied")

    return Content(content.size, chunks)


def _record(found: Found) -> Record:
    name = found.names[0].decode("utf-8", "backslashreplace") if found.names else "?"
    crc = found.crcs[0] if found.crcs else None
    return Record(name, found.size, found.stored, crc, found.method, 0, found.offset)
