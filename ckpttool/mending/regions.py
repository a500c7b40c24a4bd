"""The archives in a file: mostly one, which begins and ends with it.

Saving twice to one open handle leaves two, a download may put bytes before or after, and the first
may be cut. Whole ones are found by their end records, which say how far back they begin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckpttool.formats.zip_end import find_end
from ckpttool.formats.zip_layout import (
    CENTRAL_BYTES,
    END_BYTES,
    END_RECORD,
    LOCAL_BYTES,
    LOCAL_HEADER,
    MAX_16,
    MAX_32,
    ZIP64_END_BYTES,
    ZIP64_END_LOCATOR,
    ZIP64_END_RECORD,
)
from ckpttool.mending.twins import Window, local_copy, looks_like_local, signatures

if TYPE_CHECKING:
    from ckpttool.formats.anomaly import Anomaly
    from ckpttool.io.reading import FileReader

_ZIP64_TAIL = ZIP64_END_RECORD.size + ZIP64_END_LOCATOR.size
_MOST_CANDIDATES = 100_000
_DESCRIPTOR_BYTES = 16


class Region(NamedTuple):
    """An archive's place in the file. `whole` tells that its end records lead to its begin."""

    begin: int
    stop: int
    whole: bool


def find_regions(reader: FileReader) -> list[Region]:
    """The archives in a file, in its order; at least one, even if nothing shows where it begins."""
    whole = _single(reader)
    if whole is not None:
        return [whole]
    archives = _independent(reader, _whole_archives(reader))
    regions: list[Region] = []
    position = 0
    for archive in archives:
        regions += _damaged(reader, position, archive.begin)
        regions.append(archive)
        position = archive.stop
    regions += _damaged(reader, position, reader.size)
    return regions or [Region(0, reader.size, False)]


def _single(reader: FileReader) -> Region | None:
    """The whole file as one archive, where the end record says so; the way of nearly all files."""
    anomalies: list[Anomaly] = []
    end = find_end(reader, anomalies)
    if end is None or anomalies or end.missing or end.shift or end.directory != end.offset:
        return None
    first = end.position if end.zip64_position is None else end.zip64_position
    stop = end.position + END_RECORD.size + end.comment
    # Of two archives in one layout, the last end record leads into the first.
    near = end.zip64_position is None or end.position == end.zip64_position + _ZIP64_TAIL
    if end.directory + end.size != first or stop != reader.size or not near:
        return None
    return Region(0, reader.size, True)


def _whole_archives(reader: FileReader) -> list[Region]:
    """Every archive whose end record, directory and first record fit together."""
    found = []
    for count, position in enumerate(signatures(reader, END_BYTES, 0, reader.size)):
        archive = _archive_before(reader, position)
        if archive is not None:
            found.append(archive)
        if count > _MOST_CANDIDATES:
            break
    return found


def _archive_before(reader: FileReader, position: int) -> Region | None:
    data = reader.read(position, END_RECORD.size)
    if len(data) < END_RECORD.size:
        return None
    _, _, _, _, entries, size, offset, comment = END_RECORD.unpack(data)
    stop = position + END_RECORD.size + comment
    first = position
    zip64 = reader.read(position - _ZIP64_TAIL, ZIP64_END_RECORD.size)
    if zip64[:4] == ZIP64_END_BYTES:
        first = position - _ZIP64_TAIL
        *_, entries, size, offset = ZIP64_END_RECORD.unpack(zip64)
    elif entries == MAX_16 or MAX_32 in (size, offset):
        return None
    begin = first - size - offset
    if begin < 0 or not entries or stop > reader.size:
        return None
    if reader.read(first - size, 4) != CENTRAL_BYTES or reader.read(begin, 4) != LOCAL_BYTES:
        return None
    return Region(begin, stop, True)


def _independent(reader: FileReader, archives: list[Region]) -> list[Region]:
    """Without those that are the content of a record of another, whole or damaged."""
    kept: list[Region] = []
    for archive in reversed(archives):
        if any(other.begin <= archive.begin and archive.stop <= other.stop for other in kept):
            continue
        kept.append(archive)
    kept.reverse()
    return [archive for archive in kept if not _is_content(reader, archive, kept)]


def _is_content(reader: FileReader, archive: Region, whole: list[Region]) -> bool:
    """Whether what is around an archive says that it lies inside of one that is damaged."""
    if archive.begin == 0 or any(other.stop == archive.begin for other in whole):
        return False
    if not looks_like_local(Window(reader), 0):
        return False
    return archive.stop < reader.size and reader.read(archive.stop, 4) != LOCAL_BYTES


def _damaged(reader: FileReader, low: int, high: int) -> list[Region]:
    """The archives in a part of the file that holds no whole one."""
    if high - low < LOCAL_HEADER.size:
        return []
    window = Window(reader)
    starts = [] if low else _first_record(reader, window, high)
    for place in signatures(reader, LOCAL_BYTES, low, high):
        if starts and starts[0] <= place:
            break
        local = local_copy(window, place)
        if local is not None and local.sound:
            starts.append(place)
            break
    if not starts:
        return []
    # One more begins wherever a header follows an end record at once.
    for position in signatures(reader, END_BYTES, starts[0], high):
        comment = int.from_bytes(reader.read(position + END_RECORD.size - 2, 2), "little")
        after = position + END_RECORD.size + comment
        for place in (after, position + END_RECORD.size):
            local = local_copy(window, place) if place + LOCAL_HEADER.size < high else None
            if local is not None and local.sound:
                starts.append(place)
                break
    stops = [*starts[1:], high]
    return [Region(start, stop, False) for start, stop in zip(starts, stops, strict=True)]


def _first_record(reader: FileReader, window: Window, high: int) -> list[int]:
    """The file's first byte, if an archive begins there, even with its first header gone.

    That is so where the second record's header shows it: it stands behind a descriptor.
    """
    if looks_like_local(window, 0):
        return [0]
    for place in signatures(reader, LOCAL_BYTES, 1, high):
        local = local_copy(window, place)
        if local is None or not local.sound:
            continue
        behind = window.read(place - _DESCRIPTOR_BYTES, 4) == b"PK\x07\x08"
        return [0] if behind and place < high else []
    return [0] if high == reader.size else []
