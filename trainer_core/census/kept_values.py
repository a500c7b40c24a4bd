"""Values of attributes as a checkpoint holds them, and back, bit for bit and type for type.

Plain values, lists, tuples, dictionaries and tensors are kept as they are. The rest becomes a
dictionary whose first key begins with `$`: `{"$deque": [1, 2], "maxlen": 8}`. Tensors of the run's
device are `{"$tensor": …}`, so that they come back to where the run is.
"""

from __future__ import annotations

import enum
import functools
import random
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainer_core.census.marks import ABSENT, CONTAINERS, Container, Mark, is_array, was_nothing
from trainer_core.data.generators import is_generator, set_state, state_of
from trainer_core.resuming.fitting import is_ordinary
from trainer_core.saving.savable import CheckpointError

MOST_BYTES = 16 << 20
"""Of one attribute that is no buffer. More belongs in a buffer, which is kept whatever its size."""

MOST_TOTAL_BYTES = 64 << 20
"""Of all attributes together, buffers aside: mostly activations that somebody stores to look at."""

MOST_GRAPH_BYTES = 1 << 20
"""Of a tensor that hangs on the graph of a forward: mostly something to look at."""

_MOST_ITEMS = 10_000  # in all, with those within
_MOST_PLAIN = 100_000  # of a list or a tuple that holds numbers and nothing else
_MOST_DEPTH = 20
_AS_THEY_ARE = (type(None), bool, int, float, complex, str, bytes)
_NUMBERS = frozenset({bool, int, float})
_TORCH_PLAIN = (torch.dtype, torch.device, torch.Size, torch.layout)
_SEQUENCES: dict[type, str] = {set: "$set", frozenset: "$frozenset"}
_MAPPINGS: dict[type, str] = {
    dict: "$dict",
    OrderedDict: "$OrderedDict",
    Counter: "$Counter",
    defaultdict: "$defaultdict",
}
_NEVER_STATE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)


class UnkeptError(Exception):
    """A value that a checkpoint does not hold. `made_lazily`: it looks like it is made again.

    So look a handle (a file, a lock, a function) where there was nothing before, and a big tensor
    that hangs on the last forward: neither could be gone on from.
    """

    def __init__(self, path: str, words: str, *, made_lazily: bool = False) -> None:
        super().__init__(f"{path}: {words}" if path else words)
        self.path, self.words, self.made_lazily = path, words, made_lazily


class Keeper:
    """Makes of one attribute's value what is kept of it.

    With `copied` no tensor is shared. `caches`: what was nothing before and is too big now counts
    as made lazily (a dataset that remembers samples).
    """

    def __init__(self, *, copied: bool = False, caches: bool = False) -> None:
        self._copied, self._caches = copied, caches
        self._bytes = self._items = self._total = 0

    def keep(self, value: Any, before: Mark, path: str = "", *, any_size: bool = False) -> Any:
        """What is kept of `value`, which was `before`. Raises UnkeptError."""
        self._bytes = self._items = 0
        kept = self._keep(value, before, path, 0, any_size)
        self._total += self._bytes
        if self._total > MOST_TOTAL_BYTES:
            self._total -= self._bytes
            size = _bytes(MOST_TOTAL_BYTES)
            words = f"is not kept: with it attributes would have more than {size} in all"
            raise UnkeptError(path, words, made_lazily=was_nothing(before))
        return kept

    def _keep(self, value: Any, before: Mark, path: str, depth: int, any_size: bool) -> Any:
        kind = type(value)
        if kind in _AS_THEY_ARE or kind in _TORCH_PLAIN:
            self._count(len(value) if kind in (str, bytes) else 8, before, path)
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, before, path, any_size)
        if is_generator(value):
            return _kept_generator(value)
        if is_array(value):
            return self._array(value, before, path)
        self._items += 1
        if depth > _MOST_DEPTH:
            raise UnkeptError(path, "is nested too deeply, or contains itself")
        if kind in (list, tuple) and _NUMBERS.issuperset(map(type, value)):
            self._bytes += 8 * len(value)
            if len(value) <= _MOST_PLAIN:
                return kind(value)
        if isinstance(value, CONTAINERS) and self._items + len(value) > _MOST_ITEMS:
            lazily = self._caches and was_nothing(before)
            raise UnkeptError(path, "is too big to be kept", made_lazily=lazily)
        if kind in _MAPPINGS:
            return self._mapping(value, before, path, depth)
        if kind in (list, tuple, set, frozenset, deque):
            return self._sequence(value, before, path, depth)
        return _kept_object(value, before, path)

    def _count(self, size: int, before: Mark, path: str) -> None:
        self._bytes += size
        self._items += 1
        if self._bytes > MOST_BYTES or self._items > _MOST_ITEMS:
            lazily = self._caches and was_nothing(before)
            raise UnkeptError(path, "is too big to be kept", made_lazily=lazily)

    def _tensor(self, value: torch.Tensor, before: Mark, path: str, any_size: bool) -> Any:
        plain = value.detach()
        if type(plain) is torch.Tensor and (plain.is_inference() or not is_ordinary(plain)):
            plain = _dense(plain)
        if not is_ordinary(plain):
            raise UnkeptError(path, f"is a {_form(value)}, which is not kept")
        size = value.numel() * value.element_size()
        words = f"is a tensor of {_bytes(size)}, and not kept"
        if value.grad_fn is not None and size > MOST_GRAPH_BYTES:
            raise UnkeptError(path, words, made_lazily=True)
        if not any_size and self._bytes + size > MOST_BYTES:
            lazily = self._caches and was_nothing(before)
            raise UnkeptError(
                path, f"{words}: as a buffer (persistent=False) it is", made_lazily=lazily
            )
        self._bytes += 0 if any_size else size
        # torch saves whole storages, of which a view may use little
        if self._copied or plain.untyped_storage().nbytes() > size:
            plain = plain.clone()
        if plain.device.type == "cpu":
            return plain
        return {"$tensor": plain}

    def _array(self, value: Any, before: Mark, path: str) -> Any:
        if value.dtype.kind not in "biufc" or not value.dtype.isnative:
            raise UnkeptError(path, f"is an array of {value.dtype}, which is not kept")
        self._count(value.nbytes, before, path)
        if not hasattr(value, "__array_finalize__") or value.ndim == 0:
            return {"$numpy": value.dtype.str, "value": value.item(), "array": _is_ndarray(value)}
        try:
            return {"$array": torch.from_numpy(value.copy()), "dtype": value.dtype.str}
        except TypeError:  # a kind of number that torch has not
            raise UnkeptError(path, f"is an array of {value.dtype}, which is not kept") from None

    def _sequence(self, value: Any, before: Mark, path: str, depth: int) -> Any:
        items = self._each(enumerate(value), before, path, depth)
        if type(value) in (list, tuple):
            return type(value)(items)
        if type(value) is deque:
            return {"$deque": items, "maxlen": value.maxlen}
        return {_SEQUENCES[type(value)]: items}

    def _mapping(self, value: Any, before: Mark, path: str, depth: int) -> Any:
        plain = all(type(key) in _AS_THEY_ARE for key in value)
        if not plain:
            raise UnkeptError(path, "is a dictionary with keys that are not plain")
        items = self._each(value.items(), before, path, depth)
        if type(value) is dict and not str(next(iter(value), "")).startswith("$"):
            return dict(zip(value, items, strict=True))
        return {_MAPPINGS[type(value)]: [list(value), items]}

    def _each(self, pairs: Any, before: Mark, path: str, depth: int) -> list[Any]:
        """All items; what is only made lazily does not hide what is not."""
        kept, lazily = [], None
        for key, item in pairs:
            was = before.of(key) if isinstance(before, Container) else ABSENT
            try:
                kept.append(self._keep(item, was, f"{path}[{key!r}]", depth + 1, False))
            except UnkeptError as error:
                if not error.made_lazily:
                    raise
                lazily = error
                if self._items > _MOST_ITEMS or self._bytes > MOST_BYTES:
                    break
        if lazily is not None:
            raise lazily
        return kept


def _kept_object(value: Any, before: Mark, path: str) -> Any:
    if isinstance(value, enum.Enum) and type(value.value) in _AS_THEY_ARE:
        return {"$enum": value.value, "class": type(value).__qualname__}
    kind = type(value).__name__
    name = kind if isinstance(value, _NEVER_STATE) else f"{kind} object"
    article = "an" if name[0] in "aeiouAEIOU" else "a"
    lazily = was_nothing(before) and (_is_handle(value) or _hangs_on_graph(value))
    raise UnkeptError(path, f"{article} {name}, which is not kept", made_lazily=lazily)


def _is_handle(value: Any) -> bool:
    """Whether it is nothing that holds data: not even pickle could save it."""
    if isinstance(value, (*_NEVER_STATE, functools.partial)):
        return True
    try:
        value.__reduce_ex__(4)
    except Exception:  # each class says it in its own way
        return True
    return False


def _hangs_on_graph(value: Any) -> bool:
    """Whether it holds what a forward computed: an output of the model, stored to look at."""
    if isinstance(value, Mapping):
        items: Any = value.values()
    else:
        items = value if isinstance(value, tuple) else getattr(value, "__dict__", {}).values()
    return any(isinstance(item, torch.Tensor) and item.grad_fn is not None for item in items)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of one that was expanded, or made under inference_mode; of another the same again."""
    odd = tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested
    return tensor if odd or tensor.device.type == "meta" else tensor.clone()


def _is_ndarray(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _form(tensor: torch.Tensor) -> str:
    kind = type(tensor).__name__
    return kind if kind not in ("Tensor", "Parameter") else f"{tensor.layout} {kind}".lower()


def _bytes(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def _kept_generator(value: Any) -> dict[str, Any]:
    kept = {"$generator": _kind_of(value), "state": state_of(value)}
    if isinstance(value, torch.Generator):
        kept["device"] = value.device.type
    return kept


def _kind_of(generator: Any) -> str:
    if isinstance(generator, torch.Generator):
        return "torch"
    if isinstance(generator, random.Random):
        return "python"
    return "numpy" if hasattr(generator, "bit_generator") else "numpy-legacy"


Undo = list[Callable[[], None]]


class Returner:
    """Makes values of what was kept; what is here already is changed in place where that fits.

    So others that hold the same list or tensor see it too. `undo` takes what puts it all back.
    """

    def __init__(self, device: torch.device, undo: Undo) -> None:
        self._device, self._undo = device, undo

    def value(self, kept: Any, here: Any) -> Any:
        """The value, for an attribute that is `here` now. Raises CheckpointError."""
        if isinstance(kept, torch.Tensor):
            return self._tensor(kept, here, torch.device("cpu"))
        if type(kept) in (list, tuple):
            items = self._items(kept, here)
            return self._list(items, here) if type(kept) is list else tuple(items)
        if isinstance(kept, Mapping):
            first = next(iter(kept), "")
            if isinstance(first, str) and first.startswith("$"):
                return self._special(first, kept, here)
            return self._mapping(dict, list(kept), list(kept.values()), here)
        return kept

    def _special(self, form: str, kept: Mapping[str, Any], here: Any) -> Any:
        content: Any = kept[form]
        if form == "$tensor":
            return self._tensor(content, here, self._device)
        if form == "$generator":
            return self._generator(kept, here)
        if form == "$array":
            return self._array(content.numpy(), here)
        if form == "$numpy":
            return _number(kept)
        if form == "$enum":
            return _member(content, kept["class"], here)
        if form == "$deque":
            return self._deque(self._items(content, here), kept["maxlen"], here)
        for kind, name in _SEQUENCES.items():
            if name == form:
                return kind(self._items(content, None))
        for kind, name in _MAPPINGS.items():
            if name == form:
                keys, values = content
                return self._mapping(kind, keys, values, here)
        raise CheckpointError(f"is kept as {form[:40]!r}, which is not known here")

    def _tensor(self, kept: torch.Tensor, here: Any, device: torch.device) -> torch.Tensor:
        if not isinstance(here, torch.Tensor):
            return kept.to(device, copy=True)
        fits = (
            is_ordinary(here)
            and (here.shape, here.dtype) == (kept.shape, kept.dtype)
            and here.grad_fn is None
        )
        if not fits:
            return kept.to(here.device, copy=True)
        before = here.detach().clone()
        self._undo.append(lambda: _copy(here, before))
        _copy(here, kept)
        return here

    def _array(self, kept: Any, here: Any) -> Any:
        fits = _is_ndarray(here) and (here.shape, here.dtype) == (kept.shape, kept.dtype)
        if not fits or not here.flags.writeable:
            return kept.copy()
        before = here.copy()
        self._undo.append(lambda: here.__setitem__(..., before))
        here[...] = kept
        return here

    def _generator(self, kept: Mapping[str, Any], here: Any) -> Any:
        kind, state = kept["$generator"], kept["state"]
        if here is not None and not is_generator(here):
            words = f"is {type(here).__name__} here, while a generator was saved"
            raise CheckpointError(words)
        if here is None or _kind_of(here) != kind:
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

    def _list(self, items: list[Any], here: Any) -> list[Any]:
        if type(here) is not list:
            return items
        before = list(here)
        self._undo.append(lambda: here.__setitem__(slice(None), before))
        here[:] = items
        return here

    def _deque(self, items: list[Any], maxlen: int | None, here: Any) -> Any:
        if type(here) is not deque or here.maxlen != maxlen:
            return deque(items, maxlen)
        return self._refilled(here, items, list(here))

    def _mapping(self, kind: Any, keys: list[Any], values: list[Any], here: Any) -> Any:
        known = here if type(here) is kind else {}
        pairs = [
            (key, self.value(value, dict.get(known, key)))
            for key, value in zip(keys, values, strict=True)
        ]
        if type(here) is kind:
            return self._refilled(here, pairs, list(here.items()))
        if kind is defaultdict:
            raise CheckpointError("is no defaultdict here, while one was saved")
        return kind(dict(pairs)) if kind is Counter else kind(pairs)

    def _refilled(self, here: Any, items: list[Any], before: list[Any]) -> Any:
        self._undo.append(lambda: _refill(here, before))
        _refill(here, items)
        return here


def _refill(container: Any, items: list[Any]) -> None:
    container.clear()
    if isinstance(container, deque):
        container.extend(items)
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


def _member(value: Any, kind: str, here: Any) -> Any:
    if type(here).__qualname__ != kind:
        raise CheckpointError(f"is no {kind} here, while one was saved")
    return type(here)(value)


def is_same(one: Any, other: Any) -> bool:
    """Whether two results of `Keeper.keep` are the same."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other) or repr(one) == repr(other)
