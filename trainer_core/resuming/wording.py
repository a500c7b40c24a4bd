"""How two values are compared and shown where a checkpoint and a run differ."""

from __future__ import annotations

from typing import Any


def same(saved: Any, here: Any) -> bool:
    """Whether two plain values are alike; lists and tuples, and one nan and another, are."""
    if isinstance(saved, (list, tuple)) and isinstance(here, (list, tuple)):
        return len(saved) == len(here) and all(map(same, saved, here))
    return bool(saved == here) or repr(saved) == repr(here)  # nan is unlike itself


def short(value: Any) -> str:
    """`repr`, cut at 60 characters."""
    words = repr(value)
    return words if len(words) <= 60 else f"{words[:57]}..."
