"""The zip format's fixed structures, as APPNOTE.TXT 6.3.10 lays them out.

4.3.7 local file header, 4.3.9 data descriptor, 4.3.12 central directory header, 4.3.14 and 4.3.15
zip64 end record and locator, 4.3.16 end of central directory record, 4.5.3 zip64 extra field. All
numbers are little-endian.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

LOCAL = 0x04034B50
CENTRAL = 0x02014B50
DESCRIPTOR = 0x08074B50
ZIP64_LOCATOR = 0x07064B50

LOCAL_BYTES = b"PK\x03\x04"
CENTRAL_BYTES = b"PK\x01\x02"
DESCRIPTOR_BYTES = b"PK\x07\x08"
END_BYTES = b"PK\x05\x06"
ZIP64_END_BYTES = b"PK\x06\x06"
ZIP64_LOCATOR_BYTES = b"PK\x06\x07"

# signature, needed, flags, method, time, date, crc, stored, size, name length, extra length
LOCAL_HEADER = Struct("<IHHHHHIIIHH")
# signature, made by, needed, flags, method, time, date, crc, stored, size, name length, extra
# length, comment length, disk, internal attributes, external attributes, header offset
CENTRAL_HEADER = Struct("<IHHHHHHIIIHHHHHII")
# The same without what only a slow look needs: signature, flags, method, crc, stored, size, name
# length, extra length, comment length, header offset
CENTRAL_HEADER_FAST = Struct("<I4xHH4xIIIHHH8xI")
# signature, crc, stored, size; with four-byte and with eight-byte sizes
DESCRIPTOR_32 = Struct("<IIII")
DESCRIPTOR_64 = Struct("<IIQQ")
# signature, disk, directory's disk, entries here, entries, directory size, directory offset,
# comment length
END_RECORD = Struct("<IHHHHIIH")
# signature, record size - 12, made by, needed, disk, directory's disk, entries here, entries,
# directory size, directory offset
ZIP64_END_RECORD = Struct("<IQHHIIQQQQ")
# signature, disk, zip64 end record's offset, number of disks
ZIP64_END_LOCATOR = Struct("<IIQI")

FLAG_ENCRYPTED = 1 << 0
FLAG_STREAMED = 1 << 3

# The value of a 16-bit or 32-bit field that says "look in the zip64 fields".
MAX_16 = 0xFFFF
MAX_32 = 0xFFFFFFFF

EXTRA_ZIP64 = 0x0001
# torch pads local headers with this one, so that every record begins on an aligned offset.
EXTRA_PADDING = int.from_bytes(b"FB", "little")


class EndRecord(NamedTuple):
    """What the end of central directory record says, the zip64 one taken into account.

    `position` is the end record's own offset in the file, `zip64_position` that of the zip64 end
    record or None. `entries`, `size` and `offset` describe the central directory, `comment` is the
    length of the comment that follows. `directory` is where in the file the central directory is
    found, and `shift` what to add to every offset in it: 0 unless bytes were put before the
    archive. `missing` says that only the zip64 form is there, and `position` where the plain one
    would begin.
    """

    position: int
    zip64_position: int | None
    entries: int
    size: int
    offset: int
    comment: int
    directory: int = 0
    shift: int = 0
    missing: bool = False


def extra_fields(extra: bytes) -> list[tuple[int, bytes]] | None:
    """The (id, content) pairs of an extra field (APPNOTE.TXT 4.5.1); None if it is malformed."""
    fields, position = [], 0
    while position + 4 <= len(extra):
        kind = int.from_bytes(extra[position : position + 2], "little")
        length = int.from_bytes(extra[position + 2 : position + 4], "little")
        content = extra[position + 4 : position + 4 + length]
        if len(content) < length:
            return None
        fields.append((kind, content))
        position += 4 + length
    return fields if position == len(extra) else None


def zip64_values(extra: bytes, values: tuple[int, ...]) -> tuple[int, ...]:
    """`values` (size, stored size, header offset) with those that are 0xFFFFFFFF taken from
    `extra`.

    APPNOTE.TXT 4.5.3: the zip64 field holds, in this order, only the values that are saturated. A
    value that it lacks stays as it is.
    """
    content = dict(extra_fields(extra) or ()).get(EXTRA_ZIP64, b"")
    found, position = [], 0
    for value in values:
        if value == MAX_32 and position + 8 <= len(content):
            value = int.from_bytes(content[position : position + 8], "little")
            position += 8
        found.append(value)
    return tuple(found)
