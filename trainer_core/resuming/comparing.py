"""What in a checkpoint is unlike the present run, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from trainer_core.precision import PrecisionPlan
from trainer_core.redaction import redact
from trainer_core.resuming.facts import environment
from trainer_core.resuming.fitting import NEWER_OPTIONS
from trainer_core.resuming.modes import strange_modes
from trainer_core.resuming.parts import Parts
from trainer_core.resuming.wording import limited, same, short, some
from trainer_core.wrappers import own_state

# What is in a parameter group without being an option of the optimizer, schedulers' notes included.
_NOT_OPTIONS = frozenset(
    {"params", "param_names", "name", "initial_lr", "max_lr", "min_lr"}
    | {"base_momentum", "max_momentum"}
)
# Numbers that say how long a schedule is; those of the checkpoint replace those here.
_LENGTHS = ("total_steps", "T_max", "T_0", "total_iters", "step_size", "milestones", "_milestones")


def differences(
    state: Mapping[str, Any],
    parts: Parts,
    *,
    precision: PrecisionPlan,
    config: Any,
    device: torch.device,
    has_coordinator: bool,
) -> list[str]:
    """What in a checkpoint is unlike the present run, a line each; empty if nothing is.

    Compares the precision plan, the config (redacted, and only if both sides have one), names and
    sizes of parameter groups, names, shapes and dtypes of the model's tensors, the length of the
    schedule, the environment, and which of scheduler, scaler, averaged model, callbacks and
    coordinator are there. Tells of weights that are not finite. For learning rates and the other
    numbers that a program gives, see `trainer_core.resuming.settings`.
    """
    names = {id(parameter): name for name, parameter in parts.model.named_parameters()}
    groups = parts.optimizer.param_groups
    saved = own_state(state["model"], parts.model)
    return [
        *_precision_differences(state.get("precision"), precision),
        *limited("config", _config_differences(state.get("config"), redact(config))),
        *_group_differences(state["optimizer"]["param_groups"], groups, names),
        *limited("model", _model_differences(saved, parts.model.state_dict())),
        *limited("model", _not_finite(state["model"])),
        *_section_differences(state, precision, parts, has_coordinator),
        *_schedule_differences(
            state.get("scheduler"), parts.scheduler, state["step"], "settings" in state
        ),
        *strange_modes(parts.model, state.get("modes")),
        *_environment_differences(state.get("environment"), device),
    ]


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
                yield f"{path}.{key}: {short(saved[key])} was saved, it is not here"
            elif key not in saved:
                yield f"{path}.{key}: was not saved, it is {short(here[key])} here"
            else:
                yield from _value_differences(f"{path}.{key}", saved[key], here[key])
    elif not same(saved, here):
        yield f"{path}: {short(saved)} was saved, it is {short(here)} here"


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
        yield f"options that only the saved one has: {some(sorted(map(str, extra)))}"
    if len(saved["params"]) != len(new):
        words = f" ({some(new)})" if not isinstance(old, (list, tuple)) else ""
        saved_words = _number(len(saved["params"]), "parameter")
        yield f"{saved_words} saved, {len(new)} here{words}"


def _name_differences(saved: list[Any], here: list[str]) -> Iterator[str]:
    gone = [name for name in saved if name not in here]
    come = [name for name in here if name not in saved]
    if gone:
        yield f"only saved: {some(gone)}"
    if come:
        yield f"only here: {some(come)}"
    if not gone and not come and saved != here:
        yield "the same parameters in another order, while torch pairs them by position"


def _model_differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    gone = [name for name in saved if name not in own]
    come = [name for name in own if name not in saved]
    if gone:
        yield f"model: only saved: {some(gone)}"
    if come:
        yield f"model: only here: {some(come)}"
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
    state: Mapping[str, Any], precision: PrecisionPlan, parts: Parts, has_coordinator: bool
) -> Iterator[str]:
    # An empty mapping is what a scaler that is switched off saves.
    scaler = bool(state.get("scaler"))
    if scaler and not precision.use_scaler:
        yield "scaler: saved, not used by this precision plan; later checkpoints keep it"
    if precision.use_scaler and not scaler:
        yield "scaler: no state saved, so loss scaling starts afresh"
    scheduler = state.get("scheduler") is not None
    if scheduler and parts.scheduler is None:
        yield "scheduler: saved, but this run has none; the saved learning rates stay as they are"
    if parts.scheduler is not None and not scheduler:
        yield "scheduler: no state saved, so the schedule starts at its beginning"
    coordinator = state.get("coordinator") is not None
    if coordinator and not has_coordinator:
        yield "coordinator: saved, but this run has none; its later checkpoints will not hold it"
    if has_coordinator and not coordinator:
        yield "coordinator: no state saved, so it starts afresh"
    ema = state.get("ema") is not None
    if ema and parts.ema is None:
        yield "ema: saved, but this run has none; its later checkpoints will not hold it"
    if parts.ema is not None and not ema:
        yield "ema: no state saved, so the average starts afresh"
    yield from _callback_differences(state.get("callbacks") or {}, parts)


def _callback_differences(saved: Mapping[str, Any], parts: Parts) -> Iterator[str]:
    for name in saved:
        if name not in parts.callbacks:
            yield f"callbacks.{name}: saved, but this run has none of that name with a state"
    for name in parts.callbacks:
        if name not in saved:
            yield f"callbacks.{name}: no state saved, so it starts afresh"


def _schedule_differences(
    saved: Any, scheduler: Any, step: int, lengths_are_settings: bool
) -> Iterator[str]:
    if scheduler is None or not isinstance(saved, Mapping):
        return
    moved = saved.get("last_epoch")
    if isinstance(moved, int) and moved > step:
        yield f"scheduler: it was moved {moved} times, while {step} steps were done"
    for name in _LENGTHS if not lengths_are_settings else ():
        here = vars(scheduler).get(name)
        if name in saved and here is not None and not same(saved[name], here):
            words = f"{short(saved[name])} was saved and counts, it is {short(here)} here"
            yield f"scheduler.{name}: {words}"


def _not_finite(model: Mapping[str, Any]) -> Iterator[str]:
    for name, tensor in model.items():
        if isinstance(tensor, torch.Tensor) and not _is_finite(tensor):
            yield f"model.{name}: holds numbers that are not finite"


def _is_finite(tensor: torch.Tensor) -> bool:
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()  # this rank's shard; the others look at theirs
    odd = tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided
    inexact = tensor.is_floating_point() or tensor.is_complex()
    if odd or not inexact or tensor.device.type == "meta":
        return True
    if tensor.is_floating_point() and tensor.element_size() == 1:
        tensor = tensor.float()  # float8 knows no isfinite
    # A sum is taken several times faster, and is finite only where every number is. It overflows
    # sometimes where all are: only then they are looked at one by one.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def _environment_differences(saved: Any, device: torch.device) -> Iterator[str]:
    if isinstance(saved, Mapping):
        here = environment(device)
        both = {key: value for key, value in saved.items() if key in here}
        known = {key: here[key] for key in both}
        yield from _value_differences("environment", both, known)


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _group_name(group: Mapping[str, Any]) -> str:
    name = group.get("name")
    return f" ({name!r})" if name is not None else ""


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
