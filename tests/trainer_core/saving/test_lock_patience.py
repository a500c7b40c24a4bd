"""A restarted container goes on in the directory of the one that died; a stopped one notices."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from ckpttool.io import lock_watch
from tests.trainer_core.saving.crash_saving import state_at
from trainer_core import CheckpointError, CheckpointManager
from trainer_core.saving import directory_lock


def lock_of_another_container(directory: Path) -> None:
    """What a pod that was killed leaves: pid 1 of a namespace that is gone."""
    manager = CheckpointManager(directory, run_id="r")
    manager.save(2, state_at(2))
    path = directory / ".writer.lock"
    lock = json.loads(path.read_text())
    manager.close()
    path.write_text(json.dumps({**lock, "pid": 1, "pid_namespace": "pid:[1]"}))


def test_a_restarted_container_just_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lock_of_another_container(tmp_path)
    now = [0.0]

    def watch(most: float, say: Any) -> lock_watch.Watch:
        def sleep(seconds: float) -> None:
            now[0] += seconds

        return lock_watch.Watch(most, say, clock=lambda: now[0], sleep=sleep)

    monkeypatch.setattr(directory_lock, "Watch", watch)
    with caplog.at_level(logging.WARNING), CheckpointManager(tmp_path, run_id="r") as manager:
        manager.save(4, state_at(4))
    assert now == [90.0]
    assert [record.getMessage().split(": ")[1].split(" pid")[0] for record in caplog.records] == [
        "waiting for a sign of life of",
        "took over the lock of a writer that is gone",
    ]
    state = CheckpointManager(tmp_path).load_latest()
    assert state is not None
    assert state["step"] == 4


def test_without_patience_it_is_refused_at_once(tmp_path: Path) -> None:
    lock_of_another_container(tmp_path)
    with pytest.raises(CheckpointError, match="a writer is at work here: pid 1"):
        CheckpointManager(tmp_path, run_id="r", lock_patience=0).claim()


@pytest.mark.parametrize("patience", [-1, float("nan")])
def test_patience_is_checked(tmp_path: Path, patience: float) -> None:
    with pytest.raises(ValueError, match="lock_patience"):
        CheckpointManager(tmp_path, lock_patience=patience)


def test_one_that_was_stopped_for_long_looks_before_it_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread has not run yet when training goes on, and the lock is somebody else's."""
    manager = CheckpointManager(tmp_path, run_id="r")
    manager.save(2, state_at(2))
    path = tmp_path / ".writer.lock"
    theirs = {**json.loads(path.read_text()), "token": "0" * 32, "pid": 1, "host": "elsewhere"}
    path.write_text(json.dumps(theirs))
    manager._saver._hold._held.lock._refreshed -= 1000  # type: ignore[union-attr]  # it is held
    with pytest.raises(CheckpointError, match="nothing is written: .*taken over by pid 1"):
        manager.save(4, state_at(4))
    assert not (tmp_path / "step_000000000004.pt").exists()
    manager.close()
    assert json.loads(path.read_text()) == theirs


def test_a_directory_in_the_place_of_the_lock_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody refreshes it, and it cannot be taken over either: there is nothing to wait for."""

    def watch(most: float, say: Any) -> lock_watch.Watch:
        def sleep(seconds: float) -> None:
            raise AssertionError(f"waits for {seconds} s")

        return lock_watch.Watch(most, say, sleep=sleep)

    monkeypatch.setattr(directory_lock, "Watch", watch)
    (tmp_path / ".writer.lock").mkdir()
    with pytest.raises(CheckpointError, match="a directory lies in the place of the lock: mv -n"):
        CheckpointManager(tmp_path, run_id="r").claim()
    assert [path.name for path in tmp_path.iterdir()] == [".writer.lock"]
