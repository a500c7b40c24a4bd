"""One save at a time on a thread of its own."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable

logger = logging.getLogger(__name__)


class AbandonedError(Exception):
    """A save was given up because the program is to end at once."""


class Lane:
    """Does one piece of work at a time beside the caller.

    Its thread is not a daemon: a program that ends in the usual way waits for the last save. What
    one raised waits here until somebody asks.
    """

    def __init__(self) -> None:
        self._worker: threading.Thread | None = None
        # Not the thread's own `join`: one that is interrupted takes it for ended (CPython 3.11).
        self._idle = threading.Event()
        self._idle.set()
        self._failures: list[BaseException] = []
        self._give_up = threading.Event()
        self._afterwards: list[Callable[[], object]] = []
        self._ending = threading.Lock()
        _lanes.add(self)

    @property
    def is_busy(self) -> bool:
        """Whether a piece of work is being done."""
        return not self._idle.is_set()

    def start(self, work: Callable[[], object]) -> None:
        """Begins `work`, after what was begun before has ended."""
        self.wait()
        self._give_up.clear()
        self._worker = threading.Thread(target=self._do, args=(work,), name="checkpoint-save")
        self._idle.clear()
        try:
            self._worker.start()
        except BaseException:
            if not self._worker.is_alive():
                self._idle.set()
            raise

    def wait(self) -> None:
        """Returns when nothing is being done; at once on the lane's own thread."""
        if threading.current_thread() is not self._worker:
            self._idle.wait()

    def failure(self) -> BaseException | None:
        """What the work raised, once."""
        return self._failures.pop(0) if self._failures else None

    def abandon(self) -> None:
        """Asks the work to end as soon as it can; whatever it has not finished is lost."""
        if self.is_busy:
            self._give_up.set()

    def afterwards(self, act: Callable[[], object]) -> None:
        """Calls `act` as soon as nothing is being done: at once, or on the lane's thread."""
        with self._ending:
            if self.is_busy:
                self._afterwards.append(act)
                return
        act()

    def watch(self) -> None:
        """To be called by the work from time to time. Raises AbandonedError."""
        if self._give_up.is_set():
            raise AbandonedError("the save was abandoned")

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except AbandonedError:
            logger.warning("a save was abandoned; what was saved before it stays")
        except BaseException as error:
            self._failures.append(error)
        finally:
            with self._ending:
                self._idle.set()
                acts, self._afterwards = self._afterwards, []
            for act in acts:
                act()


_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()


def _tell() -> None:
    """At the end of the program: a failure that nobody asked for shall not be lost."""
    for lane in list(_lanes):
        while (error := lane.failure()) is not None:
            logger.error("the last checkpoint could not be saved: %s", error)


atexit.register(_tell)
