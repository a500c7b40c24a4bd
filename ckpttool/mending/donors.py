"""Donors: other records that hold the very bytes that a damaged one should have.

A donor has the size and the recorded CRC-32 of the damaged record, and its own bytes match that
checksum now. It may lie in the same file (a coordinator's baseline equals the model) or in another
step's (frozen layers). Of records with other content, one in 2^32 has the same checksum. What is
left of the damaged record is a second witness: the donor should differ from it in a few places
only, and how many bytes agree is stated. It is no condition: a record that is gone altogether may
be replaced, too.

Never a donor: anything for a record without bytes, or whose recorded checksum is 0. That is what
stands in files that were written without checksums, and by chance in one of 2^32 others.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.errors import CkptToolError, UnreadableError
from ckpttool.formats.limits import DEFAULT_LIMITS, ReaderLimits
from ckpttool.io.reading import FileReader

if TYPE_CHECKING:
    from ckpttool.formats.container import Container, Record
    from ckpttool.formats.torch_zip import ZipContainer
    from ckpttool.mending.damaged import DamagedRecord

_ZIP_KINDS = frozenset(("torch-zip", "torchscript", "zip", "pt2", "dcp-shard"))


class Agreement(NamedTuple):
    """How a donor compares with what is left of the damaged record.

    Of `compared` bytes, `differing` differ, in `runs` runs from `first` on (None if none do). Bytes
    of the record that are gone are not compared.
    """

    compared: int
    differing: int
    runs: int
    first: int | None

    @property
    def words(self) -> str:
        """`differs in 64 of 65,536 bytes, in one run at 1,024`."""
        if not self.compared:
            return "nothing of the damaged record is left to compare it with"
        if self.first is None:
            return f"the {self.compared:,} bytes that are left are the same"
        runs = "one run" if self.runs == 1 else f"{self.runs:,} runs"
        at = "at" if self.runs == 1 else "from"
        share = f"differs in {self.differing:,} of {self.compared:,} bytes"
        return f"{share}, in {runs} {at} {self.first:,}"


class Donor(NamedTuple):
    """A record that can stand for the damaged `record`.

    `path` is the file that it is in (None: the same file), `donor_record` its name there and
    `source` the record itself. `size` and `crc` are those of both. `agreement` compares it with
    what is left of the damaged one. `candidates` counts the records of this size that were
    looked at until it was found: each could have had the checksum by chance.
    """

    record: str
    path: str | None
    donor_record: str
    source: Record
    size: int
    crc: int
    agreement: Agreement
    candidates: int

    @property
    def words(self) -> str:
        """Which record it is."""
        where = "the same file" if self.path is None else os.path.basename(self.path)
        return f"{self.donor_record} of {where}"

    @property
    def proof(self) -> str:
        """What speaks for it, with the odds against it."""
        odds = "1 in 4,294,967,296" if self.candidates == 1 else f"{self.candidates:,} in 2^32"
        return (
            f"same size and same checksum, which the donor's bytes match (by chance: {odds}); "
            f"{self.agreement.words}"
        )

    def chunks(
        self, container: Container | None = None, limits: ReaderLimits = DEFAULT_LIMITS
    ) -> Iterator[memoryview | bytes]:
        """Its bytes, piece by piece. `container` is the damaged file's, for a donor inside of it.

        Raises FormatError or UnreadableError if they can't be read any more.
        """
        if self.path is None:
            if container is None:
                raise ValueError("this donor lies in the damaged file, whose container is needed")
            yield from container.chunks(self.source)
            return
        with FileReader(self.path) as reader:
            yield from _open_zip(reader, limits).chunks(self.source)

    def as_dict(self) -> dict[str, Any]:
        """All that is known of it, for JSON."""
        facts = self._asdict()
        del facts["source"]
        facts["agreement"] = self.agreement._asdict()
        return {**facts, "words": self.words, "proof": self.proof}


class DonorSearch(NamedTuple):
    """`donors` has one entry for each damaged record, None where none was found.

    `skipped` lists the siblings that could not be used, as (path, why).
    """

    donors: list[Donor | None]
    skipped: list[tuple[str, str]]


def find_donor(
    record: DamagedRecord,
    container: Container | None,
    siblings: Iterable[str | os.PathLike[str]] = (),
    *,
    limits: ReaderLimits = DEFAULT_LIMITS,
) -> Donor | None:
    """`find_donors` for a single record."""
    return find_donors([record], container, siblings, limits=limits).donors[0]


def find_donors(
    records: Sequence[DamagedRecord],
    container: Container | None,
    siblings: Iterable[str | os.PathLike[str]] = (),
    *,
    limits: ReaderLimits = DEFAULT_LIMITS,
) -> DonorSearch:
    """A donor for each damaged record: from `container`, their own file, then from the siblings.

    `siblings` are tried in their order, each opened once and closed again, and only as long as a
    record lacks a donor; in each, a record of the same name comes first. Of a sibling only the
    directory is read, until sizes and checksums agree; then that record's bytes. One that can't be
    opened is skipped and listed. Raises UnreadableError where the damaged file can't be read.
    """
    search = _Search(records)
    if container is not None:
        search.look_in(container, None)
    for sibling in siblings:
        if search.done:
            break
        path = os.fspath(sibling)
        if container is None or not _same_file(path, container.reader):
            search.open_sibling(path, limits)
    return DonorSearch(search.donors, search.skipped)


class _Search:
    """The damaged records, and what was found for them so far."""

    def __init__(self, records: Sequence[DamagedRecord]) -> None:
        self.records = records
        self.donors: list[Donor | None] = [None] * len(records)
        self.skipped: list[tuple[str, str]] = []
        self._tried = [0] * len(records)

    @property
    def done(self) -> bool:
        """Whether every record that may have a donor has one."""
        return not self._open()

    def open_sibling(self, path: str, limits: ReaderLimits) -> None:
        """Looks for donors in another file; notes why, if it can't be used."""
        try:
            with FileReader(path) as reader:
                container = _sniffed_zip(reader, limits)
                if container is None:
                    self.skipped.append((path, "is no zip, so its records have no checksums"))
                elif not container.has_checksums:
                    self.skipped.append((path, "was written without checksums"))
                else:
                    self.look_in(container, path)
        except UnreadableError as error:
            self.skipped.append((path, error.reason))
        except CkptToolError as error:
            self.skipped.append((path, str(error)))

    def look_in(self, container: Container, path: str | None) -> None:
        """Tries the records of one file. Raises UnreadableError."""
        if not container.has_checksums:
            return
        wanted: dict[tuple[int, int | None], list[int]] = {}
        for number in self._open():
            record = self.records[number]
            wanted.setdefault((record.size, record.recorded), []).append(number)
        fitting: dict[int, list[Record]] = {}
        sizes: dict[int, int] = {}
        for entry in container.entries:
            sizes[entry.size] = sizes.get(entry.size, 0) + 1
            for number in wanted.get((entry.size, entry.crc), ()):
                if path is not None or container.records.get(self.records[number].name) != entry:
                    fitting.setdefault(number, []).append(entry)
        for number in self._open():
            # Its own record is no candidate.
            self._tried[number] += sizes.get(self.records[number].size, 0) - (path is None)
        matches: dict[int, bool] = {}  # by where the record begins: each is read once
        for number, entries in fitting.items():
            self._try(number, entries, container, path, matches)

    def _open(self) -> list[int]:
        return [
            number
            for number, record in enumerate(self.records)
            if self.donors[number] is None and record.size and record.recorded
        ]

    def _try(
        self,
        number: int,
        entries: list[Record],
        container: Container,
        path: str | None,
        matches: dict[int, bool],
    ) -> None:
        record = self.records[number]
        entries.sort(key=lambda entry: entry.name != record.name)
        for entry in entries:
            if entry.header_offset not in matches:
                matches[entry.header_offset] = _matches(container, entry)
            if matches[entry.header_offset]:
                self.donors[number] = Donor(
                    record.name,
                    path,
                    entry.name,
                    entry,
                    record.size,
                    record.recorded,
                    compare(record.chunks(), container.chunks(entry)),
                    max(1, self._tried[number]),
                )
                return


def compare(
    damaged: Iterable[bytes | memoryview], donor: Iterable[bytes | memoryview]
) -> Agreement:
    """Counts the bytes in which two streams differ, as far as both go, and the runs of them."""
    import numpy as np

    compared = differing = runs = 0
    first: int | None = None
    open_run = False
    for one, other in _aligned(damaged, donor):
        unequal = np.frombuffer(one, np.uint8) != np.frombuffer(other, np.uint8)
        count = int(np.count_nonzero(unequal))
        if count:
            if first is None:
                first = compared + int(unequal.argmax())
            begins = unequal[1:] & ~unequal[:-1]
            runs += int(np.count_nonzero(begins)) + (bool(unequal[0]) and not open_run)
            differing += count
        open_run = bool(unequal[-1])
        compared += len(one)
    return Agreement(compared, differing, runs, first)


def _aligned(
    first: Iterable[bytes | memoryview], second: Iterable[bytes | memoryview]
) -> Iterator[tuple[memoryview, memoryview]]:
    """Pieces of equal length, none empty, from two streams in chunks of any size."""
    ones, others = iter(first), iter(second)
    one = other = memoryview(b"")
    while True:
        while not one:
            piece = next(ones, None)
            if piece is None:
                return
            one = memoryview(piece)
        while not other:
            piece = next(others, None)
            if piece is None:
                return
            other = memoryview(piece)
        length = min(len(one), len(other))
        yield one[:length], other[:length]
        one, other = one[length:], other[length:]


def _matches(container: Container, record: Record) -> bool:
    """Whether a record's bytes have its checksum now."""
    from ckpttool.errors import FormatError

    try:
        return container.crc32(record) == record.crc
    except FormatError:
        return False


def _sniffed_zip(reader: FileReader, limits: ReaderLimits) -> ZipContainer | None:
    from ckpttool.formats.sniff import sniff

    found = sniff(reader, limits)
    if found.kind not in _ZIP_KINDS:
        return None
    return found.container or _open_zip(reader, limits)


def _open_zip(reader: FileReader, limits: ReaderLimits) -> ZipContainer:
    from ckpttool.formats.torch_zip import open_zip

    return open_zip(reader, limits)


def _same_file(path: str, reader: FileReader) -> bool:
    """Whether a path leads to the file that is open (a link, or the file itself)."""
    try:
        there, here = os.stat(path), os.fstat(reader.fileno())
    except (OSError, ValueError):
        return False  # opening it will tell what is wrong
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
