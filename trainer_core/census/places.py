"""Where attributes lie: in an object's `__dict__` or slots, or in the closure of a function.

All are looked at, and set, as dictionaries; what a class has of its own to set an attribute
(`__setattr__`, a frozen dataclass's) is passed by.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch

from trainer_core.census.marks import ABSENT

Place = MutableMapping[str, Any]


class _Slots(Place):
    """The slots of one object that hold something."""

    def __init__(self, thing: Any, slots: dict[str, Any]) -> None:
        self._thing, self._slots = thing, slots

    def __getitem__(self, name: str) -> Any:
        try:
            return self._slots[name].__get__(self._thing)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._slots[name].__set__(self._thing, value)

    def __delitem__(self, name: str) -> None:
        self._slots[name].__delete__(self._thing)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._slots if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Cells(Place):
    """The variables that a function has from the one around it."""

    def __init__(self, function: types.FunctionType) -> None:
        self._cells = dict(
            zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        )

    def __getitem__(self, name: str) -> Any:
        try:
            return self._cells[name].cell_contents
        except ValueError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self._cells[name].cell_contents

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._cells if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def places_of(thing: Any) -> list[Place]:
    """Where its attributes lie; nowhere for what can have none (a number, a list)."""
    found: list[Place] = []
    attributes = getattr(thing, "__dict__", None)
    if type(attributes) is dict:
        found.append(attributes)
    if isinstance(thing, types.FunctionType):
        found.append(_Cells(thing))
    slots = _slots_of(type(thing))
    if slots:
        found.append(_Slots(thing, slots))
    return found


def place_of(thing: Any, name: str) -> Place:
    """The one that has this attribute, of a module also its buffers, parameters and modules.

    Where none has it, the one that can.
    """
    places = places_of(thing)
    if isinstance(thing, torch.nn.Module):
        places = [thing._buffers, thing._parameters, thing._modules, *places]
    for place in places:
        if name in place:
            return place
    if name in _slots_of(type(thing)):
        return places[-1]
    attributes: Place = vars(thing)
    return attributes


def put(target: Place, name: str, value: Any) -> None:
    """Sets an attribute, or deletes it with a value of ABSENT."""
    if value is ABSENT:
        target.pop(name, None)
    else:
        target[name] = value


_slots: weakref.WeakKeyDictionary[type, dict[str, Any]] = weakref.WeakKeyDictionary()


def _slots_of(kind: type) -> dict[str, Any]:
    """The descriptors of a class's slots, by the names that the attributes really have."""
    known = _slots.get(kind)
    if known is not None:
        return known
    found = _slots[kind] = {}
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else tuple(names):
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{base.__name__.lstrip('_')}{name}"
            slot = vars(base).get(name)
            if isinstance(slot, types.MemberDescriptorType):
                found.setdefault(name, slot)
    return found
