"""The harness that kills: it counts what strace counts, and dies where it is told to."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash import ROOT, CrashRig, Op

KINDS = [
    *("open", "write", "fsync", "rename", "mkdir", "open", "write", "write", "truncate"),
    *("open", "write", "write", "chmod", "link", "symlink", "open", "write", "write", "utime"),
    *("chmod", "unlink", "rmdir", "fsync"),
]


def program(folder: str) -> int:
    """Changes files in every common way."""
    a, b, d = (os.path.join(folder, name) for name in "abd")
    with open(a, "wb") as file:
        file.write(b"0123456789")
        file.flush()
        os.fsync(file.fileno())
    os.rename(a, b)
    os.mkdir(d)
    with open(os.path.join(folder, "t"), "x", encoding="utf-8") as text:
        text.write("words\n")
    with open(b, "r+b") as file:
        file.seek(2)
        file.write(b"xy")
        file.truncate(6)
    descriptor = os.open(a, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(descriptor, b"abc")
    os.pwrite(descriptor, b"d", 3)
    os.fchmod(descriptor, 0o640)
    os.close(descriptor)
    os.link(a, a + "2")
    os.symlink(os.path.join(folder, "nowhere"), a + "3")
    shutil.copyfile(b, os.path.join(folder, "copy"))
    os.utime(b, ns=(10**9, 2 * 10**9))
    os.chmod(b, 0o600)
    os.unlink(a + "2")
    os.rmdir(d)
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(directory)
    os.close(directory)
    print("done")
    return 5


def careful(folder: str) -> int:
    """The same; ends with the errno of what went wrong."""
    try:
        return program(folder)
    except OSError as error:
        return error.errno or 0


@pytest.fixture(scope="module")
def rig() -> Iterator[CrashRig]:
    with CrashRig("tests.test_crash:careful") as made:
        yield made


def test_a_whole_run_counts_and_returns(rig: CrashRig, tmp_path: Path) -> None:
    done = rig.run(tmp_path)
    assert (done.code, done.killed, done.output) == (5, False, "done\n")
    assert [op.kind for op in done.ops] == KINDS
    assert done.ops[0] == Op("open", str(tmp_path / "a"))
    assert done.ops[-1] == Op("fsync", str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["a", "a3", "b", "copy", "t"]
    assert (tmp_path / "b").read_bytes() == b"01xy45"


def test_it_dies_before_each_operation(rig: CrashRig, tmp_path: Path) -> None:
    for at in range(len(KINDS)):
        folder = tmp_path / str(at)
        folder.mkdir()
        done = rig.run(folder, kill_at=at)
        assert (done.killed, done.output) == (True, "")
        assert [op.kind for op in done.ops] == KINDS[:at]
        assert (folder / "b").exists() == (at > 3)
    assert not rig.run(tmp_path, kill_at=len(KINDS)).killed


def test_a_write_can_be_torn(rig: CrashRig, tmp_path: Path) -> None:
    assert rig.run(tmp_path, kill_at=1, torn=True).killed
    assert (tmp_path / "a").read_bytes() == b"01234"


def test_a_full_disk_stays_full_and_one_error_is_one(rig: CrashRig, tmp_path: Path) -> None:
    assert rig.run(tmp_path, fail_at=1).code == errno.ENOSPC
    assert (tmp_path / "a").read_bytes() == b""
    assert rig.run(tmp_path, fail_at=2, errno=errno.EIO).code == errno.EIO


@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace here to compare with")
def test_strace_sees_the_same_operations(rig: CrashRig, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    script = f"from tests.test_crash import program; program({str(theirs)!r})"
    seen = traced([sys.executable, "-B", "-c", script], theirs)
    assert seen == [op.kind for op in rig.run(ours).ops]


_CALLS = {
    "openat": "open",
    **dict.fromkeys(("write", "pwrite64", "writev", "pwritev", "sendfile"), "write"),
    "copy_file_range": "write",
    **dict.fromkeys(("rename", "renameat", "renameat2"), "rename"),
    **dict.fromkeys(("link", "linkat"), "link"),
    **dict.fromkeys(("symlink", "symlinkat"), "symlink"),
    "rmdir": "rmdir",
    **dict.fromkeys(("unlink", "unlinkat"), "unlink"),
    **dict.fromkeys(("mkdir", "mkdirat"), "mkdir"),
    **dict.fromkeys(("chmod", "fchmod", "fchmodat", "fchmodat2"), "chmod"),
    **dict.fromkeys(("truncate", "ftruncate"), "truncate"),
    "utimensat": "utime",
    **dict.fromkeys(("fsync", "fdatasync"), "fsync"),
}


def traced(command: list[str], folder: Path) -> list[str]:
    """What strace says that a command changed below `folder`, as kinds of operations."""
    log = folder.with_suffix(".strace")
    trace = ["strace", "-f", "-qq", "-y", "-e", "signal=none", "-o", str(log)]
    done = subprocess.run(
        [*trace, "-e", "trace=" + ",".join("?" + call for call in _CALLS), *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        check=False,
    )
    if "ptrace" in done.stderr or "PTRACE" in done.stderr:
        pytest.skip(f"strace may not trace here: {done.stderr[:100]}")
    assert done.returncode in (0, 1, 3, 4), done.stderr
    own = (str(folder), '"/proc/self/fd/')
    lines = [line for line in log.read_text().splitlines() if any(text in line for text in own)]
    done_lines = [line for line in lines if " = -1 E" not in line]  # what failed changed nothing
    matches = [re.match(r"\d+ +(\w+)\((.*)", line) for line in done_lines]
    found = [(match[1], match[2]) for match in matches if match]
    return [_CALLS[call] for call, rest in found if call != "openat" or _creates(rest)]


def _creates(call: str) -> bool:
    return "O_CREAT" in call or "O_TRUNC" in call
