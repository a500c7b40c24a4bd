"""The lock that makes one process the only writer of a directory, shared by all its managers.

The lock file itself is `ckpttool.io.lock`'s. A thread refreshes it, however long a step takes.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import deque

from ckpttool.errors import WriteError
from ckpttool.io.durable import make_directories
from ckpttool.io.lock import REFRESH_SECONDS, LockedError, WriterLock
from ckpttool.io.lock_watch import Watch
from trainer_core.state import CheckpointError

logger = logging.getLogger(__name__)

PROGRAM = "trainer_core"


class _Shared:
    """One lock of this process, and how many hold it."""

    def __init__(self, lock: WriterLock) -> None:
        self.lock = lock
        self.holders = 0
        self.lost: LockedError | None = None
        self._ended = threading.Event()
        # A daemon, so that a manager that nobody closed does not keep the program alive.
        threading.Thread(target=self._keep, name="checkpoint-lock", daemon=True).start()

    def end(self) -> None:
        """Gives the lock back."""
        self._ended.set()
        self.lock.release()

    def look_if_due(self) -> None:
        """Refreshes the lock where the thread that does so had no time to."""
        try:
            self.lock.refresh_if_due(2 * REFRESH_SECONDS)
        except LockedError as error:
            self.lost = error
        except WriteError as error:
            logger.warning("the lock could not be refreshed, trying again: %s", error)

    def _keep(self) -> None:
        while not self._ended.wait(REFRESH_SECONDS):
            try:
                self.lock.refresh()
            except LockedError as error:
                self.lost = error
                return
            except WriteError as error:
                logger.warning("the lock could not be refreshed, trying again: %s", error)


_shared: dict[str, _Shared] = {}
_guard = threading.Lock()
# Given back, and not yet counted off. The garbage collector gives back, too, and may do so in the
# middle of what is guarded: so nobody who gives back ever waits for the guard.
_dropped: deque[tuple[str, _Shared]] = deque()


class Hold:
    """What one manager has of its directory's lock."""

    def __init__(
        self, directory: str | os.PathLike[str], run_id: str, patience: float = 0.0
    ) -> None:
        """Makes the directory if it is missing, and takes its lock.

        Where the holder is on another machine or in another container, waits up to `patience`
        seconds to see whether it is alive. Raises CheckpointError, naming the holder, where another
        process writes there, and WriteError where the system refuses.
        """
        path = os.path.abspath(directory)
        make_directories(path)
        self._key = os.path.realpath(path)
        self._owner = os.getpid()
        with _guard:
            shared = _shared.get(self._key)
            if shared is None or shared.lost is not None:
                shared = _shared[self._key] = _Shared(_acquire(path, run_id, patience))
            shared.holders += 1
        self._held: _Shared | None = shared
        _count_off()

    def check(self) -> None:
        """Raises CheckpointError where the lock is not ours any more: nothing may be written.

        A process that was stopped for long looks first: somebody may have taken it for dead.
        """
        if self._held is not None:
            self._held.look_if_due()
        if self._held is not None and self._held.lost is not None:
            raise CheckpointError(f"nothing is written: {self._held.lost}") from self._held.lost

    def release(self) -> None:
        """Gives it back, once; the last holder of this process gives back the lock itself."""
        held, self._held = self._held, None
        if held is not None and os.getpid() == self._owner:
            _dropped.append((self._key, held))
            _count_off()


def _count_off() -> None:
    """Whoever has the guard does this again when it is free, so that nothing stays."""
    while _dropped and _guard.acquire(blocking=False):
        try:
            key, held = _dropped.popleft()
            held.holders -= 1
            if held.holders == 0:
                if _shared.get(key) is held:
                    del _shared[key]
                held.end()
        except IndexError:
            pass  # somebody else was faster
        finally:
            _guard.release()


def _acquire(directory: str, run_id: str, patience: float) -> WriterLock:
    watch = Watch(patience, lambda words: logger.warning("%s: %s", directory, words))
    try:
        lock = WriterLock.acquire(
            directory,
            program=PROGRAM,
            run_id=run_id,
            watch=watch,
            refreshed_every=REFRESH_SECONDS,
        )
    except LockedError as error:
        raise CheckpointError(str(error)) from error
    if lock.taken_over is not None:
        words = "%s: took over the lock of a writer that is gone: %s"
        logger.warning(words, directory, lock.taken_over.words())
    return lock


def _release_all() -> None:
    with _guard:
        for shared in _shared.values():
            shared.end()
        _shared.clear()


def _forget() -> None:
    """In a child that was forked off: it holds nothing."""
    global _guard
    _guard = threading.Lock()
    _shared.clear()
    _dropped.clear()


atexit.register(_release_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
