"""Time-outs for calls that have none: they run in a thread that is given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class _GivenUp(BaseException):
    """Ends the thread of a call that nobody waits for any more."""


class Pulse:
    """What a long call says from time to time, so that it isn't taken for one that hangs."""

    def __init__(self) -> None:
        self.given_up = False
        self.last = time.monotonic()

    def beat(self) -> None:
        """Says that there is progress; ends the calling thread if it has been given up."""
        if self.given_up:
            raise _GivenUp
        self.last = time.monotonic()


def run_watched(work: Callable[[Pulse], T], timeout: float) -> T:
    """What `work` returns or raises; TimeoutError after `timeout` seconds without a beat from it.

    A call that hangs in the system can't be stopped, so its thread is left behind. It ends at its
    next beat: one just before each step that others see keeps a late one from being taken.
    """
    pulse, done = Pulse(), threading.Event()
    result: list[T] = []
    failure: list[BaseException] = []
    arguments: tuple[Any, ...] = (work, pulse, result, failure, done)
    threading.Thread(target=_run, args=arguments, daemon=True, name="store call").start()
    try:
        while not done.wait(max(0.001, pulse.last + timeout - time.monotonic())):
            if time.monotonic() - pulse.last >= timeout and not done.is_set():
                raise TimeoutError(f"no answer within {timeout:g} s")
    except BaseException:
        pulse.given_up = True
        raise
    if failure:
        raise failure[0]
    return result[0]


def _run(
    work: Callable[[Pulse], T],
    pulse: Pulse,
    result: list[T],
    failure: list[BaseException],
    done: threading.Event,
) -> None:
    try:
        result.append(work(pulse))
    except BaseException as error:  # raised in the thread that waits
        failure.append(error)
    finally:
        done.set()
