"""Trying again what a shared file system refuses for a moment."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from ckpttool.errors import RefusedError

T = TypeVar("T")

logger = logging.getLogger(__name__)

TRANSIENT = frozenset(
    {errno.EIO, errno.ESTALE, errno.EDQUOT, errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT}
)
"""What network file systems are known to say once and take back: see open(2), write(2), fsync(2).

A full disk, a read-only file system and missing rights are not among them: waiting mends none.
"""

WAITS_S = (0.1, 0.5, 2.0)
"""Seconds between one try and the next; there is one try more than waits."""


def is_transient(error: OSError) -> bool:
    """Whether trying again may help."""
    return error.errno in TRANSIENT and not isinstance(error, RefusedError)


def retrying(
    attempt: Callable[[], T],
    what: str,
    *,
    waits_s: Sequence[float] = WAITS_S,
    sleep: Callable[[float], object] = time.sleep,
) -> T:
    """What `attempt` gives, tried again after each of `waits_s` while its error is transient.

    Each failure is logged under the name `what`; the last one is raised, and so is at once any
    error that is not transient.
    """
    for number, wait in enumerate(waits_s, start=1):
        try:
            return attempt()
        except OSError as error:
            if not is_transient(error):
                raise
            words = "%s: try %d of %d failed, the next in %g s: %s"
            logger.warning(words, what, number, len(waits_s) + 1, wait, error)
        sleep(wait)
    return attempt()
