"""Lazy layers (`torch.nn.LazyLinear`), which get their shapes from the first batch, or from here.

The optimizer holds the very tensors that have no shape yet: they get one in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from trainer_core.wrappers import own_state

_LAZY = (UninitializedParameter, UninitializedBuffer)


def give_shapes(module: Any, saved: Any) -> Callable[[], None]:
    """Gives what has no shape that of the saved tensor of its name; gives what takes it back.

    The numbers are not set. What is saved under no name, or is no tensor, stays without.
    """
    if not isinstance(module, torch.nn.Module) or not isinstance(saved, Mapping):
        return lambda: None
    tensors = chain(module.named_parameters(), module.named_buffers())
    lazy = {name: tensor for name, tensor in tensors if isinstance(tensor, _LAZY)}
    if not lazy:
        return lambda: None
    of_own = own_state(saved, module)
    given: list[tuple[Any, type]] = []
    for name, tensor in lazy.items():
        found = of_own.get(name)
        if isinstance(found, torch.Tensor) and not found.is_nested:
            given.append((tensor, type(tensor)))
            tensor.materialize(found.shape)

    def take_back() -> None:
        for tensor, kind in given:
            tensor.data = torch.empty(0, device=tensor.device, dtype=tensor.dtype)
            tensor.__class__ = kind

    return take_back
