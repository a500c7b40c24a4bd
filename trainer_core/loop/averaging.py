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

_METHODS = ("update_parameters", "state_dict", "load_state_dict")


def checked_ema(ema: Any) -> Any:
    """Raises TypeError for what is neither None nor has the methods of an AveragedModel."""
    missing = [name for name in _METHODS if not callable(getattr(ema, name, None))]
    if ema is not None and missing:
        raise TypeError(f"ema: a {type(ema).__name__} has no {', '.join(missing)}")
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
        one.data, other.data = other.data, one.data
