"""How two values are compared and shown where a checkpoint and a run differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

_MOST_LINES = 8


def same(saved: Any, here: Any) -> bool:
    """Whether two plain values are alike; lists and tuples, and one nan and another, are."""
    if isinstance(saved, (list, tuple)) and isinstance(here, (list, tuple)):
        return len(saved) == len(here) and all(map(same, saved, here))
    return bool(saved == here) or repr(saved) == repr(here)  # nan is unlike itself


def short(value: Any) -> str:
    """`repr`, cut at 60 characters."""
    words = repr(value)
    return words if len(words) <= 60 else f"{words[:57]}..."


def some(names: Sequence[Any], most: int = 4) -> str:
    """The first names, and how many there are besides."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def limited(what: str, lines: Iterable[str], more: str = "more differences") -> Iterator[str]:
    """The first lines about `what`, and how many there are besides."""
    everything = list(lines)
    yield from everything[:_MOST_LINES]
    if len(everything) > _MOST_LINES:
        yield f"{what}: {len(everything) - _MOST_LINES} {more}"
