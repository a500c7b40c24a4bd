from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from ckpttool.formats.tar_layout import parse_header, tar_members
from ckpttool.io.reading import FileReader

CONTENTS = {"a": b"x", "dir/b": bytes(600), "empty": b"", "c" * 90 + "/" + "d" * 80: b"long"}


def make(format: int) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=format) as archive:
        for name, content in CONTENTS.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
    return target.getvalue()


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT])
def test_members_are_those_that_tarfile_wrote(format: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(make(format))
    with FileReader(path) as reader:
        members = list(tar_members(reader, most=100))
        found = {m.name: reader.read(m.content, m.size) for m in members if m.is_file}
    assert found == CONTENTS
    assert [member.name.rstrip("/") for member in members if not member.is_file] == ["folder"]


def test_at_most_so_many(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(make(tarfile.USTAR_FORMAT))
    with FileReader(path) as reader:
        assert len(list(tar_members(reader, most=1))) <= 2


def test_a_damaged_header_is_none() -> None:
    block = make(tarfile.USTAR_FORMAT)[:512]
    assert parse_header(block, 0) is not None
    for offset in range(0, 512, 7):
        damaged = bytearray(block)
        damaged[offset] ^= 1
        # All but the checksum's own last two bytes, which hold no digits.
        assert parse_header(bytes(damaged), 0) is None or offset in (154, 155)


def test_size_in_base_256() -> None:
    block = bytearray(make(tarfile.GNU_FORMAT)[:512])
    block[124:136] = b"\x80" + (1 << 40).to_bytes(11, "big")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    member = parse_header(bytes(block), 0)
    assert member is not None
    assert member.size == 1 << 40
