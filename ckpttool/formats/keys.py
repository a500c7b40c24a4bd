"""Which keys of dictionaries and members of sets may be hashed and compared at all.

Tuples and frozensets hash and compare as deep as they are nested: a few hundred bytes of pickle can
ask for 2**40 steps. And whoever chooses many integers (or tuples of them) with one hash makes a
dictionary that takes quadratic time. Honest keys do neither.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ckpttool.errors import LimitError

# Hashed once and for all, or in constant time, and with a hash that no file can choose. Floats have
# too few values with the same hash to do harm.
_PLAIN = frozenset({str, bytes, float, bool, type(None)})
_PLAIN_OR_INT = _PLAIN | {int}
_COMPOUND = (tuple, frozenset)
_MOST_DEPTH = 16
_MOST_COMPOUNDS = 64
_MOST_LEAVES = 4096
_SMALL = 1 << 60  # smaller integers are their own hash
_MOST_ALIKE = 1000


class KeyGuard:
    """Looks at keys before they are hashed; one for each reading of a file."""

    __slots__ = ("_alike",)

    def __init__(self) -> None:
        self._alike: dict[tuple[int, int], int] = {}

    def check(self, target: object, keys: Collection[Any]) -> None:
        """Raises LimitError if `keys` would be costly to put into `target`, a dictionary or set."""
        kinds = set(map(type, keys))
        if kinds <= _PLAIN:
            return
        if kinds <= _PLAIN_OR_INT and all(
            -_SMALL < key < _SMALL for key in keys if type(key) is int
        ):
            return
        for key in keys:
            if isinstance(key, _COMPOUND):
                _check_compound(key)
            elif type(key) is not int:
                continue
            self._count(id(target), hash(key))

    def _count(self, target: int, value: int) -> None:
        count = self._alike[target, value] = self._alike.get((target, value), 0) + 1
        if count > _MOST_ALIKE:
            raise LimitError("too many keys with the same hash", limit="keys")


def _check_compound(key: Any) -> None:
    """Level by level, never deeper or wider than permitted, whatever is shared inside."""
    level, depth, compounds, leaves = [key], 0, 0, 0
    while level:
        depth += 1
        compounds += len(level)
        leaves += sum(map(len, level))
        if depth > _MOST_DEPTH or compounds > _MOST_COMPOUNDS or leaves > _MOST_LEAVES:
            raise LimitError("a key nested too deeply, or too large", limit="depth")
        level = [part for item in level for part in item if isinstance(part, _COMPOUND)]
