"""Pickles one after another: where each ends, and whether one that fails was cut or is wrong."""

from __future__ import annotations

import pickle
import pickletools
from pathlib import Path

import pytest

from ckpttool.errors import LimitError
from ckpttool.formats.limits import DEFAULT_LIMITS
from ckpttool.formats.pickle_cursor import PickleCursor, runs_out_at
from ckpttool.io.reading import FileReader

VALUES = [
    {"text": "x" * 60, "bytes": b"y" * 300, "short": "z", "big": 1 << 300, "int": -5},
    [1.5, (1, 2, 3), {4}, frozenset((5,)), None, True, 70_000, bytearray(b"w" * 20), "日本"],
    "t" * 200_000,
]


@pytest.mark.parametrize("protocol", range(6))
def test_one_pickle_behind_another(protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    streams = [pickle.dumps(value, protocol) for value in VALUES]
    path.write_bytes(b"".join(streams) + b"and then data")
    with FileReader(path) as reader:
        cursor = PickleCursor(reader, DEFAULT_LIMITS, 0, reader.size)
        position = 0
        for value, stream in zip(VALUES, streams, strict=True):
            result = cursor.next()
            position += len(stream)
            assert (result.error, result.end) == (None, position)
            if isinstance(value, str):
                assert result.value == value


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("number", [0, 1])
def test_every_cut_is_told_from_damage(number: int, protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    stream = pickle.dumps(VALUES[number], protocol)
    for length in range(len(stream)):
        path.write_bytes(stream[:length])
        with FileReader(path) as reader:
            cursor = PickleCursor(reader, DEFAULT_LIMITS, 0, reader.size)
            assert cursor.next().error is not None
            assert cursor.ended_early, length
            assert cursor.position == 0


@pytest.mark.parametrize("stream", [b"\x80\x02\xff.....", b"\x80\x02u.", b"\x80\x02h\x05.", b"R."])
def test_malformed_is_not_cut(stream: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(stream + bytes(300_000))
    with FileReader(path) as reader:
        cursor = PickleCursor(reader, DEFAULT_LIMITS, 0, reader.size)
        assert cursor.next().error is not None
        assert not cursor.ended_early


def test_a_damaged_pickle_does_not_make_the_whole_file_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\x80\x02\xff" + bytes(10_000_000))
    read = []
    original = FileReader.read

    def counting(self: FileReader, offset: int, length: int) -> bytes:
        read.append(length)
        return original(self, offset, length)

    monkeypatch.setattr(FileReader, "read", counting)
    with FileReader(path) as reader:
        PickleCursor(reader, DEFAULT_LIMITS, 0, reader.size).next()
    assert sum(read) <= 65_536


def test_a_pickle_beyond_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(pickle.dumps("x" * 5000, 2))
    limits = DEFAULT_LIMITS._replace(pickle_bytes=1000)
    with FileReader(path) as reader:
        cursor = PickleCursor(reader, limits, 0, reader.size)
        error = cursor.next().error
        assert isinstance(error, LimitError)
        assert error.limit == "pickle_bytes"
        assert not cursor.ended_early


def test_the_limit_is_of_the_pickle_not_of_what_follows(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(pickle.dumps(7, 2) + bytes(5000))
    limits = DEFAULT_LIMITS._replace(pickle_bytes=100)
    with FileReader(path) as reader:
        assert PickleCursor(reader, limits, 0, reader.size).next().value == 7


def test_arguments_are_those_of_pickletools() -> None:
    for opcode in pickletools.opcodes:
        code = opcode.code.encode("latin-1")
        if opcode.arg is None:
            assert not runs_out_at(code + b"\0", 1), opcode.name
            continue
        needed = {-1: 2, -2: 2, -3: 5, -4: 5, -5: 9}.get(opcode.arg.n, opcode.arg.n)
        if opcode.arg.n == -1:  # up to the end of a line, or of two
            lines = 2 if opcode.name in {"GLOBAL", "INST"} else 1
            assert runs_out_at(code + b"a\n" * (lines - 1) + b"a", 1), opcode.name
            assert not runs_out_at(code + b"a\n" * lines, 1), opcode.name
            continue
        argument = (1).to_bytes(8, "little")[: needed - 1] + b"a"
        if opcode.arg.n > 0:
            argument = bytes(needed)
        assert not runs_out_at(code + argument, 1), opcode.name
        assert runs_out_at(code + argument[:-1], 1), opcode.name
