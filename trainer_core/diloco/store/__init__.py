"""The shared store that the nodes of an outer loop meet at, by URL."""

from trainer_core.diloco.store.store import Entry, Store

__all__ = ["Entry", "Store"]
