"""What of a run has attributes that no state dict holds, and where everything else is kept."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from trainer_core.callbacks import Callbacks
from trainer_core.census.census import Census

_OPTIMIZER, _MORE_PARAMETERS = "optimizer", "param_groups"


def census_of(
    model: torch.nn.Module,
    *,
    optimizer: Any,
    scheduler: Any,
    ema: Any,
    loss_fn: Any,
    callbacks: Callbacks,
    parts: Mapping[str, Any],
    device: torch.device,
) -> Census:
    """The census of one run, as it is when its trainer is made.

    `parts`: what else there is of the run, by its words, with the loader and its dataset.
    """
    known = {"optimizer": optimizer, "scheduler": scheduler, "ema": ema, **parts}
    known |= {f"callbacks.{name}": one for name, one in callbacks.stateful.items()}
    loss = None if isinstance(loss_fn, types.FunctionType) else _holder(loss_fn)
    roots = {
        "model": model,
        "ema": ema if isinstance(ema, torch.nn.Module) else None,
        "loss_fn": None if loss is None or loss is model else types.SimpleNamespace(fn=loss),
        _OPTIMIZER: optimizer,
        _MORE_PARAMETERS: _parameters_besides(model, optimizer),
    }
    if not _has_all_in_its_state(scheduler):
        roots["scheduler"] = scheduler
    taken = {id(one) for one in (*known.values(), model, loss)}
    for name, callback in callbacks.others.items():
        holder = _holder(callback)
        if holder is not None and id(holder) not in taken:
            taken.add(id(holder))
            is_module = isinstance(holder, torch.nn.Module)  # whose state dict nobody asks for
            roots[f"callbacks.{name}"] = types.SimpleNamespace(fn=holder) if is_module else holder
    return Census(
        roots,
        device=device,
        parts=known,
        covered={"scheduler": _keys_of(scheduler)},
        any_size=(_OPTIMIZER, _MORE_PARAMETERS),
    )


def roots_of_callbacks(callbacks: Callbacks) -> list[str]:
    """The names of those that callbacks are."""
    return [f"callbacks.{name}" for name in callbacks.others]


def _holder(function: Any) -> Any:
    """What remembers: an object, that of a method, or a function with what it has from outside."""
    if isinstance(function, types.MethodType):
        return function.__self__
    if isinstance(function, functools.partial):
        parts = {"func": function.func, "args": function.args, "keywords": function.keywords}
        return types.SimpleNamespace(**parts)
    return None if isinstance(function, (types.BuiltinFunctionType, type)) else function


def _parameters_besides(model: torch.nn.Module, optimizer: Any) -> Any:
    """What the optimizer steps and the model does not have, by group and place."""
    of_model = {id(one) for one in model.parameters()}
    return types.SimpleNamespace(**dict(_besides(of_model, optimizer)))


def _besides(of_model: set[int], optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for index, group in enumerate(optimizer.param_groups):
        for place, one in enumerate(group["params"]):
            if id(one) not in of_model:
                yield f"{index}.params.{place}", one


def _has_all_in_its_state(scheduler: Any) -> bool:
    """As torch's state dict of a schedule has."""
    is_torchs = isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
    return is_torchs and type(scheduler).state_dict.__module__.startswith("torch.")


def _keys_of(part: Any) -> list[str]:
    try:
        return [] if part is None else [str(key) for key in part.state_dict()]
    except Exception:  # the scheduler is the user's, and need not be ready to be saved yet
        return []
