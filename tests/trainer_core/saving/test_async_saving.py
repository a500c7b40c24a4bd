"""Saving beside the training: what is saved, what waits, what is told, and what memory it takes."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.errors import WriteError
from tests.trainer_core.test_checkpoint import name_of, names, state_at, steps
from trainer_core import CheckpointManager, SaveWarning
from trainer_core.saving import saver as saver_module
from trainer_core.saving.container import take_apart
from trainer_core.saving.staging import Staging


class Gate:
    """Lets `publish` of step files wait, or fail, when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        self.threads: list[str] = []
        plain = saver_module.publish

        def publish(content: Any, path: Any, **options: Any) -> Any:
            if str(path).endswith(".pt"):
                self.threads.append(threading.current_thread().name)
                self.reached.set()
                assert self.open.wait(60)
                if self.error is not None:
                    raise self.error
            return plain(content, path, **options)

        monkeypatch.setattr(saver_module, "publish", publish)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def manager_of(directory: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(directory, **{"async_save": True, "keep_last": None, **options})


def test_the_file_and_the_pointer_come_later_and_are_the_same(tmp_path: Path, gate: Gate) -> None:
    manager = manager_of(tmp_path)
    assert manager.save(4, state_at(4)) == tmp_path / name_of(4)
    assert gate.reached.wait(60)
    assert names(tmp_path) == []
    assert manager.finished() == []
    gate.open.set()
    manager.wait()
    assert names(tmp_path) == ["latest.json", name_of(4)]
    assert manager.finished() == [(4, tmp_path / name_of(4))]
    assert manager.finished() == []
    assert gate.threads == ["checkpoint-save"]
    CheckpointManager(tmp_path / "sync", run_id=manager.run_id).save(4, state_at(4))
    one, other = (
        json.loads((d / "latest.json").read_text()) for d in (tmp_path, tmp_path / "sync")
    )
    assert one["size"] == other["size"]


def test_later_steps_never_show_through(tmp_path: Path, gate: Gate) -> None:
    manager = manager_of(tmp_path)
    weight = torch.ones(300_000)
    state = {"step": 4, "model": {"w": weight, "v": weight[5:]}, "note": ["before"]}
    manager.save(4, state)
    weight.fill_(7)
    state["note"].append("after")  # type: ignore[attr-defined]
    gate.open.set()
    manager.close()
    loaded = torch.load(tmp_path / name_of(4), weights_only=True)
    assert loaded["model"]["w"].unique().tolist() == [1]
    assert loaded["note"] == ["before"]
    assert loaded["model"]["v"].data_ptr() == loaded["model"]["w"].data_ptr() + 20


def test_one_is_in_flight_and_the_next_waits_for_it(tmp_path: Path, gate: Gate) -> None:
    manager = manager_of(tmp_path)
    manager.save(2, state_at(2))
    assert gate.reached.wait(60)
    second = threading.Thread(target=manager.save, args=(4, state_at(4)))
    second.start()
    second.join(0.1)
    assert second.is_alive()
    gate.open.set()
    second.join(60)
    manager.close()
    assert steps(tmp_path) == [2, 4]
    assert [step for step, _ in manager.finished()] == [2, 4]


def test_or_it_is_left_out(tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    manager = manager_of(tmp_path, when_busy="skip")
    manager.save(2, state_at(2))
    assert gate.reached.wait(60)
    with caplog.at_level(logging.INFO):
        assert manager.save(4, state_at(4)) is None
    assert "step 4 is not saved" in caplog.text
    gate.open.set()
    manager.wait()
    manager.save(6, state_at(6))
    manager.close()
    assert steps(tmp_path) == [2, 6]
    assert torch.load(tmp_path / name_of(6), weights_only=True)["parent_step"] == 2


@pytest.mark.parametrize("ask", ["save", "wait", "close", "with"])
def test_a_failure_is_raised_in_the_training_thread(tmp_path: Path, gate: Gate, ask: str) -> None:
    gate.error = WriteError("x.pt", "cannot write: the disk is gone")
    gate.open.set()
    manager = manager_of(tmp_path)
    if ask == "with":
        with pytest.raises(WriteError, match="the disk is gone"), manager:
            manager.save(2, state_at(2))
    else:
        manager.save(2, state_at(2))
        manager._saver.settle()
        attempt = {
            "save": lambda: manager.save(4, state_at(4)),
            "wait": manager.wait,
            "close": manager.close,
        }[ask]
        with pytest.raises(WriteError, match="the disk is gone"):
            attempt()
    manager.close()  # once is enough
    assert steps(tmp_path) == []
    assert not (tmp_path / ".writer.lock").exists()


def test_or_warned_of_and_the_next_save_goes_on(tmp_path: Path, gate: Gate) -> None:
    gate.error = WriteError("x.pt", "cannot write: the disk is gone")
    gate.open.set()
    manager = manager_of(tmp_path, on_error="warn")
    manager.save(2, state_at(2))
    manager._saver.settle()
    gate.error = None
    with pytest.warns(SaveWarning, match="the disk is gone"):
        assert manager.save(4, state_at(4)) is not None
    manager.close()
    assert steps(tmp_path) == [4]
    assert torch.load(tmp_path / name_of(4), weights_only=True)["parent_step"] is None


def test_a_bug_is_never_only_warned_of(tmp_path: Path, gate: Gate) -> None:
    gate.error = RuntimeError("a bug")
    gate.open.set()
    manager = manager_of(tmp_path, on_error="warn")
    manager.save(2, state_at(2))
    with pytest.raises(RuntimeError, match="a bug"):
        manager.close()


def test_a_failure_behind_another_error_is_logged(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    gate.error = WriteError("x.pt", "cannot write: the disk is gone")
    gate.open.set()
    with pytest.raises(ZeroDivisionError), manager_of(tmp_path) as manager:
        manager.save(2, state_at(2))
        1 / 0  # noqa: B018
    assert "the last save failed as well: x.pt: cannot write: the disk is gone" in caplog.text


def test_what_cannot_be_pickled_is_told_at_once(tmp_path: Path) -> None:
    manager = manager_of(tmp_path)
    with pytest.raises((AttributeError, TypeError)):
        manager.save(4, {"step": 4, "bad": lambda: 1})


def test_what_only_torch_can_save_is_saved_at_once(tmp_path: Path) -> None:
    manager = manager_of(tmp_path)
    with torch.serialization.skip_data():
        manager.save(4, {"step": 4, "x": torch.ones(3)})
    assert names(tmp_path) == ["latest.json", name_of(4)]


def test_reading_waits_for_what_is_being_written(tmp_path: Path) -> None:
    manager = manager_of(tmp_path)
    for step in range(1, 6):
        manager.save(step, state_at(step))
        loaded = manager.load_latest()
        assert loaded is not None
        assert loaded["step"] == step
    manager.save(6, state_at(6))
    manager.copy_to(tmp_path / "copy.pt")
    assert torch.load(tmp_path / "copy.pt", weights_only=True)["step"] == 6


def test_pruning_happens_there_too(tmp_path: Path) -> None:
    manager = manager_of(tmp_path, keep_last=2)
    for step in range(1, 8):
        manager.save(step, state_at(step))
    manager.close()
    assert steps(tmp_path) == [6, 7]


def test_an_interrupt_gives_up_what_is_being_written(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    manager = manager_of(tmp_path)
    gate.open.set()
    manager.save(2, state_at(2))
    manager.wait()
    gate.open.clear()
    gate.reached.clear()
    with pytest.raises(KeyboardInterrupt), manager:
        manager.save(4, state_at(4))
        assert gate.reached.wait(60)
        raise KeyboardInterrupt
    assert (tmp_path / ".writer.lock").exists()  # something is still being written
    gate.open.set()
    manager._saver._lane._worker.join(60)  # type: ignore[union-attr]  # it is there
    assert not (tmp_path / ".writer.lock").exists()  # and then it is anybody's
    assert "abandoned" in caplog.text
    assert names(tmp_path) == ["latest.json", name_of(2)]
    manager.save(6, state_at(6))  # and may be used on
    manager.close()
    assert steps(tmp_path) == [2, 6]


AT_EXIT = textwrap.dedent(
    """
    import sys, torch
    from trainer_core import CheckpointManager
    manager = CheckpointManager(sys.argv[1], async_save=True)
    manager.save(4, {"step": 4, "model": {"w": torch.ones(2_000_000)}})
    if sys.argv[2] == "fails":
        manager.wait()
        import trainer_core.saving.saver
        def publish(*arguments, **options):
            raise OSError(5, "the disk is gone")
        trainer_core.saving.saver.publish = publish
        manager.save(6, {"step": 6})
    """
)


@pytest.mark.parametrize("how", ["well", "fails"])
def test_a_program_that_ends_without_close_waits_and_tells(tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-c", AT_EXIT, str(tmp_path), how]
    done = subprocess.run(command, capture_output=True, text=True)
    assert names(tmp_path) == ["latest.json", name_of(4)], done.stderr
    assert torch.load(tmp_path / name_of(4), weights_only=True)["step"] == 4
    assert ("could not be saved: [Errno 5] the disk is gone" in done.stderr) == (how == "fails")
    assert not (tmp_path / ".writer.lock").exists()


def test_errors_in_tidying_up_are_only_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unlink(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EIO, "no")

    manager = manager_of(tmp_path, keep_last=2)
    monkeypatch.setattr(Path, "unlink", unlink)
    for step in (2, 4, 6):
        manager.save(step, state_at(step))
    manager.close()
    assert "could not tidy up" in caplog.text
    assert steps(tmp_path) == [2, 4, 6]


# ------------------------------------------------------------------------------------ staging


def test_one_copy_and_sharing_is_kept() -> None:
    base = torch.arange(1000)
    state = take_apart({"a": base, "b": base[10:], "c": torch.ones(3), "d": torch.ones(0)})
    assert state is not None
    staging = Staging()
    copy = staging.copy(state)
    assert copy.pickle == state.pickle
    assert [part.tolist() for part in copy.storages] == [part.tolist() for part in state.storages]
    assert len(copy.storages) == 3
    assert all(part.data_ptr() % 64 == 0 for part in copy.storages if len(part))
    base.fill_(0)
    assert copy.storages[0].view(torch.int64).tolist() == list(range(1000))


def test_the_buffer_is_used_again_and_grows_only_to_the_largest_state() -> None:
    staging = Staging()
    assert staging.nbytes == 0
    sizes = (1000, 500, 1000, 3000, 10)
    seen = []
    for size in sizes:
        state = take_apart({"a": torch.ones(size, dtype=torch.uint8)})
        assert state is not None
        seen.append((staging.copy(state).storages[0].data_ptr(), staging.nbytes))
    assert [nbytes for _, nbytes in seen] == [1024, 1024, 1024, 3008, 3008]
    assert seen[0] == seen[1] == seen[2]
    assert seen[3] == seen[4]


GROWTH = textwrap.dedent(
    """
    import os, sys, torch
    from trainer_core import CheckpointManager
    manager = CheckpointManager(sys.argv[1], async_save=True, durable=False, keep_last=1)
    weight = torch.ones(1 << 20)
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    def save(steps):
        for step in steps:
            weight.fill_(step)
            manager.save(step, {"step": step, "model": {"w": weight}})
        manager.wait()
        return resident()
    count = int(sys.argv[2])
    early = save(range(1, count // 10))
    late = save(range(count // 10, count + 1))
    manager.close()
    print((late - early) / (4 << 20))
    """
)


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_number_of_saves(tmp_path: Path, count: int) -> None:
    """In sizes of the state: less than one, after hundreds of saves."""
    command = [sys.executable, "-c", GROWTH, str(tmp_path), str(count)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1
