"""Whose attributes are looked at: a model's modules, and the program's own objects that they hold.

Of an object its `__dict__` and its slots, of a function that is a root itself (a callback) what it
has from the one around it. torch's datasets and samplers are looked at as if they were of the
program; optimizers, schedules and scalers that nobody else keeps by their state dict.

Objects of other packages (a logger, a tokenizer) are known by identity alone: to set back what is
inside of them could do harm. Only the random generators that they hold are looked at as well.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, Sampler

from trainer_core.census.marks import BYTES, CONTAINERS, SCALARS
from trainer_core.census.places import places_of
from trainer_core.data.generators import is_generator
from trainer_core.wrappers import is_wrapper, plain_namer

STATE = "state_dict()"
"""What stands for an attribute, of what is kept by its state dict."""

_MOST_OBJECTS = 10_000
_MOST_ITEMS = 64  # of one container: a longer one is data
_MOST_DEPTH = 6
_PLAIN_BASES = frozenset({"builtins", "typing", "typing_extensions", "abc", "collections.abc"})
_NEVER_OWN = frozenset({"torch", "trainer_core", "ckpttool", "numpy", "torchdata"})
_CLOSED = (*SCALARS, *BYTES, torch.Tensor, types.ModuleType, types.FunctionType, type)
_DATA = frozenset(
    f"torch.utils.data.{name}" for name in ("dataset", "sampler", "distributed", "dataloader")
)
_WITH_STATE = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)

# What torch itself sets on these, and keeps elsewhere or makes anew.
_INTERNALS: dict[type, frozenset[str]] = {
    torch.nn.Module: frozenset(vars(torch.nn.Module())) | {"_compiled_call_impl"},
    torch.optim.Optimizer: frozenset(
        {"state", "param_groups", "defaults", "step", "grad_scale", "found_inf", "_opt_called"}
        | {"_warned_capturable_if_run_uncaptured", "_need_device_dtype_check_for_fused"}
        | {"_zero_grad_profile_name", "_step_supports_amp_scaling", "_step_count"}
        | {f"_optimizer_step_{when}_hooks" for when in ("pre", "post")}
        | {f"_optimizer_state_dict_{when}_hooks" for when in ("pre", "post")}
        | {f"_optimizer_load_state_dict_{when}_hooks" for when in ("pre", "post")}
    ),
    # Told of each pass by its number, which is kept.
    torch.utils.data.distributed.DistributedSampler: frozenset({"epoch"}),
    torch.utils.data.DataLoader: frozenset({"_iterator", "_IterableDataset_len_called"}),
}


class Owner(NamedTuple):
    """`looked_at`: "all" attributes, only "values" (see `_is_value`), or only "generators".

    `is_hidden`: no state dict of the run has it. `but`: names that are not looked at.
    """

    thing: Any
    looked_at: str
    is_hidden: bool = False
    but: frozenset[str] = frozenset()


def is_torchs(kind: type) -> bool:
    """Whether a class is torch's own, or made by torch out of such (as `fully_shard` does)."""
    return all(
        base.__module__.partition(".")[0] == "torch" or base.__module__ in _PLAIN_BASES
        for base in kind.__mro__
    )


def owners_of(
    root: Any, seen: frozenset[int] = frozenset(), names: frozenset[str] = frozenset()
) -> dict[str, Owner]:
    """All owners within a module or an object, by their path from it; the root's own is "".

    `seen`: ids of what is not looked into. `names`: attributes of the root that are not looked at.
    """
    found: dict[str, Owner] = {}
    waiting: deque[tuple[str, Any, int]] = deque()
    known = set(seen) | {id(root)}
    if isinstance(root, torch.nn.Module):
        found.update(_modules(root, "", is_hidden=False))
    elif isinstance(root, torch.optim.Optimizer):
        found[""] = Owner(root, "values" if is_torchs(type(root)) else "all", but=names)
    elif places_of(root) and (_is_looked_into(root) or not is_torchs(type(root))):
        found[""] = Owner(root, "all", but=names)
    known |= {id(owner.thing) for owner in found.values()}
    waiting.extend((path, owner, 0) for path, owner in found.items())
    while waiting and len(known) < _MOST_OBJECTS:
        path, owner, depth = waiting.popleft()
        if owner.looked_at == "values" or depth >= _MOST_DEPTH:
            continue
        for name, item in _objects_in(path, owner):
            if id(item) in known:
                continue
            for inner, more in _owners_at(name, item, owner):
                known.add(id(more.thing))
                found[inner] = more
                waiting.append((inner, more, depth + 1))
    return found


def _modules(root: torch.nn.Module, before: str, *, is_hidden: bool) -> Iterator[tuple[str, Owner]]:
    plain = plain_namer(root)
    for name, module in root.named_modules():
        if not is_wrapper(module):
            path = plain(f"{name}.")[:-1] if name else ""
            looked_at = "values" if is_torchs(type(module)) else "all"
            yield _joined(before, path), Owner(module, looked_at, is_hidden)


def _joined(one: str, other: str) -> str:
    return f"{one}.{other}" if one and other else one or other


def _owners_at(path: str, item: Any, holder: Owner) -> Iterator[tuple[str, Owner]]:
    of_own = holder.looked_at == "all"
    if isinstance(item, torch.nn.Module):
        if of_own:
            yield from _modules(item, path, is_hidden=True)
    elif isinstance(item, _WITH_STATE):
        if of_own:
            yield path, Owner(item, "values" if is_torchs(type(item)) else "all", is_hidden=True)
    elif of_own and is_own(item, holder.thing):
        yield path, Owner(item, "all")
    elif package_of(item) not in _NEVER_OWN:
        yield path, Owner(item, "generators")


def _objects_in(path: str, owner: Owner) -> Iterator[tuple[str, Any]]:
    """Objects that have attributes themselves, in attributes and short containers."""
    for name, value in _own_attributes(owner):
        yield from _objects_at(_joined(path, name), value, 0)


def _objects_at(path: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _CLOSED) or is_generator(value):
        return
    if isinstance(value, types.MethodType):
        yield from _objects_at(path, value.__self__, depth)
    elif isinstance(value, functools.partial):
        parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
        for name, part in parts.items() if depth < 3 else ():
            yield from _objects_at(f"{path}.{name}", part, depth + 1)
    elif places_of(value):
        yield path, value
    if isinstance(value, CONTAINERS) and len(value) <= _MOST_ITEMS and depth < 3:
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in pairs:
            yield from _objects_at(f"{path}[{key!r}]", item, depth + 1)


def attributes_of(owner: Owner) -> Iterator[tuple[str, Any]]:
    """The attributes that are looked at, with a module's buffers that its state dict has not."""
    for name, value in _own_attributes(owner):
        if owner.looked_at == "values" and not _is_value(name, value):
            continue
        if owner.looked_at != "generators" or is_generator(value):
            yield name, value
    if isinstance(owner.thing, torch.nn.Module):
        yield from buffers_of(owner)
    elif owner.is_hidden:
        yield STATE, owner.thing.state_dict()


def _own_attributes(owner: Owner) -> Iterator[tuple[str, Any]]:
    thing, but = owner.thing, owner.but
    for kind, names in _INTERNALS.items():
        if isinstance(thing, kind):
            but = but | names if but else names
            break
    if owner.is_hidden and isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
        return  # of those all attributes are in the state dict
    for place in places_of(thing):
        for name, value in list(place.items()):
            if type(name) is str and name not in but:
                yield name, value


def buffers_of(owner: Owner) -> Iterator[tuple[str, Any]]:
    """A module's buffers that no state dict has; of one that is hidden all, and its parameters."""
    module = owner.thing
    if owner.is_hidden:
        yield from itertools.chain(module._buffers.items(), module._parameters.items())
        return
    for name in module._non_persistent_buffers_set:
        if name in module._buffers:
            yield name, module._buffers[name]


def _is_value(name: str, value: Any) -> bool:
    """Numbers and text; what a program has put there also as a list or the like, or a generator.

    Tensors are torch's own business: some of its hooks set one at each step.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return True
    return not name.startswith("_") and (isinstance(value, CONTAINERS) or is_generator(value))


def _is_data(kind: type) -> bool:
    return kind.__module__ in _DATA


def _is_looked_into(root: Any) -> bool:
    return isinstance(root, types.FunctionType) or _is_data(type(root))


def package_of(thing: Any) -> str:
    """The package of an object's class."""
    return type(thing).__module__.partition(".")[0]


def is_own(item: Any, holder: Any) -> bool:
    """Whether it is of the program, or of the same package as what holds it.

    What is in one of torch's datasets or samplers is looked at whatever it is from.
    """
    if isinstance(item, (types.SimpleNamespace, argparse.Namespace)) or _is_data(type(item)):
        return True
    package = package_of(item)
    if package in _NEVER_OWN or package == "builtins":
        return False
    if _is_data(type(holder)) and isinstance(item, (Dataset, Sampler)):
        return True
    return package == package_of(holder) or is_of_the_program(package)


@functools.cache
def is_of_the_program(package: str) -> bool:
    """Whether a package is neither installed nor of the standard library."""
    if package == "__main__":
        return True
    module = sys.modules.get(package)
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    installed = [sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")]
    return file is not None and not any(file.startswith(folder) for folder in installed)
