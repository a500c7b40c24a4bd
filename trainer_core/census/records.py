"""Objects that are nothing but attributes and items, as plain values: those that pickle knows how.

So are dataclasses, named tuples, and other classes of the program's own that say nothing themselves
about how they are copied. They are made again without calling anything of the class.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from trainer_core.census.owners import is_own
from trainer_core.census.places import place_of, places_of
from trainer_core.census.plain_forms import class_named, is_found
from trainer_core.saving.savable import CheckpointError

_OWN_WAYS = ("__getnewargs__", "__getnewargs_ex__", "__copy__", "__deepcopy__")
_GIVING = ("__getstate__", "__setstate__")
_BASES = (tuple, list, OrderedDict, dict, set)


def is_record(value: Any, holder: Any) -> bool:
    """Whether it is such an object, of a class that this program has by name."""
    return is_own(value, holder) and _is_plain(type(value)) and is_found(type(value))


def _is_plain(kind: Any) -> bool:
    if issubclass(kind, (torch.Tensor, torch.nn.Module, BaseException, type)):
        return False
    if hasattr(kind, "__del__") or kind.__flags__ & (1 << 8):  # immutable: not made in Python
        return False
    base: Any = base_of(kind)
    if issubclass(kind, tuple):
        return hasattr(kind, "_fields") and kind.__new__ is not tuple.__new__
    if kind.__new__ is not base.__new__ or kind.__reduce__ is not base.__reduce__:
        return False
    own = [name for name in _OWN_WAYS if hasattr(kind, name)]
    if not dataclasses.is_dataclass(kind):  # with slots those have both, and mean nothing by it
        own += [name for name in _GIVING if getattr(kind, name, None) is not _of_object(name)]
    return not own and kind.__reduce_ex__ is object.__reduce_ex__


def _of_object(name: str) -> Any:
    return getattr(object, name, None)


def base_of(kind: type) -> type:
    """The kind of container that a class is, or `object`."""
    return next((base for base in _BASES if issubclass(kind, base)), object)


def attributes_in(value: Any) -> dict[str, Any]:
    """All attributes, wherever they lie."""
    return {name: item for place in places_of(value) for name, item in place.items()}


def items_in(value: Any) -> list[Any] | None:
    """Of a container its items (of a mapping keys and values), else None."""
    if base_of(type(value)) is object:
        return None
    if isinstance(value, Mapping):
        return [list(value.keys()), list(value.values())]
    return list(value)


def made(named: Any, attributes: Mapping[str, Any], items: Any, here: Any) -> Any:
    """Such an object again, of the class of what is `here` or that has this name.

    Raises CheckpointError.
    """
    module, name = named
    kind = type(here) if type(here).__qualname__ == name else class_named(module, name)
    if kind is None or not _is_plain(kind):
        raise CheckpointError(f"is no {name} here, while one was saved")
    base: Any = base_of(kind)
    if base is tuple:
        return tuple.__new__(kind, items)
    new = base.__new__(kind)
    if base is list:
        list.extend(new, items)
    elif base is set:
        set.update(new, items)
    elif base is not object:
        for key, value in zip(*items, strict=True):
            base.__setitem__(new, key, value)
    for attribute, value in attributes.items():
        place_of(new, attribute)[attribute] = value
    return new


def refill(target: Any, source: Any) -> None:
    """Gives a container of one's own the items and attributes of another of its class."""
    base: Any = base_of(type(target))
    base.clear(target)
    if base is list:
        list.extend(target, source)
    elif base is set:
        set.update(target, source)
    else:
        for key in source:
            base.__setitem__(target, key, base.__getitem__(source, key))
    for attribute, value in attributes_in(source).items():
        place_of(target, attribute)[attribute] = value
