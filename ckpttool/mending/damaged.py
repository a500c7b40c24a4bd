"""A record whose content is not what its checksum says: what each way of mending starts from."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckpttool.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ckpttool.formats.container import Container, Record

_CHUNK_BYTES = 1 << 20


class DamagedRecord(NamedTuple):
    """`size` bytes that should have the CRC-32 `recorded` and have `computed`.

    `read(offset, length)` gives bytes of the content as it is now, fewer where they are gone.
    `computed` is None where the content isn't whole, so that only a donor can mend it. `byteorder`
    is that of the file's numbers.
    """

    name: str
    size: int
    recorded: int
    computed: int | None
    read: Callable[[int, int], bytes]
    byteorder: str = "little"

    @property
    def difference(self) -> int:
        """Recorded and computed checksum, exclusive-or; 0 where the content isn't whole."""
        return 0 if self.computed is None else self.recorded ^ self.computed

    def chunks(self) -> Iterator[bytes]:
        """The content as it is now, piece by piece; ends early where it is cut."""
        for offset in range(0, self.size, _CHUNK_BYTES):
            wanted = min(_CHUNK_BYTES, self.size - offset)
            chunk = self.read(offset, wanted)
            yield chunk
            if len(chunk) < wanted:
                return


def damaged_record(
    container: Container, record: Record, computed: int | None = None
) -> DamagedRecord:
    """A container's record as damaged. `computed` is its checksum now; found here if not given.

    The content of a compressed record counts as gone: one wrong bit spoils all that follows. Raises
    FormatError for a record without a checksum, UnreadableError if the system can't read the file.
    """
    if record.crc is None:
        raise FormatError(f"record {record.name!r} has no checksum", record=record.name)
    span = _span(container, record)
    if span is None or span[1] < record.size:
        computed = None
    elif computed is None:
        computed = container.crc32(record)
    start, present = span or (0, 0)

    def read(offset: int, length: int) -> bytes:
        return container.reader.read(start + offset, max(0, min(length, present - offset)))

    order = container.byteorder
    return DamagedRecord(record.name, record.size, record.crc, computed, read, order)


def patched(
    chunks: Iterable[bytes | memoryview], offset: int, mask: bytes
) -> Iterator[bytes | memoryview]:
    """The chunks with `mask` exclusive-ored to the bytes from `offset` on."""
    position, stop = 0, offset + len(mask)
    for chunk in chunks:
        low, high = max(offset, position), min(stop, position + len(chunk))
        if low < high:
            changed = bytearray(chunk)
            for index in range(low, high):
                changed[index - position] ^= mask[index - offset]
            yield bytes(changed)
        else:
            yield chunk
        position += len(chunk)


def _span(container: Container, record: Record) -> tuple[int, int] | None:
    """Where the content lies and how much of it is there; None if compressed or not found."""
    from ckpttool.formats.container import STORED
    from ckpttool.formats.torch_zip import ZipContainer

    try:
        return container.span(record)
    except FormatError:
        if record.method != STORED or not isinstance(container, ZipContainer):
            return None
    try:
        start = container.content_offset(record)
    except FormatError:
        return None  # no header leads to it
    return start, max(0, min(record.size, container.reader.size - start))
