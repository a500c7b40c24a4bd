"""Going on from a checkpoint: what differs from the present run, and loading all of it or nothing.

Two places where torch alone is not enough. `Module.load_state_dict` copies what fits before it
raises for what doesn't; here everything is put back. `Optimizer.load_state_dict` casts state to the
parameter's dtype (float32 moments of a bfloat16 parameter, integers of a float one); here the saved
bits stay.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from trainer_core.fitting import (
    NEWER_OPTIONS,
    check_loaded_options,
    check_model,
    check_optimizer,
    is_ordinary,
    places,
)
from trainer_core.precision import PrecisionPlan
from trainer_core.redaction import redact

_MOST_SHOWN = 8
_MOST_NAMES = 4
# Between these a cast cannot fail.
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
# What is in a parameter group without being an option of the optimizer, schedulers' notes included.
_NOT_OPTIONS = frozenset(
    {"params", "param_names", "name", "initial_lr", "max_lr", "min_lr"}
    | {"base_momentum", "max_momentum"}
)


class ResumeWarning(UserWarning):
    """A checkpoint and the run that resumes from it differ, or not all of it could be restored."""


def differences(
    state: Mapping[str, Any],
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    precision: PrecisionPlan,
    config: Any,
    has_scheduler: bool,
    has_coordinator: bool,
) -> list[str]:
    """What in a checkpoint is unlike the present run, a line each; empty if nothing is.

    Compares the precision plan, the config (redacted, and only if both sides have one), names and
    sizes of parameter groups, names, shapes and dtypes of the model's tensors, and which of
    scheduler, scaler and coordinator are there. Learning rates and other numbers of the groups
    are not compared: those of the checkpoint replace them.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        *_precision_differences(state.get("precision"), precision),
        *_limited("config", _config_differences(state.get("config"), redact(config))),
        *_group_differences(state["optimizer"]["param_groups"], optimizer.param_groups, names),
        *_limited("model", _model_differences(state["model"], model.state_dict())),
        *_section_differences(state, precision, has_scheduler, has_coordinator),
    ]


def apply(
    state: Mapping[str, Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any | None,
) -> None:
    """Loads model, optimizer and scheduler; on any error all three are as before.

    The error is torch's own, or a CheckpointError where torch would notice too late: see
    `check_model` and `check_optimizer`. The tensors in `state` are copied, never shared.
    """
    own = model.state_dict()
    check_model(state["model"], own)
    fits = _loads_plainly(model) and _fits(state["model"], own)
    with _all_or_nothing(None if fits else model, optimizer, scheduler):
        if not fits:  # torch's error, or hooks of the model that make it fit after all
            model.load_state_dict(state["model"])
        check_optimizer(state["optimizer"], optimizer, model)
        _load_optimizer(state["optimizer"], optimizer)
        if scheduler is not None and state.get("scheduler") is not None:
            scheduler.load_state_dict(copy.deepcopy(state["scheduler"]))
        if fits:  # last, because this cannot fail and so needs no second copy to go back to
            model.load_state_dict(state["model"])


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
def _all_or_nothing(
    model: torch.nn.Module | None, optimizer: torch.optim.Optimizer, scheduler: Any | None
) -> Iterator[None]:
    """Puts everything back if the body raises. `model` only where its loading may fail."""
    # Loading an optimizer replaces these two and leaves the old ones as they are.
    state, groups = optimizer.state, optimizer.param_groups
    schedule = None if scheduler is None else copy.deepcopy(scheduler.state_dict())
    weights = None if model is None else copy.deepcopy(model.state_dict())
    try:
        yield
    except BaseException:
        optimizer.state, optimizer.param_groups = state, groups
        if scheduler is not None:
            scheduler.load_state_dict(schedule)
        if model is not None and weights is not None:
            model.load_state_dict(weights)
        raise


def _load_optimizer(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict({**saved, "param_groups": _completed(saved, optimizer)})
    check_loaded_options(optimizer)
    for key, _, parameter in places(saved, optimizer):
        if key in saved["state"] and parameter in optimizer.state:
            loaded = optimizer.state[parameter]
            optimizer.state[parameter] = _as_saved(loaded, saved["state"][key], None)


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


def _precision_differences(saved: Any, plan: PrecisionPlan) -> Iterator[str]:
    if not isinstance(saved, Mapping):
        return
    for key, here in plan.as_dict().items():
        if key in saved and saved[key] != here:
            yield f"precision.{key}: {saved[key]!r} was saved, {here!r} is in use"


def _config_differences(saved: Any, here: Any) -> Iterator[str]:
    return iter(()) if saved is None or here is None else _value_differences("config", saved, here)


def _value_differences(path: str, saved: Any, here: Any) -> Iterator[str]:
    if isinstance(saved, Mapping) and isinstance(here, Mapping):
        for key in dict.fromkeys([*saved, *here]):
            if key not in here:
                yield f"{path}.{key}: {_short(saved[key])} was saved, it is not here"
            elif key not in saved:
                yield f"{path}.{key}: was not saved, it is {_short(here[key])} here"
            else:
                yield from _value_differences(f"{path}.{key}", saved[key], here[key])
    elif not _same(saved, here):
        yield f"{path}: {_short(saved)} was saved, it is {_short(here)} here"


def _same(saved: Any, here: Any) -> bool:
    if isinstance(saved, (list, tuple)) and isinstance(here, (list, tuple)):
        return len(saved) == len(here) and all(map(_same, saved, here))
    return bool(saved == here) or repr(saved) == repr(here)  # nan is unlike itself


def _group_differences(
    saved: Sequence[Mapping[str, Any]],
    here: Sequence[Mapping[str, Any]],
    names: Mapping[int, str],
) -> Iterator[str]:
    if len(saved) != len(here):
        sizes = [", ".join(str(len(group["params"])) for group in side) for side in (saved, here)]
        yield (
            f"optimizer: {_number(len(saved), 'parameter group')} of {sizes[0]} parameters saved, "
            f"{_number(len(here), 'group')} of {sizes[1]} here"
        )
    for index, (old, new) in enumerate(zip(saved, here, strict=False)):
        for words in _one_group(old, new, names):
            yield f"optimizer, parameter group {index}{_group_name(old)}: {words}"


def _one_group(
    saved: Mapping[str, Any], here: Mapping[str, Any], names: Mapping[int, str]
) -> Iterator[str]:
    if saved.get("name") != here.get("name"):
        yield f"named {saved.get('name')!r} when saved, {here.get('name')!r} here"
    known = [names.get(id(parameter), "?") for parameter in here["params"]]
    old, new = saved.get("param_names"), list(here.get("param_names", known))
    if isinstance(old, (list, tuple)):
        yield from _name_differences(list(old), new)
    extra = saved.keys() - here.keys() - NEWER_OPTIONS - _NOT_OPTIONS
    if extra:
        yield f"options that only the saved one has: {_some(sorted(map(str, extra)))}"
    if len(saved["params"]) != len(new):
        words = f" ({_some(new)})" if not isinstance(old, (list, tuple)) else ""
        saved_words = _number(len(saved["params"]), "parameter")
        yield f"{saved_words} saved, {len(new)} here{words}"


def _name_differences(saved: list[Any], here: list[str]) -> Iterator[str]:
    gone = [name for name in saved if name not in here]
    come = [name for name in here if name not in saved]
    if gone:
        yield f"only saved: {_some(gone)}"
    if come:
        yield f"only here: {_some(come)}"
    if not gone and not come and saved != here:
        yield "the same parameters in another order, while torch pairs them by position"


def _model_differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    gone = [name for name in saved if name not in own]
    come = [name for name in own if name not in saved]
    if gone:
        yield f"model: only saved: {_some(gone)}"
    if come:
        yield f"model: only here: {_some(come)}"
    for name, tensor in own.items():
        old = saved.get(name)
        if not isinstance(old, torch.Tensor) or not isinstance(tensor, torch.Tensor):
            continue
        if old.is_nested:  # has no shape; it is refused later
            continue
        if old.shape != tensor.shape:
            yield f"model.{name}: shape {tuple(old.shape)} saved, {tuple(tensor.shape)} here"
        if old.dtype != tensor.dtype:
            yield f"model.{name}: {_dtype(old)} saved, cast to {_dtype(tensor)} here"


def _section_differences(
    state: Mapping[str, Any], precision: PrecisionPlan, has_scheduler: bool, has_coordinator: bool
) -> Iterator[str]:
    # An empty mapping is what a scaler that is switched off saves.
    scaler = bool(state.get("scaler"))
    if scaler and not precision.use_scaler:
        yield "scaler: saved, not used by this precision plan; later checkpoints keep it"
    if precision.use_scaler and not scaler:
        yield "scaler: no state saved, so loss scaling starts afresh"
    scheduler = state.get("scheduler") is not None
    if scheduler and not has_scheduler:
        yield "scheduler: saved, but this run has none; the saved learning rates stay as they are"
    if has_scheduler and not scheduler:
        yield "scheduler: no state saved, so the schedule starts at its beginning"
    coordinator = state.get("coordinator") is not None
    if coordinator and not has_coordinator:
        yield "coordinator: saved, but this run has none; its later checkpoints will not hold it"
    if has_coordinator and not coordinator:
        yield "coordinator: no state saved, so it starts afresh"


def _limited(what: str, lines: Iterator[str]) -> Iterator[str]:
    everything = list(lines)
    yield from everything[:_MOST_SHOWN]
    if len(everything) > _MOST_SHOWN:
        yield f"{what}: {len(everything) - _MOST_SHOWN} more differences"


def _some(names: Sequence[Any]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(map(str, names[:_MOST_NAMES])) + more


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _group_name(group: Mapping[str, Any]) -> str:
    name = group.get("name")
    return f" ({name!r})" if name is not None else ""


def _short(value: Any) -> str:
    words = repr(value)
    return words if len(words) <= 60 else f"{words[:57]}..."


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
