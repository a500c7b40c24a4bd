"""Who may still be writing a temporary."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from ckpttool.io.processes import may_be_writing, process_is_alive, started_at


@pytest.fixture
def other() -> Iterator[int]:
    """The id of a process that lives as long as the test."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process.pid
    process.communicate()


def test_a_dead_process_writes_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert process_is_alive(process.pid) is False
    assert may_be_writing(process.pid, time.time()) is False


def test_what_cannot_be_told() -> None:
    assert may_be_writing(0, time.time()) is None
    assert may_be_writing(10**17, time.time()) is None


def test_the_start_is_that_of_the_clock(other: int) -> None:
    started = started_at(other)
    assert started is not None
    assert abs(started - time.time()) < 30
    assert started_at(0) is None


def test_a_number_that_was_given_again(other: int) -> None:
    """A file from before the process was started is not its own."""
    assert may_be_writing(other, time.time()) is True
    assert may_be_writing(other, time.time() - 3600) is False
    # A server whose clock is behind ours must not make a living writer look dead.
    assert may_be_writing(other, time.time() - 20) is True


def test_we_ourselves_write_nobodys_temporary() -> None:
    assert process_is_alive(os.getpid()) is True
    assert may_be_writing(os.getpid(), time.time()) is False
