"""The headers of a zip's records, with all their fields: in the directory and before each content.

APPNOTE.TXT 4.3.7 (local header), 4.3.12 (central directory), 4.5.3 (zip64 extra field).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckpttool.formats.zip_directory import directory_bytes
from ckpttool.formats.zip_layout import (
    CENTRAL_BYTES,
    CENTRAL_HEADER,
    EXTRA_ZIP64,
    MAX_32,
    zip64_values,
)

if TYPE_CHECKING:
    from ckpttool.formats.torch_zip import ZipContainer
    from ckpttool.formats.zip_layout import EndRecord


class CentralHeader(NamedTuple):
    """An entry of the central directory with all its fields, zip64 ones taken into account.

    `name` is as in `Record`, `raw_name` its bytes in the file, `offset` counted from the file's
    first byte. `size_64` and `offset_64` tell whether that field had to be looked up in `extra`.
    """

    name: str
    raw_name: bytes
    made_by: int
    needed: int
    flags: int
    method: int
    time: int
    date: int
    crc: int
    stored: int
    size: int
    extra: bytes
    comment: int
    disk: int
    internal: int
    external: int
    offset: int
    size_64: bool
    offset_64: bool

    @property
    def by_torch(self) -> bool:
        """Whether the entry looks like torch's, even if a field or two of it are damaged."""
        zeros = (self.made_by, self.time, self.date, self.disk, self.internal, self.external)
        needed = 20 if self.method else 0
        flags = 0x808 if self.size else 0x800  # an empty record has no descriptor
        alike = (self.needed == needed) + (self.flags == flags) + (self.comment == 0)
        return alike + zeros.count(0) >= 7

    @property
    def exactly_torch(self) -> bool:
        """Whether every field that torch writes the same for all records is as torch writes it."""
        return (
            not (self.made_by or self.time or self.date or self.disk or self.comment)
            and not (self.internal or self.external)
            and self.needed == (20 if self.method else 0)
            and self.flags == (0x808 if self.size else 0x800)
            and self.extra == zip64_field(self, stored=self.stored)
        )


class LocalHeader(NamedTuple):
    """A record's own header in front of its content."""

    needed: int
    flags: int
    method: int
    time: int
    date: int
    crc: int
    stored: int
    size: int
    raw_name: bytes
    extra: bytes
    content: int


def central_headers(container: ZipContainer, end: EndRecord) -> list[CentralHeader]:
    """All entries of the central directory, in its order; damaged ones are left out."""
    data = directory_bytes(container.reader, end, container.limits)
    headers: list[CentralHeader] = []
    names = iter(container.entries)
    position = data.find(CENTRAL_BYTES)
    while 0 <= position <= len(data) - CENTRAL_HEADER.size:
        fields = CENTRAL_HEADER.unpack_from(data, position)
        after = position + CENTRAL_HEADER.size + sum(fields[10:13])
        record = next(names, None)
        if record is None or after > len(data):
            break
        headers.append(_central_header(record.name, data, position, end.shift))
        position = data.find(CENTRAL_BYTES, after)
    return headers


def _central_header(name: str, data: bytes, position: int, shift: int) -> CentralHeader:
    fields = CENTRAL_HEADER.unpack_from(data, position)
    crc, stored, size, name_length, extra_length, comment = fields[7:13]
    disk, internal, external, offset = fields[13:]
    start = position + CENTRAL_HEADER.size
    stop = start + name_length
    extra = data[stop : stop + extra_length]
    size_64, offset_64 = MAX_32 in (size, stored), offset == MAX_32
    if size_64 or offset_64:
        size, stored, offset = zip64_values(extra, (size, stored, offset))
    first = (name, data[start:stop], *fields[1:7], crc, stored, size, extra, comment)
    last = (disk, internal, external, offset + shift, size_64, offset_64)
    return CentralHeader._make(first + last)


def zip64_field(header: CentralHeader, *, stored: int, shift: int = 0) -> bytes:
    """The zip64 extra field that torch writes for a record, empty where it needs none."""
    if not (header.size_64 or header.offset_64):
        return b""
    values = [header.size, stored] if header.size_64 else []
    if header.offset_64:
        values.append(header.offset - shift)
    content = b"".join(value.to_bytes(8, "little") for value in values)
    return EXTRA_ZIP64.to_bytes(2, "little") + len(content).to_bytes(2, "little") + content
