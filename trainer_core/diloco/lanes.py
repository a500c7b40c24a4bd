"""One slot of work beside training: a boundary finds it free or goes on without it.

A lane runs one job at a time on a thread of its own. Nothing is queued, so nothing piles up. What
came of a job is taken on the training thread, also an error: one that nobody foresaw ends the fit
there instead of dying unseen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple


class Outcome(NamedTuple):
    """What came of a job: its value, or the error that it raised."""

    value: Any
    error: BaseException | None


class Lane:
    """`name` is that of its threads, which never keep the process from ending."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None

    @property
    def is_free(self) -> bool:
        """Whether a job can be given: none runs, and the last one's outcome has been taken."""
        return self._thread is None

    def submit(self, work: Callable[[], Any]) -> bool:
        """Starts a job, unless the slot is taken: then False."""
        if self._thread is not None:
            return False
        self._outcome = None
        thread = threading.Thread(target=self._run, args=(work,), name=self._name, daemon=True)
        self._thread = thread
        thread.start()
        return True

    def take(self) -> Outcome | None:
        """What came of the job, once; None while it runs, or if there is none."""
        if self._thread is None or self._outcome is None:
            return None
        outcome, self._outcome, self._thread = self._outcome, None, None
        return outcome

    def wait(self, seconds: float) -> bool:
        """Waits for the job; False if it still runs after so many seconds."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or self._outcome is not None

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self._outcome = Outcome(work(), None)
        except BaseException as error:  # raised again on the training thread
            self._outcome = Outcome(None, error)
