"""What `Trainer` is given, checked."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from trainer_core.coordinator import SyncCoordinator
from trainer_core.precision import PrecisionPlan, resolve_precision


def plan(precision: PrecisionPlan | str | None, device: torch.device) -> PrecisionPlan:
    """A plan as it is, or what `resolve_precision` makes of a wish; None is "auto"."""
    if isinstance(precision, PrecisionPlan):
        return precision
    return resolve_precision("auto" if precision is None else precision, device)


def at_least(least: int, name: str, value: int) -> int:
    """A whole number. Raises ValueError below `least`, TypeError for what is no whole number."""
    if isinstance(value, bool) or operator.index(value) < least:
        raise ValueError(f"{name} must be a whole number, at least {least}, not {value!r}")
    return operator.index(value)


def checked_clip(value: float | None) -> float | None:
    """Raises ValueError for what is no norm."""
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise ValueError(f"grad_clip must be a positive number or None, not {value!r}")
    return value


def checked_scheduler(scheduler: Any) -> Any:
    """Raises TypeError for a scheduler that cannot be moved after each step, or be saved."""
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise TypeError(
            "ReduceLROnPlateau needs a metric at each step, which a trainer does not have: "
            "step it in a callback"
        )
    for method in ("step", "state_dict", "load_state_dict"):
        if scheduler is not None and not callable(getattr(scheduler, method, None)):
            raise TypeError(f"{type(scheduler).__name__} is no scheduler: it has no {method}()")
    return scheduler


def checked_coordinator(coordinator: SyncCoordinator | None) -> SyncCoordinator | None:
    """Raises TypeError for what lacks a method of the protocol."""
    if coordinator is not None and not isinstance(coordinator, SyncCoordinator):
        raise TypeError(f"{type(coordinator).__name__} has not all methods of a SyncCoordinator")
    return coordinator
