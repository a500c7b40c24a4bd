"""A checkpoint for all ranks: rank 0 decides which, and loads; the others look at no file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainer_core.site.ranks import Site
from trainer_core.site.sharded import ShardedState


def load_together(site: Site, load: Callable[[], dict[Any, Any] | None]) -> dict[Any, Any] | None:
    """What `load` gives on rank 0, on every rank; all raise what it raises."""
    found: list[dict[Any, Any] | None] = []

    def load_once() -> str | None:
        found.append(load())
        return found[0].path if isinstance(found[0], ShardedState) else None

    path = site.first(load_once)
    state: dict[Any, Any] | None = site.share(found[0] if found else None)
    return state if path is None or state is None else ShardedState(state, path)
