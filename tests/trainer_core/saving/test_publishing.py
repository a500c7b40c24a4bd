"""What a save meets on bad days: no room, errors that pass and that don't, bytes lost in silence."""

from __future__ import annotations

import errno
import hashlib
import io
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.errors import WriteError
from trainer_core.saving import publishing as saving
from trainer_core.saving.container import content_of
from trainer_core.saving.hashed import HashedFile
from trainer_core.saving.publishing import PlainBytes, TorchSave, publish
from trainer_core.saving.retrying import retrying

STATE = {"step": 4, "w": torch.arange(200_000), "b": [torch.ones(3), torch.ones(0)]}
QUICK = (0.0, 0.0)


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A file that is there already, and must stay until the new one is whole."""
    path = tmp_path / "run" / "step_000000000004.pt"
    path.parent.mkdir()
    path.write_bytes(b"old")
    return path


# ------------------------------------------------------------------------------- trying again


class Flaky:
    """An attempt that fails with these errors, one after the other, and then gives "done"."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.tries = 0

    def __call__(self) -> str:
        self.tries += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EDQUOT, errno.EBUSY])
def test_errors_that_pass_are_waited_out_longer_each_time(
    number: int, caplog: pytest.LogCaptureFixture
) -> None:
    attempt, waits = Flaky(OSError(number, "bad"), OSError(number, "bad")), []
    assert retrying(attempt, "x.pt", waits_s=(0.1, 0.5, 2.0), sleep=waits.append) == "done"
    assert (attempt.tries, waits) == (3, [0.1, 0.5])
    assert "x.pt: try 2 of 4 failed" in caplog.text


def test_tries_are_bounded() -> None:
    attempt = Flaky(*[OSError(errno.EIO, f"number {i}") for i in range(9)])
    with pytest.raises(OSError, match="number 3"):
        retrying(attempt, "x", waits_s=(0, 0, 0))
    assert attempt.tries == 4


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "full"),
        OSError(errno.EROFS, "read-only"),
        PermissionError(errno.EACCES, "no"),
        FileNotFoundError(errno.ENOENT, "gone"),
        ValueError("other"),
        KeyboardInterrupt(),
    ],
)
def test_what_waiting_does_not_mend_is_raised_at_once(error: BaseException) -> None:
    attempt = Flaky(error)
    with pytest.raises(type(error)):
        retrying(attempt, "x", waits_s=(0, 0, 0))
    assert attempt.tries == 1


def failing(monkeypatch: pytest.MonkeyPatch, name: str, *errors: OSError) -> list[Any]:
    """Lets a function of `os` fail with these errors first; gives the list of its calls."""
    plain, left, calls = getattr(os, name), list(errors), []

    def function(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if left:
            raise left.pop(0)
        return plain(*arguments, **options)

    monkeypatch.setattr(os, name, function)
    return calls


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EDQUOT])
def test_a_shared_disk_that_fails_once_costs_one_more_try_with_a_fresh_temporary(
    target: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    opened: list[str] = []
    real = saving.write_durably

    def write_durably(path: str, write: Callable[[Any], Any], **options: Any) -> Any:
        def noted(file: Any) -> Any:
            opened.append(f"{os.fstat(file.fileno()).st_ino} {os.fstat(file.fileno()).st_size}")
            return write(file)

        return real(path, noted, **options)

    monkeypatch.setattr(saving, "write_durably", write_durably)
    failing(monkeypatch, "fsync", OSError(number, os.strerror(number)))
    publish(content_of(STATE), target, waits_s=QUICK)
    assert torch.load(target, weights_only=True)["w"].sum() == STATE["w"].sum()
    assert [size.split()[1] for size in opened] == ["0", "0"]  # nothing was written on to
    assert names(target.parent) == [target.name]


def test_a_shared_disk_that_goes_on_failing_is_an_error_and_the_old_file_stays(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, "fsync", *[OSError(errno.EIO, "Input/output error")] * 9)
    with pytest.raises(WriteError, match="Input/output error") as caught:
        publish(content_of(STATE), target, waits_s=QUICK)
    assert caught.value.errno == errno.EIO
    assert target.read_bytes() == b"old"
    assert names(target.parent) == [target.name]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EBUSY])
def test_a_target_that_a_scanner_holds_for_a_moment_is_waited_for(
    target: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """What Windows says then: PermissionError [WinError 5]."""
    calls = failing(monkeypatch, "replace", *[OSError(number, "held")] * 2)
    publish(PlainBytes(b"new"), target)
    assert target.read_bytes() == b"new"
    assert len({source for source, _ in calls}) == 1  # the same file, not written again
    assert len(calls) == 3


def test_a_target_that_stays_held_is_an_error(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, "replace", *[PermissionError(errno.EACCES, "held")] * 99)
    with pytest.raises(WriteError, match="held"):
        publish(PlainBytes(b"new"), target)
    assert target.read_bytes() == b"old"
    assert names(target.parent) == [target.name]


def test_a_temporary_lies_beside_its_target_so_a_rename_never_crosses_devices(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = os.replace

    def replace(source: str, destination: str) -> None:
        if os.path.dirname(source) != os.path.dirname(destination):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        plain(source, destination)

    def rename(*arguments: Any) -> None:
        raise FileExistsError(183, "os.rename does that on Windows")

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(os, "rename", rename)
    publish(content_of(STATE), target)
    assert target.stat().st_size > 1000


def test_a_rename_that_crosses_devices_all_the_same_is_raised(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = failing(monkeypatch, "replace", OSError(errno.EXDEV, "Invalid cross-device link"))
    with pytest.raises(WriteError, match="cross-device"):
        publish(PlainBytes(b"new"), target, waits_s=QUICK)
    assert len(calls) == 1
    assert names(target.parent) == [target.name]


# ----------------------------------------------------------------------- bytes lost in silence


def silently_stops(monkeypatch: pytest.MonkeyPatch, at: int, times: int = 99) -> list[str]:
    """Files from now on keep only their first bytes, and say nothing; gives their names."""
    real, opened = open, []

    class Stopping(io.FileIO):
        def write(self, data: Any, /) -> int:
            view = memoryview(data).cast("B")
            room = max(0, at - self.tell())
            super().write(view[:room])
            return len(view)

    def stopping(path: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
        if mode != "xb" or len(opened) >= times:
            return real(path, mode, *more, **options)
        opened.append(os.fspath(path))
        return io.BufferedWriter(Stopping(path, "xb"))

    monkeypatch.setattr("builtins.open", stopping)
    return opened


@pytest.mark.parametrize("at", [0, 1, 4096, 1_000_000, -1])
def test_a_writer_that_stops_in_silence_is_caught_before_the_file_gets_its_name(
    target: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    size = publish(content_of(STATE), target.with_name("whole")).size
    target.with_name("whole").unlink()
    opened = silently_stops(monkeypatch, at if at >= 0 else size - 1)
    with pytest.raises(WriteError, match="bytes arrived of the") as caught:
        publish(content_of(STATE), target, waits_s=QUICK)
    assert f"{size:,}" in str(caught.value)
    assert str(target) in str(caught.value)
    assert len(opened) == 3
    assert target.read_bytes() == b"old"
    assert names(target.parent) == [target.name]


def test_one_that_stops_once_is_written_again(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silently_stops(monkeypatch, 4096, times=1)
    publish(content_of(STATE), target, waits_s=QUICK)
    assert torch.load(target, weights_only=True)["step"] == 4


def test_an_archive_whose_end_does_not_come_back_is_caught(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as it should be, but its last bytes are zero."""
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if os.fstat(descriptor).st_size > 5000:
            os.pwrite(descriptor, bytes(5000), os.fstat(descriptor).st_size - 5000)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(WriteError, match="cannot be read back"):
        publish(content_of(STATE), target, waits_s=QUICK)
    assert target.read_bytes() == b"old"


def test_an_archive_whose_directory_is_another_one_is_caught(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if ".pt.tmp" in path.name:
            content = bytearray(path.read_bytes())
            content[content.rindex(b"archive/version") + 8] ^= 1
            path.write_bytes(content)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(WriteError, match="directory is not what was written"):
        publish(content_of(STATE), target, waits_s=QUICK)


# ---------------------------------------------------------------------------------- full disks


def test_space_is_looked_up_before_anything_is_written(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "free_bytes", lambda directory: 1_000_000)
    with pytest.raises(WriteError, match=r"bytes are needed, 1,000,000 are free") as caught:
        publish(content_of(STATE), target)
    assert caught.value.errno == errno.ENOSPC
    assert names(target.parent) == [target.name]


def test_min_free_stays_free(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "free_bytes", lambda directory: 2_000_000)
    publish(content_of(STATE), target)
    with pytest.raises(WriteError, match=r"and 1,000,000 are to stay free, 2,000,000 are free"):
        publish(content_of(STATE), target, min_free=1_000_000)


def test_the_space_is_that_of_the_directory(tmp_path: Path) -> None:
    usage = shutil.disk_usage(tmp_path)
    free = saving.free_bytes(str(tmp_path))
    assert free is not None
    assert usage.free // 2 <= free <= usage.total
    assert saving.free_bytes(str(tmp_path / "nothing")) is None


def test_where_nobody_knows_the_space_the_save_is_tried(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "free_bytes", lambda directory: None)
    publish(content_of(STATE), target, min_free=10**18)
    assert torch.load(target, weights_only=True)["step"] == 4


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_dev_full(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real thing: the system says ENOSPC at the first write that reaches it."""
    real = open

    def full(path: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
        if mode == "xb":
            real(path, mode).close()
            return real("/dev/full", "wb")
        return real(path, mode, *more, **options)

    monkeypatch.setattr("builtins.open", full)
    for content in (content_of(STATE), PlainBytes(b"small")):
        with pytest.raises(WriteError, match=r"No space left on device.*bytes free"):
            publish(content, target)
    assert target.read_bytes() == b"old"
    assert names(target.parent) == [target.name]


TMPFS = textwrap.dedent(
    """
    import os, subprocess, sys, torch
    from trainer_core import CheckpointManager
    where = sys.argv[1]
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", where])
    if done.returncode:
        sys.exit(77)
    state = lambda step, n: {"step": step, "model": {"w": torch.full((n,), float(step))}}
    manager = CheckpointManager(where, keep_last=2)
    for step in (1, 2, 3):
        manager.save(step, state(step, 60_000))
    try:
        manager.save(4, state(4, 250_000))
    except OSError as error:
        print(error.errno, "are needed" in str(error), "are free" in str(error))
    import trainer_core.saving.publishing
    trainer_core.saving.publishing.free_bytes = lambda directory: None   # and if it is not looked up
    try:
        manager.save(4, state(4, 250_000))
    except OSError as error:
        print(error.errno, "bytes free" in str(error))
    print(sorted(name for name in os.listdir(where) if "step" in name))
    loaded = manager.load_latest()
    print(loaded["step"], loaded["model"]["w"][0].item())
    manager.save(5, state(5, 60_000))
    print(manager.load_latest()["step"])
    """
)


def test_a_small_disk_that_is_really_full(tmp_path: Path) -> None:
    command = ["unshare", "-rm", sys.executable, "-c", TMPFS, str(tmp_path)]
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 77 or "unshare:" in done.stderr:
        pytest.skip("needs the right to mount")
    assert done.stdout.splitlines() == [
        "28 True True",
        "28 True",
        "['step_000000000002.pt', 'step_000000000003.pt']",
        "3 3.0",
        "5",
    ], done.stderr


def test_a_directory_that_is_read_only() -> None:
    program = textwrap.dedent(
        """
        import os, sys, torch
        from trainer_core import CheckpointManager
        where = sys.argv[1]
        manager = CheckpointManager(where)
        manager.save(2, {"step": 2})
        manager.close()
        os.chmod(where, 0o555)
        if os.geteuid() == 0:
            os.chown(where, 65534, 65534)
            os.setuid(65534)
        for on_error in ("raise", "warn"):
            try:
                print(CheckpointManager(where, on_error=on_error).save(4, {"step": 4}))
            except OSError as error:
                print(error.errno, "Permission denied" in str(error))
        print(sorted(os.listdir(where)))
        """
    )
    # Not in tmp_path: the directories above that are root's alone, and the child gives up root.
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        os.mkdir(os.path.join(directory, "run"))
        command = [sys.executable, "-c", program, os.path.join(directory, "run")]
        done = subprocess.run(command, capture_output=True, text=True)
    shown = "['latest.json', 'manifest.jsonl', 'step_000000000002.pt']"
    assert done.stdout.splitlines() == ["13 True", "None", shown], done.stderr
    assert "SaveWarning: no checkpoint was saved, training goes on without it" in done.stderr


# ------------------------------------------------------------------------------------- hashing


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("sizes", [(), (0,), (10, 3), (1 << 20, 5, 0, 200_000, 70_000)])
def test_size_and_digest_are_those_of_all_that_went_through(
    sizes: tuple[int, ...], beside: bool
) -> None:
    pieces = [os.urandom(size) for size in sizes]
    buffer = io.BytesIO()
    with HashedFile(buffer, beside=beside) as file:
        for position, piece in enumerate(pieces):
            file.write(memoryview(piece) if position % 2 else piece)
            assert file.tell() == sum(sizes[: position + 1])
        digest = file.sha256()
    whole = b"".join(pieces)
    assert buffer.getvalue() == whole
    assert (file.size, digest) == (len(whole), hashlib.sha256(whole).hexdigest())
    assert file.sha256() == digest


def test_after_drain_a_buffer_may_be_used_again() -> None:
    buffer, expected = bytearray(1 << 20), hashlib.sha256()
    with HashedFile(io.BytesIO()) as file:
        for value in range(20):
            buffer[:] = bytes([value]) * len(buffer)
            expected.update(buffer)
            file.write(memoryview(buffer))
            file.drain()
        assert file.sha256() == expected.hexdigest()


def test_without_a_digest_it_only_counts() -> None:
    with HashedFile(io.BytesIO(), digest=False) as file:
        file.write(bytes(1 << 20))
        assert (file.size, file.sha256()) == (1 << 20, None)


def test_what_the_watch_raises_ends_the_writing(target: Path) -> None:
    calls: list[int] = []

    def watch() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        publish(content_of(STATE), target, watch=watch)
    assert target.read_bytes() == b"old"
    assert names(target.parent) == [target.name]


@pytest.mark.parametrize("state", [STATE, {"x": 1}, [torch.ones(5)]])
@pytest.mark.parametrize("kind", [content_of, TorchSave])
def test_the_digest_is_that_of_the_file(
    target: Path, state: Any, kind: Callable[[Any], Any]
) -> None:
    written = publish(kind(state), target, digest=True)
    content = target.read_bytes()
    assert written == (len(content), hashlib.sha256(content).hexdigest())


def test_without_sync_nothing_is_synced(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        raise AssertionError

    monkeypatch.setattr(os, "fsync", fsync)
    publish(content_of(STATE), target, sync=False)
    assert torch.load(target, weights_only=True)["step"] == 4


def test_failures_are_logged_with_the_name_of_the_file(
    target: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing(monkeypatch, "fsync", OSError(errno.EIO, "Input/output error"))
    with caplog.at_level(logging.WARNING):
        publish(PlainBytes(b"new"), target, waits_s=QUICK)
    assert f"{target}: try 1 of 3 failed" in caplog.text
