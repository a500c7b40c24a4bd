from __future__ import annotations

import hashlib
import os
import random
import socket
import threading
from pathlib import Path

import pytest

from ckpttool.errors import UnreadableError
from ckpttool.io.reading import FileReader, HashingReader

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "file"
    file.write_bytes(CONTENT)
    return file


def test_reads_at_any_offset(path: Path) -> None:
    with FileReader(path) as reader:
        assert reader.size == len(CONTENT)
        assert reader.read(0, 10) == CONTENT[:10]
        assert reader.read(1000, 256) == CONTENT[1000:1256]


@pytest.mark.parametrize(
    ("offset", "length", "expected"),
    [
        (len(CONTENT) - 5, 100, CONTENT[-5:]),
        (len(CONTENT), 1, b""),
        (10**15, 10**15, b""),
        (0, 1 << 62, CONTENT),
        (-1, 10, b""),
        (5, -1, b""),
    ],
)
def test_reads_no_more_than_the_file_holds(
    path: Path, offset: int, length: int, expected: bytes
) -> None:
    with FileReader(path) as reader:
        assert reader.read(offset, length) == expected
        assert b"".join(map(bytes, reader.chunks(offset, length))) == expected


@pytest.mark.parametrize("chunk_bytes", [1, 7, 256, 1 << 20])
def test_chunks_give_every_byte_once(path: Path, chunk_bytes: int) -> None:
    with FileReader(path) as reader:
        pieces = [bytes(piece) for piece in reader.chunks(3, 5000, chunk_bytes=chunk_bytes)]
    assert b"".join(pieces) == CONTENT[3:5003]
    assert all(0 < len(piece) <= chunk_bytes for piece in pieces)


def test_chunks_use_one_buffer(path: Path) -> None:
    with FileReader(path) as reader:
        owners = {id(piece.obj) for piece in reader.chunks(0, 1000, chunk_bytes=100)}
    assert len(owners) == 1


def test_a_file_that_shrinks_gives_what_is_left(path: Path) -> None:
    with FileReader(path) as reader:
        os.truncate(path, 100)
        assert reader.read(0, 5000) == CONTENT[:100]
        assert b"".join(map(bytes, reader.chunks(0, 5000))) == CONTENT[:100]
        assert reader.changed()


def test_unchanged_file_is_not_changed(path: Path) -> None:
    with FileReader(path) as reader:
        assert not reader.changed()


def test_replaced_file_is_changed(path: Path) -> None:
    with FileReader(path) as reader:
        other = path.with_name("other")
        other.write_bytes(CONTENT)
        os.replace(other, path)
        assert reader.changed()
        assert reader.read(0, 10) == CONTENT[:10]


def test_removed_file_is_changed(path: Path) -> None:
    with FileReader(path) as reader:
        path.unlink()
        assert reader.changed()


def test_file_written_in_place_is_changed(path: Path) -> None:
    with FileReader(path) as reader:
        path.write_bytes(CONTENT)
        os.utime(path, ns=(1, 1))
        assert reader.changed()


def test_symbolic_link_is_followed(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path)
    with FileReader(link) as reader:
        assert reader.read(0, 3) == CONTENT[:3]


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="No such file"):
        FileReader(tmp_path / "nothing")


def test_null_in_path() -> None:
    with pytest.raises(UnreadableError):
        FileReader("a\0b")


def test_directory(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="is a directory"):
        FileReader(tmp_path)


def test_named_pipe_does_not_block(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UnreadableError, match="named pipe"):
        FileReader(pipe)


def test_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path has to be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        with pytest.raises(UnreadableError):
            FileReader("socket")


def test_device() -> None:
    with pytest.raises(UnreadableError, match="is a device"):
        FileReader("/dev/zero")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_forbidden_file(path: Path) -> None:
    path.chmod(0)
    with pytest.raises(UnreadableError, match="Permission denied"):
        FileReader(path)


def test_refused_opening_leaks_no_descriptor(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(UnreadableError):
            FileReader(tmp_path)
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_reading_after_close_is_an_error_of_ours(path: Path) -> None:
    reader = FileReader(path)
    reader.close()
    reader.close()
    with pytest.raises(UnreadableError):
        reader.read(0, 1)


def test_descriptor_is_not_inherited(path: Path) -> None:
    with FileReader(path) as reader:
        assert not os.get_inheritable(reader.fileno())


@pytest.mark.parametrize("order", ["forward", "backward", "shuffled", "nothing"])
def test_a_hash_is_the_files_whatever_was_read_before(tmp_path: Path, order: str) -> None:
    content = random.Random(4).randbytes(700_000)
    path = tmp_path / "file"
    path.write_bytes(content)
    spans = [(at, min(9_999, 700_000 - at)) for at in range(0, 700_000, 10_007)]
    if order != "forward":
        spans = {"backward": spans[::-1], "nothing": []}.get(order, spans)
    if order == "shuffled":
        random.Random(5).shuffle(spans)
    with HashingReader(path) as reader:
        assert isinstance(reader, HashingReader)
        for at, length in spans:
            if at % 2:
                assert reader.read(at, length) == content[at : at + length]
            else:
                assert b"".join(map(bytes, reader.chunks(at, length))) == content[at : at + length]
        assert reader.sha256() == hashlib.sha256(content).hexdigest() == reader.sha256()


def test_threads_share_a_reader(path: Path) -> None:
    wrong = []
    with FileReader(path) as reader:

        def work(start: int) -> None:
            for offset in range(start, 5000, 7):
                if reader.read(offset, 13) != CONTENT[offset : offset + 13]:
                    wrong.append(offset)

        threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
