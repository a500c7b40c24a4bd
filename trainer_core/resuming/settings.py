"""The numbers that a program gives to its optimizer, scheduler and trainer, kept to be compared.

A checkpoint brings the optimizer's options and the scheduler's numbers along, and they replace
those that the new program was written with. Which of them the program has changed cannot be told
from the optimizer's state: schedules and callbacks move it. So each checkpoint also says how they
were when its trainer was made, under the key `settings`:

    {"optimizer": "AdamW", "groups": [{"lr": 0.01, …}], "scheduler": "StepLR" or None,
     "schedule": {"gamma": 0.1, …}, "grad_clip": None, "accumulation_steps": 1, "batch_size": 4}
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from trainer_core.resuming.wording import limited, same, short

_MORE = "more settings differ"
_PLAIN = (type(None), bool, int, float, str)
# In a parameter group without being an option; `initial_lr` is what `lr` was before a schedule.
_NOT_OPTIONS = frozenset({"params", "param_names", "name", "initial_lr"})
# What a scheduler moves as it goes; everything else in it was given to it.
_MOVING = frozenset(
    {"last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial"}
    | {"T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter"}
)
_HOW = (
    "settings: to have this run's own, set them after `resume`, in optimizer.param_groups and in "
    "the scheduler (base_lrs); with fit(resume=...) a callback's on_fit_start does it"
)


class Settings:
    """Those of one trainer, as they are now, when it is made.

    `given` are those of the trainer itself, such as `grad_clip`; these always count as they are
    here. Those of optimizer and scheduler are the checkpoint's after a resume, until somebody sets
    them.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, scheduler: Any, loader: Any, **given: Any
    ) -> None:
        self._given = {**given, "batch_size": _batch_size(loader)}
        self._own: dict[str, Any] = {
            "optimizer": type(optimizer).__name__,
            "groups": [_options(group) for group in optimizer.param_groups],
            "scheduler": None if scheduler is None else type(scheduler).__name__,
            "schedule": _schedule(scheduler),
            **self._given,
        }
        # A class that builds on what was saved takes its numbers as they are meant.
        self._kinds = {"optimizer": _ancestors(optimizer), "scheduler": _ancestors(scheduler)}
        self._counting = copy.deepcopy(self._own)
        self._loaded: list[dict[str, Any]] = []

    def section(self) -> dict[str, Any]:
        """What belongs into a checkpoint: those that count now."""
        return copy.deepcopy(self._counting)

    def differences(self, saved: Any, kept: Collection[str] = ()) -> list[str]:
        """What was saved otherwise, a line each, and which of the two counts.

        `kept`: the parts that stay as they are here, of which nothing is said.
        """
        if not isinstance(saved, Mapping):
            return []
        overruled = [
            *limited("optimizer", self._group_differences(saved, kept), _MORE),
            *limited("scheduler", self._schedule_differences(saved, kept), _MORE),
        ]
        return [
            *self._kind_differences(saved, kept),
            *overruled,
            *([_HOW] if overruled else []),
            *self._given_differences(saved),
        ]

    def resumed(self, saved: Any, optimizer: torch.optim.Optimizer, kept: set[str]) -> None:
        """Notes what counts from now on. `kept`: the parts that stayed as they are here."""
        self._counting = copy.deepcopy(self._own)
        self._loaded = [_as_loaded(group) for group in optimizer.param_groups]
        if not isinstance(saved, Mapping):
            return
        if "optimizer" not in kept:
            for index, name, value, _ in _changed_options(saved.get("groups"), self._own["groups"]):
                self._counting["groups"][index][name] = copy.deepcopy(value)
        if "scheduler" not in kept:
            for name, value, _ in _changed(saved.get("schedule"), self._own["schedule"]):
                self._counting["schedule"][name] = copy.deepcopy(value)

    def settle(self, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        """Notes what somebody has set since the resume: there this run's own counts again."""
        groups = zip(optimizer.param_groups, self._loaded, self._own["groups"], strict=False)
        for index, (group, then, own) in enumerate(groups):
            now = _as_loaded(group)
            for name, value in own.items():
                names = ("lr", "initial_lr") if name == "lr" else (name,)
                if any(not same(now.get(one), then.get(one)) for one in names):
                    self._counting["groups"][index][name] = value
        self._loaded = []
        counting, now = self._counting["schedule"], _schedule(scheduler)
        for name, own in self._own["schedule"].items():
            if name in now and not same(now[name], counting.get(name)):
                counting[name] = own

    def _kind_differences(self, saved: Mapping[str, Any], kept: Collection[str]) -> Iterator[str]:
        for part in (part for part in ("optimizer", "scheduler") if part not in kept):
            then, here = saved.get(part), self._own[part]
            if isinstance(then, str) and here is not None and then not in self._kinds[part]:
                words = "which goes on with the saved numbers"
                yield f"{part}: {then} was saved, it is {here} here, {words}"

    def _group_differences(self, saved: Mapping[str, Any], kept: Collection[str]) -> Iterator[str]:
        found: dict[tuple[str, str], list[int]] = {}
        groups = None if "optimizer" in kept else saved.get("groups")
        for index, name, then, here in _changed_options(groups, self._own["groups"]):
            words = f"{short(then)} was saved and counts, it is {short(here)} here"
            found.setdefault((name, words), []).append(index)
        for (name, words), at in found.items():
            numbers = f"group {at[0]}" if len(at) == 1 else f"groups {', '.join(map(str, at))}"
            if len(at) > 1 and len(at) == len(self._own["groups"]):
                numbers = f"groups, all {len(at)}"
            yield f"optimizer, parameter {numbers}: {name}: {words}"

    def _schedule_differences(
        self, saved: Mapping[str, Any], kept: Collection[str]
    ) -> Iterator[str]:
        schedule = None if "scheduler" in kept else saved.get("schedule")
        for name, then, here in _changed(schedule, self._own["schedule"]):
            words = f"{short(then)} was saved and counts, it is {short(here)} here"
            yield f"scheduler.{name}: {words}"

    def _given_differences(self, saved: Mapping[str, Any]) -> Iterator[str]:
        for name, then, here in _changed(saved, self._given):
            if name == "batch_size" and (then is None or here is None):
                continue  # a loader that does not say so
            more = "; the place in the data is counted in batches" if name == "batch_size" else ""
            yield f"{name}: {short(then)} was saved, it is {short(here)} here, which counts{more}"


def _changed(saved: Any, here: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Name and both values of each setting that both sides have, and that differs."""
    for name, value in here.items():
        if isinstance(saved, Mapping) and name in saved and not same(saved[name], value):
            yield name, saved[name], value


def _changed_options(saved: Any, here: list[dict[str, Any]]) -> Iterator[tuple[int, str, Any, Any]]:
    if isinstance(saved, (list, tuple)) and len(saved) == len(here):
        for index, (then, now) in enumerate(zip(saved, here, strict=True)):
            for name, value, own in _changed(then, now):
                yield index, name, value, own


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group's options as they were given: a schedule has moved `lr` already."""
    options = {name: value for name, value in group.items() if name not in _NOT_OPTIONS}
    if "initial_lr" in group:
        options["lr"] = group["initial_lr"]
    return _plain(options)


def _as_loaded(group: Mapping[str, Any]) -> dict[str, Any]:
    return _plain({name: value for name, value in group.items() if name != "params"})


def _schedule(scheduler: Any) -> dict[str, Any]:
    """The numbers of a scheduler, those of its parts too, by dotted name."""
    try:
        state = {} if scheduler is None else scheduler.state_dict()
    except Exception:  # the scheduler is the user's, and need not be ready to be saved yet
        return {}
    return dict(_numbers(state, "")) if isinstance(state, Mapping) else {}


def _numbers(state: Mapping[Any, Any], path: str) -> Iterator[tuple[str, Any]]:
    for name, value in state.items():
        if name in _MOVING or not isinstance(name, str):
            continue
        if name == "_schedulers" and isinstance(value, (list, tuple)):
            for index, part in enumerate(value):
                if isinstance(part, Mapping):
                    yield from _numbers(part, f"{path}_schedulers[{index}].")
        else:
            yield from _plain({f"{path}{name}": value}).items()


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are plain values or lists of such, copied; one-number tensors as numbers."""
    found = {name: _number(value) for name, value in values.items()}
    return {name: value for name, value in found.items() if _is_plain(value)}


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type != "meta":
        return value.item()
    return [_number(item) for item in value] if type(value) in (list, tuple) else value


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if type(value) is list else type(value) in _PLAIN


def _ancestors(part: Any) -> set[str]:
    return {kind.__name__ for kind in type(part).__mro__}


def _batch_size(loader: Any) -> int | None:
    for holder in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(holder, "batch_size", None)
        if type(size) is int:
            return size
    return None
