"""The zip container as torch's own writer lays it out, byte for byte.

Source: caffe2/serialize/inline_container.cc (`PyTorchStreamWriter`) and miniz 3.0.2, of which it
uses `mz_zip_writer_add_mem_ex_v2` with zip64 switched on; field by field after APPNOTE.TXT 6.3.10.
Records are stored, never compressed; with version 0, flags 0x0808 (UTF-8 name, sizes in a data
descriptor behind the content), no time, and an extra field `FB` full of `Z` that moves the content
to a multiple of the alignment. An empty record has no descriptor. Sizes and offsets from 0xFFFFFFFF
on are in a zip64 extra field, and then the descriptor has 64-bit sizes. Zip64 end record and
locator are always there.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, BinaryIO

from ckpttool.errors import FormatError
from ckpttool.io.checksum import crc32_function

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# signature, needed, flags, method, time, date, crc, stored, size, name length, extra length
_LOCAL = Struct("<4sHHHHHIIIHH")
# signature, made by, needed, flags, method, time, date, crc, stored, size, name length, extra
# length, comment length, disk, internal attributes, external attributes, header offset
_CENTRAL = Struct("<4sHHHHHHIIIHHHHHII")
_DESCRIPTOR_32 = Struct("<4sIII")
_DESCRIPTOR_64 = Struct("<4sIQQ")
# signature, record size - 12, made by, needed, disk, directory's disk, entries here, entries,
# directory size, directory offset
_ZIP64_END = Struct("<4sQHHIIQQQQ")
_ZIP64_LOCATOR = Struct("<4sIQI")
_END = Struct("<4sHHHHIIH")

_UTF8 = 0x0800
_STREAMED = 0x0008
_MADE_BY_UNIX_3_0 = 0x031E
_ZIP64_NEEDED = 45
_MAX_16 = 0xFFFF
_MAX_32 = 0xFFFFFFFF
_MOST_ALIGNMENT = 1 << 15  # the padding's length has 16 bits, and other fields share its field
# Small enough to be in the processor's cache still when it is written after the checksum.
_PIECE_BYTES = 1 << 20


class TorchZipWriter:
    """Lays records out byte for byte as `torch.save` (2.x) does: headers, padding, directory.

    `file` takes all bytes that it is given (a buffered file does, a bare descriptor need not). It
    is written from where it stands, front to back, and never closed; offsets count from there.
    `root` is the folder that all records lie in, without its slash. The content of each record
    begins at a multiple of `alignment`, a power of two. `checksums` false leaves them out (zero),
    as `torch.serialization.set_crc32_options(False)` does.
    """

    def __init__(
        self, file: BinaryIO, root: str = "archive", *, alignment: int = 64, checksums: bool = True
    ) -> None:
        if not 1 <= alignment <= _MOST_ALIGNMENT or alignment & (alignment - 1):
            raise ValueError(f"an alignment of {alignment} is no power of two up to 32,768")
        self._file = file
        self._root = f"{root}/"
        self._alignment = alignment
        self._checksums = checksums
        self._position = 0
        self._pending = b""  # the descriptor of the last record; goes out with the next header
        self._records: dict[str, tuple[int, int]] = {}
        self._directory: list[bytes] = []
        self._finished = False

    @property
    def position(self) -> int:
        """Bytes written so far."""
        return self._position + len(self._pending)

    @property
    def records(self) -> list[tuple[str, int, int]]:
        """(name below the root, size, CRC-32) of each record so far, in the order written."""
        return [(name, size, crc) for name, (size, crc) in self._records.items()]

    def content_offset(self, name: str, size: int) -> int:
        """Where the content of a record added now would begin."""
        full = self._full_name(name)
        return self.position + _LOCAL.size + len(full) + len(self._extra(full, size))

    def add(
        self,
        name: str,
        content: bytes | bytearray | memoryview | Iterable[bytes | memoryview],
        size: int | None = None,
    ) -> int:
        """Writes a record, `name` below the root; gives the CRC-32 of its content.

        `content` is a buffer, or its pieces one after the other, each of which is used up before
        the next is asked for; then `size` says how many bytes they have together. Raises
        FormatError where they have another number; the file is spoiled then. Raises ValueError
        for a name that is taken, or that zip cannot hold.
        """
        pieces: Iterable[bytes | memoryview]
        if isinstance(content, (bytes, bytearray, memoryview)):
            view = memoryview(content)
            view = view.cast("B") if view.nbytes else memoryview(b"")
            size, pieces = len(view), _slices(view)
        elif size is None:
            raise ValueError("the size of a record in pieces must be said beforehand")
        else:
            pieces = content
        if name in self._records or self._finished:
            raise ValueError(f"record {name!r} is there already, or the file is finished")
        return self._write_record(name, pieces, size)

    def skip(self, name: str, size: int) -> None:
        """Makes room for a record of `size` bytes and moves past it, so that it stays a hole.

        As `torch.save` under `skip_data` does; its checksum is that of nothing, zero. The file must
        be one that can seek.
        """
        full, offset, extra = self._begin(name, size)
        self._file.seek(size, 1)
        self._position += size
        self._end(name, full, size, offset, extra, 0)

    def finish(self) -> None:
        """Writes the directory and the end records. The file stays open."""
        if self._finished:
            return
        self._finished = True
        directory = b"".join(self._directory)
        start, count, size = self.position, len(self._directory), len(directory)
        end = start + size
        few = min(count, _MAX_16)
        self._write(
            self._pending
            + directory
            + _ZIP64_END.pack(
                *(b"PK\x06\x06", _ZIP64_END.size - 12, _MADE_BY_UNIX_3_0, _ZIP64_NEEDED, 0, 0),
                *(count, count, size, start),
            )
            + _ZIP64_LOCATOR.pack(b"PK\x06\x07", 0, end, 1)
            + _END.pack(b"PK\x05\x06", 0, 0, few, few, min(size, _MAX_32), min(start, _MAX_32), 0)
        )
        self._pending = b""

    def _write_record(self, name: str, pieces: Iterable[bytes | memoryview], size: int) -> int:
        full, offset, extra = self._begin(name, size)
        update, write, crc, written = crc32_function(), self._file.write, 0, 0
        for piece in pieces:
            if self._checksums:
                crc = update(piece, crc)
            write(piece)
            written += len(piece)
        self._position += written
        if written != size:
            words = f"record {name!r} has {written:,} bytes, not the {size:,} announced"
            raise FormatError(words, record=name)
        self._end(name, full, size, offset, extra, crc)
        return crc

    def _begin(self, name: str, size: int) -> tuple[bytes, int, bytes]:
        """Writes the local header; gives the full name, its offset and its zip64 field."""
        full, offset = self._full_name(name), self.position
        extra = self._extra(full, size)
        flags = _UTF8 | _STREAMED if size else _UTF8
        sizes = (0, 0, 0, len(full), len(extra))
        header = _LOCAL.pack(b"PK\x03\x04", 0, flags, 0, 0, 0, *sizes)
        self._write(self._pending + header + full + extra)
        self._pending = b""
        return full, offset, extra

    def _end(self, name: str, full: bytes, size: int, offset: int, extra: bytes, crc: int) -> None:
        """Notes the descriptor and the directory's entry."""
        zip64 = _zip64_extra(size, size, offset)
        if size:
            descriptor = _DESCRIPTOR_64 if zip64 else _DESCRIPTOR_32
            self._pending = descriptor.pack(b"PK\x07\x08", crc, size, size)
        flags, seen = (_UTF8 | _STREAMED if size else _UTF8), min(size, _MAX_32)
        entry = _CENTRAL.pack(
            *(b"PK\x01\x02", 0, 0, flags, 0, 0, 0, crc, seen, seen, len(full), len(zip64)),
            *(0, 0, 0, 0, min(offset, _MAX_32)),
        )
        self._directory.append(entry + full + zip64)
        self._records[name] = size, crc

    def _extra(self, full: bytes, size: int) -> bytes:
        """The local header's extra fields: zip64 where needed, then the padding."""
        # miniz has not counted the stored bytes yet when it writes this one.
        zip64 = _zip64_extra(size, 0, self.position)
        start = self.position + _LOCAL.size + len(full) + len(zip64) + 4
        padding = -start % self._alignment
        return zip64 + b"FB" + padding.to_bytes(2, "little") + b"Z" * padding

    def _full_name(self, name: str) -> bytes:
        full = (self._root + name).encode("utf-8", "surrogateescape")
        if len(full) > _MAX_16 or b"\0" in full:
            raise ValueError(f"{name[:80]!r} cannot be the name of a record")
        return full

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._position += len(data)


def _slices(view: memoryview) -> Iterator[memoryview]:
    return (view[at : at + _PIECE_BYTES] for at in range(0, len(view), _PIECE_BYTES))


def _zip64_extra(size: int, stored: int, offset: int) -> bytes:
    """The zip64 extra field, with only what 32 bits cannot say; empty where they can."""
    numbers = [size, stored] if size >= _MAX_32 else []
    if offset >= _MAX_32:
        numbers.append(offset)
    if not numbers:
        return b""
    content = b"".join(number.to_bytes(8, "little") for number in numbers)
    return b"\x01\x00" + len(content).to_bytes(2, "little") + content
