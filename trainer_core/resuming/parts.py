"""The parts of a run that a checkpoint restores at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch


class Parts(NamedTuple):
    """`callbacks` are those that have a state, by name.

    `load_attributes` sets back what `Census.section` gave, and adds what undoes that to a list.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any | None
    ema: Any | None
    callbacks: Mapping[str, Any]
    load_attributes: Callable[[Any, list[Callable[[], None]]], None] | None = None
