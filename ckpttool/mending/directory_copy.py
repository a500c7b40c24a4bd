"""The central directory as far as it is there: entries with damage in any field, or only some.

APPNOTE.TXT 4.3.12, 4.3.14 to 4.3.16. Entries follow each other without a gap, so one whose
signature or lengths are damaged is still bounded by its neighbours. Where it begins and ends is
said by the end records (three times), and by its own signatures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckpttool.formats.zip_layout import (
    CENTRAL_BYTES,
    CENTRAL_HEADER,
    END_BYTES,
    END_RECORD,
    EXTRA_ZIP64,
    MAX_16,
    MAX_32,
    ZIP64_END_BYTES,
    ZIP64_END_LOCATOR,
    ZIP64_END_RECORD,
    ZIP64_LOCATOR_BYTES,
    extra_fields,
    zip64_values,
)
from ckpttool.mending.canonical import directory_entry
from ckpttool.mending.twins import Claim, is_plausible_name

if TYPE_CHECKING:
    from ckpttool.io.reading import FileReader

_ENTRY = CENTRAL_HEADER.size
# The longest entry: three lengths of sixteen bits.
_MOST_ENTRY = _ENTRY + 3 * MAX_16
# How far from the end of what is there the last traces of a directory are looked for.
_TAIL_BYTES = 1 << 20
_ZIP64_TAIL = ZIP64_END_RECORD.size + ZIP64_END_LOCATOR.size
# Of the eight fields that most writers leave zero, or torch makes constant, so many must be so.
_FEWEST_USUAL = 6


class DirectoryCopy(NamedTuple):
    """A central directory: where it begins and ends in the file, and its entries.

    `broken` counts places at which no entry could be made out.
    """

    start: int
    stop: int
    claims: list[Claim]
    broken: int


class _Tail(NamedTuple):
    """What the end records say: where the directory ends, and where it may begin."""

    stop: int | None
    starts: list[int]


def read_directory_copy(
    reader: FileReader, begin: int, stop: int, *, most: int
) -> DirectoryCopy | None:
    """The directory of the archive that lies from `begin` to `stop`; None if no entry is left.

    At most `most` entries are read. Offsets count from the file's first byte.
    """
    tail = _find_tail(reader, begin, stop)
    limit = stop if tail.stop is None else tail.stop
    start = _find_start(reader, begin, limit, tail.starts)
    if start is None:
        return None
    data = reader.read(start, limit - start)
    claims, broken, end = _parse(data, start, begin, most)
    return DirectoryCopy(start, start + end, claims, broken) if claims else None


# Where it is.


def _find_tail(reader: FileReader, begin: int, stop: int) -> _Tail:
    low = max(begin, stop - _TAIL_BYTES)
    data = reader.read(low, stop - low)
    zip64, locator, end = (
        data.rfind(signature) for signature in (ZIP64_END_BYTES, ZIP64_LOCATOR_BYTES, END_BYTES)
    )
    # Where one is damaged, its neighbours' places tell its own.
    if zip64 < 0:
        zip64 = max(
            locator - ZIP64_END_RECORD.size if locator >= 0 else -1,
            end - _ZIP64_TAIL if end >= 0 and locator < 0 and _is_zip64(data, end) else -1,
        )
    if end < 0 and zip64 >= 0:
        end = zip64 + _ZIP64_TAIL
    elif end < 0 and locator >= 0:
        end = locator + ZIP64_END_LOCATOR.size
    first = zip64 if zip64 >= 0 else end
    if first < 0:
        return _Tail(None, [])
    return _Tail(low + first, _starts(data, low, begin, zip64, end, first))


def _is_zip64(data: bytes, end: int) -> bool:
    """Whether, in front of the end record, there is what is left of torch's zip64 records.

    Both signatures are damaged, or there are none: the numbers of entries then agree or they don't.
    """
    start = end - _ZIP64_TAIL
    if start < 0:
        return False
    entries = ZIP64_END_RECORD.unpack_from(data, start)[7]
    return bool(entries) and entries == END_RECORD.unpack_from(data, end)[4]


def _starts(data: bytes, low: int, begin: int, zip64: int, end: int, first: int) -> list[int]:
    """Where the directory may begin: as stated, and as far before its end as its size says."""
    stated: list[tuple[int, int]] = []  # size, offset
    if zip64 >= 0 and zip64 + ZIP64_END_RECORD.size <= len(data):
        fields = ZIP64_END_RECORD.unpack_from(data, zip64)
        stated.append((fields[8], fields[9]))
    if end >= 0 and end + END_RECORD.size <= len(data):
        fields = END_RECORD.unpack_from(data, end)
        stated.append((fields[5], fields[6]))
    starts = [begin + offset for _, offset in stated]
    starts += [low + first - size for size, _ in stated]
    return sorted({start for start in starts if begin <= start < low + first})


def _find_start(reader: FileReader, begin: int, limit: int, stated: list[int]) -> int | None:
    """Where the first entry is: where the end records say, else where the signatures begin."""
    believable = [
        start for start in stated if _looks_like_entry(reader.read(start, _ENTRY), 0, signed=True)
    ]
    if believable:
        return believable[0]
    run = _first_signature(reader, begin, limit)
    # The first entry may have lost its signature.
    damaged = [
        start
        for start in stated
        if (run is None or 0 < run - start <= _MOST_ENTRY)
        and _looks_like_entry(reader.read(start, _ENTRY), 0, signed=False)
    ]
    return damaged[0] if damaged else run


def _first_signature(reader: FileReader, begin: int, limit: int) -> int | None:
    """The first of the entries that lie, one close behind another, before `limit`."""
    earliest: int | None = None
    reach = _TAIL_BYTES
    position = limit
    while position > begin:
        low = max(begin, position - reach)
        data = reader.read(low, position - low)
        found = data.find(CENTRAL_BYTES)
        while found >= 0 and not _looks_like_entry(data, found, signed=True):
            found = data.find(CENTRAL_BYTES, found + 1)
        if found < 0:
            break
        position = earliest = low + found
        reach = _MOST_ENTRY
    return earliest


# What it says.


def _parse(data: bytes, base: int, begin: int, most: int) -> tuple[list[Claim], int, int]:
    """Entries, the number of places that hold none, and where the last entry ends."""
    claims: list[Claim] = []
    position = broken = end = 0
    while position + _ENTRY <= len(data) and len(claims) < most:
        after = _stated_end(data, position)
        signed = data[position : position + 4] == CENTRAL_BYTES
        sound = signed or _looks_like_entry(data, position, signed=False)
        if not (sound and _is_boundary(data, after)):
            after = data.find(CENTRAL_BYTES, position + 4)
            after = len(data) if after < 0 else after
            if not sound or after - position > _MOST_ENTRY or after - position < _ENTRY:
                broken += 1
                position = after
                continue
            sound = False
        index = len(claims) + broken
        claim = _claim(data, position, after, (base, begin, index), sound and signed)
        if claim.sound or is_plausible_name(claim.raw_name):
            claims.append(claim)
        else:
            broken += 1
        position = end = after
    return claims, broken, end


def _stated_end(data: bytes, position: int) -> int:
    name, extra, comment = CENTRAL_HEADER.unpack_from(data, position)[10:13]
    return position + _ENTRY + int(name + extra + comment)


def _is_boundary(data: bytes, position: int) -> bool:
    """Whether an entry begins at `position`, or all end there."""
    return position == len(data) or (
        data[position : position + 4] == CENTRAL_BYTES
        or _looks_like_entry(data, position, signed=False)
    )


def _looks_like_entry(data: bytes, position: int, *, signed: bool) -> bool:
    """Whether an entry begins there; without `signed`, even with a damaged signature."""
    if position + _ENTRY > len(data):
        return False
    fields = CENTRAL_HEADER.unpack_from(data, position)
    if signed:
        return data[position : position + 4] == CENTRAL_BYTES and 0 < fields[10] <= MAX_16
    made_by, _, flags, method, time, date = fields[1:7]
    usual = (made_by, time, date, *fields[12:16]).count(0) + (flags in (0x800, 0x808))
    there = data[position : position + 4]
    signature = sum(a == b for a, b in zip(there, CENTRAL_BYTES, strict=True))
    return usual >= _FEWEST_USUAL and method in (0, 8) and (flags != 0 or signature >= 2)


def _claim(
    data: bytes, position: int, after: int, where: tuple[int, int, int], sound: bool
) -> Claim:
    """The entry between two places of the directory; see Claim. `where` is that of the directory,
    of the archive's begin, and the entry's number.
    """
    base, begin, index = where
    fields = CENTRAL_HEADER.unpack_from(data, position)
    flags, method, _, _, crc, stored, size = fields[3:10]
    offset, start = fields[16], position + _ENTRY
    saturated = (size == MAX_32, stored == MAX_32, offset == MAX_32)
    name_length, extra_length = fields[10:12]
    if after != _stated_end(data, position):
        lengths = fields[10], fields[11]
        name_length, extra_length = _lengths(data[start:after], *lengths, saturated)
    extra = data[start + name_length : start + name_length + extra_length]
    if any(saturated):
        size, stored, offset = zip64_values(extra, (size, stored, offset))
    wide = any(kind == EXTRA_ZIP64 for kind, _ in extra_fields(extra) or ())
    name = data[start : start + name_length]
    usual = sound and data[position:after] == directory_entry(name, size, crc, offset)
    place = (base + position, base + after, usual)
    return Claim(index, name, flags, method, crc, stored, size, begin + offset, wide, sound, *place)


def _lengths(
    rest: bytes, name: int, extra: int, saturated: tuple[bool, bool, bool]
) -> tuple[int, int]:
    """The lengths of name and extra field in an entry whose variable part is `rest`.

    One of them may be damaged. What fits the whole, and torch's own manner (a zip64 field where one
    is needed, no comment), is taken.
    """
    zip64 = sum(8 for value in saturated if value)
    usual = zip64 + 4 if zip64 else 0
    choices = [(name, extra), (len(rest) - usual, usual), (len(rest) - extra, extra)]
    choices += [(name, len(rest) - name)]
    for name_length, extra_length in choices:
        if name_length <= 0 or extra_length < 0 or name_length + extra_length > len(rest):
            continue
        whole = name_length + extra_length == len(rest)
        fields = extra_fields(rest[name_length : name_length + extra_length])
        if whole and fields is not None and is_plausible_name(rest[:name_length]):
            return name_length, extra_length
    return max(0, min(name, len(rest))), max(0, min(extra, len(rest) - name))
