"""The zip container of torch 1.6 and later: `<root>/data.pkl`, `<root>/data/0`, `<root>/version`, …

Read after APPNOTE.TXT 6.3.10 (PKWARE) and what torch does (caffe2/serialize/inline_container.cc,
through miniz). The parser is this package's own, so that it shows what general zip readers hide:
they trust one copy of each field, see one of several namesakes, and stop at the first oddity.

torch writes every record stored, not compressed; with version needed 0, flags 0x808 (sizes in a
data descriptor behind the record; UTF-8 name), no time; with its content moved to a multiple of 64
by an extra field `FB` full of `Z`; and always ends the file with zip64 end record, locator and end
record. A file that was unpacked and zipped again has none of this and reads as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.errors import FormatError
from ckpttool.formats.anomaly import Anomaly
from ckpttool.formats.container import DEFLATED, STORED, Container, Record, cut_short, too_big
from ckpttool.formats.zip_layout import (
    END_RECORD,
    LOCAL_BYTES,
    LOCAL_HEADER,
    ZIP64_END_LOCATOR,
    ZIP64_END_RECORD,
    EndRecord,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpttool.formats.limits import ReaderLimits
    from ckpttool.io.reading import FileReader

# Compressed content may always grow to this many times its size on disk: work stays proportional to
# the file, and a big honest file that was zipped again can be checked whole.
_HARMLESS_RATIO = 16
_ZERO_STEP_BYTES = 1 << 18
_FACT_BYTES = 128

_FACT_RECORDS = {
    "version": "version",
    "format_version": ".format_version",
    "storage_alignment": ".storage_alignment",
    "serialization_id": ".data/serialization_id",
    "byteorder": "byteorder",
}


def open_zip(reader: FileReader, limits: ReaderLimits) -> ZipContainer:
    """Opens a zip container: reads its end records and its directory, and nothing of its contents.

    Without a directory the records are found by walking over the whole file instead; the anomaly
    `no-end-record` says so, and each such record is marked. Raises UnreadableError when the system
    can't read the file; what is wrong in it is an anomaly.
    """
    return ZipContainer(reader, limits)


class ZipContainer(Container):
    """A zip as torch writes it, or as another tool zipped it. See `Container`.

    `end` is what the end records say; None where they are gone and the records were recovered.
    """

    format = "torch-zip"

    def __init__(self, reader: FileReader, limits: ReaderLimits) -> None:
        from ckpttool.formats.zip_end import find_end

        super().__init__(reader, limits)
        self.end: EndRecord | None = find_end(reader, self.anomalies)
        self.entries = self._find_entries()
        self._name_records()
        self._note_edges()
        self._note_checksums()
        self._read_facts()

    def span(self, name: str | Record) -> tuple[int, int] | None:
        """See `Container.span`. None also for a method that is unknown."""
        record = self.record(name)
        if record.method != STORED:
            return None
        start, present = self._present(record)
        if present < record.size:
            raise cut_short(record, record.size, present)
        return start, record.size

    def chunks(self, name: str | Record) -> Iterator[memoryview | bytes]:
        """See `Container.chunks`."""
        record = self.record(name)
        span = self.span(record)
        if span is not None:
            return self.reader.chunks(*span)
        growth = max(self.limits.inflated_bytes, _HARMLESS_RATIO * record.stored_size)
        return self._inflated(record, growth)

    def read(self, name: str | Record, *, limit: int | None = None) -> bytes:
        """See `Container.read`. Compressed content is bounded by `limits.inflated_bytes` too."""
        record = self.record(name)
        if limit is not None and record.size > limit:
            raise too_big(record, limit)
        span = self.span(record)
        if span is not None:
            return self.reader.read(*span)
        return b"".join(self._inflated(record, self.limits.inflated_bytes))

    def content_offset(self, record: Record) -> int:
        """Where a record's content begins, as its local header has it (APPNOTE.TXT 4.3.7).

        The directory doesn't say: the local header's name and extra field may have other lengths.
        Raises FormatError where there is no local header.
        """
        data = self.reader.read(record.header_offset, LOCAL_HEADER.size)
        if len(data) < LOCAL_HEADER.size or data[:4] != LOCAL_BYTES:
            raise FormatError(
                f"record {record.name!r} has no local header at {record.header_offset:,}",
                record=record.name,
            )
        name_length, extra_length = LOCAL_HEADER.unpack(data)[9:]
        return record.header_offset + LOCAL_HEADER.size + int(name_length) + int(extra_length)

    def check_structure(self) -> Iterator[Anomaly]:
        """Every field that is stated twice, compared; see `zip_structure.check_structure`."""
        from ckpttool.formats.zip_structure import check_structure

        return check_structure(self)

    def _find_entries(self) -> list[Record]:
        if self.end is not None:
            from ckpttool.formats.zip_directory import read_directory

            if self.end.missing:
                self.anomalies.append(Anomaly("no-end-record", found_by="zip64 end record"))
            return read_directory(self.reader, self.end, self.limits, self.anomalies)
        from ckpttool.formats.zip_recovery import recover

        records, anomalies = recover(self.reader, self.limits)
        self.anomalies.append(
            Anomaly("no-end-record", found_by="local headers", recovered=len(records))
        )
        self.anomalies += anomalies
        return records

    def _name_records(self) -> None:
        from ckpttool.formats.zip_names import name_records

        self.prefix, self.entries, self.records, odd = name_records(self.entries)
        self.anomalies += odd

    def _note_edges(self) -> None:
        """What lies before the archive and behind it."""
        if self.end is None:
            self._note_zero_tail()
            return
        if self.end.shift > 0:
            # Two archives in one file: only the last can be seen through the end record.
            archive = self.reader.read(0, 4) == LOCAL_BYTES
            code = "second-archive" if archive else "leading-bytes"
            self.anomalies.append(Anomaly(code, length=self.end.shift, where="before"))
        elif self.end.shift < 0:
            self.anomalies.append(
                Anomaly("end-record-damaged", field="offset", difference=self.end.shift)
            )
        elif self.end.directory != self.end.offset:
            facts = {"stated": self.end.offset, "found": self.end.directory}
            self.anomalies.append(Anomaly("end-record-damaged", None, field="offset", **facts))
        elif self.entries and (first := min(r.header_offset for r in self.entries)) > 0:
            self.anomalies.append(Anomaly("leading-bytes", length=first, where="before"))
        if not self.end.missing:
            self._note_between(self.end)
            self._note_trailing(self.end.position + END_RECORD.size + self.end.comment)

    def _note_between(self, end: EndRecord) -> None:
        """A whole second archive between the directory that is read and the last end record.

        Two archives of one layout have the same offsets, so the last end record leads into the
        first archive: torch reads that one, and says nothing.
        """
        stop = end.directory + end.size + END_RECORD.size
        if end.zip64_position is not None:
            stop = end.zip64_position + ZIP64_END_RECORD.size + ZIP64_END_LOCATOR.size
            stop += END_RECORD.size
        if stop < end.position and self.reader.read(stop, 4) == LOCAL_BYTES:
            length = self.reader.size - stop
            self.anomalies.append(Anomaly("second-archive", length=length, where="behind"))

    def _note_trailing(self, stop: int) -> None:
        length = self.reader.size - stop
        if length < 0:
            self.anomalies.append(
                Anomaly("end-record-damaged", field="comment length", missing=-length)
            )
        elif length > 0:
            start = self.reader.read(stop, 4)
            code = "second-archive" if start == LOCAL_BYTES else "trailing-bytes"
            zeros = trailing_zeros(self.reader, stop) == length
            self.anomalies.append(Anomaly(code, length=length, zeros=zeros, where="behind"))

    def _note_zero_tail(self) -> None:
        zeros = trailing_zeros(self.reader, 0)
        if zeros >= 64:  # shorter ones are ordinary content
            self.anomalies.append(Anomaly("zero-tail", length=zeros))

    def _note_checksums(self) -> None:
        filled = [record for record in self.entries if record.size and record.crc is not None]
        self.has_checksums = any(record.crc for record in filled) or not filled
        if not self.has_checksums:
            self.anomalies.append(Anomaly("checksums-off", records=len(filled)))

    def _read_facts(self) -> None:
        for fact, name in _FACT_RECORDS.items():
            text = self._short_text(name)
            if text is not None:
                self.facts[fact] = _number(text)
        order = self.facts.get("byteorder", "little")
        if order in ("little", "big"):
            self.byteorder = order
        else:
            self.anomalies.append(Anomaly("bad-byteorder", "byteorder", found=order))

    def _short_text(self, name: str) -> str | None:
        """The text of a record that holds a line; None if missing, too long or unreadable."""
        record = self.records.get(name)
        if record is None or record.size > _FACT_BYTES:
            return None
        try:
            return self.read(record).decode("utf-8", "backslashreplace").strip()
        except FormatError:
            return None

    def _inflated(self, record: Record, limit: int) -> Iterator[bytes]:
        from ckpttool.formats.inflate import inflated

        if record.method != DEFLATED:
            raise FormatError(
                f"record {record.name!r} is compressed by unknown method {record.method}",
                record=record.name,
            )
        start, present = self._present(record)
        if present < record.stored_size:
            raise cut_short(record, record.stored_size, present)
        return inflated(self.reader.chunks(start, record.stored_size), record, limit)

    def _present(self, record: Record) -> tuple[int, int]:
        """Where a record's bytes begin, and how many the file has from there on."""
        start = self.content_offset(record)
        return start, max(0, self.reader.size - start)


def trailing_zeros(reader: FileReader, floor: int) -> int:
    """How many zero bytes the file ends with, counted back to `floor` at most."""
    position = max(floor, reader.data_end())
    while position > floor:
        low = max(floor, position - _ZERO_STEP_BYTES)
        filled = len(reader.read(low, position - low).rstrip(b"\0"))
        if filled:
            return reader.size - low - filled
        position = low
    return reader.size - floor


def _number(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else text
