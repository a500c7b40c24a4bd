"""Which modules train and which evaluate: a model's `training` flags, as part of a checkpoint.

Kept are the flag of the model itself and the names of those modules that differ from it.
"""

from __future__ import annotations

from typing import Any

import torch


def modes_of(model: torch.nn.Module) -> dict[str, Any]:
    """The flags of all modules, as plain values."""
    mode = model.training
    others = [name for name, module in model.named_modules() if module.training != mode]
    return {"training": mode, "others": others}


def set_modes(model: torch.nn.Module, modes: Any) -> None:
    """Sets the flags that `modes_of` gave; leaves what is no such thing, and modules it misses."""
    if strange_modes(model, modes) or not modes:
        return
    for name, module in model.named_modules():
        module.training = modes["training"] != (name in modes["others"])


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
