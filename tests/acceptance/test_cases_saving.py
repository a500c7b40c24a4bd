"""Problems with saving that people reported, one test each, through the training core's front door.

B writing that fails or is interrupted, C choosing, D retention, E several at once, K the system
that the training core follows. What single parts do in detail is tested beside them.
"""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool
from tests import corrupt
from tests.trainer_core.saving.test_publishing import failing, silently_stops
from tests.trainer_core.test_checkpoint import name_of, names, state_at, steps
from tests.trainer_core.test_trainer import assert_equal, trainer
from trainer_core import (
    Callback,
    CheckpointError,
    CheckpointManager,
    ResumeWarning,
    SaveWarning,
    atomic_torch_save,
)

ROOT = Path(__file__).resolve().parents[2]


def run_of(directory: Path, *wanted: int, **options: Any) -> CheckpointManager:
    manager = CheckpointManager(directory, **{"keep_last": None, **options})
    for step in wanted:
        manager.save(step, state_at(step))
    return manager


def python(program: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, **options)


def full_after(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Files that are made from now on are on a disk with room for so many bytes each."""
    real = open

    class Full(io.FileIO):
        def write(self, data: Any, /) -> int:
            if self.tell() + memoryview(data).nbytes > room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    def opened(path: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
        if mode != "xb":
            return real(path, mode, *more, **options)
        return io.BufferedWriter(Full(path, "xb"))

    monkeypatch.setattr("builtins.open", opened)


# ---- B: writing that fails, or is interrupted


@pytest.mark.parametrize("room", [0, 100, 5000, 12_000])
def test_b01_the_disk_gets_full_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    manager = run_of(tmp_path, 2, 4)
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    full_after(monkeypatch, room)
    with pytest.raises(OSError, match=r"No space left on device \([0-9,]+ bytes free\)") as caught:
        manager.save(6, state_at(6))
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == before
    manager.save(6, state_at(6))
    assert ckpttool.verify(tmp_path).newest_valid == 6


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_b02_a_full_disk_never_ends_the_process(tmp_path: Path) -> None:
    program = """
        import builtins, sys, torch
        from trainer_core import atomic_torch_save
        real = open
        builtins.open = lambda path, mode="r", *a, **k: real(
            "/dev/full" if mode == "xb" and not real(path, mode).close() else path,
            "wb" if mode == "xb" else mode, *a, **k)
        for state in ({"w": torch.ones(1_000_000)}, {"s": torch.ones(9)}, [1]):
            try:
                atomic_torch_save(state, sys.argv[1] + "/a.pt")
            except OSError as error:
                print(error.errno)
    """
    done = python(program, tmp_path)
    assert (done.returncode, done.stdout) == (0, "28\n28\n28\n"), done.stderr
    assert os.listdir(tmp_path) == []


def test_b03_one_passing_error_of_a_shared_disk_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (errno.EIO, errno.ESTALE, errno.EDQUOT):
        manager = CheckpointManager(tmp_path / str(number), every_steps=3)
        manager.claim()
        with monkeypatch.context() as patch:
            failing(patch, "fsync", OSError(number, os.strerror(number)))
            assert trainer(checkpoint_manager=manager).fit(6).steps == 6
        assert steps(tmp_path / str(number)) == [3, 6]
        assert "try 1 of 4 failed" in caplog.text


def test_b03_one_that_stays_ends_it_or_not_as_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer_core.saving import publishing as saving

    monkeypatch.setattr(saving, "retrying", lambda attempt, what, waits_s: attempt())
    plain = os.fsync

    def fsync(descriptor: int) -> None:
        if "step_" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EIO, "Input/output error")
        plain(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    one = trainer(checkpoint_manager=CheckpointManager(tmp_path / "a", every_steps=3))
    with pytest.raises(OSError, match="Input/output error"):
        one.fit(6)
    other = CheckpointManager(tmp_path / "b", every_steps=3, on_error="warn")
    with pytest.warns(SaveWarning, match="Input/output error"):
        assert trainer(checkpoint_manager=other).fit(6).steps == 6
    assert names(tmp_path / "a") == names(tmp_path / "b") == []


def test_b06_two_interrupts_while_a_slow_disk_writes(tmp_path: Path) -> None:
    program = """
        import os, signal, sys, time
        from tests.trainer_core.test_trainer import trainer
        from trainer_core import CheckpointManager
        plain = os.fsync
        def fsync(descriptor):
            if "step_000000000004" in os.readlink(f"/proc/self/fd/{descriptor}"):
                for _ in range(2):
                    signal.raise_signal(signal.SIGINT)
            plain(descriptor)
        os.fsync = fsync
        trainer(checkpoint_manager=CheckpointManager(sys.argv[1], every_steps=2)).fit(10)
    """
    done = python(program, tmp_path)
    assert "KeyboardInterrupt" in done.stderr
    assert names(tmp_path) == ["latest.json", name_of(2)]
    assert ckpttool.verify(tmp_path).newest_valid == 2


def test_b07_a_signal_during_evaluation_is_not_lost(tmp_path: Path) -> None:
    class Evaluates(Callback):
        def on_step_end(self, trainer: Any, step: int, metrics: dict[str, Any]) -> None:
            if step == 3:
                signal.raise_signal(signal.SIGTERM)
                assert trainer.should_stop()

    manager = CheckpointManager(tmp_path, every_steps=1000)
    result = trainer(checkpoint_manager=manager, callbacks=[Evaluates()]).fit(10)
    assert (result.steps, result.stopped_by, result.exit_code) == (3, "signal SIGTERM", 75)
    assert ckpttool.verify(tmp_path).newest_valid == 3


def test_b09_what_cannot_be_pickled_leaves_the_file_before(tmp_path: Path) -> None:
    manager = run_of(tmp_path, 4)
    before = (tmp_path / name_of(4)).read_bytes()
    with pytest.raises((AttributeError, TypeError)):
        manager.save(4, {**state_at(4), "extra": {"f": lambda: 1}})
    assert (tmp_path / name_of(4)).read_bytes() == before
    assert names(tmp_path) == ["latest.json", name_of(4)]


def test_b09_a_function_in_a_callbacks_state_is_named_when_it_is_saved(tmp_path: Path) -> None:
    class Finder(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"fn": lambda: 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError

    manager = CheckpointManager(tmp_path, every_steps=2)
    with pytest.raises(CheckpointError, match=r"callbacks.*fn"):
        trainer(checkpoint_manager=manager, callbacks=[Finder()]).fit(4)
    assert names(tmp_path) == []


def test_b10_the_temporary_is_on_the_targets_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = os.replace

    def replace(source: Any, target: Any) -> None:
        if os.path.dirname(source) != os.path.dirname(target):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        plain(source, target)

    monkeypatch.setattr(os, "replace", replace)
    run_of(tmp_path, 2, 4)
    assert steps(tmp_path) == [2, 4]


def test_b11_a_rename_that_only_copied_half_is_seen_by_whoever_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On some mounts a rename is a copy. A file that has its name and not its bytes is no step."""
    manager = run_of(tmp_path, 2)
    plain = os.replace

    def replace(source: Any, target: Any) -> None:
        if "step_" not in str(target):
            return plain(source, target)
        content = Path(source).read_bytes()
        Path(target).write_bytes(content[: len(content) // 2])
        raise KeyboardInterrupt  # killed meanwhile

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        manager.save(4, state_at(4))
    monkeypatch.undo()
    assert ckpttool.verify(tmp_path).newest_valid == 2
    state = CheckpointManager(tmp_path).load_latest()
    assert state is not None
    assert state["step"] == 2


def test_b12_a_file_that_a_scanner_holds_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = run_of(tmp_path, 2)
    failing(monkeypatch, "replace", *[PermissionError(errno.EACCES, "Access is denied")] * 2)
    manager.save(2, {**state_at(2), "config": {"new": 1}})
    assert torch.load(tmp_path / name_of(2), weights_only=True)["config"] == {"new": 1}


def test_b13_a_rename_onto_a_file_that_is_there_is_always_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rename(*arguments: Any, **options: Any) -> None:
        raise FileExistsError(183, "Cannot create a file when that file already exists")

    monkeypatch.setattr(os, "rename", rename)
    run_of(tmp_path, 2, 4, 4)
    assert steps(tmp_path) == [2, 4]


@pytest.mark.parametrize(("umask", "mode"), [(0o007, 0o660), (0o022, 0o644)])
def test_b14_whoever_may_read_is_for_the_umask_to_say(
    tmp_path: Path, umask: int, mode: int
) -> None:
    before = os.umask(umask)
    try:
        run_of(tmp_path, 2, 4)
    finally:
        os.umask(before)
    for name in (name_of(2), "latest.json", "manifest.jsonl"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode


def test_b15_saving_over_the_file_that_is_mapped(tmp_path: Path) -> None:
    manager = run_of(tmp_path, 4)
    mapped = torch.load(tmp_path / name_of(4), mmap=True, weights_only=True)
    manager.save(4, {**mapped, "model": {"weight": mapped["model"]["weight"] + 1}})
    assert mapped["model"]["weight"].unique().tolist() == [4]
    loaded = manager.load_latest()
    assert loaded is not None
    assert loaded["model"]["weight"].unique().tolist() == [5]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux tells what is mapped")
def test_b16_nothing_is_mapped_unless_asked_for(tmp_path: Path) -> None:
    """Not while it is verified and loaded, nor as long as what was loaded is in use."""
    manager = run_of(tmp_path, 4)
    maps = Path("/proc/self/maps")
    loaded = manager.load_latest()
    assert loaded is not None and loaded["step"] == 4
    assert str(tmp_path) not in maps.read_text()
    mapped = torch.load(tmp_path / name_of(4), mmap=True, weights_only=True)
    assert str(tmp_path / name_of(4)) in maps.read_text()
    assert mapped["step"] == 4


def test_b17_names_are_portable(tmp_path: Path) -> None:
    run_of(tmp_path, 2)
    allowed = set("abcdefghijklmnopqrstuvwxyz0123456789_.-")
    assert all(set(name) <= allowed for name in os.listdir(tmp_path))


@pytest.mark.parametrize("name", ["тест_каталог", "🙂 with spaces", "[1]*?"])
def test_b18_any_directory_name(tmp_path: Path, name: str) -> None:
    manager = run_of(tmp_path / name, 2, 4, keep_last=1)
    assert steps(tmp_path / name) == [4]
    assert manager.load_latest() is not None


def test_b19_b20_memory() -> None:
    """Beside their parts: test_container (peak), test_async_saving (growth)."""
    from tests.trainer_core.saving import test_async_saving, test_container

    assert test_container.test_a_save_takes_little_memory_beside_the_state
    assert test_async_saving.test_memory_does_not_grow_with_the_number_of_saves


@pytest.mark.parametrize("at", [0, 3000, 20_000])
def test_a_disk_that_drops_bytes_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    manager = run_of(tmp_path, 2)
    silently_stops(monkeypatch, at, times=1)
    manager.save(4, state_at(4))
    assert ckpttool.verify(tmp_path).newest_valid == 4


# ---- C: which one


def test_c14_resuming_by_hand_says_where_from_and_never_silently_from_zero(tmp_path: Path) -> None:
    must = trainer(checkpoint_manager=CheckpointManager(tmp_path))
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        must.fit(4, resume="must")
    run_of(tmp_path / "run", 2).close()
    path = tmp_path / "run" / name_of(2)
    path.write_bytes(path.read_bytes()[:-3000])
    auto = trainer(checkpoint_manager=CheckpointManager(tmp_path / "run"))
    with pytest.raises(CheckpointError, match="No valid step is left"):
        auto.fit(4, resume="auto")


def test_c18_the_pointer_says_what_its_file_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The pointer came to the other side before its file, which is still an older one there."""
    manager = run_of(tmp_path, 2, 4)
    pointer = json.loads((tmp_path / "latest.json").read_text())
    assert pointer["size"] == (tmp_path / name_of(4)).stat().st_size
    older = {**state_at(4), "config": {"older": "x" * 500}}
    atomic_torch_save(older, tmp_path / name_of(4))
    assert "PTR109" in {finding.id for finding in ckpttool.verify(tmp_path).findings}
    assert manager.load_latest() is not None
    assert "it is not the file that was saved there" in caplog.text


# ---- D: retention


def test_d01_the_newest_by_number_stay(tmp_path: Path) -> None:
    run_of(tmp_path, *range(9000, 10001, 100), keep_last=10)
    assert steps(tmp_path) == list(range(9100, 10001, 100))


def test_d02_what_the_pointer_names_stays_beside_the_newest(tmp_path: Path) -> None:
    manager = run_of(tmp_path, 2, 4, 6, 8)
    manager.point_to(2)  # say, the best one
    manager.keep_last = 1
    manager.prune()
    assert steps(tmp_path) == [2, 8]


@pytest.mark.parametrize("form", ["{0}/", "{0}/../out", "{1}"])
def test_d03_keeping_one_keeps_one_however_the_directory_is_spelled(
    tmp_path: Path, form: str
) -> None:
    (tmp_path / "out").mkdir()
    os.symlink(tmp_path / "out", tmp_path / "link")
    run_of(Path(form.format(tmp_path / "out", tmp_path / "link")), 1, 2, 3, keep_last=1)
    assert steps(tmp_path / "out") == [3]


def test_d04_ten_comes_after_nine(tmp_path: Path) -> None:
    run_of(tmp_path, *range(13), keep_last=3)
    assert steps(tmp_path) == [10, 11, 12]


def test_d05_after_a_resume_no_number_is_used_again(tmp_path: Path) -> None:
    trainer(checkpoint_manager=CheckpointManager(tmp_path, every_steps=5)).fit(5)
    manager = CheckpointManager(tmp_path, every_steps=1, keep_last=None)
    one = trainer(checkpoint_manager=manager)
    state = manager.load_latest()
    assert state is not None
    one.resume(state)
    before = (tmp_path / name_of(5)).read_bytes()
    one.fit(7)
    assert steps(tmp_path) == [5, 6, 7]
    assert (tmp_path / name_of(5)).read_bytes() == before


def test_d06_a_file_that_somebody_else_deleted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = run_of(tmp_path, 2, 4, 6, keep_last=3)
    plain = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        plain(path)
        plain(path, missing_ok=missing_ok)  # the other one was faster: ENOENT

    monkeypatch.setattr(Path, "unlink", unlink)
    manager.save(8, state_at(8))
    assert steps(tmp_path) == [4, 6, 8]


def test_d10_a_run_deletes_nothing_outside_its_own_directory(tmp_path: Path) -> None:
    old = run_of(tmp_path / "old", 2, 4)
    state = old.load_latest()
    assert state is not None
    new = CheckpointManager(tmp_path / "new", keep_last=1)
    new.resumed_from(state)
    for step in (6, 8):
        new.save(step, state_at(step))
    (tmp_path / "new" / "latest.json").write_text(
        json.dumps({"step": 2, "file": str(tmp_path / "old" / name_of(2))})
    )
    new.save(10, state_at(10))
    assert (steps(tmp_path / "old"), steps(tmp_path / "new")) == ([2, 4], [10])


def test_d13_a_record_that_is_empty_where_there_should_be_bytes_is_no_good_file(
    tmp_path: Path,
) -> None:
    run_of(tmp_path, 2, 4)
    data = (tmp_path / name_of(4)).read_bytes()
    (tmp_path / name_of(4)).write_bytes(corrupt.replace_record(data, "data/0", b""))
    (tmp_path / "latest.json").unlink()
    manager = CheckpointManager(tmp_path, keep_last=1)
    assert manager.prune() == []
    assert manager.latest_valid_path() == tmp_path / name_of(2)


# ---- E: several at once


def test_e01_two_writers_never_share_a_temporary(tmp_path: Path) -> None:
    target = tmp_path / "a.pt"
    states = [{"w": torch.full((50_000,), float(number))} for number in range(4)]
    threads = [
        threading.Thread(target=lambda s=state: [atomic_torch_save(s, target) for _ in range(5)])
        for state in states
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.load(target, weights_only=True)["w"].unique().numel() == 1
    assert os.listdir(tmp_path) == ["a.pt"]


def test_e02_two_trainers_in_one_directory(tmp_path: Path) -> None:
    """The second is refused before its first step, and told who writes there."""
    program = """
        import sys, time
        from tests.trainer_core.test_trainer import trainer
        from trainer_core import CheckpointManager
        def wait(trainer, step, metrics):
            if step == 2:
                print("training", flush=True)
                sys.stdin.read(1)
        manager = CheckpointManager(sys.argv[1], every_steps=1, keep_last=None)
        trainer(checkpoint_manager=manager, callbacks=[wait]).fit(3)
    """
    pipe = subprocess.PIPE
    first = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        stdin=pipe,
        stdout=pipe,
        text=True,
        cwd=ROOT,
    )
    assert first.stdout is not None
    assert first.stdout.readline() == "training\n"
    second = trainer(checkpoint_manager=CheckpointManager(tmp_path, every_steps=1))
    with pytest.raises(CheckpointError, match=rf"pid {first.pid} on .* \(trainer_core\)"):
        second.fit(9)
    assert second.step == 0
    first.communicate("x")
    assert first.returncode == 0
    assert steps(tmp_path) == [1, 2, 3]
    with pytest.raises(CheckpointError, match="holds checkpoints of run"):
        second.fit(9)  # and now it is another run's directory


def test_e04_a_directory_that_seems_to_exist_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = os.makedirs

    def makedirs(*arguments: Any, **options: Any) -> None:
        plain(*arguments, **options)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "makedirs", makedirs)
    run_of(tmp_path / "run", 297)
    assert steps(tmp_path / "run") == [297]


def test_e05_a_directory_that_is_made_at_the_same_time(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "c"
    threads = [
        threading.Thread(target=atomic_torch_save, args=({"n": n}, target / f"{n}.pt"))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(os.listdir(target)) == 8


def test_e06_whoever_reads_while_a_trainer_writes_sees_whole_files(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=3)
    manager.save(1, state_at(1))
    done = threading.Event()

    def write() -> None:
        for step in range(2, 40):
            manager.save(step, state_at(step))
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = []
    reader = CheckpointManager(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while not done.is_set():
            try:
                state = reader.load_latest(fallback=True)
            except CheckpointError:
                continue  # deleted between choosing and opening
            assert state is not None
            assert state["model"]["weight"].unique().tolist() == [state["step"]]
            seen.append(state["step"])
    writer.join()
    assert seen == sorted(seen)


# ---- K: what the system that this one follows did


def test_k06_a_full_disk_at_the_pointer_leaves_no_temporary_and_the_next_save_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = run_of(tmp_path, 2)
    plain = os.fsync

    def fsync(descriptor: int) -> None:
        if ".latest.json" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left"):
        manager.save(4, state_at(4))
    assert names(tmp_path) == ["latest.json", name_of(2), name_of(4)]
    monkeypatch.undo()
    manager.save(6, state_at(6))
    assert json.loads((tmp_path / "latest.json").read_text())["step"] == 6


def test_k07_what_a_killed_save_left_is_swept_by_the_next(tmp_path: Path) -> None:
    program = """
        import os, signal, sys
        from tests.trainer_core.test_checkpoint import CheckpointManager, state_at
        manager = CheckpointManager(sys.argv[1], run_id="r")
        manager.save(2, state_at(2))
        def fsync(descriptor):
            os.kill(os.getpid(), signal.SIGKILL)
        os.fsync = fsync
        manager.save(4, state_at(4))
    """
    assert python(program, tmp_path).returncode == -signal.SIGKILL
    assert [name for name in names(tmp_path) if ".tmp-" in name] != []
    CheckpointManager(tmp_path, run_id="r").save(6, state_at(6))
    assert names(tmp_path) == ["latest.json", name_of(2), name_of(6)]


class Fails(Callback):
    """Raises at one micro-batch."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.left, self.error = at, error

    def loss(self, model: Any, batch: Any) -> Any:
        self.left -= 1
        value = model(*batch)  # random numbers are drawn, and then it fails
        if self.left == 0:
            raise self.error
        return value


def test_k14_an_exception_between_two_intervals_leaves_the_last_one(tmp_path: Path) -> None:
    """That is the decision: whether what is in memory is any good, nobody knows."""
    fails = Fails(4, ZeroDivisionError("step 4"))
    manager = CheckpointManager(tmp_path, every_steps=2)
    with pytest.raises(ZeroDivisionError, match="step 4"):
        trainer(checkpoint_manager=manager, loss_fn=fails.loss).fit(10)
    assert steps(tmp_path) == [2]
    assert not (tmp_path / ".writer.lock").exists()


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_k14_or_the_last_whole_step_where_that_is_asked_for(
    tmp_path: Path, accumulation: int, beside: bool
) -> None:
    options: dict[str, Any] = {"accumulation_steps": accumulation}
    whole = trainer(**options)
    whole.fit(10)
    fails = Fails(4 * accumulation, ZeroDivisionError("step 4"))
    manager = CheckpointManager(tmp_path, every_steps=2, async_save=beside)
    one = trainer(checkpoint_manager=manager, loss_fn=fails.loss, save_on_exception=True, **options)
    with pytest.raises(ZeroDivisionError, match="step 4"):
        one.fit(10)
    assert steps(tmp_path) == [2, 3]
    again = trainer(**options)
    state = manager.load_latest()
    assert state is not None
    # What the loss that fails has counted is kept, and this one counts nothing.
    with pytest.warns(ResumeWarning, match="loss_fn.fn: has attributes saved, is not here"):
        again.resume(state)
    again.fit(10)
    assert_equal(again.model, whole.model)  # bit for bit as if it had not failed


def test_k14_not_where_the_optimizer_itself_failed(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, every_steps=2)
    one = trainer(checkpoint_manager=manager, save_on_exception=True)
    plain, calls = one.optimizer.step, []

    def step(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise MemoryError("half of the weights are new")
        return plain(*arguments, **options)

    one.optimizer.step = step  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        one.fit(10)
    assert steps(tmp_path) == [2]


def test_k14_a_failure_while_saving_does_not_hide_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fails = Fails(4, ZeroDivisionError("step 4"))
    manager = CheckpointManager(tmp_path, every_steps=2, min_free=10**18)
    manager.every_steps = 100
    one = trainer(checkpoint_manager=manager, loss_fn=fails.loss, save_on_exception=True)
    with pytest.raises(ZeroDivisionError, match="step 4"):
        one.fit(10)
    assert "step 3 could not be saved after a failure" in caplog.text
    assert names(tmp_path) == []


@pytest.mark.parametrize("interval", [2])
def test_k14_ctrl_c_after_step_5_saves_step_5(tmp_path: Path, interval: int) -> None:
    class Interrupts(Callback):
        def on_step_end(self, trainer: Any, step: int, metrics: dict[str, Any]) -> None:
            if step == 5:
                signal.raise_signal(signal.SIGINT)

    manager = CheckpointManager(tmp_path, every_steps=interval)
    result = trainer(checkpoint_manager=manager, callbacks=[Interrupts()]).fit(10)
    assert (result.steps, result.stopped_by, result.exit_code) == (5, "signal SIGINT", 130)
    assert steps(tmp_path) == [2, 4, 5]
