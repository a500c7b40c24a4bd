"""Attributes set to what was kept of them; each step can be undone."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from trainer_core.census.kept_values import Keeper, UnkeptError
from trainer_core.census.marks import ABSENT, Mark, value_of
from trainer_core.census.owners import STATE, Owner
from trainer_core.census.places import Place, place_of, put
from trainer_core.census.returned_values import Returner, Undo
from trainer_core.census.sections import BUFFER, GONE
from trainer_core.resuming.copies import copied
from trainer_core.saving.savable import CheckpointError


class SettingBack:
    """Of one section. `device`, `undo`, `parts`: see Returner."""

    def __init__(self, device: torch.device, undo: Undo, parts: Mapping[str, Any]) -> None:
        self._undo = undo
        self._returner = Returner(device, undo, parts)

    def set(self, words: str, owner: Owner, name: str, kept: Any) -> None:
        """Sets one attribute, whose path is `words`. Raises CheckpointError."""
        try:
            if name == STATE:
                self._set_state(owner.thing, kept)
            else:
                self._set(owner.thing, name, kept)
        except Exception as error:  # whatever a malformed value makes torch or numpy raise
            raise CheckpointError(f"attributes: {words}: {error}") from error

    def rewind(self, owner: Owner, name: str, before: Mark) -> None:
        """Makes it what it was at first, where that is known."""
        if before is ABSENT:
            self._set(owner.thing, name, {GONE: None})
            return
        try:
            kept = Keeper().keep(value_of(before), ABSENT)
        except (LookupError, UnkeptError):
            return
        self._set(owner.thing, name, kept)

    def _set_state(self, thing: Any, kept: Any) -> None:
        state = kept["$state"]
        if isinstance(thing, torch.optim.Optimizer):
            from trainer_core.resuming.resume import load_optimizer

            load_optimizer(state, thing, torch.nn.Module(), self._undo)
            return
        before = copied(thing.state_dict())
        self._undo.append(lambda: thing.load_state_dict(before))
        thing.load_state_dict(copied(state))

    def _set(self, thing: Any, name: str, kept: Any) -> None:
        form = next(iter(kept), "") if isinstance(kept, Mapping) else ""
        is_buffer = isinstance(thing, torch.nn.Module) and form == BUFFER
        if is_buffer and name not in thing._buffers:
            self._undo.append(functools.partial(_unregister, thing, name))
            thing.__dict__.pop(name, None)
            thing._buffers[name] = None
            thing._non_persistent_buffers_set.add(name)
        target = place_of(thing, name)
        before = target.get(name, ABSENT)
        self._undo.append(functools.partial(put, target, name, before))
        if form == GONE:
            target.pop(name, None)
            return
        here = None if before is ABSENT else before
        value = self._returner.value(kept[BUFFER] if form == BUFFER else kept, here)
        if not _belongs(value, thing, target):
            raise CheckpointError("does not fit what is here under its name")
        target[name] = value


def _unregister(module: torch.nn.Module, name: str) -> None:
    module._buffers.pop(name, None)
    module._non_persistent_buffers_set.discard(name)


def _belongs(value: Any, thing: Any, target: Place) -> bool:
    if not isinstance(thing, torch.nn.Module):
        return True
    if target is thing._buffers:
        return value is None or isinstance(value, torch.Tensor)
    if target is thing._parameters:
        return isinstance(value, torch.nn.Parameter)
    return target is not thing._modules
