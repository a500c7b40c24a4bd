"""Which modules train and which evaluate, and which parameters learn, as part of a checkpoint.

Kept are the `training` flag of the model itself and the names of those modules that differ from it;
of parameters `requires_grad` where training has changed it (gradual unfreezing).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trainer_core.wrappers import plain_names


def modes_of(model: torch.nn.Module, first: Mapping[str, bool] | None = None) -> dict[str, Any]:
    """The flags of all modules, as plain values. `first`: what `learning` gave in the beginning."""
    mode = model.training
    others = [name for name, module in model.named_modules() if module.training != mode]
    modes = {"training": mode, "others": others}
    if first is not None:
        now = learning(model)
        changed = {name: flag for name, flag in now.items() if first.get(name, flag) != flag}
        modes |= {"requires_grad": changed} if changed else {}
    return modes


def learning(model: torch.nn.Module) -> dict[str, bool]:
    """Of each parameter, by its name without wrappers, whether it learns."""
    names = plain_names(model)
    return {names[id(one)]: one.requires_grad for one in model.parameters()}


def set_modes(model: torch.nn.Module, modes: Any) -> None:
    """Sets the flags that `modes_of` gave; leaves what is no such thing, and modules it misses."""
    if strange_modes(model, modes) or not modes:
        return
    for name, module in model.named_modules():
        module.training = modes["training"] != (name in modes["others"])
    learns = modes.get("requires_grad")
    if isinstance(learns, Mapping) and learns:
        names = plain_names(model)
        for parameter in model.parameters():
            flag = learns.get(names[id(parameter)])
            if isinstance(flag, bool):
                parameter.requires_grad_(flag)


def strange_modes(model: torch.nn.Module, modes: Any) -> list[str]:
    """Why `set_modes` could not restore them, in words; empty if it can, or none were saved."""
    if modes is None:
        return []
    if not isinstance(modes, dict) or not isinstance(modes.get("training"), bool):
        return ["modes: what is saved are no modes of modules"]
    others = modes.get("others")
    if not isinstance(others, list):
        return ["modes: what is saved are no modes of modules"]
    gone = set(others) - {name for name, _ in model.named_modules()}
    if gone:
        return [
            f"modes: {', '.join(sorted(map(str, gone)))[:200]} had another mode, and is not here"
        ]
    return []
