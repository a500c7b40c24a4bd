"""The progress line: silent when piped, silent for short work, wiped at the end."""

from __future__ import annotations

import io
import time

import pytest

from ckpttool.render.progress import ProgressLine, duration_text, progress_text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def test_nothing_where_nobody_looks(clock: Clock) -> None:
    stream = io.StringIO()
    with ProgressLine(stream) as progress:
        clock.now += 10
        progress(1, 2, "a")
    assert stream.getvalue() == ""


def test_nothing_for_short_work(clock: Clock) -> None:
    stream = Terminal()
    with ProgressLine(stream) as progress:
        clock.now += 0.4
        progress(1, 2, "a")
    assert stream.getvalue() == ""


def test_long_work(clock: Clock) -> None:
    stream = Terminal()
    with ProgressLine(stream) as progress:
        clock.now += 2
        progress(2 << 20, 10 << 20, "step\x1b.pt")
        clock.now += 0.05
        progress(3 << 20, 10 << 20, "too soon")
    wipe = "\r\x1b[K"
    line = r" 20%  2.0 MiB of 10.0 MiB  1.0 MiB/s  8 s left  step\x1b.pt"
    assert stream.getvalue() == wipe + line + wipe


def test_unknown_total() -> None:
    assert progress_text(1024, 0, 2.0, "a") == "1.0 KiB  512 B/s  a"
    assert progress_text(0, 0, 0.0, "a") == "0 B  0 B/s  a"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(8.4, "8 s"), (200, "3 min 20 s"), (3599.7, "1 h 00 min"), (7500, "2 h 05 min")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
