"""What pruning keeps so that there is always something proven good; and when a save is due."""

from __future__ import annotations

import logging
import resource
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpttool.actions.newest as newest_module
from tests.trainer_core.saving.test_publishing import failing
from tests.trainer_core.test_checkpoint import flip_a_weight, name_of, names, state_at, steps
from trainer_core import CheckpointManager, SaveWarning


def run_of(directory: Path, *wanted: int, **options: Any) -> CheckpointManager:
    manager = CheckpointManager(directory, **{"run_id": "r", "keep_last": None, **options})
    for step in wanted:
        manager.save(step, state_at(step))
    return manager


def test_beside_the_new_file_one_stays_that_is_proven_good(tmp_path: Path) -> None:
    """A flipped bit is not seen at a glance: sizes and directory are right."""
    run_of(tmp_path, 2, 4, 6)
    flip_a_weight(tmp_path / name_of(6))
    run_of(tmp_path, 8, keep_last=2)
    assert steps(tmp_path) == [4, 6, 8]  # 6 does not count, and 4 is the newest that does
    flip_a_weight(tmp_path / name_of(4))
    run_of(tmp_path, 10, keep_last=2)
    assert steps(tmp_path) == [8, 10]  # 8 was read, and is good: nothing else is needed


def test_where_nothing_beside_it_is_good_everything_stays(tmp_path: Path) -> None:
    run_of(tmp_path, 2, 4, 6)
    for step in (2, 4, 6):
        flip_a_weight(tmp_path / name_of(step))
    run_of(tmp_path, 8, keep_last=2)
    assert steps(tmp_path) == [2, 4, 6, 8]


def test_where_one_is_to_be_left_it_is_read_before_the_others_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = run_of(tmp_path, 2, keep_last=1)
    manager.save(4, state_at(4))
    assert steps(tmp_path) == [4]
    plain = CheckpointManager.point_to

    def spoil(self: CheckpointManager, step: int) -> None:
        plain(self, step)
        flip_a_weight(tmp_path / name_of(step))  # the disk returns something else than it took

    monkeypatch.setattr(CheckpointManager, "point_to", spoil)
    manager.save(6, state_at(6))
    assert steps(tmp_path) == [4, 6]
    monkeypatch.undo()
    manager.save(8, state_at(8))
    assert steps(tmp_path) == [8]


def test_files_that_it_wrote_or_loaded_itself_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_of(tmp_path, 2, 4)
    manager = CheckpointManager(tmp_path, keep_last=2)
    manager.load_latest()
    read: list[tuple[str, bool]] = []
    plain = newest_module.judge

    def judge(file: Any, *, quick: bool = False, **more: Any) -> Any:
        read.append((file.name, quick))
        return plain(file, quick=quick, **more)

    monkeypatch.setattr(newest_module, "judge", judge)
    for step in (6, 8, 10):
        manager.save(step, state_at(step))
    assert steps(tmp_path) == [8, 10]
    assert [name for name, quick in read if not quick] == []


def test_what_cannot_be_pruned_costs_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = run_of(tmp_path, 2, 4, keep_last=2)
    monkeypatch.setattr(newest_module, "judge", lambda *more, **options: 1 / 0)
    CheckpointManager(tmp_path, run_id="r", keep_last=1).save(6, state_at(6))
    assert "could not tidy up" in caplog.text
    assert manager.latest_path() == tmp_path / name_of(6)


# ------------------------------------------------------------------------------ errors by policy


def test_a_full_disk_may_be_only_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = run_of(tmp_path, 2, on_error="warn")
    manager.finished()
    failing(monkeypatch, "fsync", *[OSError(28, "No space left on device")] * 99)
    with pytest.warns(SaveWarning, match=r"training goes on without it.*No space left") as caught:
        assert manager.save(4, state_at(4)) is None
    assert caught[0].filename == __file__
    assert "No space left" in caplog.text
    monkeypatch.undo()
    assert manager.finished() == []
    assert manager.latest_path() == tmp_path / name_of(2)
    manager.save(6, state_at(6))
    assert torch.load(tmp_path / name_of(6), weights_only=True)["parent_step"] == 2


def test_by_default_it_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = run_of(tmp_path, 2)
    failing(monkeypatch, "fsync", *[OSError(28, "No space left on device")] * 99)
    with pytest.raises(OSError, match="No space left"):
        manager.save(4, state_at(4))


def test_a_state_that_is_wrong_is_never_only_a_warning(tmp_path: Path) -> None:
    manager = run_of(tmp_path, 2, on_error="warn")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((AttributeError, TypeError)):
            manager.save(4, {"step": 4, "bad": lambda: 1})


@pytest.mark.parametrize(
    ("option", "bad"),
    [
        ("save_every_seconds", 0),
        ("save_every_seconds", float("nan")),
        ("min_free", -1),
        ("when_busy", "maybe"),
        ("on_error", "ignore"),
    ],
)
def test_settings_that_make_no_sense(option: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=option):
        CheckpointManager("x", **{option: bad})


def test_min_free_reaches_the_writing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="are to stay free"):
        run_of(tmp_path, 2, min_free=10**18)
    assert names(tmp_path) == []


def test_without_durable_nothing_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = run_of(tmp_path, durable=False)
    manager.claim()
    calls = failing(monkeypatch, "fsync")
    for step in (2, 4):
        manager.save(step, state_at(step))
    assert calls == []
    assert steps(tmp_path) == [2, 4]


# --------------------------------------------------------------------------------- when it is due


class Clock:
    """A clock that is set by hand, in place of `time.monotonic`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def test_seconds_beside_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    manager = CheckpointManager(tmp_path, every_steps=100, save_every_seconds=60)
    assert not manager.should_save(1)
    clock.now += 59
    assert not manager.should_save(2)
    clock.now += 1
    assert manager.should_save(3)
    manager.save(3, state_at(3))
    assert not manager.should_save(4)
    assert manager.should_save(100)
    clock.now += 61
    assert manager.should_save(101)
    assert not manager.should_save(0)
    assert not CheckpointManager(tmp_path, enabled=False, save_every_seconds=1).should_save(3)


def test_a_clock_that_is_set_back_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    wall = [2e9]
    monkeypatch.setattr(time, "time", lambda: wall[0])
    manager = run_of(tmp_path, 2, save_every_seconds=60, keep_last=2, every_steps=10**6)
    for step in (3, 4):
        wall[0] -= 10**8
        clock.now += 61
        assert manager.should_save(step)
        manager.save(step, state_at(step))
    assert steps(tmp_path) == [3, 4]
    assert manager.latest_path() == tmp_path / name_of(4)
    manager.close()


def test_a_save_that_failed_is_not_tried_again_at_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    options: dict[str, Any] = {"save_every_seconds": 60, "min_free": 10**18, "on_error": "warn"}
    manager = CheckpointManager(tmp_path, every_steps=10**6, **options)
    clock.now += 61
    assert manager.should_save(2)
    with pytest.warns(SaveWarning):
        manager.save(2, state_at(2))
    assert not manager.should_save(3)


# ------------------------------------------------------------------------------------ many saves

MANY = textwrap.dedent(
    """
    import resource, sys, threading, torch
    from trainer_core import CheckpointManager
    torch.set_num_threads(1)
    manager = CheckpointManager(sys.argv[1], keep_last=2, async_save=sys.argv[3] == "async")
    model = {"w": torch.ones(1_000)}
    manager.save(1, {"step": 1, "model": model})
    manager.wait()
    resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
    for step in range(2, int(sys.argv[2]) + 2):
        manager.save(step, {"step": step, "model": model})
    manager.close()
    print(manager.load_latest()["step"], threading.active_count())
    """
)


@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_thousand_saves_leak_no_file_and_no_thread(tmp_path: Path, how: str, count: int) -> None:
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 24
    command = [sys.executable, "-c", MANY, str(tmp_path), str(count), how]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == f"{count + 1} 1\n", done.stderr
    assert names(tmp_path) == ["latest.json", name_of(count), name_of(count + 1)]


def test_what_is_swept_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    left = [
        f".{target}.tmp-{child.pid}"
        for target in (name_of(2), "latest.json", "manifest.jsonl", ".writer.lock")
    ]
    for name in left:
        (tmp_path / name).write_text("x")
    with caplog.at_level(logging.INFO):
        run_of(tmp_path, 4)
    assert names(tmp_path) == ["latest.json", name_of(4)]
    for name in left:
        assert f"removing {tmp_path / name}" in caplog.text
