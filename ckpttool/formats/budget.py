"""How much a pickle may have copied: no more than it holds, within reason.

A few bytes that call for a copy of one big object, again and again, would otherwise fill memory.
Honest streams spell each thing once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckpttool.errors import LimitError

_SIZED = (str, bytes, bytearray, list, tuple, dict, set, frozenset)


class CopyBudget:
    """What is left to be copied, in items and characters.

    It knows nothing of the reader, so that what holds on to it does not hold on to the stream.
    """

    __slots__ = ("left",)

    def __init__(self, stream_bytes: int) -> None:
        # A pickle in a pickle is honestly copied twice: decoded, then kept to be read itself.
        self.left = 2 * stream_bytes

    def spend(self, values: tuple[Any, ...]) -> None:
        """Count a copy of `values`, or a walk over them. Raises LimitError when all is spent."""
        self.left -= len(values) + sum(len(value) for value in values if isinstance(value, _SIZED))
        if self.left < 0:
            raise LimitError("copies more than it holds", limit="copies")

    def metered(self, rebuild: Callable[..., Any]) -> Callable[..., Any]:
        """`rebuild`, paying for what it is given."""

        def copy(*args: Any) -> Any:
            self.spend(args)
            return rebuild(*args)

        return copy
