"""What `Trainer` is given, checked."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from trainer_core.coordinator import SyncCoordinator
from trainer_core.given import at_least, positive
from trainer_core.precision import PrecisionPlan, resolve_precision

__all__ = [
    "at_least",
    "checked_clip",
    "checked_coordinator",
    "checked_optimizer",
    "checked_scheduler",
    "plan",
]


def plan(precision: PrecisionPlan | str | None, device: torch.device) -> PrecisionPlan:
    """A plan as it is, or what `resolve_precision` makes of a wish; None is "auto"."""
    if isinstance(precision, PrecisionPlan):
        return precision
    return resolve_precision("auto" if precision is None else precision, device)


def checked_clip(value: float | None) -> float | None:
    """Raises ValueError or TypeError for what is no norm."""
    return None if value is None else positive("grad_clip", value)


def checked_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Raises TypeError for what is no optimizer, or one that asks for more at each step."""
    for name in ("step", "zero_grad", "state_dict", "load_state_dict", "param_groups"):
        if not hasattr(optimizer, name):
            raise TypeError(f"{type(optimizer).__name__} is no optimizer: it has no {name}")
    # Of the class: a scheduler has put a function of its own in the place of the object's.
    needed = _needed_arguments(getattr(type(optimizer), "step", None))[1:]
    if needed:
        raise TypeError(
            f"{type(optimizer).__name__}.step needs {', '.join(needed)}, which a trainer does not "
            "give: it computes the gradients of each step once, and then calls step()"
        )
    return optimizer


def _needed_arguments(function: Any) -> list[str]:
    """The names of those without a default, `self` first."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # built in: nothing says what it takes
        return []
    several = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [one.name for one in parameters if one.default is one.empty and one.kind not in several]


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
