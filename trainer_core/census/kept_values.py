"""Values of attributes as a checkpoint holds them: `returned_values` makes them again of that.

Plain values, lists, tuples, dictionaries and tensors are kept as they are. The rest becomes a
dictionary whose first key begins with `$`: `{"$deque": [1, 2], "maxlen": 8}`. Tensors of the run's
device are `{"$tensor": …}`, so that they come back to where the run is. `{"$new": …}` is what had
taken the place of another object, which others may still hold; `{"$part": "model.layer"}` is
something that the run has anyway.
"""

from __future__ import annotations

import array
import functools
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from trainer_core.census.handles import NEVER_STATE, hangs_on_graph, is_handle
from trainer_core.census.marks import (
    ABSENT,
    BYTES,
    CONTAINERS,
    Container,
    Mark,
    is_array,
    was_nothing,
    was_replaced,
)
from trainer_core.census.owners import is_own
from trainer_core.census.plain_forms import PLAIN, plain_form
from trainer_core.census.records import attributes_in, is_record, items_in
from trainer_core.data.generators import is_generator, kind_of, state_of
from trainer_core.resuming.fitting import is_ordinary
from trainer_core.saving.savable import CheckpointError, to_plain

MOST_BYTES = 16 << 20
"""Of one attribute that is no buffer. More belongs in a buffer, which is kept whatever its size."""

MOST_TOTAL_BYTES = 64 << 20
"""Of all attributes together, buffers aside: mostly activations that somebody stores to look at."""

MOST_GRAPH_BYTES = 1 << 20
"""Of a tensor that hangs on the graph of a forward: mostly something to look at."""

FACTORIES = (list, dict, set, int, float, bool, str, tuple, deque, Counter, OrderedDict)
"""What a defaultdict makes, where it can be kept by name."""

_MOST_ITEMS = 10_000  # in all, with those within
_MOST_PLAIN = 100_000  # of a list or a tuple that holds numbers and nothing else
_MOST_DEPTH = 20
_NUMBERS = frozenset({bool, int, float})
_TORCH_PLAIN = (torch.dtype, torch.device, torch.Size, torch.layout)
SEQUENCES: dict[type, str] = {set: "$set", frozenset: "$frozenset"}
MAPPINGS: dict[type, str] = {
    dict: "$dict",
    OrderedDict: "$OrderedDict",
    Counter: "$Counter",
    defaultdict: "$defaultdict",
}


class UnkeptError(Exception):
    """A value that a checkpoint does not hold. `made_lazily`: it looks like it is made again.

    So look a handle (a file, a lock, a function) where there was nothing before, and a big tensor
    that hangs on the last forward: neither could be gone on from.
    """

    def __init__(self, path: str, words: str, *, made_lazily: bool = False) -> None:
        super().__init__(f"{path}: {words}" if path else words)
        self.path, self.words, self.made_lazily = path, words, made_lazily


class Keeper:
    """Makes of the values of attributes what is kept of them; what is one object stays one.

    With `copied` no tensor is shared. `caches`: what was nothing before and is too big now counts
    as made lazily (a dataset that remembers samples). `parts` gives the words for what the run has
    anyway, by id.
    """

    def __init__(
        self,
        *,
        copied: bool = False,
        caches: bool = False,
        parts: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        self._copied, self._caches = copied, caches
        self._find_parts = parts  # mostly there is no need to
        self._bytes = self._items = self._total = 0
        self._any_size, self._holder, self._own = False, None, ""
        self._done: dict[int, tuple[Any, Any]] = {}  # with the value, so that its id stays its

    def keep(
        self,
        value: Any,
        before: Mark,
        *,
        any_size: bool = False,
        holder: Any = None,
        path: str = "",
    ) -> Any:
        """What is kept of `value`, which was `before`. Raises UnkeptError.

        `holder`: whose attribute it is; objects of its package are looked into as well. `path`: its
        own, under which it is no part of the run.
        """
        self._bytes = self._items = 0
        self._any_size, self._holder, self._own = any_size, holder, path
        kept = self._keep(value, before, "", 0)
        self._total += self._bytes
        if self._total > MOST_TOTAL_BYTES:
            self._total -= self._bytes
            size = _bytes(MOST_TOTAL_BYTES)
            words = f"is not kept: with it attributes would have more than {size} in all"
            raise UnkeptError("", words, made_lazily=was_nothing(before))
        return kept

    def keep_state(self, state: Any) -> Any:
        """What is kept of a state dict, whatever its size. Raises UnkeptError."""
        try:
            plain = to_plain(state, "")
        except CheckpointError as error:
            raise UnkeptError("", str(error)) from None
        return {"$state": _copied(plain) if self._copied else plain}

    def _keep(self, value: Any, before: Mark, path: str, depth: int) -> Any:
        kind = type(value)
        if kind in PLAIN or kind in _TORCH_PLAIN:
            self._count(len(value) if kind in (str, bytes) else 8, before, path)
            return {"$empty": 0} if value == b"" and kind is bytes else value
        if id(value) in self._parts and (depth or self._parts[id(value)] != self._own):
            return {"$part": self._parts[id(value)]}
        plain = plain_form(value)
        if plain is not None:
            self._count(64, before, path)
            return plain
        if id(value) not in self._done:
            self._done[id(value)] = value, self._changeable(value, before, path, depth)
        kept = self._done[id(value)][1]
        return {"$new": kept} if was_replaced(before, value) else kept

    def _changeable(self, value: Any, before: Mark, path: str, depth: int) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, before, path)
        if is_generator(value):
            return _kept_generator(value)
        if is_array(value):
            return self._array(value, before, path)
        if type(value) in BYTES:
            self._count(len(value) * getattr(value, "itemsize", 1), before, path)
            kept = {"$bytes": _as_tensor(bytes(value))}
            return kept | ({"of": value.typecode} if isinstance(value, array.array) else {})
        self._items += 1
        if depth > _MOST_DEPTH:
            raise UnkeptError(path, "is nested too deeply, or contains itself")
        if isinstance(value, CONTAINERS):
            return self._container(value, before, path, depth)
        return self._object(value, before, path, depth)

    @functools.cached_property
    def _parts(self) -> Mapping[int, str]:
        return self._find_parts()

    def _count(self, size: int, before: Mark, path: str) -> None:
        self._bytes += size
        self._items += 1
        if (self._bytes > MOST_BYTES and not self._any_size) or self._items > _MOST_ITEMS:
            lazily = self._caches and was_nothing(before)
            raise UnkeptError(path, "is too big to be kept", made_lazily=lazily)

    def _tensor(self, value: torch.Tensor, before: Mark, path: str) -> Any:
        plain = value.detach()
        if type(plain) is torch.Tensor and (plain.is_inference() or not is_ordinary(plain)):
            plain = _dense(plain)
        if not is_ordinary(plain):
            raise UnkeptError(path, f"is a {_form(value)}, which is not kept")
        size = value.numel() * value.element_size()
        words = f"is a tensor of {_bytes(size)}, and not kept"
        if value.grad_fn is not None and size > MOST_GRAPH_BYTES:
            raise UnkeptError(path, words, made_lazily=True)
        if not self._any_size and self._bytes + size > MOST_BYTES:
            lazily = self._caches and was_nothing(before)
            raise UnkeptError(
                path, f"{words}: as a buffer (persistent=False) it is", made_lazily=lazily
            )
        self._bytes += 0 if self._any_size else size
        # torch saves whole storages, of which a view may use little
        if self._copied or plain.untyped_storage().nbytes() > size:
            plain = plain.clone()
        kept = plain if plain.device.type == "cpu" else {"$tensor": plain}
        if value.is_leaf and value.requires_grad:
            return {"$leaf": kept, "parameter": isinstance(value, torch.nn.Parameter)}
        return kept

    def _array(self, value: Any, before: Mark, path: str) -> Any:
        if value.dtype.kind not in "biufcSUmM" or not _is_plain_array(value):
            raise UnkeptError(path, f"is {_array_words(value)}, which is not kept")
        self._count(value.nbytes, before, path)
        if value.dtype.kind in "biufc" and value.dtype.isnative and value.dtype.itemsize <= 16:
            if value.ndim == 0:
                item = value.item()
                if type(item) in PLAIN:
                    form = {"$numpy": value.dtype.str, "value": item}
                    return {**form, "array": _is_ndarray(value)}
            elif _fits_torch(value):
                return {
                    "$array": torch.from_numpy(value.copy(order="K")),
                    "dtype": value.dtype.str,
                }
        shape = list(value.shape) if _is_ndarray(value) else None
        return {"$raw": _as_tensor(value.tobytes()), "dtype": value.dtype.str, "shape": shape}

    def _container(self, value: Any, before: Mark, path: str, depth: int) -> Any:
        kind = type(value)
        if kind in (list, tuple) and _NUMBERS.issuperset(map(type, value)):
            self._bytes += 8 * len(value)
            if len(value) <= _MOST_PLAIN:
                return kind(value)
        if self._items + len(value) > _MOST_ITEMS:
            lazily = self._caches and was_nothing(before)
            raise UnkeptError(path, "is too big to be kept", made_lazily=lazily)
        if kind in MAPPINGS:
            return self._mapping(value, before, path, depth)
        if kind in (list, tuple, set, frozenset, deque):
            return self._sequence(value, before, path, depth)
        return self._object(value, before, path, depth)

    def _sequence(self, value: Any, before: Mark, path: str, depth: int) -> Any:
        items = self._each(_numbered(value), before, path, depth)
        if type(value) in (list, tuple):
            return type(value)(items)
        if type(value) is deque:
            return {"$deque": items, "maxlen": value.maxlen}
        return {SEQUENCES[type(value)]: items}

    def _mapping(self, value: Any, before: Mark, path: str, depth: int) -> Any:
        plain = all(type(key) in PLAIN for key in value)
        if not plain:
            raise UnkeptError(path, "is a dictionary with keys that are not plain")
        more: dict[str, Any] = {}
        if type(value) is defaultdict:
            if value.default_factory is None or value.default_factory in FACTORIES:
                more["factory"] = getattr(value.default_factory, "__name__", None)
            elif not _was(before, defaultdict):
                raise UnkeptError(path, "is a defaultdict whose factory is not kept")
        pairs = ((f"[{key!r}]", key, item) for key, item in value.items())
        items = self._each(pairs, before, path, depth)
        if type(value) is dict and not str(next(iter(value), "")).startswith("$"):
            return dict(zip(value, items, strict=True))
        if type(value) is OrderedDict and vars(value):  # a state dict's versions
            more["attributes"] = self._attributes(value, path, depth)
        return {MAPPINGS[type(value)]: [list(value), items], **more}

    def _each(
        self, pairs: Iterable[tuple[str, Any, Any]], before: Mark, path: str, depth: int
    ) -> list[Any]:
        """All items; what is only made lazily does not hide what is not."""
        kept, lazily = [], None
        for words, key, item in pairs:
            was = before.of(key) if isinstance(before, Container) else ABSENT
            try:
                kept.append(self._keep(item, was, f"{path}{words}", depth + 1))
            except UnkeptError as error:
                if not error.made_lazily:
                    raise
                lazily = error
                if self._items > _MOST_ITEMS or self._bytes > MOST_BYTES:
                    break
        if lazily is not None:
            raise lazily
        return kept

    def _attributes(self, value: Any, path: str, depth: int) -> dict[str, Any]:
        own = attributes_in(value)
        pairs = ((f".{name}", name, item) for name, item in own.items())
        return dict(zip(own, self._each(pairs, ABSENT, path, depth), strict=True))

    def _object(self, value: Any, before: Mark, path: str, depth: int) -> Any:
        if isinstance(value, NEVER_STATE) or not is_record(value, self._holder):
            raise _unkept_object(value, before, path, self._holder)
        kind = type(value)
        kept: dict[str, Any] = {"$object": [kind.__module__, kind.__qualname__]}
        try:
            kept["attributes"] = self._attributes(value, path, depth)
            items = items_in(value)
            if items is not None:
                kept["items"] = self._keep(items, ABSENT, path, depth + 1)
        except UnkeptError as error:  # a handle does not hide what else there is
            lazily = error.made_lazily and hangs_on_graph(value)
            raise UnkeptError(error.path, error.words, made_lazily=lazily) from None
        return kept


def _numbered(value: Any) -> Iterator[tuple[str, Any, Any]]:
    return ((f"[{index}]", index, item) for index, item in enumerate(value))


def _was(before: Mark, kind: type) -> bool:
    return isinstance(before, Container) and before.kind is kind


def _unkept_object(value: Any, before: Mark, path: str, holder: Any) -> UnkeptError:
    kind = type(value).__name__
    name = kind if isinstance(value, NEVER_STATE) else f"{kind} object"
    article = "an" if name[0] in "aeiouAEIOU" else "a"
    lazily = was_nothing(before) and (
        is_handle(value, looks_within=not is_own(value, holder)) or hangs_on_graph(value)
    )
    return UnkeptError(path, f"{article} {name}, which is not kept", made_lazily=lazily)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of one that was expanded, or made under inference_mode; of another the same again."""
    odd = tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested
    return tensor if odd or tensor.device.type == "meta" else tensor.clone()


def _is_ndarray(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_plain_array(value: Any) -> bool:
    numpy = sys.modules["numpy"]
    return type(value) is numpy.ndarray or not isinstance(value, numpy.ndarray)


def _array_words(value: Any) -> str:
    if _is_plain_array(value):
        return f"an array of {value.dtype}"
    return f"a {type(value).__name__} of numpy's"


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.tensor(bytearray(data), dtype=torch.uint8)


def _fits_torch(value: Any) -> bool:
    try:
        torch.from_numpy(value[:0].copy())
    except TypeError:  # a kind of number that torch has not
        return False
    return True


def _form(tensor: torch.Tensor) -> str:
    kind = type(tensor).__name__
    return kind if kind not in ("Tensor", "Parameter") else f"{tensor.layout} {kind}".lower()


def _bytes(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def _copied(state: Any) -> Any:
    from trainer_core.resuming.copies import copied

    return copied(state)


def _kept_generator(value: Any) -> dict[str, Any]:
    kept = {"$generator": kind_of(value), "state": state_of(value)}
    if isinstance(value, torch.Generator):
        kept["device"] = value.device.type
    return kept


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
