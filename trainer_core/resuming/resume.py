"""Going on from a checkpoint: loading all of it, or nothing, or all but what may be left out.

Two places where torch alone is not enough. `Module.load_state_dict` copies what fits before it
raises for what doesn't; here everything is put back. `Optimizer.load_state_dict` casts state to the
parameter's dtype (float32 moments of a bfloat16 parameter, integers of a float one); here the saved
bits stay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from trainer_core.resuming.copies import copied
from trainer_core.resuming.fitting import (
    NEWER_OPTIONS,
    check_loaded,
    check_loaded_options,
    check_model,
    check_optimizer,
    is_ordinary,
    places,
)
from trainer_core.resuming.parts import Parts
from trainer_core.resuming.unfit import unfit
from trainer_core.state import CheckpointError
from trainer_core.wrappers import own_state

logger = logging.getLogger(__name__)

PARTIAL = (
    *("model", "optimizer", "scheduler", "scaler", "ema", "callbacks", "rng", "data"),
    *("accumulation", "coordinator", "attributes"),
)
"""What `allow_partial` may name."""

# Between these a cast cannot fail.
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class ResumeWarning(UserWarning):
    """A checkpoint and the run that resumes from it differ, or not all of it could be restored."""


def checked_partial(names: Collection[str]) -> frozenset[str]:
    """What may be left out. Raises ValueError for a name that no part has."""
    if isinstance(names, str):
        names = (names,)
    strange = sorted(set(names) - set(PARTIAL))
    if strange:
        raise ValueError(f"allow_partial: no part is called {strange[0]!r}: {', '.join(PARTIAL)}")
    return frozenset(names)


def apply(
    state: Mapping[str, Any],
    parts: Parts,
    allowed: Collection[str] = (),
    once_it_fits: Callable[[list[str]], None] = lambda told: None,
) -> list[str]:
    """Loads the parts; on any error all of them are as before.

    `once_it_fits` is called with what will be the result when nothing can fail any more; what it
    raises is such an error, too.

    The error is an UnfitError that says which part, why and what `allowed` would do, with torch's
    own as its cause, or with `check_model`'s and `check_optimizer`'s where torch would notice too
    late. A part that `allowed` names is left as it was instead, and the result says so in words; of
    the model then all is loaded that fits. The tensors in `state` are copied, never shared.
    """
    told: list[str] = []
    last: list[Callable[[], None]] = []
    with _all_or_nothing() as undo:
        for name, load in _loaders(state, parts, "model" in allowed, last, told):
            part = name.partition(".")[0]
            mark = len(undo)
            try:
                load(undo)
            except Exception as error:
                if part not in allowed:
                    module = {"model": parts.model, "ema": parts.ema}.get(part)
                    told_better = unfit(name, error, state.get(part), module)
                    if told_better is error:
                        raise
                    raise told_better from error
                _undo(undo[mark:])
                del undo[mark:]
                told.append(f"{name}: not restored, as allowed: {error}")
        once_it_fits(told)
        for load_last in last:  # these cannot fail, and so need no second copy to go back to
            load_last()
    return told


_Load = Callable[[list[Callable[[], None]]], None]


def _loaders(
    state: Mapping[str, Any],
    parts: Parts,
    partial_model: bool,
    last: list[Callable[[], None]],
    told: list[str],
) -> Iterator[tuple[str, _Load]]:
    """Each part with the function that loads it, in order; it adds what undoes it to a list."""
    saved = state["model"]
    if partial_model:
        saved = _what_fits(saved, parts.model, told)
    yield "model", lambda undo: _load_module("model", saved, parts.model, undo, last)
    if parts.ema is not None and state.get("ema") is not None:
        yield "ema", lambda undo: _load_ema(state["ema"], parts.ema, undo, last)
    saved_of_it = state["optimizer"], parts.optimizer, parts.model
    yield "optimizer", lambda undo: load_optimizer(*saved_of_it, undo)
    if parts.scheduler is not None and state.get("scheduler") is not None:
        yield "scheduler", lambda undo: _load_stateful(state["scheduler"], parts.scheduler, undo)
    callbacks = state.get("callbacks")
    for name, callback in parts.callbacks.items():
        if isinstance(callbacks, Mapping) and name in callbacks:
            yield f"callbacks.{name}", _loader_of(f"callbacks.{name}", callbacks[name], callback)
    load_attributes, attributes = parts.load_attributes, state.get("attributes")
    if load_attributes is not None and attributes is not None:
        yield "attributes", lambda undo: load_attributes(attributes, undo)


def _loader_of(path: str, saved: Any, callback: Any) -> _Load:
    def load(undo: list[Callable[[], None]]) -> None:
        try:
            _load_stateful(saved, callback, undo)
        except Exception as error:  # the callback is the user's
            raise CheckpointError(f"{path}: could not be restored: {error}") from error

    return load


def _load_stateful(saved: Any, part: Any, undo: list[Callable[[], None]]) -> None:
    before = copied(part.state_dict())
    undo.append(lambda: part.load_state_dict(before))
    part.load_state_dict(copied(saved))


def _load_module(
    path: str,
    saved: Mapping[str, Any],
    module: torch.nn.Module,
    undo: list[Callable[[], None]],
    last: list[Callable[[], None]],
) -> None:
    saved = own_state(saved, module)
    own = module.state_dict()
    check_model(saved, own, path)
    if _loads_plainly(module) and _fits(saved, own):
        last.append(lambda: _load_strictly(module, saved))
        return
    # torch's error, or hooks of the model that make it fit after all
    before = copied(own)
    undo.append(lambda: _load_strictly(module, before))
    _load_strictly(module, saved)


def _load_strictly(module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    module.load_state_dict(state)


def _load_ema(
    saved: Any, ema: Any, undo: list[Callable[[], None]], last: list[Callable[[], None]]
) -> None:
    if isinstance(ema, torch.nn.Module) and isinstance(saved, Mapping):
        _load_module("ema", saved, ema, undo, last)
    else:
        _load_stateful(saved, ema, undo)


def _what_fits(saved: Mapping[str, Any], model: torch.nn.Module, told: list[str]) -> dict[str, Any]:
    """The model's own state with those saved tensors in it that fit."""
    own = model.state_dict()
    saved = own_state(saved, model)
    fitting = {
        name: tensor
        for name, tensor in saved.items()
        if name in own and _fits({name: tensor}, {name: own[name]})
    }
    missing = [name for name in own if name not in fitting]
    if missing:
        some = ", ".join(missing[:4]) + (" and more" if len(missing) > 4 else "")
        told.append(f"model: {len(missing)} of {len(own)} tensors not restored, as allowed: {some}")
    return {**own, **fitting}


def _fits(saved: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Whether copying cannot fail."""
    return saved.keys() == own.keys() and all(
        is_ordinary(tensor)
        and is_ordinary(saved[name])
        and saved[name].shape == tensor.shape
        and (saved[name].dtype == tensor.dtype or {saved[name].dtype, tensor.dtype} <= _FLOATS)
        for name, tensor in own.items()
    )


def _loads_plainly(model: torch.nn.Module) -> bool:
    """Whether no code but torch's runs in loading: others' may raise after the copying."""
    return all(
        not module._load_state_dict_pre_hooks
        and not module._load_state_dict_post_hooks
        and type(module).load_state_dict.__module__.startswith("torch.")
        and type(module)._load_from_state_dict.__module__.startswith("torch.")
        for module in model.modules()
    )


@contextmanager
def _all_or_nothing() -> Iterator[list[Callable[[], None]]]:
    """Gives a list for what puts things back; calls it all, the last first, if the body raises."""
    undo: list[Callable[[], None]] = []
    try:
        yield undo
    except BaseException:
        _undo(undo)
        raise


def _undo(steps: list[Callable[[], None]]) -> None:
    for step in reversed(steps):
        try:
            step()
        except Exception:  # a part of the user's; the others are put back all the same
            logger.exception("a part could not be put back to what it was")


def load_optimizer(
    saved: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    undo: list[Callable[[], None]],
) -> None:
    """Loads its state dict with every bit as it was saved; `undo` takes what takes that back.

    `model` is where names for what does not fit come from. Raises CheckpointError, or what torch
    raises.
    """
    check_optimizer(saved, optimizer, model)
    # Loading an optimizer replaces these two and leaves the old ones as they are.
    state, groups = optimizer.state, optimizer.param_groups

    def put_back() -> None:
        optimizer.state, optimizer.param_groups = state, groups

    undo.append(put_back)
    groups_here = copied(_completed(saved, optimizer))
    optimizer.load_state_dict({**saved, "param_groups": groups_here})
    check_loaded_options(optimizer)
    for key, _, parameter in places(saved, optimizer):
        if key in saved["state"] and parameter in optimizer.state:
            loaded = optimizer.state[parameter]
            optimizer.state[parameter] = _as_saved(loaded, saved["state"][key], None)
    check_loaded(saved, optimizer)


def _completed(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The saved groups, with the present run's value for options that older files don't have."""
    groups = []
    for index, group in enumerate(saved["param_groups"]):
        here = optimizer.param_groups[index] if index < len(optimizer.param_groups) else {}
        lacking = (NEWER_OPTIONS & here.keys()) - group.keys()
        groups.append({**group, **{name: here[name] for name in here if name in lacking}})
    return groups


def _as_saved(loaded: Any, saved: Any, key: Any) -> Any:
    """`loaded` with every tensor's dtype as it was saved, and none shared with `saved`.

    `step` is left to torch, which knows where a fused or capturable optimizer needs it.
    """
    if isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor):
        if loaded.dtype != saved.dtype and key != "step":
            return saved.to(loaded.device, copy=True)
        return loaded.clone() if loaded is saved else loaded
    if isinstance(loaded, dict) and isinstance(saved, Mapping):
        return {name: _as_saved(item, saved.get(name), name) for name, item in loaded.items()}
    if type(loaded) in (list, tuple) and type(loaded) is type(saved) and len(loaded) == len(saved):
        pairs = zip(loaded, saved, strict=True)
        return type(loaded)(_as_saved(item, other, None) for item, other in pairs)
    return loaded
