"""The record `.data/serialization_id`: forty digits made from the names and checksums of a file.

torch hashes the names of all records into the first twenty digits and their checksums into the last
twenty (caffe2/serialize/inline_container.cc, `writeSerializationId` and `ostream_write_func`). The
names are combined in the order in which libstdc++ walks a `std::unordered_set<std::string>`, which
is followed here (bits/hashtable.h, bits/hashtable_policy.h; libsupc++/hash_bytes.cc): so what a
torch on Linux wrote can be written again to the last digit. Other builds of torch have other
hashes; nothing but a person ever compares the number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

NAME = ".data/serialization_id"

_MASK = (1 << 64) - 1
_MUL = 0xC6A4A7935BD1E995
_SEED = 0xC70F6907
_GOLDEN = 0x9E3779B9
# The numbers of buckets that a set grows through: the first prime of libstdc++'s list that is at
# least twice the one before.
_BUCKETS = (
    *(13, 29, 59, 127, 257, 541, 1109, 2357, 5087, 10273, 20753, 42043, 85229, 172933, 351061),
    *(712697, 1447153, 2938679, 5967347, 12117689, 24607243, 49969847),
)


def serialization_id(records: Iterable[tuple[str, int, int]]) -> str:
    """The forty digits for records of these (name below the root, size, CRC-32), as written.

    In the order of the file, up to where this record itself follows.
    """
    listed = list(records)
    names = contents = 0
    for value in _walk_of_set(_hash_bytes(_utf8(name)) for name, _, _ in listed):
        names = _combine(names, value)
    for _, size, crc in listed:
        if size:  # what is empty has no data descriptor, which is where torch sees the checksum
            contents = _combine(contents, crc)
    return f"{names:020d}{contents:020d}"


def _utf8(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _combine(seed: int, value: int) -> int:
    """c10::hash_combine (c10/util/hash.h)."""
    return seed ^ ((value + _GOLDEN + (seed << 6) + (seed >> 2)) & _MASK)


def _hash_bytes(data: bytes) -> int:
    """`std::hash<std::string>` of libstdc++ on 64 bits: MurmurHash2, 64A."""
    value = _SEED ^ (len(data) * _MUL & _MASK)
    whole = len(data) & ~7
    for at in range(0, whole, 8):
        word = int.from_bytes(data[at : at + 8], "little") * _MUL & _MASK
        word = (word ^ word >> 47) * _MUL & _MASK
        value = (value ^ word) * _MUL & _MASK
    if len(data) & 7:
        value = (value ^ int.from_bytes(data[whole:], "little")) * _MUL & _MASK
    value = (value ^ value >> 47) * _MUL & _MASK
    return value ^ value >> 47


def _walk_of_set(hashes: Iterable[int]) -> Iterable[int]:
    """The hashes in the order in which an unordered set that they were put in one by one has them.

    It is one linked list: a new member goes to the front of its bucket, or of the list where its
    bucket is empty. When there are more members than buckets, all are dealt out anew, in the list's
    order. Two different names with one hash are not told apart, and 2**64 hashes make that no loss.
    """
    chain = _Chain(_BUCKETS[0])
    for count, value in enumerate(hashes, 1):
        if count > chain.buckets:
            chain = chain.dealt_out(next(size for size in _BUCKETS if size > chain.buckets))
        chain.insert(value)
    return chain.walk()


class _Chain:
    """The linked list of a set, with the number of its buckets."""

    __slots__ = ("_before", "_next", "buckets")

    def __init__(self, buckets: int) -> None:
        self.buckets = buckets
        self._next: dict[int | None, int | None] = {None: None}  # None stands before the first
        self._before: dict[int, int | None] = {}  # by bucket: what stands before its first member

    def insert(self, value: int) -> None:
        """Puts a value that is not there yet at the front of its bucket."""
        bucket, follow = value % self.buckets, self._next
        if bucket in self._before:
            before = self._before[bucket]
            follow[value], follow[before] = follow[before], value
            return
        first = follow[None]
        follow[value], follow[None] = first, value
        if first is not None:
            self._before[first % self.buckets] = value
        self._before[bucket] = None

    def dealt_out(self, buckets: int) -> _Chain:
        """The same members in another number of buckets."""
        dealt = _Chain(buckets)
        for value in self.walk():
            dealt.insert(value)
        return dealt

    def walk(self) -> Iterator[int]:
        """The members in the list's order."""
        value = self._next[None]
        while value is not None:
            yield value
            value = self._next[value]
