"""Whether an archive was laid out by torch, and which copies of its facts differ from that layout.

torch's layout follows from names, sizes and checksums alone (caffe2/serialize/inline_container.cc),
so each byte of the structure can be compared with what torch would have written there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.formats.container import STORED
from ckpttool.formats.zip_layout import (
    END_RECORD,
    MAX_16,
    MAX_32,
    ZIP64_END_LOCATOR,
    ZIP64_END_RECORD,
    ZIP64_LOCATOR,
)
from ckpttool.mending import canonical
from ckpttool.mending.survey import ALIGNMENT, stated_alignment
from ckpttool.mending.twins import Window

if TYPE_CHECKING:
    from ckpttool.io.reading import FileReader
    from ckpttool.mending.found import Found
    from ckpttool.mending.naming import Named
    from ckpttool.mending.survey import Survey

_ZIP64_END = 0x06064B50
_END = 0x06054B50
HEADER, BEHIND, ENTRY = "local header", "data descriptor", "directory entry"


def alignment_of(reader: FileReader, survey: Survey) -> int:
    """The multiple to which contents are moved, as the file says, else torch's usual one."""
    for found in survey.records:
        if any(name.endswith(b"/.storage_alignment") for name in found.names):
            return stated_alignment(reader, found) or ALIGNMENT
    return ALIGNMENT


def is_by_torch(survey: Survey, alignment: int) -> bool:
    """Whether most records lie as torch lays them out, with torch's flags."""
    records = [found for found in survey.records if found.names]
    alike = 0
    for found in records:
        if found.usual:
            alike += 1
            continue
        length, offset = len(found.names[0]), found.offset - survey.region.begin
        start = canonical.content_start(offset, length, alignment, size=found.size)
        flags = {copy.flags for copy in (found.local, found.claim) if copy is not None}
        usual = canonical.STREAMED if found.size else canonical.UTF8
        there = found.start - survey.region.begin
        alike += found.method == STORED and start == there and usual in flags
    return bool(records) and 2 * alike > len(records)


def damaged_copies(
    reader: FileReader, survey: Survey, named: Named, *, by_torch: bool
) -> list[list[str]]:
    """For each record of the survey, which copies of its facts are damaged or gone."""
    window, alignment = Window(reader), alignment_of(reader, survey)
    listed = survey.directory is not None
    found: list[list[str]] = []
    for record, name in zip(survey.records, named.names, strict=True):
        full = f"{named.root}/{name}".encode("utf-8", "surrogateescape")
        if record.usual and record.names == (full,):
            found.append([])
        elif by_torch and name is not None and record.matches:
            found.append(_compare(window, survey, record, full, alignment))
        else:
            found.append(_differing(record, listed=listed))
    return found


def _compare(
    window: Window, survey: Survey, record: Found, full: bytes, alignment: int
) -> list[str]:
    """The copies of a proven record, byte for byte against torch's."""
    offset, size, crc = record.offset - survey.region.begin, record.size, record.crc or 0
    header = canonical.local_header(full, size, offset, alignment)
    behind = canonical.descriptor(size, crc, offset)
    entry = canonical.directory_entry(full, size, crc, offset)
    claim, damaged = record.claim, []
    if window.read(record.offset, len(header)) != header:
        damaged.append(HEADER)
    if window.read(record.start + record.stored, len(behind)) != behind:
        damaged.append(BEHIND)
    if claim is None or window.read(claim.start, claim.stop - claim.start) != entry:
        damaged.append(ENTRY)
    return damaged


def _differing(record: Found, *, listed: bool) -> list[str]:
    """The same as far as it shows in a file of another writer, or a record without a proof."""
    local, claim, damaged = record.local, record.claim, []
    if local is None or not local.sound or len(record.names) > 1:
        damaged.append(HEADER)
    if claim is None or (record.matches and (claim.crc, claim.size) != (record.crc, record.size)):
        damaged.append(ENTRY)
    return damaged if listed or damaged != [ENTRY] else []


def damaged_ends(reader: FileReader, survey: Survey) -> list[str]:
    """What is wrong with directory and end records of an archive that torch wrote, in words."""
    directory, region = survey.directory, survey.region
    if directory is None:
        return ["the central directory is gone"]
    problems = []
    if directory.broken:
        problems.append("a part of the central directory is gone")
    start = directory.start - region.begin
    size, count = directory.stop - directory.start, len(directory.claims)
    few = min(count, MAX_16)
    zip64 = (count, count, size, start)
    tail = ZIP64_END_RECORD.pack(_ZIP64_END, 44, 0x031E, 45, 0, 0, *zip64)
    tail += ZIP64_END_LOCATOR.pack(ZIP64_LOCATOR, 0, start + size, 1)
    sizes = (min(size, MAX_32), min(start, MAX_32))
    tail += END_RECORD.pack(_END, 0, 0, few, few, *sizes, 0)
    there = reader.read(directory.stop, min(len(tail), region.stop - directory.stop))
    if there != tail:
        cut = len(there) < len(tail) and tail.startswith(there)
        problems.append("the end records are cut off" if cut else "the end records are damaged")
    return problems
