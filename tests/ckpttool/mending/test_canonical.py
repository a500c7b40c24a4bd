"""torch's layout, worked out from names, sizes and checksums, against a file that torch wrote."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest

from ckpttool.mending import canonical
from tests import corrupt
from tests.ckpttool.mending.damaged_zip import (
    descriptor_range,
    entry_range,
    header_range,
    small,
)


@pytest.mark.parametrize("record", list(corrupt.entry_offsets(small())))
def test_every_structure_of_a_record(record: str) -> None:
    data = small()
    content = corrupt.content_range(data, record)
    name, size = f"archive/{record}".encode(), len(content)
    crc = zlib.crc32(data[content.start : content.stop])
    header, entry = header_range(data, record), entry_range(data, record)
    behind = descriptor_range(data, record)
    offset = header.start
    assert canonical.local_header(name, size, offset, 64) == data[header.start : header.stop]
    assert canonical.content_start(offset, len(name), 64, size=size) == content.start
    assert canonical.descriptor(size, crc, offset) == data[behind.start : behind.stop]
    assert canonical.directory_entry(name, size, crc, offset) == data[entry.start : entry.stop]


def test_files_of_the_corpus(corpus: Path) -> None:
    for path in corpus.glob("torch-*/train_zip.pt"):
        data = path.read_bytes()
        for full, content in corrupt.read_records(data):
            record = full.partition("/")[2]
            header = header_range(data, record)
            made = canonical.local_header(full.encode(), len(content), header.start, 64)
            assert made == data[header.start : header.stop]


def test_what_32_bits_cannot_say() -> None:
    """APPNOTE 4.5.3: only the saturated numbers are in the zip64 field, in their order."""
    size, offset = 1 << 32, 5 << 32
    entry = canonical.directory_entry(b"a/b", size, 7, offset)
    assert entry[-28:] == struct.pack("<HHQQQ", 1, 24, size, size, offset)
    assert canonical.descriptor(size, 7, 0) == b"PK\x07\x08" + struct.pack("<IQQ", 7, size, size)
    assert canonical.descriptor(5, 7, offset) == b"PK\x07\x08" + struct.pack("<IQQ", 7, 5, 5)
    for given in ((size, 0), (5, offset), (size, offset)):
        header = canonical.local_header(b"a/b", *given, 64)
        assert (given[1] + len(header)) % 64 == 0
        start = canonical.content_start(given[1], 3, 64, size=given[0])
        assert start == given[1] + len(header)
