"""Numbers that a caller gives, checked at once, by the name of the argument."""

from __future__ import annotations

import math
import operator
from typing import Any


def at_least(least: int, name: str, value: Any) -> int:
    """A whole number. Raises ValueError below `least`, TypeError for what is no whole number.

    A bool is one to Python, and never meant as one: ValueError.
    """
    words = f"{name} must be a whole number, at least {least}, not {shown(value)}"
    if isinstance(value, bool):
        raise ValueError(words)
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(words) from None
    if number < least:
        raise ValueError(words)
    return number


def shown(value: Any) -> str:
    """`repr` in at most 80 characters."""
    return repr(value)[:80]


def positive(name: str, value: Any, *, or_zero: bool = False, finite: bool = True) -> float:
    """A number above zero, as it was given.

    Raises ValueError for one that is not (nan, and a bool, are not), or that is infinite, and
    TypeError for what is no number.
    """
    kind = "a number that is not negative" if or_zero else "a positive number"
    words = f"{name} must be {kind}, not {shown(value)}"
    if isinstance(value, bool):
        raise ValueError(words)
    if isinstance(value, (str, bytes, bytearray)):  # from which `float` would read one
        raise TypeError(words)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # torch's, of several numbers
        raise TypeError(words) from None
    if not (number > 0 or (or_zero and number == 0)) or (finite and math.isinf(number)):
        raise ValueError(words)
    given: float = value
    return given
