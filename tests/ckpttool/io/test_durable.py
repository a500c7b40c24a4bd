"""Durable writing: the order of system calls, what is left behind, and names of temporaries."""

from __future__ import annotations

import errno
import os
import re
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from ckpttool.errors import UnreadableError, WriteError
from ckpttool.io import durable
from ckpttool.io.durable import (
    copy_durably,
    fsync_directory,
    parse_temporary_name,
    temporary_name,
    write_durably,
    write_error,
)


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def test_content_and_result(tmp_path: Path) -> None:
    target = tmp_path / "a.bin"
    assert write_durably(target, lambda file: file.write(b"hello")) == 5
    assert target.read_bytes() == b"hello"
    assert names(tmp_path) == ["a.bin"]


def test_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_durably("a", lambda file: file.write(b"x"))
    assert names(tmp_path) == ["a"]


def test_order_is_write_fsync_replace_fsync_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        size = os.fstat(descriptor).st_size
        calls.append("fsync directory" if is_directory else f"fsync {size} bytes")
        real_fsync(descriptor)

    def replace(source: str, target: str) -> None:
        assert os.path.dirname(source) == os.path.dirname(target)
        calls.append("replace")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    write_durably(tmp_path / "a", lambda file: file.write(b"12345"))
    assert calls == ["fsync 5 bytes", "replace", "fsync directory"]


class Boom(BaseException):
    """Like KeyboardInterrupt: not an Exception."""


@pytest.mark.parametrize("error", [Boom(), ValueError("no"), OSError(errno.ENOSPC, "full")])
def test_failure_leaves_the_old_file_and_no_temporary(tmp_path: Path, error: BaseException) -> None:
    target = tmp_path / "a"
    target.write_bytes(b"old")

    def write(file: BinaryIO) -> None:
        file.write(b"half")
        assert names(tmp_path) == [f".a.tmp-{os.getpid()}", "a"]
        raise error

    with pytest.raises(type(error)) as caught:
        write_durably(target, write)
    assert caught.value is error
    assert names(tmp_path) == ["a"]
    assert target.read_bytes() == b"old"


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_failing_system_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    target = tmp_path / "a"
    target.write_bytes(b"old")

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(os, name, fail)
    with pytest.raises(OSError, match="I/O error"):
        write_durably(target, lambda file: file.write(b"new"))
    assert names(tmp_path) == ["a"]
    assert target.read_bytes() == b"old"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o007, 0o660)])
def test_mode_follows_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    # In a process of its own: the umask belongs to the whole process.
    script = f"""
        import os
        os.umask({umask})
        from ckpttool.io.durable import write_durably
        write_durably({str(tmp_path / "a")!r}, lambda file: file.write(b"x"))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == mode


def test_mode_asked_for(tmp_path: Path) -> None:
    write_durably(tmp_path / "a", lambda file: file.write(b"x"), mode=0o604)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o604


def test_a_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    mine = tmp_path / f".a.tmp-{os.getpid()}"
    mine.write_bytes(b"somebody's")

    def write(file: BinaryIO) -> None:
        assert names(tmp_path) == [mine.name, f"{mine.name}-1"]
        file.write(b"x")

    write_durably(tmp_path / "a", write)
    assert names(tmp_path) == [mine.name, "a"]
    assert mine.read_bytes() == b"somebody's"


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"keep")
    link = tmp_path / "link"
    link.symlink_to(elsewhere)
    write_durably(link, lambda file: file.write(b"new"))
    assert not link.is_symlink()
    assert link.read_bytes() == b"new"
    assert elsewhere.read_bytes() == b"keep"


def test_open_readers_keep_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "a"
    target.write_bytes(b"old")
    with target.open("rb") as reader:
        write_durably(target, lambda file: file.write(b"new"))
        assert reader.read() == b"old"


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_durably(tmp_path / "no" / "a", lambda file: file.write(b"x"))


@pytest.mark.parametrize("links_work", [True, False])
def test_without_replace_nothing_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links_work: bool
) -> None:
    def link(*_: Any) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    if not links_work:
        monkeypatch.setattr(os, "link", link)
    target = tmp_path / "a"

    def write(file: BinaryIO) -> None:
        target.write_bytes(b"came meanwhile")
        file.write(b"x")

    with pytest.raises(FileExistsError):
        write_durably(target, write, replace=False)
    assert target.read_bytes() == b"came meanwhile"
    assert names(tmp_path) == ["a"]
    target.unlink()
    write_durably(target, lambda file: file.write(b"x"), replace=False)
    assert target.read_bytes() == b"x"
    assert names(tmp_path) == ["a"]


def test_full_disk(tmp_path: Path) -> None:
    """A real ENOSPC: a write to /dev/full, which also fails at close."""

    def write(file: BinaryIO) -> None:
        os.dup2(os.open("/dev/full", os.O_WRONLY), file.fileno())
        file.write(b"x" * 100)

    with pytest.raises(OSError) as caught:
        write_durably(tmp_path / "a", write)
    assert caught.value.errno == errno.ENOSPC
    assert names(tmp_path) == []
    error = write_error(tmp_path / "a", caught.value)
    pattern = r".*/a: cannot write: No space left on device \([\d,]+ bytes free\)"
    assert re.fullmatch(pattern, str(error))
    assert error.errno == errno.ENOSPC


class Space:
    """A file system of 1,000 blocks of 4 KiB, of which one that is not yet removed takes all."""

    f_frsize = 4096

    def __init__(self, directory: Path) -> None:
        self.f_bavail = 0 if names(directory) else 1000


def test_free_space_is_counted_before_the_temporary_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(_: BinaryIO) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "statvfs", lambda _: Space(tmp_path))
    with pytest.raises(OSError) as caught:
        write_durably(tmp_path / "a", write)
    assert str(write_error("a", caught.value)).endswith("No space left on device (0 bytes free)")


def test_a_copy_says_what_it_needed_and_what_was_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(123_456))
    (tmp_path / "to").mkdir()
    monkeypatch.setattr(os, "statvfs", lambda _: Space(tmp_path / "to"))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as caught:
        copy_durably(source, tmp_path / "to" / "a")
    assert names(tmp_path / "to") == []
    words = str(write_error("a", caught.value))
    assert words.endswith("(123,456 bytes needed, 4,096,000 free before)")


def test_fsync_directory_tolerates_only_what_cannot_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_with(number: int) -> None:
        def fsync(_: int) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", fsync)

    fail_with(errno.EINVAL)
    fsync_directory(tmp_path)
    fail_with(errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        fsync_directory(tmp_path)


def test_names_of_temporaries() -> None:
    assert temporary_name("step_000000000004.pt", 77) == ".step_000000000004.pt.tmp-77"
    assert temporary_name("a", 77, 2) == ".a.tmp-77-2"
    for name in (".a.tmp-77", ".a.tmp-77-2"):
        assert parse_temporary_name(name) == ("a", 77)
    for name in ("a.tmp-77", ".a.tmp-", ".tmp-77", ".a.tmp-x", ".a.tmp-77.pt"):
        assert parse_temporary_name(name) is None


def test_copy_keeps_bytes_mode_and_time(tmp_path: Path) -> None:
    source, copy = tmp_path / "a", tmp_path / "b"
    source.write_bytes(bytes(range(256)) * 10_000)
    source.chmod(0o640)
    os.utime(source, ns=(1_000_000_007, 2_000_000_009))
    seen: list[tuple[int, int]] = []
    assert copy_durably(source, copy, progress=lambda done, of, _: seen.append((done, of))) == (
        2_560_000
    )
    assert copy.read_bytes() == source.read_bytes()
    assert stat.S_IMODE(copy.stat().st_mode) == 0o640
    assert copy.stat().st_mtime_ns == 2_000_000_009
    assert seen == sorted(seen)
    assert seen[-1] == (5_120_000, 5_120_000)
    assert names(tmp_path) == ["a", "b"]


def test_copy_of_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert copy_durably(tmp_path / "a", tmp_path / "b") == 0
    assert (tmp_path / "b").stat().st_size == 0


def test_copy_overwrites_only_by_force(tmp_path: Path) -> None:
    source, copy = tmp_path / "a", tmp_path / "b"
    source.write_bytes(b"new")
    copy.write_bytes(b"old")
    with pytest.raises(FileExistsError):
        copy_durably(source, copy)
    assert copy.read_bytes() == b"old"
    copy_durably(source, copy, force=True)
    assert copy.read_bytes() == b"new"
    assert names(tmp_path) == ["a", "b"]


def test_copy_onto_itself(tmp_path: Path) -> None:
    source = tmp_path / "a"
    source.write_bytes(b"x")
    (tmp_path / "link").symlink_to("a")
    for destination in (source, tmp_path / "." / "a", tmp_path / "link"):
        with pytest.raises(FileExistsError, match="very file"):
            copy_durably(source, destination, force=True)
    assert names(tmp_path) == ["a", "link"]
    assert source.read_bytes() == b"x"


def test_copy_of_what_changes_meanwhile(tmp_path: Path) -> None:
    source = tmp_path / "a"
    source.write_bytes(b"x" * 100)

    def touch(*_: Any) -> None:
        source.write_bytes(b"y" * 50)

    with pytest.raises(UnreadableError, match="changed"):
        copy_durably(source, tmp_path / "b", progress=touch)
    assert names(tmp_path) == ["a"]


def test_copy_reads_back_what_it_wrote(tmp_path: Path) -> None:
    source = tmp_path / "a"
    size = 3 << 20  # more than any buffer on the way
    source.write_bytes(b"x" * size)

    def spoil(done: int, _: int, label: str) -> None:
        if label == "copying" and done == size:
            # A disk that lies: the temporary no longer holds what was written.
            with (tmp_path / f".b.tmp-{os.getpid()}").open("r+b") as temporary:
                temporary.seek(1 << 20)
                temporary.write(b"y")

    with pytest.raises(WriteError, match="read back"):
        copy_durably(source, tmp_path / "b", progress=spoil)
    assert names(tmp_path) == ["a"]


def test_copy_source_must_be_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for source in (tmp_path, tmp_path / "fifo", tmp_path / "missing"):
        with pytest.raises(UnreadableError):
            copy_durably(source, tmp_path / "b")
    assert names(tmp_path) == ["fifo"]


def test_module_does_not_import_torch_or_numpy() -> None:
    script = "import sys, ckpttool.io.durable; print({'torch', 'numpy'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    assert found.stdout == b"set()\n"
    assert durable.__doc__


def test_a_check_sees_the_finished_file_before_it_gets_its_name(tmp_path: Path) -> None:
    target = tmp_path / "a"
    target.write_bytes(b"old")
    seen: list[bytes] = []

    def check(temporary: str) -> None:
        assert target.read_bytes() == b"old"
        seen.append(Path(temporary).read_bytes())
        if len(seen) == 2:
            raise ValueError("not good enough")

    write_durably(target, lambda file: file.write(b"new"), check=check)
    assert (seen, target.read_bytes()) == ([b"new"], b"new")
    target.write_bytes(b"old")
    with pytest.raises(ValueError, match="not good enough"):
        write_durably(target, lambda file: file.write(b"newer"), check=check)
    assert (target.read_bytes(), names(tmp_path)) == (b"old", ["a"])


def test_without_sync_nothing_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        raise AssertionError

    monkeypatch.setattr(os, "fsync", fsync)
    write_durably(tmp_path / "a", lambda file: file.write(b"x"), sync=False)
    assert (tmp_path / "a").read_bytes() == b"x"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EBUSY])
def test_a_target_that_is_held_for_a_moment_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real, waits, left = os.replace, [], [OSError(number, "held")] * 3

    def replace(source: str, target: str) -> None:
        if left:
            raise left.pop()
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(durable.time, "sleep", waits.append)
    write_durably(tmp_path / "a", lambda file: file.write(b"x"))
    assert (tmp_path / "a").read_bytes() == b"x"
    assert len(waits) == 3 and sum(waits) < 1
    left.extend([OSError(number, "held")] * 99)
    with pytest.raises(OSError, match="held"):
        write_durably(tmp_path / "a", lambda file: file.write(b"y"))
    assert (tmp_path / "a").read_bytes() == b"x"
    assert names(tmp_path) == ["a"]
