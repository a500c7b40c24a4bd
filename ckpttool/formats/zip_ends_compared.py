"""A zip's end records against each other, and against where its directory really is.

APPNOTE.TXT 4.3.14 to 4.3.16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.formats.anomaly import Anomaly
from ckpttool.formats.zip_layout import (
    END_RECORD,
    MAX_16,
    MAX_32,
    ZIP64_END_LOCATOR,
    ZIP64_END_RECORD,
    ZIP64_LOCATOR,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpttool.formats.zip_layout import EndRecord
    from ckpttool.io.reading import FileReader

# What torch writes into its zip64 end record: version made by, version needed.
_TORCH_MADE_BY, _TORCH_NEEDED = 0x031E, 45


def check_end(reader: FileReader, end: EndRecord, *, torch: bool) -> Iterator[Anomaly]:
    """The end records against each other, and against where the directory really is."""
    if not end.missing:
        yield from _check_plain(reader, end)
    stop = end.position
    if end.zip64_position is not None:
        stop = end.zip64_position
        yield from _check_zip64(reader, end, torch=torch)
    elif torch:
        # There may be one that is damaged, and torch may find it where we do not.
        yield Anomaly("zip64-mismatch", field="zip64 end record", found="none")
    gap = stop - end.directory - end.size
    if gap > 0 and end.directory == end.offset + end.shift:
        yield unused(reader, stop - gap, gap, None)
    elif gap:
        yield Anomaly("end-record-damaged", field="directory size or offset", difference=gap)


def _check_plain(reader: FileReader, end: EndRecord) -> Iterator[Anomaly]:
    """The plain end record. Where there is a zip64 one, torch takes nothing from this."""
    data = reader.read(end.position, END_RECORD.size)
    if len(data) < END_RECORD.size:
        return  # the file was cut since it was opened
    _, disk, first_disk, here, entries, size, offset, _ = END_RECORD.unpack(data)
    zip64 = end.zip64_position is not None
    for field, found, wanted in (
        ("disk", disk, 0),
        ("directory's disk", first_disk, 0),
        ("entries here", here, min(end.entries, MAX_16)),
        ("entries", entries, min(end.entries, MAX_16)),
        ("directory size", size, min(end.size, MAX_32)),
        ("directory offset", offset, min(end.offset, MAX_32)),
    ):
        saturated = zip64 and found == (MAX_32 if "directory " in field else MAX_16)
        if found != wanted and not saturated:
            yield Anomaly(
                "end-record-damaged", field=field, found=found, wanted=wanted, harmless=zip64
            )


def _check_zip64(reader: FileReader, end: EndRecord, *, torch: bool) -> Iterator[Anomaly]:
    position = end.zip64_position or 0
    data = reader.read(position, ZIP64_END_RECORD.size)
    after = position + ZIP64_END_RECORD.size
    # An extensible record is longer (4.3.14.2); the locator follows it either way.
    locator_at = end.position - ZIP64_END_LOCATOR.size
    locator = reader.read(locator_at, ZIP64_END_LOCATOR.size)
    if len(data) < ZIP64_END_RECORD.size or len(locator) < ZIP64_END_LOCATOR.size:
        return
    _, length, made_by, needed, disk, first_disk, here, *_ = ZIP64_END_RECORD.unpack(data)
    signature, locator_disk, stated, disks = ZIP64_END_LOCATOR.unpack(locator)
    checks = [
        ("entries here", here, end.entries),
        ("disk", disk, 0),
        ("directory's disk", first_disk, 0),
        ("record size", length, locator_at - position - 12),
        ("locator signature", signature, ZIP64_LOCATOR),
        ("locator disk", locator_disk, 0),
        ("locator offset", stated, position - end.shift),
        ("number of disks", disks, 1),
    ]
    if torch:
        checks += [("version made by", made_by, _TORCH_MADE_BY)]
        checks += [("version needed", needed, _TORCH_NEEDED)]
        checks += [("locator position", locator_at, after)]
    for field, found, wanted in checks:
        if found != wanted:
            yield Anomaly("zip64-mismatch", field=field, found=found, wanted=wanted)


def unused(reader: FileReader, offset: int, length: int, name: str | None) -> Anomaly:
    """Bytes that belong to nothing, in front of the record `name` or of the directory."""
    zeros = not any(any(chunk) for chunk in reader.chunks(offset, min(length, 1 << 20)))
    return Anomaly("gap-not-padding", name, offset=offset, length=length, zeros=zeros)
