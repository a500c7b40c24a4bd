"""Lines of the log that a long run could repeat for ever: said once, then rarely, with a count.

What fails is tried again for as long as a run lasts, so the same words may come at every try.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

QUIET_S = 600.0
"""Seconds for which a line that was said is only counted; doubled each time that it came again …"""
MOST_QUIET_S = 24 * 3600.0
"""… up to this. A line that did not come for so long begins anew."""
_MOST_KNOWN = 1000


class _Said(NamedTuple):
    at: float
    quiet: float
    unsaid: int


class Rarely:
    """What one object has to say in `logger`; `clock` gives seconds. For any thread.

    Lines are the same where their words are, or, for those with numbers that always change, what
    they are `about`.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger, self._clock = logger, clock
        self._known: OrderedDict[str, _Said] = OrderedDict()
        self._lock = threading.Lock()

    def warning(self, words: str, *arguments: object, about: str | None = None) -> None:
        """Says it, unless that was done a short while ago."""
        self._say(logging.WARNING, words % arguments, about)

    def info(self, words: str, *arguments: object, about: str | None = None) -> None:
        """The same, for what nobody need do anything about."""
        self._say(logging.INFO, words % arguments, about)

    def _say(self, level: int, line: str, about: str | None) -> None:
        with self._lock:
            unsaid = self._unsaid(line if about is None else about)
        if unsaid == 0:
            self._logger.log(level, "%s", line)
        elif unsaid is not None:
            self._logger.log(level, "%s (and %d times since this was last said)", line, unsaid)

    def _unsaid(self, key: str) -> int | None:
        """How often it has come unsaid until now, when it is to be said; else None."""
        now = self._clock()
        said = self._known.pop(key, None)
        if said is not None and now < said.at + said.quiet:
            self._known[key] = said._replace(unsaid=said.unsaid + 1)
            return None
        quiet = QUIET_S
        if said is not None and said.unsaid:
            quiet = min(2 * said.quiet, MOST_QUIET_S)
        self._known[key] = _Said(now, quiet, 0)
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        return 0 if said is None else said.unsaid
