"""The records of a damaged zip: each fact from whichever of its copies a checksum proves right.

The walk goes from record to record, since torch leaves no gap between them. For each it gathers
where the content may begin and where it may end, from local header, data descriptor, directory,
alignment, neighbours and the pickle, and takes the combination whose content has a checksum that
some copy records. Nothing is guessed: without such a match the record is given with what most
copies say, and is not proven.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.errors import FormatError
from ckpttool.formats.container import DEFLATED, STORED
from ckpttool.formats.zip_layout import (
    DESCRIPTOR_32,
    DESCRIPTOR_64,
    DESCRIPTOR_BYTES,
    FLAG_STREAMED,
    LOCAL_BYTES,
    LOCAL_HEADER,
)
from ckpttool.mending import canonical
from ckpttool.mending.directory_copy import DirectoryCopy, read_directory_copy
from ckpttool.mending.skeleton import Skeleton, read_skeleton
from ckpttool.mending.twins import (
    LONGEST_NAME,
    Claim,
    LocalCopy,
    Window,
    descriptor_copies,
    local_copy,
    looks_like_local,
    padded_copy,
    signatures,
)

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
_CHUNK_BYTES = 1 << 18
_LONGEST_NUMBER = 20
_MOST_ALIGNMENT = 1 << 15


class Found(NamedTuple):
    """A record as far as it was found.

    `offset` is where its header is, or was. `names` are the full names that its copies give, the
    likeliest first; none where all are gone. The content begins at `start`, of which `stored` bytes
    belong to it and `present` are there; `size` counts them once inflated. `crcs` are the recorded
    checksums, `crc` that of the content as it is now (None where it is not all there, or cannot be
    inflated). `following` is where the next structure begins. `local` and `claim` are its header
    and its directory entry as they are. `ended` is false where the file ends in the content, and
    nobody knows how long it was: `stored` counts what is there. `usual` tells that all around the
    content is, byte for byte, what torch writes.
    """

    offset: int
    names: tuple[bytes, ...]
    start: int
    stored: int
    size: int
    present: int
    method: int
    crcs: tuple[int, ...]
    crc: int | None
    following: int
    local: LocalCopy | None
    claim: Claim | None
    ended: bool = True
    usual: bool = False

    @property
    def matches(self) -> bool:
        """Whether the content is proven: one of its recorded checksums is the content's own."""
        return self.crc is not None and self.crc in self.crcs

    @property
    def is_cut(self) -> bool:
        """Whether bytes of the content are missing from the file."""
        return self.present < self.stored or not self.ended


class Survey(NamedTuple):
    """What was found of one archive. `records` are in the file's order.

    `skeleton` is what the pickle says, None where there is no pickle that can be read. `directory`
    is the central directory, as far as it is there.
    """

    region: Region
    records: list[Found]
    directory: DirectoryCopy | None
    skeleton: Skeleton | None


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
    walk = _Walk(reader, region, limits, progress)
    walk.known_skeleton = skeleton
    walk.run()
    return Survey(region, walk.records, walk.directory, walk.skeleton())


class _Walk:
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
        self.by_offset = {claim.offset: claim for claim in claims}
        self.by_name: dict[bytes, list[Claim]] = {}
        for claim in claims:
            self.by_name.setdefault(claim.raw_name, []).append(claim)
        self.offsets = sorted(self.by_offset)
        self.following = {claim.number: after for claim, after in pairwise(claims)}
        self.used: set[int] = set()
        self.known_skeleton: Skeleton | None = None
        self._skeleton: Skeleton | None = None
        self._pickle_record: Found | None = None
        self._checksums: dict[tuple[int, int], int] = {}

    def run(self) -> None:
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
            if found.claim is not None:
                self.used.add(found.claim.number)
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
        claim = self.claim_for(position, local)
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
        return _Weighing(self, position, local, claim, padded).result(named=there or bool(claim))

    def as_torch_wrote(self, position: int) -> Found | None:
        """The shortest way: all around a content is what torch writes for the directory's entry."""
        claim = self.by_offset.get(position)
        if claim is None or not claim.usual or claim.number in self.used:
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

    def claim_for(self, position: int, local: LocalCopy | None) -> Claim | None:
        """The directory's entry for the record at `position`: by place, by name, or by order."""
        here = self.by_offset.get(position)
        named = self.by_name.get(local.raw_name, []) if local is not None and local.sound else []
        named = [claim for claim in named if claim.number not in self.used]
        if here in named:
            return here
        nearest = min(named, key=lambda claim: abs(claim.offset - position), default=None)
        if here is not None:
            # A name that belongs elsewhere is damaged; unless all places are off, for bytes are
            # missing or too many.
            moved = nearest is not None and not looks_like_local(self.window, nearest.offset)
            return nearest if moved else here
        if nearest is not None:
            return nearest
        last = self.records[-1].claim if self.records else None
        if last is None or local is None or not looks_like_local(self.window, position):
            return None
        after = self.following.get(last.number)
        if after is None or after.number in self.used or after.number != last.number + 1:
            return None
        return None if looks_like_local(self.window, after.offset) else after

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
            if length <= 1 << 15:
                known = crc32(self.window.read(start, length))
            else:
                known = crc32_of(self.reader, start, length)
            self._checksums[start, stop] = known
            if len(self._checksums) > 1000:
                self._checksums.clear()
        return known

    # Where the next record is.

    def next_record(self, position: int) -> int | None:
        """The next place behind `position` at which a record begins, or None."""
        claimed = next((o for o in self.offsets if o > position), self.limit)
        for place in signatures(self.reader, LOCAL_BYTES, position + 1, min(claimed, self.limit)):
            if self.is_own_header(place):
                return place
        return claimed if claimed < self.limit else None

    def next_header(self, position: int) -> int | None:
        """The next local header behind `position` that is sound and this archive's, or None."""
        for count, place in enumerate(
            signatures(self.reader, LOCAL_BYTES, position + 1, self.limit)
        ):
            if count > _MOST_CANDIDATES:
                return None
            if self.is_own_header(place):
                return place
        return None

    def is_own_header(self, place: int) -> bool:
        local = local_copy(self.window, place)
        if local is None or not local.sound:
            return False
        roots = {name.split(b"/")[0] for found in self.records[:8] for name in found.names[:1]}
        return not roots or local.raw_name.split(b"/")[0] in roots

    def next_claimed(self, position: int) -> int:
        """Where the directory says that the next record begins, or where the directory does."""
        return next((offset for offset in self.offsets if offset > position), self.limit)

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


class _Weighing:
    """One record whose copies do not all agree: every way to read it, until one is proven."""

    def __init__(
        self,
        walk: _Walk,
        position: int,
        local: LocalCopy | None,
        claim: Claim | None,
        padded: tuple[bytes, int] | None,
    ) -> None:
        self.walk = walk
        self.position = position
        self.local = local
        self.claim = claim
        self.padded = padded
        names = [claim.raw_name] if claim is not None else []
        if padded is not None:
            names.append(padded[0])
        if local is not None and local.raw_name:
            at = 0 if local.sound and claim is None else len(names)
            names.insert(at, local.raw_name)
        self.names = tuple(dict.fromkeys(names))

    def result(self, *, named: bool) -> Found | None:
        """The record; without any name or header (`named`), only if a descriptor proves it."""
        if not named:
            return self.by_descriptor()
        ways = [self.stored, self.deflated, self.by_descriptor, self.unproven]
        if self.methods() == {DEFLATED}:
            ways[:2] = [self.deflated, self.stored]
        return next(filter(None, (way() for way in ways)), None)

    def methods(self) -> set[int]:
        """What its copies say of how it is compressed."""
        return {copy.method for copy in (self.local, self.claim) if copy is not None}

    # Ways to read it.

    def starts(self) -> list[int]:
        """Where the content may begin, the likeliest first."""
        walk, starts = self.walk, []
        if self.claim is not None:
            starts.append(self.usual_start(self.claim.raw_name, self.claim.size))
        if self.local is not None:
            starts.insert(0 if self.local.sound else len(starts), self.local.content)
        if self.padded is not None:
            starts.append(self.padded[1])
        starts += [self.usual_start(name) for name in self.names]
        floor = self.position + LOCAL_HEADER.size
        return [start for start in dict.fromkeys(starts) if floor < start <= walk.limit]

    def usual_start(self, name: bytes, size: int = 0) -> int:
        """Where the content begins if torch wrote the header, with this name."""
        walk = self.walk
        offset = self.position - walk.begin
        usual = canonical.content_start(offset, len(name), walk.alignment, size=size)
        return walk.begin + usual

    def stops(self, start: int) -> Iterator[int]:
        """Where a stored content that begins at `start` may end, the likeliest first."""
        walk = self.walk
        if self.claim is not None:
            yield start + self.claim.stored
            yield start + self.claim.size
        if self.local is not None and not self.local.flags & FLAG_STREAMED:
            yield start + self.local.stored
            yield start + self.local.size
        for size in walk.expected_size(self.names):
            yield start + size
        yield from self.before(walk.next_claimed(self.position))
        for place, length in self.descriptors(start):
            if length == place - start:
                yield place
        after = walk.next_header(self.position)
        if after is not None:
            yield from self.before(after)

    def before(self, boundary: int) -> Iterator[int]:
        """Where the content ends if the next structure begins at `boundary`."""
        for length in (DESCRIPTOR_32.size, DESCRIPTOR_64.size, DESCRIPTOR_32.size - 4, 0):
            yield boundary - length

    def descriptors(self, start: int) -> Iterator[tuple[int, int]]:
        """Every descriptor behind `start` whose two sizes agree: its place and that size."""
        walk = self.walk
        places = signatures(walk.reader, DESCRIPTOR_BYTES, start, walk.limit)
        for count, place in enumerate(places):
            if count > _MOST_CANDIDATES:
                return
            for layout in (DESCRIPTOR_32, DESCRIPTOR_64):
                data = walk.window.read(place, layout.size)
                if len(data) == layout.size:
                    _, _, stored, size = layout.unpack(data)
                    if stored == size:
                        yield place, size

    def stored(self) -> Found | None:
        """The first reading as a stored content that a recorded checksum proves."""
        for start in self.starts():
            tried: set[int] = set()
            for stop in self.stops(start):
                if stop in tried or not start <= stop <= self.walk.limit:
                    continue
                tried.add(stop)
                found = self.proven(start, stop)
                if found is not None:
                    return found
        return None

    def proven(self, start: int, stop: int) -> Found | None:
        walk = self.walk
        crcs = walk.recorded(self.local, self.claim, start, stop)
        if not crcs or (stop == start and not self.is_empty(start)):
            return None
        crc = walk.checksum(start, stop)
        if crc not in crcs:
            return None
        return walk.found(self.local, self.claim, self.names, start, stop, crc)._replace(
            offset=self.position
        )

    def is_empty(self, start: int) -> bool:
        """Whether enough says that the content that begins at `start` has no bytes at all.

        Two facts must say so: nothing has a checksum, too, and would fit anywhere.
        """
        claim, local, walk = self.claim, self.local, self.walk
        bounded = walk.is_boundary(start) or walk.next_claimed(self.position) == start
        claimed = claim is not None and not (claim.size or claim.stored or claim.crc)
        unstreamed = local is not None and not local.flags & FLAG_STREAMED
        expected = 0 in walk.expected_size(self.names)
        return bounded + claimed + unstreamed + expected >= 2 and (bounded or expected)

    def deflated(self) -> Found | None:
        """The record read as compressed, if a copy says that it is, and a checksum proves it."""
        if DEFLATED not in self.methods():
            return None
        for start in self.starts():
            read = _inflate(self.walk.reader, start, self.walk.limit, self.walk.limits)
            if read is None:
                continue
            stored, size, crc = read
            found = self.walk.found(
                *(self.local, self.claim, self.names, start, start + stored, crc),
                size=size,
                method=DEFLATED,
            )
            if found.matches:
                return found._replace(offset=self.position)
        return None

    def by_descriptor(self) -> Found | None:
        """A record whose header is gone, or too short: its descriptor tells size and begin.

        Never beyond the next header, which would be that of another record.
        """
        walk = self.walk
        floor = self.position + LOCAL_HEADER.size + 1
        ceiling = floor + LONGEST_NAME + walk.alignment
        after = walk.next_header(self.position)
        for place, length in self.descriptors(floor):
            start = place - length
            if after is not None and place > after:
                break
            aligned = (start - walk.begin) % walk.alignment == 0
            # Where bytes are missing from a header, nothing behind it is aligned any more.
            if floor <= start <= ceiling and (aligned or self.claim is not None):
                found = self.proven(start, place)
                if found is not None:
                    return found
            if start > ceiling:
                return None  # that of a later record
        return self.nameless_empty(after)

    def nameless_empty(self, after: int | None) -> Found | None:
        """An empty record whose header is gone: the next header stands where padding would end."""
        walk = self.walk
        floor = self.position + LOCAL_HEADER.size + 1
        if after is None or self.names or (after - walk.begin) % walk.alignment:
            return None
        if not floor <= after <= floor + LONGEST_NAME:
            return None
        found = walk.found(None, None, (), after, after, 0)
        return found._replace(offset=self.position, following=after, crcs=(0,))

    # Without a proof.

    def unproven(self) -> Found | None:
        """The reading that most copies support; it may be cut."""
        walk = self.walk
        starts = self.starts()
        if not starts:
            return None
        after = walk.next_header(self.position)
        end = walk.limit if after is None else after
        readings = [(start, stop) for start in starts for stop in dict.fromkeys(self.stops(start))]
        inside = [(a, b) for a, b in readings if a <= b <= end]
        best = max(inside, key=lambda reading: self.support(*reading), default=None)
        if best is not None and self.support(*best) >= 1:
            crc = walk.checksum(*best)
            found = walk.found(self.local, self.claim, self.names, *best, crc)
            return found._replace(offset=self.position)
        wanted = next(walk.expected_size(self.names), None)
        if wanted is None and self.claim is not None:
            wanted = self.claim.size
        return self.cut(starts[0], end, wanted)

    def support(self, start: int, stop: int) -> int:
        """How many independent facts speak for a reading."""
        walk, length = self.walk, stop - start
        claimed = self.claim is not None and length in (self.claim.stored, self.claim.size)
        copies = descriptor_copies(walk.window, stop, length, wide=False)
        fitting = max((copy.fitting for copy in copies), default=0)
        expected = length in walk.expected_size(self.names)
        behind = walk.behind(self.local, self.claim, start, stop, None)
        return claimed + fitting + expected + walk.is_boundary(behind)

    def cut(self, start: int, end: int, wanted: int | None) -> Found:
        """A record whose end is not in the file, or can't be told from what follows at `end`."""
        walk = self.walk
        stop = end if wanted is None else start + wanted
        found = walk.found(self.local, self.claim, self.names, start, max(start, stop), None)
        present = max(0, min(end, stop) - start)
        return found._replace(
            offset=self.position,
            present=present,
            crcs=() if self.claim is None else (self.claim.crc,),
            following=max(end, self.position + 1),
            ended=wanted is not None,
        )


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


def _inflate(
    reader: FileReader, start: int, stop: int, limits: ReaderLimits
) -> tuple[int, int, int] | None:
    """Stored size, size and checksum of a deflated content; None if it is none, or too big."""
    import zlib

    from ckpttool.io.checksum import crc32

    inflater, size, crc, used = zlib.decompressobj(-zlib.MAX_WBITS), 0, 0, 0
    most = max(limits.inflated_bytes, 16 * (stop - start))
    for chunk in reader.chunks(start, stop - start):
        pending: bytes | memoryview = chunk
        output = b""
        while not inflater.eof and (pending or len(output) == _CHUNK_BYTES):
            try:
                output = inflater.decompress(pending, _CHUNK_BYTES)
            except zlib.error:
                return None
            size, crc = size + len(output), crc32(output, crc)
            if size > most:
                return None
            pending = inflater.unconsumed_tail
        used += len(chunk)
        if inflater.eof:
            return used - len(inflater.unused_data), size, crc
    return None
