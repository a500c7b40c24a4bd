"""Names of a model's tensors without what wrappers put into them.

`torch.compile` and (Distributed)DataParallel keep the model in an attribute of their own, and its
name (`_orig_mod`, `module`) gets into every key of the state dict, at any depth. A checkpoint holds
the names without it, so that a run may go on with or without the wrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainer_core.state import CheckpointError

_COMPILED = "_orig_mod."
_PARALLEL = "module."


def plain_state(model: torch.nn.Module) -> dict[str, Any]:
    """The model's state dict under names without wrappers. Tensors are shared."""
    state = model.state_dict()
    prefixes = _prefixes(model)
    if not prefixes:
        return state
    return {_without(prefixes, name): value for name, value in state.items()}


def own_state(saved: Mapping[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """A saved state dict under the names that `model` has for its tensors.

    Also takes names with the prefixes of wrappers that are not here. What belongs nowhere keeps its
    name, for torch to refuse. Raises CheckpointError where two tensors would get one name.
    """
    own = list(model.state_dict())
    prefixes = _prefixes(model)
    of_plain = {_without(prefixes, name): name for name in own}
    if saved.keys() <= of_plain.keys() and not prefixes:
        return dict(saved)
    known, renamed = set(own), {}
    parallel = bool(saved) and all(name.startswith(_PARALLEL) for name in saved)
    for name, value in saved.items():
        new = name if name in known else of_plain.get(name)
        if new is None:
            bare = name.removeprefix(_PARALLEL) if parallel else name
            new = of_plain.get(bare.replace(_COMPILED, ""), name)
        if new in renamed:
            raise CheckpointError(f"model: two saved tensors would both become {new}")
        renamed[new] = value
    return renamed


def plain_namer(model: torch.nn.Module) -> Callable[[str], str]:
    """Gives the names of the model's parameters and buffers without wrappers.

    The model is walked once, here, and not for each name.
    """
    prefixes = _prefixes(model)
    return lambda name: _without(prefixes, name)


def plain_names(model: torch.nn.Module) -> dict[int, str]:
    """The name of each parameter without wrappers, by the parameter's `id`."""
    plain = plain_namer(model)
    return {id(one): plain(name) for name, one in model.named_parameters()}


def is_wrapper(module: torch.nn.Module) -> bool:
    """Whether it is one of those that put something into names."""
    return bool(_adds(module))


def _prefixes(model: torch.nn.Module) -> list[tuple[str, str]]:
    """What the wrappers in a model put before names, and what remains of it; deepest first."""
    found = []
    for name, module in model.named_modules(remove_duplicate=False):
        added = _adds(module)
        if added:
            before = f"{name}." if name else ""
            found.append((before + added, before))
    return sorted(found, key=lambda pair: len(pair[0]), reverse=True)


def _adds(module: torch.nn.Module) -> str:
    parallel = torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel
    if isinstance(module, parallel):
        return _PARALLEL
    # By name: to import the class would import the compiler.
    return _COMPILED if type(module).__name__ == "OptimizedModule" else ""


def _without(prefixes: list[tuple[str, str]], name: str) -> str:
    for prefix, remains in prefixes:
        if name.startswith(prefix):
            name = remains + name[len(prefix) :]
    return name
