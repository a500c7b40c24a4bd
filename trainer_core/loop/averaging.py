"""An averaged copy of the model (EMA, SWA) that is moved after each step.

After Polyak and Juditsky 1992, "Acceleration of Stochastic Approximation by Averaging". torch's
`torch.optim.swa_utils.AveragedModel` does the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from trainer_core.site.ranks import has_shards

_METHODS = ("update_parameters", "state_dict", "load_state_dict")


def checked_ema(ema: Any, model: torch.nn.Module) -> Any:
    """Raises TypeError for what is neither None nor has the methods of an AveragedModel.

    Raises ValueError for a module that is not sharded like the model.
    """
    missing = [name for name in _METHODS if not callable(getattr(ema, name, None))]
    if ema is not None and missing:
        raise TypeError(f"ema: a {type(ema).__name__} has no {', '.join(missing)}")
    if isinstance(ema, torch.nn.Module) and has_shards(ema) != has_shards(model):
        raise ValueError(
            "ema: either it or the model is sharded, and not the other: make the AveragedModel of "
            "the model first, then call fully_shard on `ema.module` as on the model"
        )
    return ema


@contextmanager
def swapped(model: torch.nn.Module, ema: Any) -> Iterator[None]:
    """Within the body the model has the averaged weights, and the average those of the model.

    Raises TypeError where `ema` is no AveragedModel of such a model.
    """
    other = getattr(ema, "module", None)
    if not isinstance(other, torch.nn.Module):
        raise TypeError(f"a {type(ema).__name__} holds no model whose weights could be used")
    pairs = list(zip(_tensors(model), _tensors(other), strict=True))
    _swap(pairs)
    try:
        yield
    finally:
        _swap(pairs)


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    return chain(model.parameters(), model.buffers())


def _swap(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for one, other in pairs:
        if hasattr(one, "to_local") and hasattr(other, "to_local"):
            _swap_contents(one.to_local(), other.to_local())
        else:
            one.data, other.data = other.data, one.data


@torch.no_grad()
def _swap_contents(one: torch.Tensor, other: torch.Tensor) -> None:
    """For shards: what computes with them keeps the memory, whatever the tensor is told."""
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)
