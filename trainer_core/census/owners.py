"""Whose attributes are looked at: a model's modules, and the program's own objects that they hold.

Objects of other packages (a logger, a tokenizer) are known by identity alone: to set back what is
inside of them could do harm. Only the random generators that they hold are looked at as well.
"""

from __future__ import annotations

import functools
import itertools
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from trainer_core.census.marks import CONTAINERS, SCALARS
from trainer_core.data.generators import is_generator
from trainer_core.wrappers import is_wrapper, plain_namer

_MOST_OBJECTS = 10_000
_MOST_ITEMS = 64  # of one container: a longer one is data
_MOST_DEPTH = 6
_INTERNALS = frozenset(vars(torch.nn.Module())) | {"_compiled_call_impl"}
_PLAIN_BASES = frozenset({"builtins", "typing", "typing_extensions", "abc", "collections.abc"})
_NEVER_OWN = frozenset({"torch", "trainer_core", "ckpttool", "numpy", "torchdata"})
_CLOSED = (*SCALARS, torch.Tensor, types.ModuleType, types.FunctionType, type)


class Owner(NamedTuple):
    """`looked_at`: "all" attributes, only "values" (numbers and text), or only "generators"."""

    thing: Any
    looked_at: str
    is_hidden: bool = False  # a module that the model does not know of: no state dict has it


def is_torchs(kind: type) -> bool:
    """Whether a class is torch's own, or made by torch out of such (as `fully_shard` does)."""
    return all(
        base.__module__.partition(".")[0] == "torch" or base.__module__ in _PLAIN_BASES
        for base in kind.__mro__
    )


def owners_of(root: Any, but: frozenset[int] = frozenset()) -> dict[str, Owner]:
    """All owners within a module or an object, by their path from it; the root's own is "".

    `but`: ids of what is not looked into.
    """
    found: dict[str, Owner] = {}
    if isinstance(root, torch.nn.Module):
        found.update(_modules(root, "", is_hidden=False))
    elif _attributes(root) is not None and not is_torchs(type(root)):
        found[""] = Owner(root, "all")
    seen = {id(owner.thing) for owner in found.values()} | but | {id(root)}
    waiting = deque((path, owner, 0) for path, owner in found.items())
    while waiting and len(seen) < _MOST_OBJECTS:
        path, owner, depth = waiting.popleft()
        if owner.looked_at == "values" or depth >= _MOST_DEPTH:
            continue
        for name, item in _objects_in(path, owner):
            if id(item) in seen:
                continue
            for inner, more in _owners_at(name, item, owner):
                seen.add(id(more.thing))
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
    if isinstance(item, torch.nn.Module):
        if holder.looked_at == "all":
            yield from _modules(item, path, is_hidden=True)
    elif holder.looked_at == "all" and _is_own(type(item), type(holder.thing)):
        yield path, Owner(item, "all")
    elif type(item).__module__.partition(".")[0] not in _NEVER_OWN:
        yield path, Owner(item, "generators")


def _objects_in(path: str, owner: Owner) -> Iterator[tuple[str, Any]]:
    """Objects that have attributes themselves, in attributes and short containers."""
    for name, value in _own_attributes(owner.thing):
        yield from _objects_at(_joined(path, name), value, 0)


def _objects_at(path: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _CLOSED) or is_generator(value):
        return
    if not isinstance(value, CONTAINERS):
        if _attributes(value) is not None:
            yield path, value
    elif len(value) <= _MOST_ITEMS and depth < 3:
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in pairs:
            yield from _objects_at(f"{path}[{key!r}]", item, depth + 1)


def _attributes(thing: Any) -> dict[str, Any] | None:
    attributes = getattr(thing, "__dict__", None)
    return attributes if type(attributes) is dict else None


def attributes_of(owner: Owner) -> Iterator[tuple[str, Any]]:
    """The attributes that are looked at, with a module's buffers that its state dict has not."""
    wanted = {"values": _is_scalar, "generators": is_generator}.get(owner.looked_at)
    for name, value in _own_attributes(owner.thing):
        if wanted is None or wanted(value):
            yield name, value
    if isinstance(owner.thing, torch.nn.Module):
        yield from buffers_of(owner)


def _own_attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    is_module = isinstance(thing, torch.nn.Module)
    for name, value in list((_attributes(thing) or {}).items()):
        if type(name) is str and not (is_module and name in _INTERNALS):
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


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _is_own(kind: type, holder: type) -> bool:
    """Whether a class is of the program, or of the same package as the class that holds it."""
    if issubclass(kind, types.SimpleNamespace):
        return True
    top = kind.__module__.partition(".")[0]
    if top in _NEVER_OWN or top == "builtins":
        return False
    return top == holder.__module__.partition(".")[0] or _is_of_the_program(top)


@functools.cache
def _is_of_the_program(package: str) -> bool:
    """Whether a package is neither installed nor of the standard library."""
    if package == "__main__":
        return True
    file = getattr(sys.modules.get(package), "__file__", None)
    installed = [sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")]
    return file is not None and not any(file.startswith(folder) for folder in installed)
