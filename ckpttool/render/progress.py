"""A progress line on standard error: only on a terminal, and only for work that takes a while."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, TextIO

from ckpttool.render.text import escape, shorten_middle, size_text

if TYPE_CHECKING:
    from types import TracebackType

QUIET_S = 0.5
INTERVAL_S = 0.1
_WIPE = "\r\x1b[K"


class ProgressLine:
    """One line, rewritten in place: what is done, bytes, rate and the time that is left.

    Call it as `progress(done, total, label)`, with bytes; `total` may be 0 where it is not known.
    It may be called from several threads. Use it as a context manager, which wipes the line.
    """

    __slots__ = ("_next", "_on", "_shown", "_start", "_stream")

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._on = self._stream.isatty()
        self._shown = False
        self._start = time.monotonic()
        self._next = self._start + QUIET_S

    def __call__(self, done: int, total: int, label: str) -> None:
        """Shows `done` of `total` bytes, if it is time to."""
        now = time.monotonic()
        if not self._on or now < self._next:
            return
        self._next = now + INTERVAL_S
        self._shown = True
        text = progress_text(done, total, now - self._start, escape(label))
        self._stream.write(_WIPE + shorten_middle(text, 79))
        self._stream.flush()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._shown:
            self._stream.write(_WIPE)
            self._stream.flush()
        self._on = False


def progress_text(done: int, total: int, elapsed: float, label: str) -> str:
    """The line: ` 42%  1.2 of 2.9 GiB  812.0 MiB/s  2 s left  label`. `elapsed` is in seconds."""
    rate = done / elapsed if elapsed > 0 else 0.0
    parts = [f"{100 * done // total:3d}%"] if total > 0 else []
    parts.append(f"{size_text(done)} of {size_text(total)}" if total > 0 else size_text(done))
    parts.append(f"{size_text(int(rate))}/s")
    if total > done and rate > 0:
        parts.append(f"{duration_text((total - done) / rate)} left")
    return "  ".join([*parts, label])


def duration_text(seconds: float) -> str:
    """`8 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
