from __future__ import annotations

import hashlib
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.io.checksum import crc32, crc32_of, sha256_of
from ckpttool.io.reading import FileReader


def test_check_value_of_the_algorithm() -> None:
    # The check value of CRC-32/ISO-HDLC in the catalogue of parametrised CRC algorithms.
    assert crc32(b"123456789") == 0xCBF43926


@given(st.binary(max_size=3000), st.integers(0, 3000))
def test_same_as_zlib_in_one_piece_or_two(data: bytes, cut: int) -> None:
    assert crc32(data) == zlib.crc32(data)
    assert crc32(data[cut:], crc32(data[:cut])) == zlib.crc32(data)


def test_takes_views_and_bytearrays() -> None:
    assert crc32(memoryview(b"123456789")) == crc32(bytearray(b"123456789")) == 0xCBF43926


@pytest.mark.parametrize(("offset", "length"), [(0, 700_000), (1, 300_000), (650_000, 10**12)])
def test_of_a_part_of_a_file(tmp_path: Path, offset: int, length: int) -> None:
    data = bytes(index * 7 % 251 for index in range(700_000))
    path = tmp_path / "file"
    path.write_bytes(data)
    with FileReader(path) as reader:
        assert crc32_of(reader, offset, length) == zlib.crc32(data[offset : offset + length])
        assert sha256_of(reader) == hashlib.sha256(data).hexdigest()


def test_without_isal_the_numbers_are_the_same() -> None:
    script = (
        "import sys; sys.modules['isal'] = None\n"
        "from ckpttool.io.checksum import crc32, crc32_function\n"
        "import zlib; assert crc32_function() is zlib.crc32\n"
        "assert crc32(b'123456789') == 0xCBF43926"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_nothing_heavy_is_imported_before_use() -> None:
    script = (
        "import sys, ckpttool.io.checksum, ckpttool.io.reading\n"
        "heavy = {'isal', 'zlib', 'hashlib', 'numpy', 'tempfile', 'zipfile'} & set(sys.modules)\n"
        "assert not heavy - {'zlib'}, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
