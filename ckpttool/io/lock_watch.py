"""Waiting to see whether the holder of a lock is alive, where nobody here can ask.

A container that is started again finds the lock of its predecessor: of another boot, another host
or another pid namespace. The predecessor is dead, and nothing on this machine says so. But a living
trainer refreshes its lock every few seconds from a thread of its own, and says in it how often. So
the new one watches the lock: one sign of life, and it is refused at once; none for six times as
long as was promised, and the lock is taken over. What counts is the watcher's own clock, which
never goes backwards, and whether the lock's content changes; no two clocks are compared.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ckpttool.io.lock_holder import STALE_SECONDS, is_from_here

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpttool.io.lock_holder import Holder

    Life = tuple[str, str | None]

MISSED = 6
"""So many refreshes in a row have to be missing."""

_LOOK_SECONDS = 1.0


def silence_needed(holder: Holder) -> float:
    """For how long, in seconds, a lock must not have changed until its holder counts as dead.

    Five minutes where it promised nothing: then it may just have no time.
    """
    every = holder.refreshed_every
    return STALE_SECONDS if every is None or every <= 0 else min(STALE_SECONDS, MISSED * every)


class Watch:
    """Watches a holder that is elsewhere, for `most` seconds at the most.

    `silent` are the holders (see Holder.life) that have been watched for long enough. `say` is told
    once, in words, that there is a wait, and for how long. `clock` and `sleep` are those of `time`.
    """

    def __init__(
        self,
        most: float,
        say: Callable[[str], object] = lambda words: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.silent: frozenset[Life] = frozenset()
        self._most = most
        self._say = say
        self._clock = clock
        self._sleep = sleep
        self._seen: Holder | None = None
        self._since = 0.0

    def goes_on(self, holder: Holder | None) -> bool:
        """Whether to try again: after a moment, or now that the holder counts as dead.

        False for a holder of this machine, for one that has shown a sign of life, and after `most`
        seconds.
        """
        if holder is None or is_from_here(holder):
            return False
        if self._seen is None:
            self._begin(holder)
        elif holder.path == self._seen.path and holder.life != self._seen.life:
            return False
        watched = self._clock() - self._since
        if watched >= silence_needed(holder):
            is_new = holder.life not in self.silent
            self.silent |= {holder.life}
            return is_new
        if watched >= self._most:
            return False
        self._sleep(min(_LOOK_SECONDS, self._most - watched))
        return True

    def _begin(self, holder: Holder) -> None:
        self._seen, self._since = holder, self._clock()
        if self._most > 0:
            needed = min(silence_needed(holder), self._most)
            self._say(f"waiting for a sign of life of {holder.words()}, for {needed:.0f} s at most")
