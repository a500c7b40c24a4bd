"""The bytes of a zip's structure as torch writes them, worked out from name, size and checksum.

caffe2/serialize/inline_container.cc and miniz; APPNOTE.TXT 4.3.7, 4.3.9, 4.3.12. Stored records,
version 0, UTF-8 names, sizes in a descriptor (none for what is empty), no times, an extra field
`FB` full of `Z` up to the alignment, zip64 fields only for what 32 bits cannot say.
"""

from __future__ import annotations

from ckpttool.formats.zip_layout import (
    CENTRAL,
    CENTRAL_HEADER,
    DESCRIPTOR,
    DESCRIPTOR_32,
    DESCRIPTOR_64,
    LOCAL,
    LOCAL_HEADER,
    MAX_16,
    MAX_32,
)

UTF8, STREAMED = 0x800, 0x808
_PADDING = b"Z"


def content_start(offset: int, name_length: int, alignment: int, *, size: int = 0) -> int:
    """Where the content begins behind a header at `offset`; both count from the archive's begin."""
    wide = 8 * (offset >= MAX_32) + 16 * (size >= MAX_32)
    end = offset + LOCAL_HEADER.size + name_length + (wide and wide + 4) + 4
    return -(-end // alignment) * alignment


def local_header(name: bytes, size: int, offset: int, alignment: int) -> bytes:
    """A record's local header with name and padding; its content begins where this ends."""
    zip64 = _zip64(size, 0, offset)
    fixed = LOCAL_HEADER.size + len(name) + len(zip64) + 4
    padding = -(offset + fixed) % alignment
    extra = min(MAX_16, len(zip64) + 4 + padding)
    flags = STREAMED if size else UTF8
    header = LOCAL_HEADER.pack(LOCAL, 0, flags, 0, 0, 0, 0, 0, 0, len(name), extra)
    length = (padding & MAX_16).to_bytes(2, "little")
    return header + name + zip64 + b"FB" + length + _PADDING * padding


def descriptor(size: int, crc: int, offset: int) -> bytes:
    """What follows the content of a record whose header is at `offset`; nothing if it is empty."""
    if not size:
        return b""
    layout = DESCRIPTOR_64 if max(size, offset) >= MAX_32 else DESCRIPTOR_32
    return layout.pack(DESCRIPTOR, crc, size, size)


def directory_entry(name: bytes, size: int, crc: int, offset: int) -> bytes:
    """A record's entry in the central directory."""
    zip64 = _zip64(size, size, offset)
    flags, shown = (STREAMED if size else UTF8), min(size, MAX_32)
    lengths = (len(name), len(zip64), 0, 0, 0, 0)
    numbers = (crc, shown, shown, *lengths, min(offset, MAX_32))
    return CENTRAL_HEADER.pack(CENTRAL, 0, 0, flags, 0, 0, 0, *numbers) + name + zip64


def _zip64(size: int, stored: int, offset: int) -> bytes:
    numbers = [size, stored] if size >= MAX_32 else []
    if offset >= MAX_32:
        numbers.append(offset)
    if not numbers:
        return b""
    content = b"".join(number.to_bytes(8, "little") for number in numbers)
    return b"\x01\0" + len(content).to_bytes(2, "little") + content
