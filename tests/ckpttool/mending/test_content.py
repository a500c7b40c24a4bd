"""Contents put together from pieces, streamed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from ckpttool.errors import FormatError
from ckpttool.io.reading import FileReader
from ckpttool.mending import content as contents


def pieces(data: bytes, size: int) -> contents.Content:
    """Bytes that come in pieces, all through the same buffer, as a file's do."""

    def chunks() -> Iterator[memoryview]:
        buffer = bytearray(size)
        for start in range(0, len(data), size):
            piece = data[start : start + size]
            buffer[: len(piece)] = piece
            yield memoryview(buffer)[: len(piece)]

    return contents.Content(len(data), chunks)


DATA = bytes(range(256)) * 5


@pytest.mark.parametrize("size", [1, 7, 256, 5000])
def test_reading_copies_each_piece(size: int) -> None:
    assert pieces(DATA, size).read() == DATA
    assert contents.checksum(pieces(DATA, size)) == (zlib.crc32(DATA), len(DATA))


@pytest.mark.parametrize("offset", [0, 5, 254, 1276])
@pytest.mark.parametrize("size", [1, 7, 256, 5000])
def test_a_patch_over_the_edges_of_pieces(offset: int, size: int) -> None:
    mask = b"\x01\x80\xff\x0f"
    wanted = bytearray(DATA)
    for index, value in enumerate(mask):
        wanted[offset + index] ^= value
    assert contents.patched(pieces(DATA, size), offset, mask).read() == wanted


@pytest.mark.parametrize("count", [0, 1, 7, 300, 1280])
def test_the_first_bytes_and_zeros(count: int) -> None:
    head = contents.first(pieces(DATA, 7), count)
    assert head.size == count
    whole = contents.joined(head, contents.zeros(100_000))
    assert whole.size == count + 100_000
    assert whole.read() == DATA[:count] + bytes(100_000)


def test_zeros_are_never_made_at_once() -> None:
    assert all(len(piece) <= 1 << 16 for piece in islice(contents.zeros(1 << 40).chunks(), 3))


def test_what_changes_meanwhile_is_found() -> None:
    good = contents.require(pieces(DATA, 7), zlib.crc32(DATA))
    assert good.read() == DATA
    for bad in (
        contents.require(pieces(DATA, 7), 1),
        contents.require(contents.Content(3, pieces(DATA, 7).chunks), None),
    ):
        with pytest.raises(FormatError, match="changed"):
            bad.read()


def test_a_span_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    with FileReader(path) as reader:
        assert contents.of_span(reader, 3, 1000).read() == DATA[3:1003]
