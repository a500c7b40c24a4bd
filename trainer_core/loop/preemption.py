"""Stopping early without losing anything: signals, the flag that they set, and the exit code.

Schedulers announce the end of a job with a signal and kill it some seconds later. So a signal only
sets a flag; the loop looks at it after every micro-batch, saves, and returns in the usual way.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Protocol, TypeVar

import torch

E = TypeVar("E", bound=BaseException)

SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1")
"""Those that stop a fit: what schedulers and `kill` send, Ctrl-C, and Slurm's `--signal=USR1@90`.

Where the platform has them.
"""

EXIT_FINISHED = 0
EXIT_REQUEUE = 75
"""EX_TEMPFAIL of sysexits.h, "try again later": stopped by a scheduler, saved, to be run again.

Not 128 + the signal's number: the shell reports that of a process that was killed unsaved, too.
"""
EXIT_INTERRUPTED = 130
"""What a shell reports after Ctrl-C: somebody wanted the run to end; it is not to be requeued."""


def exit_code(stopped_by: str | None) -> int:
    """The exit code for a fit that was stopped by this; None for one that was not."""
    if stopped_by is None:
        return EXIT_FINISHED
    return EXIT_INTERRUPTED if stopped_by == "signal SIGINT" else EXIT_REQUEUE


_WRAPPERS = frozenset({"DistributedDataParallel", "FullyShardedDataParallel"})


def told_to_all(error: E) -> E:
    """Marks an error that all ranks raise together: none has to be told of it."""
    error.is_told_to_all = True  # type: ignore[attr-defined]  # every exception takes attributes
    return error


def is_told(error: BaseException) -> bool:
    """Whether all ranks raise this error, or what came of it."""
    return getattr(error, "is_told_to_all", False)


class Ranks(Protocol):
    """What is needed of a `trainer_core.site.ranks.Site`."""

    def sum(self, *counts: int) -> list[int]:
        """The sums over all ranks."""

    def gather(self, value: Any) -> list[Any]:
        """The value of each rank."""


class StopFlag:
    """Why a fit is to end early, if it is.

    Ranks that step together (`ranks`) have to agree, or some would wait for ever for those that
    have left: then `is_set` is true only from an `agree` on.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.ranks: Ranks | None = None
        self._agreed = False

    @property
    def is_set(self) -> bool:
        """Whether it is time to end."""
        return self._agreed or (self.reason is not None and self.ranks is None)

    def set(self, reason: str) -> None:
        """Asks for the end; the first reason is the one that stays."""
        if self.reason is None:
            self.reason = reason

    def agree(self) -> bool:
        """`is_set`, once all ranks know whether any of them was asked; all call it, at each step.

        Costs nothing where there are no `ranks`, else one number to be summed on the CPU. All end
        for the same reason: that of the lowest rank which has one.
        """
        if not self._agreed and self.ranks is not None:
            self._agreed = self.ranks.sum(self.reason is not None)[0] > 0
            if self._agreed:
                reasons = self.ranks.gather(self.reason)
                self.reason = next(reason for reason in reasons if reason is not None)
        return self.is_set

    def clear(self) -> None:
        """Forgets it, for the next fit."""
        self.reason, self._agreed = None, False


def is_wrapped(model: torch.nn.Module) -> bool:
    """Whether each step of this model needs all ranks because a wrapper of torch's says so."""
    return any(type(module).__name__ in _WRAPPERS for module in model.modules())


class StopSignals:
    """While it is entered, SIGNALS call `stop("signal SIGTERM")` and the like.

    A second SIGINT raises KeyboardInterrupt at once. A handler that the program has set itself gets
    its signal afterwards, when the checkpoint is safe: many of them end the program. Signals that
    it ignores stay ignored. Only the main thread may have handlers: on others nothing is done.
    """

    def __init__(self, stop: Callable[[str], object]) -> None:
        self._stop = stop
        self._previous: dict[int, Any] = {}
        self._came: list[int] = []
        self._process = os.getpid()

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in (getattr(signal, name) for name in SIGNALS if hasattr(signal, name)):
            previous = signal.getsignal(number)
            # None: somebody set it from C, and we could not put it back.
            if previous is not None and previous is not signal.SIG_IGN:
                self._previous[number] = previous
                signal.signal(number, self._received)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._put_back()
        except BaseException:  # one more Ctrl-C, right here
            self._put_back()
            raise
        theirs = [number for number in self._came if _is_own(self._previous.get(number))]
        self._previous.clear()
        self._came.clear()
        for number in theirs if error is None else ():
            signal.raise_signal(number)

    def _put_back(self) -> None:
        for number, previous in self._previous.items():
            # Somebody who has set another one meanwhile wants that to stay.
            if signal.getsignal(number) == self._received:
                signal.signal(number, previous)

    def _received(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # a worker that was forked off: its parent decides when it ends
        if number == signal.SIGINT and number in self._came:
            signal.default_int_handler(number, frame)
        if number not in self._came:
            self._came.append(number)
        self._stop(f"signal {signal.Signals(number).name}")
        if number == signal.SIGINT:
            _say_what_now()


def _is_own(handler: Any) -> bool:
    """Whether the program has set it itself."""
    return callable(handler) and handler is not signal.default_int_handler


def _say_what_now() -> None:
    """On a terminal; with no stream of Python's, which may be in the middle of a write."""
    try:
        if sys.stderr.isatty():
            words = b"\nstopping: saving a checkpoint; Ctrl-C again to end at once\n"
            os.write(sys.stderr.fileno(), words)
    except (OSError, ValueError, AttributeError):
        return
