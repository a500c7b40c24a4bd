"""Reading a zip's central directory (APPNOTE.TXT 4.3.12) into records, fast and without trust.

The directory is read with one call and walked in one loop: a file of 100,000 records has one entry
for each, and nothing of the records themselves is touched. Every number in it may be a lie;
whatever is used later is checked against the file's size first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.formats.anomaly import Anomaly
from ckpttool.formats.container import DEFLATED, STORED, Record
from ckpttool.formats.zip_layout import (
    CENTRAL,
    CENTRAL_BYTES,
    CENTRAL_HEADER_FAST,
    FLAG_ENCRYPTED,
    MAX_32,
    EndRecord,
    zip64_values,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from ckpttool.formats.limits import ReaderLimits
    from ckpttool.io.reading import FileReader

_ENTRY_BYTES = CENTRAL_HEADER_FAST.size
# A central directory of more bytes than this for each permitted record is nobody's.
_BYTES_PER_RECORD = 1024


def read_directory(
    reader: FileReader, end: EndRecord, limits: ReaderLimits, anomalies: list[Anomaly]
) -> list[Record]:
    """All records that the central directory names, in its order; what is odd is appended."""
    data = directory_bytes(reader, end, limits)
    records, stopped = _parse(data, end.shift, limits.records)
    if stopped < len(data) and len(records) < limits.records:
        stopped = _resume(data, stopped, end.shift, limits.records, records, anomalies)
    if len(records) >= limits.records and end.entries > limits.records:
        anomalies.append(Anomaly("too-many-records", declared=end.entries, limit=limits.records))
    elif len(records) != end.entries:
        anomalies.append(_damaged("entries", declared=end.entries, found=len(records)))
    anomalies.extend(_oddities(records, end.directory))
    return records


def directory_bytes(reader: FileReader, end: EndRecord, limits: ReaderLimits) -> bytes:
    """The bytes of the central directory, never more than lie between it and the end records."""
    stop = end.position if end.zip64_position is None else end.zip64_position
    length = min(end.size, stop - end.directory, limits.records * _BYTES_PER_RECORD)
    return reader.read(end.directory, length)


def _parse(data: bytes, shift: int, limit: int, start: int = 0) -> tuple[list[Record], int]:
    """Records from `start` on, and where reading stopped: at the end, or at what is no entry."""
    # One character a byte, so that names can be cut out without decoding each.
    text = data.decode("latin-1")
    records, position = _walk(data, text, shift, limit, start)
    if (
        not "".join([record.name for record in records]).isascii()
        or not _root(text, start).isascii()
    ):
        records = [_decoded(record) for record in records]
    return records, position


def _walk(
    data: bytes, text: str, shift: int, limit: int, position: int
) -> tuple[list[Record], int]:
    """The loop of `_parse`. Every step in it costs a file of 100,000 records about 5 ms."""
    records: list[Record] = []
    append, unpack, new = records.append, CENTRAL_HEADER_FAST.unpack_from, tuple.__new__
    root, last = _root(text, position), len(data) - _ENTRY_BYTES
    below = len(root)
    while position <= last and limit:
        signature, flags, method, crc, stored, size, name, extra, comment, offset = unpack(
            data, position
        )
        start = position + _ENTRY_BYTES
        stop = start + name
        after = stop + extra + comment
        if signature != CENTRAL or after > len(data):
            break
        if size == MAX_32 or stored == MAX_32 or offset == MAX_32:
            values = (size, stored, offset)
            size, stored, offset = zip64_values(data[stop : stop + extra], values)
        if text.startswith(root, start, stop):
            name = text[start + below : stop]
            entry = (name, size, stored, crc, method, flags, offset + shift, root, True, False)
        else:
            name = text[start:stop]
            entry = (name, size, stored, crc, method, flags, offset + shift, "", False, False)
        append(new(Record, entry))
        position = after
        limit -= 1
    return records, position


def _root(text: str, start: int) -> str:
    """The first entry's first folder, with its slash; torch takes this for the root of all."""
    length = int.from_bytes(text[start + 28 : start + 30].encode("latin-1"), "little")
    name = text[start + _ENTRY_BYTES : start + _ENTRY_BYTES + length]
    return name[: name.find("/") + 1]


def _decoded(record: Record) -> Record:
    """The record with its name read as UTF-8; bytes that are not UTF-8 are spelt out."""
    name, root = (
        text.encode("latin-1").decode("utf-8", "backslashreplace")
        for text in (record.name, record.root)
    )
    return record._replace(name=name, root=root)


def _resume(
    data: bytes,
    stopped: int,
    shift: int,
    limit: int,
    records: list[Record],
    anomalies: list[Anomaly],
) -> int:
    """Goes on behind damaged entries, as long as a signature is found; appends to `records`."""
    while stopped < len(data) and len(records) < limit:
        anomalies.append(_damaged("signature", entry=len(records), offset=stopped))
        following = data.find(CENTRAL_BYTES, stopped + 4)
        if following < 0 or len(anomalies) > 100:
            break
        more, stopped = _parse(data, shift, limit - len(records), following)
        records.extend(more)
    return stopped


def _oddities(records: list[Record], directory: int) -> list[Anomaly]:
    """Methods nobody can read, encryption, sizes that differ, and records out of bounds."""
    # Sets of few values first: the loop is for the files that need it.
    methods = {record.method for record in records}
    encrypted = any(flags & FLAG_ENCRYPTED for flags in {record.flags for record in records})
    if methods <= {STORED} and not encrypted:
        records = [
            record
            for record in records
            if record.size != record.stored_size
            or not 0 <= record.header_offset <= directory - record.stored_size
        ]
    return [anomaly for record in records for anomaly in _odd(record, directory)]


def _odd(record: Record, directory: int) -> Iterator[Anomaly]:
    if record.flags & FLAG_ENCRYPTED:
        yield Anomaly("encrypted", record.name, where="central directory")
    if record.method not in (STORED, DEFLATED):
        yield Anomaly("unsupported-method", record.name, method=record.method)
    if record.method == STORED and record.size != record.stored_size:
        sizes = {"size": record.size, "stored_size": record.stored_size}
        yield Anomaly("header-mismatch", record.name, field="size", values=sizes)
    if not 0 <= record.header_offset <= directory - record.stored_size:
        offset, stored = record.header_offset, record.stored_size
        yield Anomaly("record-outside-file", record.name, offset=offset, stored_size=stored)


def _damaged(field: str, **facts: Any) -> Anomaly:
    return Anomaly("central-directory-damaged", field=field, **facts)
