"""A record of a damaged zip as far as it was found."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ckpttool.mending.twins import Claim, LocalCopy


class Found(NamedTuple):
    """A record as far as it was found.

    `offset` is where its header is, or was. `names` are the full names that its copies give, the
    likeliest first; none where all are gone. The content begins at `start`, of which `stored` bytes
    belong to it and `present` are there; `size` counts them once inflated. `crcs` are the recorded
    checksums, `crc` that of the content as it is now (None where it is not all there, or cannot be
    inflated). `following` is where the next structure begins. `local` and `claim` are its header
    and its directory entry as they are. `ended` is false where the file ends in the content, and
    nobody knows how long it was: `stored` counts what is there. `usual` tells that all around the
    content is, byte for byte, what torch writes; `bounded` that the next structure, or the end of
    a cut file, is just where the content's end leads to.
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
    bounded: bool = True

    @property
    def matches(self) -> bool:
        """Whether the content is proven: one of its recorded checksums is the content's own."""
        return self.crc is not None and self.crc in self.crcs

    @property
    def is_cut(self) -> bool:
        """Whether bytes of the content are missing from the file."""
        return self.present < self.stored or not self.ended
