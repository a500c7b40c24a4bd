"""Every way to read one record whose copies do not agree, until one is proven.

Where the content begins and ends is taken from local header, descriptor, directory, alignment,
neighbours and pickle, in all combinations that some of them support. A recorded checksum proves the
right one. What it proves is a content; whose it is, header or directory must say as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.formats.container import DEFLATED
from ckpttool.formats.zip_layout import (
    DESCRIPTOR_32,
    DESCRIPTOR_64,
    DESCRIPTOR_BYTES,
    FLAG_STREAMED,
    LOCAL_HEADER,
)
from ckpttool.mending import canonical
from ckpttool.mending.twins import (
    descriptor_copies,
    is_plausible_name,
    looks_like_local,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpttool.formats.limits import ReaderLimits
    from ckpttool.io.reading import FileReader
    from ckpttool.mending.found import Found
    from ckpttool.mending.survey import Walk
    from ckpttool.mending.twins import Claim, LocalCopy

# Signatures that lie in contents by chance or on purpose; more of them are not looked at.
_MOST_CANDIDATES = 10_000
_CHUNK_BYTES = 1 << 18
# Of a checksum's four bytes.
_MOST_DAMAGED = 2


class Weighing:
    """One record whose copies do not all agree: every way to read it, until one is proven."""

    def __init__(
        self,
        walk: Walk,
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
        self.names = tuple(filter(is_plausible_name, dict.fromkeys(names)))

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
        sound = self.local is not None and self.local.sound
        ceiling = walk.limit if sound else min(walk.limit, self.ceiling())
        floor = self.position + LOCAL_HEADER.size
        return [start for start in dict.fromkeys(starts) if floor < start <= ceiling]

    def ceiling(self) -> int:
        """How far behind a header that torch wrote here the content can begin."""
        walk = self.walk
        longest = max([len(name) for name in self.names], default=0)
        longest = max(walk.longest_name(), longest)
        return self.position + LOCAL_HEADER.size + longest + walk.alignment

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
        places = walk.places(DESCRIPTOR_BYTES, start, walk.limit)
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
        """A stored content that one of the checksums that are recorded for it proves."""
        walk = self.walk
        crcs = walk.recorded(self.local, self.claim, start, stop)
        if not crcs or (stop == start and not self.is_empty(start)):
            return None
        crc = walk.checksum(start, stop)
        if crc not in crcs:
            return None
        if self.is_anothers(crc, stop - start):
            return None
        found = walk.found(self.local, self.claim, self.names, start, stop, crc)
        return self.bound(found._replace(offset=self.position))

    def is_anothers(self, crc: int, size: int) -> bool:
        """Whether the directory knows a checksum and size as those of another record.

        Where a block is missing or doubled, the header of one record can stand before the content
        and the descriptor of another. Not so where the directory's copy of the checksum is merely
        damaged: that differs in a byte or two.
        """
        claim, local = self.claim, self.local
        known = self.walk.claims.with_checksum(crc, size)
        if not known or (claim is not None and claim.crc == crc):
            return False
        own = local.raw_name if local is not None and local.sound else None
        if any(other.raw_name == own for other in known):
            return False
        return claim is None or _bytes_differing(claim.crc, crc) > _MOST_DAMAGED

    def bound(self, found: Found) -> Found:
        """A proven record without the directory's entry if that is another record's.

        It is this one's if it records the content's checksum, or the name in the header; or, where
        the header is damaged, if place and size are right.
        """
        claim, local = self.claim, self.local
        if claim is None or claim.crc == found.crc:
            return found
        if local is not None and local.sound:
            if local.raw_name == claim.raw_name:
                return found
        elif claim.offset == self.position:
            usual = self.usual_start(claim.raw_name, claim.size)
            if (found.start, found.size) == (usual, claim.size):
                return found
        names = tuple(name for name in found.names if name != claim.raw_name)
        crcs = tuple(crc for crc in found.crcs if crc != claim.crc)
        return found._replace(claim=None, names=names, crcs=crcs)

    def is_the_one(self, found: Found) -> bool:
        """Whether a content that its descriptor alone has shown is this record's.

        The directory must know its checksum, or it must begin where the directory's entry, with a
        header as torch writes it, would have it. Without an entry there must be no header, either.
        """
        claim = self.claim
        if claim is None:
            return self.local is None or not self.local.sound
        usual = self.usual_start(claim.raw_name, claim.size)
        return found.crc == claim.crc or (found.start, found.size) == (usual, claim.size)

    def is_empty(self, start: int) -> bool:
        """Whether enough says that the content that begins at `start` has no bytes at all.

        Two facts must say so: nothing has a checksum, too, and would fit anywhere.
        """
        claim, local, walk = self.claim, self.local, self.walk
        if claim is not None and claim.size and claim.size == claim.stored:
            return False
        bounded = walk.is_boundary(start) or walk.next_claimed(self.position) == start
        claimed = claim is not None and not (claim.size or claim.stored or claim.crc)
        header = local is not None and looks_like_local(walk.window, self.position)
        unstreamed = header and local is not None and not local.flags & FLAG_STREAMED
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
                return self.bound(found._replace(offset=self.position))
        return None

    def by_descriptor(self) -> Found | None:
        """A record whose header is gone, or too short: its descriptor tells size and begin.

        No other record's: the content must begin where a header from here on would end, and the
        directory, if it has a word on the record, must agree.
        """
        walk = self.walk
        floor = self.position + LOCAL_HEADER.size + 1
        ceiling = self.ceiling()
        after = walk.next_header(self.position)
        for place, length in self.descriptors(floor):
            start = place - length
            if after is not None and place > after:
                break
            aligned = (start - walk.begin) % walk.alignment == 0
            # Where bytes are missing from a header, nothing behind it is aligned any more.
            if floor <= start <= ceiling and (aligned or self.claim is not None):
                found = self.proven(start, place)
                if found is not None and self.is_the_one(found):
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
        if not floor <= after <= self.ceiling():
            return None
        found = walk.found(None, None, (), after, after, 0)
        return found._replace(offset=self.position, following=after, crcs=(0,))

    # Without a proof.

    def unproven(self) -> Found | None:
        """The reading that most copies support; it may be cut."""
        walk, local = self.walk, self.local
        claimed = None if self.claim is None else self.claim.raw_name
        if local is not None and local.sound and claimed not in (None, local.raw_name):
            # Nobody knows whose checksum that is.
            self.claim, self.names = None, (local.raw_name,)
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
            cut = best[1] == walk.limit and walk.directory is None
            bounded = cut or walk.is_boundary(found.following)
            crcs = tuple(crc for crc in found.crcs if not self.is_anothers(crc, found.size))
            if crc in crcs:  # proven as what it cannot be
                crcs = ()
            return found._replace(offset=self.position, bounded=bounded, crcs=crcs)
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


def _bytes_differing(a: int, b: int) -> int:
    return sum(
        x != y for x, y in zip(a.to_bytes(4, "little"), b.to_bytes(4, "little"), strict=True)
    )


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
