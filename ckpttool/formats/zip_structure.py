"""A zip's structure, byte for byte outside of the contents: everything said twice, compared.

APPNOTE.TXT 4.3.7 (local header), 4.3.9 (data descriptor), 4.3.12 (central directory), 4.3.14 to
4.3.16 (end records), 4.4.4 (flags), 4.5.3 (zip64 extra field). Each record's name, method, flags,
checksum and sizes stand in its local header or its data descriptor and again in the directory; the
number of records, the directory's size and its offset stand in two end records. What torch writes
has, beyond that, constants where other writers put times, versions and permissions, and leaves no
byte unused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.formats.anomaly import Anomaly
from ckpttool.formats.zip_ends_compared import check_end, unused
from ckpttool.formats.zip_headers import CentralHeader, LocalHeader, central_headers, zip64_field
from ckpttool.formats.zip_layout import (
    DESCRIPTOR,
    DESCRIPTOR_32,
    DESCRIPTOR_64,
    DESCRIPTOR_BYTES,
    EXTRA_PADDING,
    EXTRA_ZIP64,
    FLAG_ENCRYPTED,
    FLAG_STREAMED,
    LOCAL,
    LOCAL_BYTES,
    LOCAL_HEADER,
    MAX_16,
    extra_fields,
    zip64_values,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpttool.formats.torch_zip import ZipContainer
    from ckpttool.formats.zip_layout import EndRecord
    from ckpttool.io.reading import FileReader

_WINDOW_BYTES = 1024
_PADDING = b"Z"
# MS-DOS's mark of a directory in the external attributes: torch's reader gives such a record no
# content at all, and the tensor whatever was in memory.
_DIRECTORY_BIT = 0x10
# Fields of the directory's entries that torch's reader never looks at.
_UNREAD = frozenset(
    (
        *("version made by", "version needed", "time", "date", "internal attributes"),
        "external attributes",
    )
)


def check_structure(container: ZipContainer) -> Iterator[Anomaly]:
    """Compares, for each record and for the whole, every field that the file states twice.

    In a file as torch wrote it no byte outside of the contents can change unseen: each one is part
    of a field with a second copy, of a constant (versions, times, attributes, disk numbers), of the
    padding (all `Z`), or of a length or offset that has to lead to the next structure without a
    gap. What does no harm in torch's eyes is reported too, with `harmless=True`: of the constants
    torch looks at the disk numbers and the mark of a directory alone, and it takes sizes and
    checksums from the central directory.

    In a file that another tool zipped some bytes may change unseen, without harm, since they have
    no second copy and nothing reads them: version made by, version needed, internal attributes,
    external ones but for the mark of a directory, comments, and extra fields other than zip64.
    Compressed data may change where it still gives the same content (the unused bits of its last
    byte; a repetition taken from another place with the same bytes).

    Gives nothing for a file whose directory is gone: there is nothing to compare with then.
    """
    end = container.end
    if end is None:
        return
    headers = central_headers(container, end)
    torch = bool(headers) and all(header.by_torch for header in headers)
    yield from check_end(container.reader, end, torch=torch)
    for header in headers:
        yield from _check_constants(header)
    yield from _Layout(container.reader, end).check(headers)


def _check_constants(header: CentralHeader) -> Iterator[Anomaly]:
    """What torch always writes the same into the directory; for others' entries only the disk."""
    if header.exactly_torch:
        return
    if not header.by_torch:
        if header.disk:
            yield Anomaly(
                "central-directory-damaged", header.name, field="disk", found=header.disk, usual=0
            )
        if header.external & _DIRECTORY_BIT and header.size:
            field = "external attributes"
            yield Anomaly(
                "central-directory-damaged", header.name, field=field, found=header.external
            )
        return
    flags = FLAG_STREAMED if header.size else 0
    found: dict[str, tuple[int | bytes, int | bytes]]
    found = {
        "version made by": (header.made_by, 0),
        "version needed": (header.needed, 20 if header.method else 0),
        "flags": (header.flags & ~FLAG_ENCRYPTED, 0x800 | flags),
        "time": (header.time, 0),
        "date": (header.date, 0),
        "disk": (header.disk, 0),
        "internal attributes": (header.internal, 0),
        "external attributes": (header.external, 0),
        "comment length": (header.comment, 0),
        "extra field": (header.extra, zip64_field(header, stored=header.stored)),
    }
    for field, (value, usual) in found.items():
        if value != usual:
            yield Anomaly(
                "central-directory-damaged",
                header.name,
                field=field,
                found=_shown(value),
                usual=_shown(usual),
                harmless=field in _UNREAD
                and not (field == "external attributes" and header.external & _DIRECTORY_BIT),
            )


class _Layout:
    """A walk over the file in the order of offsets: each record has to begin where one ended."""

    def __init__(self, reader: FileReader, end: EndRecord) -> None:
        self.reader = reader
        self.end = end
        self.window = (0, b"")
        # Where the last record ended; None after one whose end can't be told.
        self.cursor: int | None = max(0, end.shift)

    def read(self, offset: int, length: int) -> bytes:
        """Bytes of the file. Small neighbours are read at once: a header follows a descriptor."""
        start, data = self.window
        if not start <= offset <= offset + length <= start + len(data):
            start = offset
            data = self.reader.read(offset, max(length, _WINDOW_BYTES))
            self.window = (start, data)
        return data[offset - start : offset - start + length]

    def check(self, headers: list[CentralHeader]) -> Iterator[Anomaly]:
        for header in sorted(headers, key=lambda header: header.offset):
            yield from self.check_gap(header.offset, header.name)
            yield from self.check_record(header)
        yield from self.check_gap(self.end.directory, None)

    def check_gap(self, offset: int, name: str | None) -> Iterator[Anomaly]:
        """The bytes between the last record and `offset`: there should be none."""
        if self.cursor is None or offset == self.cursor:
            return
        if offset < self.cursor:
            yield Anomaly("records-overlap", name, offset=offset, length=self.cursor - offset)
        else:
            length = offset - self.cursor
            yield unused(self.reader, self.cursor, length, name)

    def check_record(self, header: CentralHeader) -> Iterator[Anomaly]:
        if self.as_torch_wrote(header):
            return
        local = self.local_header(header)
        if local is None:
            self.cursor = None
            yield Anomaly("local-header-damaged", header.name, field="signature")
            return
        yield from _compare(header, local)
        yield from _check_extra(header, local, self.end.shift)
        stop = local.content + header.stored
        if stop > self.end.directory:
            self.cursor = None
            size = header.stored
            yield Anomaly("record-outside-file", header.name, offset=local.content, size=size)
            return
        self.cursor = stop
        if header.flags & FLAG_STREAMED:
            length, wrong = self.descriptor(header, local, stop)
            self.cursor += length
            if wrong:
                yield Anomaly("descriptor-mismatch", header.name, field=wrong, harmless=True)

    def as_torch_wrote(self, header: CentralHeader) -> bool:
        """Whether local header, padding and descriptor are, byte for byte, what torch writes.

        The short way for healthy files; whatever is not so is looked at field by field. Moves the
        cursor behind the record when it is.
        """
        if not header.exactly_torch or not 0 <= header.offset < self.end.directory:
            return False
        zip64 = zip64_field(header, stored=0, shift=self.end.shift)
        fixed = LOCAL_HEADER.size + len(header.raw_name) + len(zip64)
        start = self.read(header.offset, fixed + 4)
        padding = int.from_bytes(start[-2:], "little")
        extra = len(zip64) + 4 + padding
        if extra > MAX_16:
            return False
        sizes = (len(header.raw_name), extra)
        numbers = (header.needed, header.flags, header.method, 0, 0, 0, 0, 0)
        whole = LOCAL_HEADER.pack(LOCAL, *numbers, *sizes) + header.raw_name + zip64
        content = header.offset + fixed + 4 + padding
        stop = content + header.stored
        if start[:-2] != whole + b"FB" or stop > self.end.directory:
            return False
        if self.read(header.offset + fixed + 4, padding).strip(_PADDING):
            return False
        if header.size:
            layout = DESCRIPTOR_64 if zip64 else DESCRIPTOR_32
            values = (DESCRIPTOR, header.crc, header.stored, header.size)
            if self.read(stop, layout.size) != layout.pack(*values):
                return False
            stop += layout.size
        self.cursor = stop
        return True

    def local_header(self, header: CentralHeader) -> LocalHeader | None:
        if not 0 <= header.offset < self.end.directory:
            return None
        data = self.read(header.offset, LOCAL_HEADER.size)
        if len(data) < LOCAL_HEADER.size or data[:4] != LOCAL_BYTES:
            return None
        *fields, name_length, extra_length = LOCAL_HEADER.unpack(data)
        start = header.offset + LOCAL_HEADER.size
        rest = self.read(start, name_length + extra_length)
        content = start + name_length + extra_length
        strings = (rest[:name_length], rest[name_length:])
        return LocalHeader._make((*fields[1:], *strings, content))

    def descriptor(
        self, header: CentralHeader, local: LocalHeader, offset: int
    ) -> tuple[int, str | None]:
        """Length of the data descriptor at `offset`, and which fields of it are wrong, if any.

        With zip64 sizes if the local header has a zip64 field (4.3.9.2); the signature is optional.
        """
        fields = extra_fields(local.extra) or ()
        wide = header.size_64 or header.offset_64 or any(k == EXTRA_ZIP64 for k, _ in fields)
        layout = DESCRIPTOR_64 if wide else DESCRIPTOR_32
        data = self.read(offset, layout.size)
        values = (header.crc, header.stored, header.size)
        if len(data) == layout.size:
            signature, *found = layout.unpack(data)
            names = ("checksum", "stored size", "size")
            wrong = [n for n, v, f in zip(names, values, found, strict=True) if v != f]
            if data[:4] == DESCRIPTOR_BYTES:
                return layout.size, ", ".join(wrong) or None
            if not wrong:
                return layout.size, f"signature ({signature:#010x})"
        if not header.by_torch and data[:-4] == layout.pack(0, *values)[4:]:
            return layout.size - 4, None  # the form without a signature
        return layout.size, "all"


def _compare(header: CentralHeader, local: LocalHeader) -> Iterator[Anomaly]:
    """A local header's fields against the directory's."""
    pairs: dict[str, tuple[int | bytes, int | bytes]] = {
        "name": (local.raw_name, header.raw_name),
        "flags": (local.flags, header.flags),
        "method": (local.method, header.method),
        "time": (local.time, header.time),
        "date": (local.date, header.date),
    }
    if header.by_torch:
        pairs["version needed"] = (local.needed, header.needed)
    streamed = bool(header.flags & FLAG_STREAMED)
    size, stored = zip64_values(local.extra, (local.size, local.stored))[:2]
    for field, own, value in (
        ("checksum", local.crc, header.crc),
        ("stored size", stored, header.stored),
        ("size", size, header.size),
    ):
        # Written before the content was known: zero, unless another writer went back to fill it in.
        if streamed and header.by_torch:
            pairs[field] = (own, 0)
        elif not (streamed and own == 0):
            pairs[field] = (own, value)
    for field, (ours, theirs) in pairs.items():
        if ours != theirs:
            yield Anomaly(
                "header-mismatch",
                header.name,
                field=field,
                local=_shown(ours),
                directory=_shown(theirs),
                harmless=field not in ("name", "flags", "method"),
            )


def _check_extra(header: CentralHeader, local: LocalHeader, shift: int) -> Iterator[Anomaly]:
    """The local extra field: well-formed, and where torch wrote it, padding of nothing but `Z`."""
    fields = extra_fields(local.extra)
    if fields is None:
        yield Anomaly("local-header-damaged", header.name, field="extra field", harmless=True)
        return
    if not header.by_torch:
        return
    # torch knows neither the compressed size when it writes the header, nor any other field.
    wanted = zip64_field(header, stored=0, shift=shift)
    padding = local.extra[len(wanted) :]
    kinds = [kind for kind, _ in fields]
    known = [EXTRA_ZIP64, EXTRA_PADDING] if wanted else [EXTRA_PADDING]
    if kinds != known or not local.extra.startswith(wanted):
        yield Anomaly("padding-damaged", header.name, field="extra field", harmless=True)
    elif padding[4:].strip(_PADDING):
        yield Anomaly("padding-damaged", header.name, field="padding", harmless=True)


def _shown(value: int | bytes) -> int | str:
    return value if isinstance(value, int) else value[:80].decode("utf-8", "backslashreplace")
