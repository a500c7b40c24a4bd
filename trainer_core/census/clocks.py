"""Readings of a clock, which are no state: after a resume they would say how late it was then.

`time.time` is known by its value alone. The others count from some boot, so that any number may
look like theirs: with them the attribute's name has to say so, too.
"""

from __future__ import annotations

import datetime
import re
import time
from typing import Any

_NEAR_S = 30 * 24 * 3600.0
_BEFORE_S = 600.0  # a program may look at a clock before it imports this
_BEGAN = time.monotonic(), time.perf_counter()
_NAMES = re.compile("time|clock|start|beg[aiu]n|tic|toc|since|stamp|deadline|^_?t[0-9]?$")


def is_reading(name: str, value: Any) -> bool:
    """Whether an attribute of this name with this value is when something was, or will be."""
    if type(value) is datetime.datetime:
        try:
            value = value.timestamp()
        except (OverflowError, ValueError, OSError):  # of a year that no clock shows
            return False
    if type(value) is int and value > 1e12:
        value /= 1e9  # nanoseconds
    if type(value) is not float:
        return False
    if abs(value - time.time()) < _NEAR_S:
        return True
    now = time.monotonic(), time.perf_counter()
    pairs = zip(_BEGAN, now, strict=True)
    is_near = any(began - _BEFORE_S < value <= late for began, late in pairs)
    return is_near and _NAMES.search(name.lower()) is not None
