"""What all containers of torch's have in common: named records, read one at a time.

A container states facts and anomalies and never judges. Its records are known after opening; their
contents are read only when asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckpttool.errors import FormatError, LimitError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

    from ckpttool.formats.anomaly import Anomaly
    from ckpttool.formats.limits import ReaderLimits
    from ckpttool.formats.static_pickle import PickleResult
    from ckpttool.io.reading import FileReader

STORED = 0
DEFLATED = 8


class Record(NamedTuple):
    """One member of a container.

    `name` is its name below the root folder (`data/0`), `full_name` its name in the file. `size`
    counts the bytes of its content, `stored_size` those on disk, both as declared. `crc` is the
    CRC-32 that the container keeps, None where it keeps none. `method` is the zip method (0 stored,
    8 deflated) and `flags` the zip's general purpose bits. `header_offset` is where the record
    begins, counted from the file's first byte. `root` is the root folder with its slash, or empty.
    `in_root` is false for a record outside the root folder, which torch can't see. `recovered`
    marks a record that was found without the container's own directory.
    """

    name: str
    size: int
    stored_size: int
    crc: int | None
    method: int
    flags: int
    header_offset: int
    root: str = ""
    in_root: bool = True
    recovered: bool = False

    @property
    def full_name(self) -> str:
        """The whole name, root folder included, as it stands in the file."""
        return self.root + self.name


class Container:
    """A file's records and what was seen while they were found. Base of each format's own class.

    `records` maps a name to the record that torch would read under it; `entries` has every record
    in the file's order, those that are hidden behind a namesake or lie outside the root folder
    included. `prefix` is the root folder without its slash. `anomalies` holds what was odd while
    opening. `byteorder` is `"little"` or `"big"`. `facts` has what the container says of itself
    (`version`, `format_version`, `storage_alignment`, `serialization_id`, `protocol`), where it
    does. `has_checksums` is false if it keeps none, or if they were switched off when it was
    written.

    `pickle_results` holds what was made of pickles that had to be read to find the records, by
    name: `data.pkl` in the legacy formats; empty for zips.

    The file stays open as long as the `reader` does; closing it is the caller's task.
    """

    format = ""

    def __init__(self, reader: FileReader, limits: ReaderLimits) -> None:
        self.reader = reader
        self.limits = limits
        self.records: dict[str, Record] = {}
        self.entries: list[Record] = []
        self.prefix = ""
        self.anomalies: list[Anomaly] = []
        self.byteorder = "little"
        self.has_checksums = False
        self.facts: dict[str, Any] = {}
        self.pickle_results: dict[str, PickleResult] = {}

    def record(self, name: str | Record) -> Record:
        """The record with this name. Raises FormatError if there is none."""
        if isinstance(name, Record):
            return name
        try:
            return self.records[name]
        except KeyError:
            raise FormatError(f"there is no record {name!r}", record=name) from None

    def span(self, name: str | Record) -> tuple[int, int] | None:
        """Offset and length in the file where a record's content lies as it is; None if compressed.

        The span never leaves the file: where less is there than is declared, FormatError is raised.
        """
        raise NotImplementedError

    def chunks(self, name: str | Record) -> Iterator[memoryview | bytes]:
        """A record's content piece by piece; each piece is valid until the next is asked for.

        Raises FormatError where the file or the compressed data ends too soon, is malformed, or
        gives another number of bytes than declared; LimitError where compressed data passes its
        limit.
        """
        record = self.record(name)
        span = self.span(record)
        if span is None:
            raise FormatError(f"record {record.name!r} has no content", record=record.name)
        yield from self.reader.chunks(*span)

    def read(self, name: str | Record, *, limit: int | None = None) -> bytes:
        """A record's whole content, at most `limit` bytes. Errors as for `chunks`."""
        record = self.record(name)
        if limit is not None and record.size > limit:
            raise too_big(record, limit)
        span = self.span(record)
        if span is not None:
            return self.reader.read(*span)
        return b"".join(self.chunks(record))

    def crc32(self, name: str | Record) -> int:
        """CRC-32 of a record's content as it is in the file now. Errors as for `chunks`."""
        from ckpttool.io.checksum import crc32_function, crc32_of

        span = self.span(name)
        if span is not None:
            return crc32_of(self.reader, *span)
        update, value = crc32_function(), 0
        for chunk in self.chunks(name):
            value = update(chunk, value)
        return value

    def storage_record(self, key: str) -> str:
        """The name of the record that holds the storage with this key."""
        return f"data/{key}"

    def pickles(self) -> list[str]:
        """Names of the records that hold pickles by their names, in the file's order."""
        return [name for name in self.records if name.lower().endswith(".pkl")]

    def check_structure(self) -> Iterable[Anomaly]:
        """What only a slow look at everything but the contents shows; for `verify`."""
        return ()


def too_big(record: Record, limit: int) -> LimitError:
    """The error for a record that declares more bytes than its reader wants to take."""
    return LimitError(
        f"record {record.name!r} declares {record.size:,} bytes; the limit is {limit:,}",
        limit="pickle_bytes",
        record=record.name,
    )


def cut_short(record: Record, needed: int, present: int) -> FormatError:
    """The error for a record of which the file holds only a part."""
    return FormatError(
        f"record {record.name!r} is cut: {needed:,} bytes are needed, {present:,} are there",
        record=record.name,
    )
