"""The directory's entries, and which of them is the record at a place.

By place, by name, by checksum, or by order: each of them may be what is damaged, or all places may
be off, since bytes are missing from the file or too many.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING

from ckpttool.mending.twins import Claim, LocalCopy, Window, local_copy, looks_like_local

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.mending.found import Found


# No honest archive has two.
_MOST_NAMESAKES = 64
# Fresh optimizer states are all the same; more of them than this need not be told apart.
_MOST_ALIKE = 10_000


class Claims:
    """All entries of a directory; `use` says of one that its record is found and proven."""

    def __init__(self, claims: Sequence[Claim], window: Window) -> None:
        self._window = window
        self._by_offset = {claim.offset: claim for claim in claims}
        self._by_name: dict[bytes, list[Claim]] = {}
        self._by_checksum: dict[tuple[int, int], list[Claim]] = {}
        for claim in claims:
            self._by_name.setdefault(claim.raw_name, []).append(claim)
            self._by_checksum.setdefault((claim.crc, claim.size), []).append(claim)
        self._offsets = sorted(self._by_offset)
        self._following = {claim.number: after for claim, after in pairwise(claims)}
        self._used: set[int] = set()

    def use(self, claim: Claim) -> None:
        """Takes an entry away: its record is proven."""
        self._used.add(claim.number)

    def at(self, offset: int) -> Claim | None:
        """The entry of a record whose header is at `offset`, if it is not used."""
        claim = self._by_offset.get(offset)
        return None if claim is None or claim.number in self._used else claim

    def next_offset(self, offset: int, default: int) -> int:
        """The first place behind `offset` at which a record begins, as they say."""
        index = bisect_right(self._offsets, offset)
        return self._offsets[index] if index < len(self._offsets) else default

    def with_checksum(self, crc: int, size: int) -> list[Claim]:
        """All entries, used or not, with this checksum and size."""
        return self._by_checksum.get((crc, size), [])

    def find(self, offset: int, local: LocalCopy | None, before: Claim | None) -> Claim | None:
        """The entry for the record at `offset`, whose header is `local` and behind `before`."""
        here = self._by_offset.get(offset)
        named = self._named(local)
        if here in named:
            return here
        nearest = min(named, key=lambda claim: abs(claim.offset - offset), default=None)
        if here is None:
            return nearest or self._by_order(offset, local, before)
        # A name that belongs elsewhere is damaged; unless all places are off.
        moved = nearest is not None and not self._stands(nearest)
        return nearest if moved else here

    def completed(self, found: Found) -> Found:
        """A proven record, with the entry for its checksum and size if it has none yet.

        Another entry with both would be of a record with the same content, so either is right.
        """
        if found.claim is not None or not found.matches or not found.size:
            return found
        named = found.local is not None and found.local.sound
        for claim in self._by_checksum.get((found.crc or 0, found.size), [])[:_MOST_ALIKE]:
            if claim.number not in self._used and (not named or claim.raw_name in found.names):
                names = tuple(dict.fromkeys((*found.names, claim.raw_name)))
                return found._replace(claim=claim, names=names)
        return found

    def _named(self, local: LocalCopy | None) -> list[Claim]:
        named = self._by_name.get(local.raw_name, []) if local is not None and local.sound else []
        return [claim for claim in named[:_MOST_NAMESAKES] if claim.number not in self._used]

    def _stands(self, claim: Claim) -> bool:
        """Whether a header of that name is where the directory says."""
        there = local_copy(self._window, claim.offset)
        return there is not None and there.sound and there.raw_name == claim.raw_name

    def _by_order(self, offset: int, local: LocalCopy | None, before: Claim | None) -> Claim | None:
        """The next entry, where the header has lost its name and the entry its place."""
        if before is None or local is None or local.sound:
            return None
        after = self._following.get(before.number)
        if after is None or after.number in self._used or after.number != before.number + 1:
            return None
        if not looks_like_local(self._window, offset):
            return None
        return None if looks_like_local(self._window, after.offset) else after
