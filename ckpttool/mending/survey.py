"""The records of a damaged zip: each fact from whichever of its copies a checksum proves right.

The walk goes from record to record, since torch leaves no gap between them. For each it gathers
where the content may begin and where it may end, from local header, data descriptor, directory,
alignment, neighbours and the pickle, and takes the combination whose content has a checksum that
some copy records. Nothing is guessed: without such a match the record is given with what most
copies say, and is not proven.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckpttool.errors import FormatError, LimitError
from ckpttool.formats.container import STORED
from ckpttool.formats.zip_layout import (
    DESCRIPTOR_32,
    DESCRIPTOR_64,
    FLAG_STREAMED,
    LOCAL_BYTES,
)
from ckpttool.mending import canonical
from ckpttool.mending.claims import Claims
from ckpttool.mending.directory_copy import DirectoryCopy, read_directory_copy
from ckpttool.mending.found import Found
from ckpttool.mending.skeleton import Skeleton, read_skeleton
from ckpttool.mending.twins import (
    Claim,
    LocalCopy,
    Window,
    descriptor_copies,
    local_copy,
    looks_like_local,
    padded_copy,
    signatures,
)
from ckpttool.mending.weighing import Weighing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckpttool.formats.limits import ReaderLimits
    from ckpttool.io.reading import FileReader
    from ckpttool.mending.regions import Region

ALIGNMENT = 64
_PICKLE = b"data.pkl"
_ALIGNMENT_RECORD = b"/.storage_alignment"
# Signatures that lie in contents by chance or on purpose; more of them are not looked at.
_MOST_CANDIDATES = 10_000
_LONGEST_NUMBER = 20
# Bytes of a name where none is known, and how many more one may have than those that are.
_USUAL_NAME = 64
_MORE_NAME = 32
_MOST_ALIGNMENT = 1 << 15
# Bytes that may be read in all: some passes over the archive, and this much for any.
_MOST_PASSES = 32
_LEAST_WORK = 1 << 28


class Survey(NamedTuple):
    """What was found of one archive. `records` are in the file's order.

    `skeleton` is what the pickle says, None where there is no pickle that can be read. `directory`
    is the central directory, as far as it is there. `stopped` says why the survey did not come to
    the end, None if it did.
    """

    region: Region
    records: list[Found]
    directory: DirectoryCopy | None
    skeleton: Skeleton | None
    stopped: str | None = None


def survey(
    reader: FileReader,
    region: Region,
    limits: ReaderLimits,
    progress: Callable[[int], object] | None = None,
    *,
    skeleton: Skeleton | None = None,
) -> Survey:
    """Looks for all records of the archive in `region`, reading each content once or more.

    `skeleton` is what the pickle says, if that is known better than from the pickle in the file.
    `progress(bytes)` is told what has been walked over. Raises UnreadableError.
    """
    walk = Walk(reader, region, limits, progress)
    walk.known_skeleton = skeleton
    stopped = None
    try:
        walk.run()
    except LimitError as error:
        stopped = str(error)
    return Survey(region, walk.records, walk.directory, walk.skeleton(), stopped)


class Walk:
    """A walk over one archive from record to record."""

    def __init__(
        self,
        reader: FileReader,
        region: Region,
        limits: ReaderLimits,
        progress: Callable[[int], object] | None,
    ) -> None:
        self.reader = reader
        self.begin = region.begin
        self.limits = limits
        self.progress = progress or (lambda count: None)
        self.window = Window(reader)
        self.directory = read_directory_copy(reader, region.begin, region.stop, most=limits.records)
        self.limit = region.stop if self.directory is None else self.directory.start
        self.records: list[Found] = []
        self.alignment = ALIGNMENT
        claims = self.directory.claims if self.directory else []
        self.claims = Claims(claims, self.window)
        self.budget = _LEAST_WORK + _MOST_PASSES * (region.stop - region.begin)
        self.known_skeleton: Skeleton | None = None
        self._skeleton: Skeleton | None = None
        self._pickle_record: Found | None = None
        self._checksums: dict[tuple[int, int], int] = {}

    def run(self) -> None:
        """Walks from the archive's begin to its directory, or to the end of what is there."""
        position: int | None = self.begin
        sure = True  # an archive begins with a record, and behind a proven one is another
        while position is not None and position < self.limit:
            if len(self.records) >= self.limits.records:
                return
            found = self.record_at(position, sure=sure)
            if found is None:
                after = self.next_record(position)
                self.progress((self.limit if after is None else after) - position)
                position, sure = after, False
                continue
            found = self.claims.completed(found)
            if found.claim is not None and found.matches:
                self.claims.use(found.claim)
            self.records.append(found)
            self.note_alignment(found)
            self.progress(found.following - position)
            sure, position = found.matches, max(found.following, position + 1)

    def note_alignment(self, found: Found) -> None:
        """torch can be told to align otherwise; a small record then says so."""
        if any(name.endswith(_ALIGNMENT_RECORD) for name in found.names):
            self.alignment = stated_alignment(self.reader, found) or self.alignment

    # One record.

    def record_at(self, position: int, *, sure: bool) -> Found | None:
        """The record whose header is, or was, at `position`; None if there is no sign of one."""
        found = self.as_torch_wrote(position)
        if found is not None:
            return found
        local = local_copy(self.window, position)
        before = self.records[-1].claim if self.records else None
        claim = self.claims.find(position, local, before)
        found = self.as_both_say(local, claim, position)
        if found is not None:
            return found
        there = local is not None and (local.sound or looks_like_local(self.window, position))
        if not there and (claim is None or claim.offset != position) and not sure:
            return None
        self._checksums.clear()
        padded = padded_copy(self.window, position, self.begin, self.alignment)
        if local is not None and not local.sound and not (there or claim):
            local = None
        found = Weighing(self, position, local, claim, padded).result(named=there or bool(claim))
        if found is not None and not there and not found.matches and self.has_moved(found):
            return None
        return found

    def has_moved(self, found: Found) -> bool:
        """Whether a record that only the directory puts here has its own header further on."""
        after = self.next_header(found.offset)
        return after is not None and after < found.start + found.stored

    def as_torch_wrote(self, position: int) -> Found | None:
        """The shortest way: all around a content is what torch writes for the directory's entry."""
        claim = self.claims.at(position)
        if claim is None or not claim.usual:
            return None
        offset, size, name = position - self.begin, claim.size, claim.raw_name
        header = canonical.local_header(name, size, offset, self.alignment)
        start = position + len(header)
        stop = start + size
        if stop > self.limit or self.window.read(position, len(header)) != header:
            return None
        crc = claim.crc
        behind = canonical.descriptor(size, crc, offset)
        if self.checksum(start, stop) != crc or self.window.read(stop, len(behind)) != behind:
            return None
        following, facts = stop + len(behind), (size, size, size, STORED, (crc,), crc)
        return Found(position, (name,), start, *facts, following, None, claim, usual=True)

    def as_both_say(
        self, local: LocalCopy | None, claim: Claim | None, position: int
    ) -> Found | None:
        """The short way, for a record whose header and directory entry agree with its content."""
        if (
            local is None
            or claim is None
            or not local.sound
            or claim.offset != position
            or claim.raw_name != local.raw_name
            or claim.method != STORED
            or local.method != STORED
            or claim.stored != claim.size
        ):
            return None
        stop = local.content + claim.stored
        if stop > self.limit:
            return None
        crc = self.checksum(local.content, stop)
        if crc != claim.crc:
            return None
        return self.found(local, claim, (local.raw_name,), local.content, stop, crc)

    def found(
        self,
        local: LocalCopy | None,
        claim: Claim | None,
        names: tuple[bytes, ...],
        start: int,
        stop: int,
        crc: int | None,
        *,
        size: int | None = None,
        method: int = STORED,
    ) -> Found:
        """The record with these facts; the rest is read where they lead."""
        length = stop - start
        crcs = self.recorded(local, claim, start, stop, size)
        present = max(0, min(stop, self.limit) - start)
        following = self.behind(local, claim, start, stop, size)
        offset = claim.offset if local is None and claim is not None else -1
        return Found(
            offset=local.offset if local is not None else offset,
            names=names,
            start=start,
            stored=length,
            size=length if size is None else size,
            present=present,
            method=method,
            crcs=crcs,
            crc=crc,
            following=following,
            local=local,
            claim=claim,
        )

    def recorded(
        self,
        local: LocalCopy | None,
        claim: Claim | None,
        start: int,
        stop: int,
        size: int | None = None,
    ) -> tuple[int, ...]:
        """The checksums that are recorded for a content, each once."""
        crcs = [] if claim is None else [claim.crc]
        if stop > start and stop <= self.limit:
            wide = (local is not None and local.wide) or (claim is not None and claim.wide)
            for copy in descriptor_copies(self.window, stop, stop - start, wide=wide):
                if copy.fitting:
                    crcs.append(copy.crc)
        if local is not None and not local.flags & FLAG_STREAMED and (local.crc or stop == start):
            crcs.append(local.crc)
        elif stop == start:
            crcs.append(0)
        return tuple(dict.fromkeys(crcs))

    def behind(
        self,
        local: LocalCopy | None,
        claim: Claim | None,
        start: int,
        stop: int,
        size: int | None,
    ) -> int:
        """Where the structure behind a content begins: over its descriptor, if it has one."""
        if stop >= self.limit:
            return self.limit
        wide = (local is not None and local.wide) or (claim is not None and claim.wide)
        copies = descriptor_copies(self.window, stop, stop - start, wide=wide)
        best = copies[0] if copies else None
        if best is not None and best.fitting == 3:
            return stop + best.length
        usual = (DESCRIPTOR_64 if wide else DESCRIPTOR_32).size
        lengths = [usual, DESCRIPTOR_32.size, DESCRIPTOR_64.size, 0, usual - 4]
        for length in lengths:
            if self.is_boundary(stop + length):
                return stop + length
        flags = claim.flags if claim is not None else local.flags if local is not None else 8
        streamed = flags & FLAG_STREAMED and stop > start
        return min(self.limit, stop + (usual if streamed else 0))

    def is_boundary(self, position: int) -> bool:
        """Whether a record's header, or the directory, is at `position`."""
        if position == self.limit:
            return self.directory is not None
        return looks_like_local(self.window, position)

    def checksum(self, start: int, stop: int) -> int:
        """CRC-32 of a range of the file."""
        known = self._checksums.get((start, stop))
        if known is None:
            from ckpttool.io.checksum import crc32, crc32_of

            length = stop - start
            self.spend(length)
            if length <= 1 << 15:
                known = crc32(self.window.read(start, length))
            else:
                known = crc32_of(self.reader, start, length)
            self._checksums[start, stop] = known
            if len(self._checksums) > 1000:
                self._checksums.clear()
        return known

    def spend(self, count: int) -> None:
        """Counts bytes that are read. Raises LimitError when they are more than anyone needs.

        A file whose records all contradict each other would have each read up to the end.
        """
        self.budget -= count
        if self.budget < 0:
            raise LimitError("its records contradict each other too often", limit="work")

    def places(self, signature: bytes, start: int, stop: int) -> Iterator[int]:
        """Every place of a signature; what is read for it is counted."""
        last = start
        for place in signatures(self.reader, signature, start, stop):
            self.spend(place - last)
            last = place
            yield place
        self.spend(max(0, stop - last))

    # Where the next record is.

    def next_record(self, position: int) -> int | None:
        """The next place behind `position` at which a record begins, or None."""
        claimed = self.next_claimed(position)
        for place in self.places(LOCAL_BYTES, position + 1, min(claimed, self.limit)):
            if self.is_own_header(place):
                return place
        return claimed if claimed < self.limit else None

    def next_header(self, position: int) -> int | None:
        """The next local header behind `position` that is sound and this archive's, or None."""
        for count, place in enumerate(self.places(LOCAL_BYTES, position + 1, self.limit)):
            if count > _MOST_CANDIDATES:
                return None
            if self.is_own_header(place):
                return place
        return None

    def longest_name(self) -> int:
        """A bound on the bytes of a name and its padding's head, by the names that are known."""
        known = [len(name) for found in self.records for name in found.names]
        return max(known, default=_USUAL_NAME) + _MORE_NAME

    def is_own_header(self, place: int) -> bool:
        """Whether a sound header there names something below the root of the records so far."""
        local = local_copy(self.window, place)
        if local is None or not local.sound:
            return False
        roots = {name.split(b"/")[0] for found in self.records[:8] for name in found.names[:1]}
        return not roots or local.raw_name.split(b"/")[0] in roots

    def next_claimed(self, position: int) -> int:
        """Where the directory says that the next record begins, or where the directory does."""
        return self.claims.next_offset(position, self.limit)

    # What the pickle says.

    def skeleton(self) -> Skeleton | None:
        """What the pickle says of the storages, read when it is first asked for."""
        if self.known_skeleton is not None:
            return self.known_skeleton
        if self._skeleton is None:
            record = next(filter(_is_pickle, self.records), None)
            record = record or next(filter(_may_be_pickle, self.records), None)
            if record is None and self.records and not self.records[0].names:
                record = self.records[0]  # where torch writes it
            if record is not None and record is not self._pickle_record:
                self._pickle_record = record
                self._skeleton = _read_pickle_of(self.reader, record, self.limits)
        return self._skeleton

    def expected_size(self, names: tuple[bytes, ...]) -> Iterator[int]:
        """The sizes that the pickle declares for records of these names."""
        skeleton = self.skeleton()
        if skeleton is not None:
            for name in names:
                size = skeleton.sizes.get(name.partition(b"/")[2].decode("utf-8", "replace"))
                if size is not None:
                    yield size


def stated_alignment(reader: FileReader, found: Found) -> int | None:
    """What the record `.storage_alignment` says, if it is proven and makes sense."""
    if not found.matches or found.method != STORED or not 0 < found.size <= _LONGEST_NUMBER:
        return None
    text = reader.read(found.start, found.size)
    number = int(text) if text.isdigit() else 0
    power = number & (number - 1) == 0
    return number if 0 < number <= _MOST_ALIGNMENT and power else None


def _is_pickle(found: Found) -> bool:
    return any(name == _PICKLE or name.endswith(b"/" + _PICKLE) for name in found.names)


def _may_be_pickle(found: Found) -> bool:
    """Whether a record's name is the pickle's, but for the damage to it."""
    ends = [name[-len(_PICKLE) :] for name in found.names if b"/" in name]
    return any(sum(a != b for a, b in zip(end, _PICKLE, strict=False)) <= 2 for end in ends)


def _read_pickle_of(reader: FileReader, record: Found, limits: ReaderLimits) -> Skeleton | None:
    from ckpttool.mending.content import content_of

    if record.is_cut or record.size > limits.pickle_bytes:
        return None
    try:
        data = content_of(reader, record, limits).read()
    except FormatError:
        return None
    return read_skeleton(data, limits)
