"""Finding a zip's end records, and through them its central directory.

APPNOTE.TXT 4.3.16 (end of central directory record), 4.3.14 and 4.3.15 (its zip64 forms). The end
record is searched from the file's end backwards, as torch's reader does; torch gives up after about
64 KiB, this goes on looking where that finds nothing usable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.formats.anomaly import Anomaly
from ckpttool.formats.zip_layout import (
    CENTRAL_BYTES,
    END_BYTES,
    END_RECORD,
    LOCAL_BYTES,
    MAX_16,
    MAX_32,
    ZIP64_END_BYTES,
    ZIP64_END_LOCATOR,
    ZIP64_END_RECORD,
    ZIP64_LOCATOR_BYTES,
    EndRecord,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpttool.io.reading import FileReader

# The longest comment and the record itself: as far back as an end record can honestly begin.
_TAIL_BYTES = MAX_16 + END_RECORD.size
# How far back to look once nothing is found there, in steps of `_STEP_BYTES`.
_FAR_BYTES = 16 << 20
_STEP_BYTES = 1 << 20
# Honest files have one, and seldom its four bytes by chance in what a copy left behind it.
_MOST_CANDIDATES = 1000


def find_end(reader: FileReader, anomalies: list[Anomaly]) -> EndRecord | None:
    """The last end record that leads to a central directory, or None; what is odd is appended.

    An end record that is only there in its zip64 form (the last bytes of the file are gone, or
    overwritten) is found too, with `position` where the plain one would begin, and said to be
    missing.
    """
    passed = 0
    for position in _candidates(reader):
        end = _end_record_at(reader, position)
        if end is not None and _is_inside_another(reader, end):
            continue
        if end is not None:
            if passed:
                anomalies.append(
                    Anomaly("end-record-damaged", field="stray signatures", count=passed)
                )
            return end
        passed += 1
        if passed >= _MOST_CANDIDATES:
            break
    if passed:
        anomalies.append(Anomaly("end-record-damaged", field="all", count=passed))
    return _zip64_end_alone(reader)


def _candidates(reader: FileReader) -> Iterator[int]:
    """Offsets of end record signatures, last first: those in reach of torch, then those beyond."""
    high = reader.size
    reach = max(0, high - _TAIL_BYTES)
    yield from _signatures(reader, END_BYTES, reach, high)
    floor = max(0, high - _FAR_BYTES)
    while reach > floor:
        low = max(floor, reach - _STEP_BYTES)
        yield from _signatures(reader, END_BYTES, low, min(high, reach + 3))
        reach = low


def _signatures(reader: FileReader, signature: bytes, low: int, high: int) -> Iterator[int]:
    data = reader.read(low, high - low)
    found = data.rfind(signature)
    while found >= 0:
        yield low + found
        found = data.rfind(signature, 0, found + 3)


def _end_record_at(reader: FileReader, position: int) -> EndRecord | None:
    """The end record at `position`, if it is whole and a central directory lies where it says."""
    data = reader.read(position, END_RECORD.size)
    if len(data) < END_RECORD.size:
        return None
    _, _, _, _, entries, size, offset, comment = END_RECORD.unpack(data)
    plain = EndRecord(position, None, entries, size, offset, comment)
    saturated = entries == MAX_16 or MAX_32 in (size, offset)
    zip64 = _zip64_record_of(reader, position, needed=saturated)
    if zip64 is not None:
        found = _with_zip64(reader, plain, zip64)
        if found is not None:
            return found
    return None if saturated else _locate(reader, plain, position)


def _zip64_record_of(reader: FileReader, position: int, *, needed: bool) -> int | None:
    """Where the zip64 end record is that belongs to the end record at `position`, or None."""
    data = reader.read(position - ZIP64_END_LOCATOR.size, ZIP64_END_LOCATOR.size)
    located = data[:4] == ZIP64_LOCATOR_BYTES
    usual = position - ZIP64_END_LOCATOR.size - ZIP64_END_RECORD.size
    stated = ZIP64_END_LOCATOR.unpack(data)[2] if located else usual
    for candidate in (stated, usual) if located or needed else ():
        if 0 <= candidate <= usual and reader.read(candidate, 4) == ZIP64_END_BYTES:
            return candidate
    return None


def _with_zip64(reader: FileReader, plain: EndRecord, zip64: int) -> EndRecord | None:
    data = reader.read(zip64, ZIP64_END_RECORD.size)
    if len(data) < ZIP64_END_RECORD.size:
        return None
    _, _, _, _, _, _, _, entries, size, offset = ZIP64_END_RECORD.unpack(data)
    full = plain._replace(zip64_position=zip64, entries=entries, size=size, offset=offset)
    return _locate(reader, full, zip64)


def _locate(reader: FileReader, end: EndRecord, limit: int) -> EndRecord | None:
    """`end` with `directory` and `shift` set, if a directory is found that ends by `limit`."""
    if end.entries == 0 and end.size == 0:
        # Nothing to find; only an offset in the file makes it believable.
        return end._replace(directory=limit) if end.offset <= limit else None
    for start in (end.offset, limit - end.size):
        if 0 <= start < limit and reader.read(start, 4) == CENTRAL_BYTES:
            return end._replace(directory=start, shift=_shift(reader, start, end.offset))
    return None


def _shift(reader: FileReader, start: int, stated: int) -> int:
    """What to add to the directory's offsets; the first record shows which base is right."""
    if start == stated:
        return 0
    first = int.from_bytes(reader.read(start + 42, 4), "little")
    for shift in (start - stated, 0):
        if first + shift >= 0 and reader.read(first + shift, 4) == LOCAL_BYTES:
            return shift
    return start - stated


def _is_inside_another(reader: FileReader, end: EndRecord) -> bool:
    """Whether what was found is a zip that is the content of a record of a zip which is cut.

    Else what lies in front of it is no zip, or another whole one, which ends where it begins.
    """
    if end.shift <= 0 or reader.read(0, 4) != LOCAL_BYTES:
        return False
    low = max(0, end.shift - _TAIL_BYTES)
    for position in _signatures(reader, END_BYTES, low, end.shift):
        comment = reader.read(position + END_RECORD.size - 2, 2)
        if position + END_RECORD.size + int.from_bytes(comment, "little") == end.shift:
            return False
    return True


def _zip64_end_alone(reader: FileReader) -> EndRecord | None:
    """The zip64 end record of a file whose plain end record is gone."""
    low = max(0, reader.size - _TAIL_BYTES)
    for position in _signatures(reader, ZIP64_END_BYTES, low, reader.size):
        after = position + ZIP64_END_RECORD.size + ZIP64_END_LOCATOR.size
        end = _with_zip64(reader, EndRecord(after, None, 0, 0, 0, 0), position)
        if end is not None and not _is_inside_another(reader, end):
            return end._replace(missing=True)
    return None
