"""Objects that hold no data to go on from: files, locks, functions, and what a forward computed."""

from __future__ import annotations

import functools
import io
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from trainer_core.census.places import places_of

NEVER_STATE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)
"""What a checkpoint never holds."""

_MOST_LOOKED_AT = 200  # objects within one


def is_handle(value: Any, *, looks_within: bool = False) -> bool:
    """Whether it is nothing that holds data: not even pickle could save it.

    With `looks_within` neither what it holds (a writer that has a file). An iterator is none: its
    place would be lost.
    """
    if isinstance(value, (*NEVER_STATE, functools.partial)):
        return True
    if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
        return False
    waiting, seen = [value], {id(value)}
    for item in waiting:
        try:
            item.__reduce_ex__(4)
        except Exception:  # each class says it in its own way
            return True
        if looks_within:
            fresh = [part for part in _within(item) if id(part) not in seen]
            seen.update(map(id, fresh))
            waiting += fresh[: max(0, _MOST_LOOKED_AT - len(waiting))]
    return False


def _within(item: Any) -> Iterator[Any]:
    if isinstance(item, (torch.Tensor, torch.nn.Module)):
        return
    places: list[Any] = places_of(item)
    for place in (*places, item) if type(item) is dict else places:
        yield from (part for part in place.values() if not isinstance(part, NEVER_STATE))


def hangs_on_graph(value: Any) -> bool:
    """Whether it holds what a forward computed: an output of the model, stored to look at."""
    if isinstance(value, Mapping):
        items: Any = value.values()
    else:
        items = value if isinstance(value, tuple) else getattr(value, "__dict__", {}).values()
    return any(isinstance(item, torch.Tensor) and item.grad_fn is not None for item in items)
