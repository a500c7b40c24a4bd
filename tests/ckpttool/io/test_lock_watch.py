"""A holder that nobody here can ask: watched by a clock of our own, refused or taken over."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpttool.io.lock import LOCK_NAME, LockedError, WriterLock, read_holder
from ckpttool.io.lock_watch import Watch


class Clock:
    """A clock that only sleeping moves; `then` happens at some moments of it."""

    def __init__(self, **then: Callable[[], object]) -> None:
        self.now = 1000.0
        self.then = {int(moment[2:]): act for moment, act in then.items()}

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for moment in [m for m in self.then if self.now - 1000 >= m]:
            self.then.pop(moment)()

    @property
    def waited(self) -> float:
        return self.now - 1000


def left_by_another(directory: Path, every: int | None = 15, **facts: Any) -> None:
    """The lock of a container that was on this machine, or on another one."""
    WriterLock.acquire(directory, program="trainer_core", refreshed_every=every)
    path = directory / LOCK_NAME
    there = {"pid": 1, "pid_namespace": "pid:[1]", "refreshed": "2026-11-29T19:40:42Z"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **there, **facts}))


def refresh(directory: Path) -> None:
    path = directory / LOCK_NAME
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "refreshed": "2026-11-29T19:40:57Z"}))


def take(directory: Path, watch: Watch) -> WriterLock:
    return WriterLock.acquire(directory, program="trainer_core", watch=watch)


@pytest.mark.parametrize(("every", "seconds"), [(15, 90), (None, 300), (100, 300), (-1, 300)])
def test_a_holder_without_a_sign_of_life_is_taken_over(
    tmp_path: Path, every: int | None, seconds: float
) -> None:
    left_by_another(tmp_path, every)
    clock, said = Clock(), list[str]()
    with take(tmp_path, Watch(330, said.append, clock=clock, sleep=clock.sleep)) as lock:
        assert lock.taken_over is not None
        assert lock.taken_over.pid == 1
        holder = read_holder(tmp_path)
        assert holder is not None
        assert holder.pid == os.getpid()
    assert clock.waited == seconds
    assert len(said) == 1
    assert f"pid 1 on {os.uname().nodename} (trainer_core)" in said[0]
    assert f"for {seconds} s at most" in said[0]


def test_one_sign_of_life_is_enough_to_be_refused(tmp_path: Path) -> None:
    left_by_another(tmp_path)
    clock = Clock(at40=lambda: refresh(tmp_path))
    with pytest.raises(LockedError, match="a writer is at work here: pid 1"):
        take(tmp_path, Watch(330, clock=clock, sleep=clock.sleep))
    assert clock.waited == 40


def test_the_times_of_the_file_do_not_count(tmp_path: Path) -> None:
    """A clock that was set back, or a file server from the future: only change is life."""
    left_by_another(tmp_path)
    path = tmp_path / LOCK_NAME
    future = path.stat().st_mtime + 10**6
    os.utime(path, (future, future))
    clock = Clock()
    take(tmp_path, Watch(330, clock=clock, sleep=clock.sleep)).release()
    assert clock.waited == 90


def test_another_that_was_faster_is_alive(tmp_path: Path) -> None:
    left_by_another(tmp_path)
    clock = Clock(at50=lambda: left_by_a_third(tmp_path))
    with pytest.raises(LockedError, match="pid 3"):
        take(tmp_path, Watch(330, clock=clock, sleep=clock.sleep))
    assert clock.waited == 50


def left_by_a_third(directory: Path) -> None:
    (directory / LOCK_NAME).unlink()
    left_by_another(directory, pid=3)


def test_one_that_comes_back_while_it_is_taken_over_keeps_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last look is after the claim: who wakes up before it is not replaced."""
    left_by_another(tmp_path)
    clock = Clock()
    plain = WriterLock._claim_on

    def wakes_up(self: WriterLock, identity: str) -> str:
        refresh(tmp_path)
        return plain(self, identity)

    monkeypatch.setattr(WriterLock, "_claim_on", wakes_up)
    with pytest.raises(LockedError, match="pid 1"):
        take(tmp_path, Watch(330, clock=clock, sleep=clock.sleep))
    assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == 1
    assert os.listdir(tmp_path) == [LOCK_NAME]


@pytest.mark.parametrize("patience", [0, 20])
def test_who_does_not_wait_long_enough_is_refused(tmp_path: Path, patience: float) -> None:
    left_by_another(tmp_path)
    clock, said = Clock(), list[str]()
    with pytest.raises(LockedError, match="pid 1"):
        take(tmp_path, Watch(patience, said.append, clock=clock, sleep=clock.sleep))
    assert clock.waited == patience
    assert bool(said) == bool(patience)


def test_a_living_holder_of_this_machine_is_not_waited_for(tmp_path: Path) -> None:
    clock = Clock()
    with (
        WriterLock.acquire(tmp_path, program="trainer_core"),
        pytest.raises(LockedError, match="which is this process"),
    ):
        take(tmp_path, Watch(330, clock=clock, sleep=clock.sleep))
    assert clock.waited == 0
