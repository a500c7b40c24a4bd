"""A loaded checkpoint as one rank takes it: its tensors laid out like its own, its own random part.

Also for a process alone that goes on from what several ranks have saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer_core.resuming.parts import Parts
from trainer_core.site.per_rank import KEY as RANKS
from trainer_core.site.per_rank import Taken, take_own
from trainer_core.site.ranks import Site, has_shards
from trainer_core.site.sharded import ShardedState, filled, laid_out


def taken(state: Mapping[str, Any], parts: Parts, site: Site | None, loader: Any) -> Taken:
    """The checkpoint for this rank, and what of it could not be kept, in words.

    All ranks call it. Nothing of this run is changed. Raises CheckpointError.
    """
    if isinstance(state, ShardedState):
        state = filled(state, parts, site)
    elif has_shards(parts.model):
        state = laid_out(state, parts)
    if site is None and RANKS not in state:
        return Taken(dict(state), [])
    rank, size = (0, 1) if site is None else (site.rank, site.size)
    return take_own(state, rank, size, loader)
