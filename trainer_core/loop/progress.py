"""What a run says while it trains, without making the device wait for it.

Losses stay tensors on their device and are read in one go now and then: on a terminal twice a
second, else for each line of the log. Between two readings at most 256 steps are waiting.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TextIO

import torch

_MOST_WAITING = 256
_MOST_RECORDS = 1024
_BAR_SECONDS = 0.5
_LINE_SECONDS = 30.0
_LINES = 10


class _Waiting(NamedTuple):
    step: int
    loss: torch.Tensor
    lr: Any
    samples: int
    tokens: int
    at: float


class Progress:
    """Shows the steps from `start` to `target`, and keeps records of them.

    On a terminal a tqdm bar with loss, learning rate and steps/s; else plain lines through
    `logger`: about ten in all and at least one in 30 seconds. If nobody has configured logging,
    lines go to standard error as they are. A loss that is not finite is told once, as a warning.
    One that is `quiet`, since another process shows the same steps, says warnings only.
    """

    def __init__(
        self,
        logger: logging.Logger,
        start: int,
        target: int,
        *,
        stream: TextIO | None = None,
        quiet: bool = False,
    ) -> None:
        self._logger = logger
        self._stream = stream if stream is not None else sys.stderr
        self._start, self._target = start, target
        self._began = self._shown_at = time.perf_counter()
        self._shown = start
        self._every = max(1, math.ceil((target - start) / _LINES))
        self._records = _Records()
        self._waiting: list[_Waiting] = []
        self._warned = False
        self._quiet = quiet
        self._bar = None if quiet else _bar(self._stream, start, target)
        self._patience = _LINE_SECONDS if self._bar is None else _BAR_SECONDS

    @property
    def records(self) -> list[dict[str, Any]]:
        """Step, loss, lr, samples, tokens and elapsed_s of each step; evenly thinned above 1,024.

        Up to the last reading; all of them after `finish`.
        """
        return self._records.kept

    def note(self, step: int, loss: torch.Tensor, lr: Any, samples: int, tokens: int) -> None:
        """Takes note of a step that is done; reads its loss at once only if a display is due."""
        now = time.perf_counter()
        self._waiting.append(_Waiting(step, loss, lr, samples, tokens, now))
        if now - self._shown_at >= self._patience or self._is_line_due(step):
            self._show(now)
        elif len(self._waiting) >= _MOST_WAITING:
            self._read()

    def finish(self) -> float | None:
        """Reads and shows what is left. Gives the last step's loss, None if there was no step."""
        if self._waiting and self._waiting[-1].step != self._shown:
            self._show(time.perf_counter())
        self._read()
        return self._records.last["loss"] if self._records.last else None

    def say(self, line: str, level: int = logging.INFO) -> None:
        """One line to the log, or to standard error where logging is not configured."""
        if self._quiet and level < logging.WARNING:
            return
        if self._bar is not None and not self._logger.hasHandlers():
            self._bar.write(line, file=self._stream)
        else:
            tell(self._logger, line, level, self._stream)

    def close(self) -> None:
        """Takes the bar down. Touches no tensor, so it is safe after a failure of the device."""
        if self._bar is not None:
            self._bar.close()

    def _is_line_due(self, step: int) -> bool:
        if self._bar is not None or self._quiet:
            return False
        done = step - self._start
        return step == self._target or done == 1 or done % self._every == 0

    def _show(self, now: float) -> None:
        self._read()
        last = self._records.last
        seconds, steps = now - self._shown_at, last["step"] - self._shown
        self._shown_at, self._shown = now, last["step"]
        words = f"loss {last['loss']:.4f}  lr {last['lr']:.3g}"
        rate = f"{steps / seconds:.3g} steps/s" if seconds > 0 else ""
        if self._bar is None:
            self.say(f"step {last['step']}/{self._target}  {words}  {rate}".rstrip())
        else:
            self._bar.set_postfix_str(f"{words}  {rate}", refresh=False)
            self._bar.update(last["step"] - self._bar.n)

    def _read(self) -> None:
        """Turns what waits into records: the one place where the device is waited for."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        for one, loss in zip(waiting, _values([one.loss for one in waiting]), strict=True):
            if not self._warned and not math.isfinite(loss):
                self._warned = True
                self.say(f"the loss is {loss} at step {one.step}", logging.WARNING)
            self._records.add(
                step=one.step,
                loss=loss,
                lr=float(one.lr),
                samples=one.samples,
                tokens=one.tokens,
                elapsed_s=one.at - self._began,
            )


def tell(
    logger: logging.Logger, line: str, level: int = logging.INFO, stream: TextIO | None = None
) -> None:
    """One line to the log, or to standard error (or `stream`) where logging is not configured."""
    if logger.hasHandlers():
        logger.log(level, line)
        return
    out = sys.stderr if stream is None else stream
    out.write(line + "\n")
    out.flush()


@contextmanager
def progress_of(
    logger: logging.Logger, start: int, target: int, *, quiet: bool = False
) -> Iterator[Progress]:
    """A Progress that is closed at the end, whatever happens."""
    progress = Progress(logger, start, target, quiet=quiet)
    try:
        yield progress
    finally:
        progress.close()


class _Records:
    """A list that stays short: when it is full, every second record goes, then only such are kept.

    The first record always stays, and so the list depends on the steps alone, not on the time.
    """

    def __init__(self) -> None:
        self.kept: list[dict[str, Any]] = []
        self.last: dict[str, Any] = {}
        self._stride = 1
        self._seen = 0

    def add(self, **record: Any) -> None:
        self.last = record
        if self._seen % self._stride == 0:
            if len(self.kept) == _MOST_RECORDS:
                del self.kept[1::2]
                self._stride *= 2
            if self._seen % self._stride == 0:
                self.kept.append(record)
        self._seen += 1


def _values(losses: list[torch.Tensor]) -> list[float]:
    """Their numbers, with one wait for all of them."""
    values: list[float] = torch.stack(losses).tolist()
    return values


def _bar(stream: TextIO, start: int, target: int) -> Any:
    """A tqdm bar if `stream` is a terminal, and tqdm there; else None."""
    if not stream.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(
        total=target,
        initial=start,
        unit="step",
        file=stream,
        **({"dynamic_ncols": True} if _has_width(stream) else {"ncols": 80, "nrows": 20}),
        bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
    )


def _has_width(stream: TextIO) -> bool:
    """Whether the terminal says how wide it is; to one that says 0, tqdm would show nothing."""
    try:
        return os.get_terminal_size(stream.fileno()).columns > 0
    except (OSError, ValueError):
        return False
