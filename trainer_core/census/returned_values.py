"""Values of attributes again, of what `kept_values` made of them, bit for bit and type for type."""

from __future__ import annotations

import array
import copy
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainer_core.census.kept_values import FACTORIES, MAPPINGS, SEQUENCES
from trainer_core.census.marks import BYTES
from trainer_core.census.plain_forms import from_plain_form
from trainer_core.census.records import made, refill
from trainer_core.data.generators import is_generator, kind_of, set_state, state_of
from trainer_core.resuming.fitting import is_ordinary
from trainer_core.saving.savable import CheckpointError

Undo = list[Callable[[], None]]


class Returner:
    """Makes values of what was kept; what is here already is changed in place where that fits.

    So others that hold the same list or tensor see it too. What was one object then is one again.
    `undo` takes what puts it all back. `parts`: what the run has anyway, by its words.
    """

    def __init__(
        self, device: torch.device, undo: Undo, parts: Mapping[str, Any] | None = None
    ) -> None:
        self._device, self._undo, self._parts = device, undo, parts or {}
        self._done: dict[int, tuple[Any, Any]] = {}  # with what was kept, so that its id stays its

    def value(self, kept: Any, here: Any, *, fresh: bool = False) -> Any:
        """The value, for an attribute that is `here` now. Raises CheckpointError.

        With `fresh` what is here was replaced, and stays as it is for others who hold it.
        """
        form = next(iter(kept), "") if isinstance(kept, Mapping) else ""
        if form == "$new":
            return self.value(kept["$new"], here, fresh=True)
        if not isinstance(kept, (list, Mapping, torch.Tensor)):
            return tuple(self._items(kept, here)) if type(kept) is tuple else kept
        if id(kept) not in self._done:
            self._done[id(kept)] = kept, self._made(form, kept, here, fresh)
        return self._done[id(kept)][1]

    def _made(self, form: Any, kept: Any, here: Any, fresh: bool) -> Any:
        if isinstance(kept, torch.Tensor):
            return self._tensor(kept, here, torch.device("cpu"), fresh)
        if isinstance(kept, list):
            return self._list(self._items(kept, here), here, fresh)
        if isinstance(form, str) and form.startswith("$"):
            return self._special(form, kept, here, fresh)
        return self._mapping(dict, list(kept), list(kept.values()), here, fresh)

    def _special(self, form: str, kept: Mapping[str, Any], here: Any, fresh: bool) -> Any:
        content: Any = kept[form]
        if form == "$tensor":
            return self._tensor(content, here, self._device, fresh)
        if form == "$leaf":
            return self._leaf(content, here, fresh, kept.get("parameter") is True)
        if form == "$generator":
            return self._generator(kept, here)
        if form == "$array":
            return self._array(content.numpy(), here, fresh)
        if form in _ALONE:
            return _ALONE[form](kept)
        if form == "$bytes":
            return self._bytes(kept, here, fresh)
        if form == "$part":
            return self._part(content)
        if form == "$object":
            return self._object(kept, here, fresh)
        if form == "$deque":
            return self._deque(self._items(content, here), kept["maxlen"], here, fresh)
        for kind, name in SEQUENCES.items():
            if name == form:
                return self._set(kind, self._items(content, None), here, fresh)
        for kind, name in MAPPINGS.items():
            if name == form:
                return self._mapping(kind, content[0], content[1], here, fresh, kept)
        return from_plain_form(form, kept, here)

    def _object(self, kept: Mapping[str, Any], here: Any, fresh: bool) -> Any:
        attributes = {name: self.value(item, None) for name, item in kept["attributes"].items()}
        items = self.value(kept.get("items"), None)
        new = made(kept["$object"], attributes, items, here)
        if fresh or items is None or type(here) is not type(new) or isinstance(here, tuple):
            return new
        before = copy.copy(here)
        self._undo.append(lambda: refill(here, before))
        refill(here, new)
        return here

    def _part(self, words: Any) -> Any:
        if words not in self._parts:
            raise CheckpointError(f"was {words!r:.60}, which is not here")
        return self._parts[words]

    def _tensor(
        self, kept: torch.Tensor, here: Any, device: torch.device, fresh: bool
    ) -> torch.Tensor:
        if not isinstance(here, torch.Tensor):
            return kept.to(device, copy=True)
        fits = (
            is_ordinary(here)
            and (here.shape, here.dtype) == (kept.shape, kept.dtype)
            and here.grad_fn is None
        )
        if not fits or fresh:
            return kept.to(here.device, copy=True)
        before = here.detach().clone()
        self._undo.append(lambda: _copy(here, before))
        _copy(here, kept)
        return here

    def _leaf(self, kept: Any, here: Any, fresh: bool, is_parameter: bool) -> torch.Tensor:
        """One that has a gradient of its own."""
        value = self.value(kept, here, fresh=fresh)
        if value is not here:
            value = torch.nn.Parameter(value) if is_parameter else value.requires_grad_()
        leaf: torch.Tensor = value
        return leaf

    def _array(self, kept: Any, here: Any, fresh: bool) -> Any:
        numpy = sys.modules["numpy"]
        fits = type(here) is numpy.ndarray and (here.shape, here.dtype) == (kept.shape, kept.dtype)
        if not fits or fresh or not here.flags.writeable:
            return kept.copy(order="K")
        before = here.copy()
        self._undo.append(lambda: here.__setitem__(..., before))
        here[...] = kept
        return here

    def _bytes(self, kept: Mapping[str, Any], here: Any, fresh: bool) -> Any:
        code = kept.get("of")
        data = _bytes_of(kept["$bytes"])
        new: Any = bytearray(data) if code is None else array.array(code, data)
        if fresh or type(here) not in BYTES or getattr(here, "typecode", None) != code:
            return new
        before = here[:]
        self._undo.append(lambda: here.__setitem__(slice(None), before))
        here[:] = new
        return here

    def _generator(self, kept: Mapping[str, Any], here: Any) -> Any:
        kind, state = kept["$generator"], kept["state"]
        if here is not None and not is_generator(here):
            words = f"is {type(here).__name__} here, while a generator was saved"
            raise CheckpointError(words)
        if here is None or kind_of(here) != kind:
            here = self._new_generator(kind, kept)
        before = state_of(here)
        self._undo.append(lambda: set_state(here, before))
        set_state(here, state)
        return here

    def _new_generator(self, kind: str, kept: Mapping[str, Any]) -> Any:
        if kind == "torch":
            return torch.Generator("cpu" if kept.get("device") == "cpu" else self._device)
        if kind == "python":
            return random.Random()  # noqa: S311 - not for secrets
        import numpy

        if kind == "numpy-legacy":
            return numpy.random.RandomState()
        return numpy.random.Generator(getattr(numpy.random, kept["state"]["bit_generator"])())

    def _items(self, kept: Any, here: Any) -> list[Any]:
        known = list(here) if isinstance(here, (list, tuple, deque)) else []
        known += [None] * (len(kept) - len(known))
        return [self.value(item, old) for item, old in zip(kept, known, strict=False)]

    def _list(self, items: list[Any], here: Any, fresh: bool) -> list[Any]:
        if type(here) is not list or fresh:
            return items
        before = list(here)
        self._undo.append(lambda: here.__setitem__(slice(None), before))
        here[:] = items
        return here

    def _set(self, kind: type, items: list[Any], here: Any, fresh: bool) -> Any:
        if type(here) is not set or kind is not set or fresh:
            return kind(items)
        return self._refilled(here, items, list(here))

    def _deque(self, items: list[Any], maxlen: int | None, here: Any, fresh: bool) -> Any:
        if type(here) is not deque or here.maxlen != maxlen or fresh:
            return deque(items, maxlen)
        return self._refilled(here, items, list(here))

    def _mapping(
        self,
        kind: Any,
        keys: list[Any],
        values: list[Any],
        here: Any,
        fresh: bool,
        kept: Mapping[str, Any] | None = None,
    ) -> Any:
        known = here if type(here) is kind else {}
        pairs = [
            (key, self.value(value, dict.get(known, key)))
            for key, value in zip(keys, values, strict=True)
        ]
        if type(here) is kind and not fresh:
            return self._refilled(here, pairs, list(here.items()))
        new: Any = OrderedDict() if kind is OrderedDict else kind()
        if kind is defaultdict:
            new.default_factory = _factory(kept or {}, here)
        _refill(new, pairs)
        if kind is OrderedDict:
            more = (kept or {}).get("attributes", {})
            vars(new).update({name: self.value(value, None) for name, value in more.items()})
        return new

    def _refilled(self, here: Any, items: list[Any], before: list[Any]) -> Any:
        self._undo.append(lambda: _refill(here, before))
        _refill(here, items)
        return here


def _factory(kept: Mapping[str, Any], here: Any) -> Any:
    named = {factory.__name__: factory for factory in FACTORIES}
    if "factory" in kept:
        return None if kept["factory"] is None else named[kept["factory"]]
    if type(here) is not defaultdict:
        raise CheckpointError("is no defaultdict here, while one was saved")
    return here.default_factory


def _refill(container: Any, items: list[Any]) -> None:
    container.clear()
    if isinstance(container, deque):
        container.extend(items)
    elif isinstance(container, set):
        container.update(items)
    else:
        for key, value in items:  # a Counter's own update would add
            container[key] = value


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)


def _number(kept: Mapping[str, Any]) -> Any:
    import numpy

    number = numpy.dtype(kept["$numpy"]).type(kept["value"])
    return numpy.array(number) if kept["array"] else number


def _bytes_of(kept: Any) -> bytes:
    data: bytes = kept.numpy().tobytes()
    return data


def _raw_array(kept: Mapping[str, Any]) -> Any:
    """Dates, text and the like, which torch has not."""
    import numpy

    dtype = numpy.dtype(kept["dtype"])
    if dtype.hasobject:
        raise CheckpointError("is an array of objects, which never is kept")
    flat, shape = numpy.frombuffer(_bytes_of(kept["$raw"]), dtype), kept["shape"]
    return flat[0] if shape is None else flat.reshape(shape).copy()


_ALONE: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "$numpy": _number,
    "$raw": _raw_array,
    "$empty": lambda kept: b"",  # which torch's own loading refuses
}
