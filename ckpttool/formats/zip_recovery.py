"""Finding a zip's records when its directory is gone: a walk over the local headers.

APPNOTE.TXT 4.3.7 and 4.3.9. torch writes a record's sizes and checksum behind its content, into a
data descriptor, and not into the header in front of it. So where the directory is cut off, a
record's end is the place at which a descriptor states the very distance from the record's begin.
Nothing is guessed: a record for which there is no such place is given as cut, with the bytes that
are there.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.formats.anomaly import Anomaly
from ckpttool.formats.container import Record
from ckpttool.formats.zip_layout import (
    DESCRIPTOR_32,
    DESCRIPTOR_64,
    EXTRA_ZIP64,
    FLAG_STREAMED,
    LOCAL_BYTES,
    LOCAL_HEADER,
    extra_fields,
    zip64_values,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpttool.formats.limits import ReaderLimits
    from ckpttool.io.reading import FileReader

# A descriptor, a local header, a directory entry.
_SIGNATURES = re.compile(rb"PK(?:\x07\x08|\x03\x04|\x01\x02)")
# Small records end soon: so the first look is short, and each next one longer.
_FIRST_CHUNK_BYTES = 1 << 11
_CHUNK_BYTES = 1 << 20
_OVERLAP_BYTES = 3
# Signatures in the midst of contents: more of them than this is an attempt to waste our time.
_MOST_CANDIDATES = 1_000_000
_LONGEST_NAME = 4096


class _Header(NamedTuple):
    """A local header: the record's full name, and what is known of its size (None if streamed)."""

    name: str
    raw_name: bytes
    flags: int
    method: int
    crc: int
    stored: int
    size: int
    content: int
    wide: bool


class _End(NamedTuple):
    """Where a record's content ends, where the next structure begins, and what is known."""

    stop: int
    following: int
    crc: int | None
    size: int
    whole: bool


def recover(reader: FileReader, limits: ReaderLimits) -> tuple[list[Record], list[Anomaly]]:
    """The records that can be found by their own headers, in the file's order, all `recovered`.

    A record that is cut, or whose descriptor is damaged, comes with the bytes that are there, no
    checksum, and the anomaly `record-unreadable`. Raises UnreadableError.
    """
    walk = _Walk(reader)
    records: list[Record] = []
    position: int | None = 0
    root = ""
    while position is not None and len(records) < limits.records:
        header = walk.header(position)
        if header is None:
            position = walk.next_header(position)
            continue
        if not records:
            root = header.name[: header.name.find("/") + 1]
        end = walk.end(header)
        records.append(_record(header, end, position, root))
        if not end.whole:
            walk.note_cut(records[-1], end)
        position = end.following
    return records, walk.anomalies


def _record(header: _Header, end: _End, offset: int, root: str) -> Record:
    inside = header.name.startswith(root)
    return Record(
        name=header.name[len(root) :] if inside else header.name,
        size=end.size,
        stored_size=end.stop - header.content,
        crc=end.crc,
        method=header.method,
        flags=header.flags,
        header_offset=offset,
        root=root if inside else "",
        in_root=inside,
        recovered=True,
    )


class _Walk:
    """Reads structures at given places, and searches for the next where there is none."""

    def __init__(self, reader: FileReader) -> None:
        self.reader = reader
        self.anomalies: list[Anomaly] = []
        self.candidates = 0
        self.root = b""

    def header(self, position: int) -> _Header | None:
        """The local header at `position`, or None if what is there is none."""
        data = self.reader.read(position, LOCAL_HEADER.size)
        if len(data) < LOCAL_HEADER.size or data[:4] != LOCAL_BYTES:
            return None
        _, _, flags, method, _, _, crc, stored, size, name_length, extra_length = (
            LOCAL_HEADER.unpack(data)
        )
        start = position + LOCAL_HEADER.size
        rest = self.reader.read(start, name_length + extra_length)
        if len(rest) < name_length + extra_length or not 0 < name_length <= _LONGEST_NAME:
            return None
        extra = rest[name_length:]
        size, stored = zip64_values(extra, (size, stored))
        wide = any(kind == EXTRA_ZIP64 for kind, _ in extra_fields(extra) or ())
        raw_name = rest[:name_length]
        name = raw_name.decode("utf-8", "backslashreplace")
        content = start + name_length + extra_length
        return _Header(name, raw_name, flags, method, crc, stored, size, content, wide)

    def end(self, header: _Header) -> _End:
        """The end of the record that `header` begins."""
        if not self.root:
            self.root = header.raw_name[: header.raw_name.find(b"/") + 1]
        if header.flags & FLAG_STREAMED and not header.stored:
            return self._end_by_descriptor(header)
        stop = header.content + header.stored
        if stop > self.reader.size:
            return self._cut(header, self.reader.size)
        following = stop
        if header.flags & FLAG_STREAMED:
            following += self._descriptor_length(header, stop)
        return _End(stop, following, header.crc, header.size, whole=True)

    def next_header(self, position: int) -> int | None:
        """Where the next local header begins that names something below the same root."""
        for found, kind in self._signatures(position + 1):
            if kind == LOCAL_BYTES and self._is_header(found):
                if self.root:  # else it is the first one, behind bytes that are no zip
                    length = found - position
                    self.anomalies.append(
                        Anomaly("gap-not-padding", offset=position, length=length)
                    )
                return found
        return None

    def note_cut(self, record: Record, end: _End) -> None:
        present = record.stored_size
        if end.stop == self.reader.size:
            reason = f"the file ends in it, {present:,} bytes of it are there"
        else:
            reason = "its data descriptor is damaged, so its size and checksum are not known"
        self.anomalies.append(
            Anomaly("record-unreadable", record.name, reason=reason, present=present)
        )

    def _end_by_descriptor(self, header: _Header) -> _End:
        for found, kind in self._signatures(header.content):
            if kind == LOCAL_BYTES:
                if self._is_header(found):
                    return self._cut(header, found)
            elif kind == b"PK\x07\x08":
                end = self._descriptor(header, found)
                if end is not None:
                    return end
            elif self._is_directory(found):
                return self._cut(header, found)
        return self._cut(header, self.reader.size)

    def _descriptor(self, header: _Header, position: int) -> _End | None:
        """The descriptor at `position`, if it states just the distance from the content's begin."""
        stored = position - header.content
        for layout in (DESCRIPTOR_64, DESCRIPTOR_32) if header.wide else (DESCRIPTOR_32,):
            data = self.reader.read(position, layout.size)
            if len(data) == layout.size:
                _, crc, declared, size = layout.unpack(data)
                if declared == stored and (header.method or size == stored):
                    return _End(position, position + layout.size, crc, size, whole=True)
        return None

    def _descriptor_length(self, header: _Header, position: int) -> int:
        end = self._descriptor(header, position)
        return end.following - position if end else 0

    def _cut(self, header: _Header, stop: int) -> _End:
        present = max(0, stop - header.content)
        return _End(header.content + present, stop, None, present, whole=False)

    def _is_header(self, position: int) -> bool:
        header = self.header(position)
        return header is not None and (not self.root or header.raw_name.startswith(self.root))

    def _is_directory(self, position: int) -> bool:
        data = self.reader.read(position, 46 + len(self.root))
        return data[46:] == self.root

    def _signatures(self, position: int) -> Iterator[tuple[int, bytes]]:
        """Every signature from `position` on, as (offset, its four bytes)."""
        length = _FIRST_CHUNK_BYTES
        while position < self.reader.size and self.candidates < _MOST_CANDIDATES:
            position = max(position, self.reader.next_data(position))
            data = self.reader.read(position, length)
            length = min(2 * length, _CHUNK_BYTES)
            for match in _SIGNATURES.finditer(data):
                self.candidates += 1
                yield position + match.start(), match[0]
            if len(data) <= _OVERLAP_BYTES:
                return
            position += len(data) - _OVERLAP_BYTES
