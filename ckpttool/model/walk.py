"""One walk over the inert content of a file: its tensors by dotted name, in the file's order.

The walk is iterative and visits each shared object once, so neither nesting nor doubling can blow
it up. Names can: a hostile file may put a long key above many tensors. So their length is bounded,
and with it the depth, for each level makes names longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from ckpttool.formats.limits import DEFAULT_LIMITS, ReaderLimits
from ckpttool.formats.values import NumpyArray, Opaque, OrderedMap, StorageRef, TensorValue

_LEAVES = frozenset({str, int, float, bool, type(None), bytes, bytearray, complex})
_LONGEST_INTEGER_BITS = 256  # longer ones are only described: Python refuses to spell the largest

_Members = Iterator[tuple[Any, Any]]


class Walk:
    """What carries over from one `find_tensors` to the next in the same file.

    `seen` are the containers that have been visited, by identity. `characters` is what is left for
    names. `stopped` says in words which limit left something out, None if none did. `storages` are
    those that stand by themselves, without a tensor.
    """

    __slots__ = ("characters", "depth", "seen", "stopped", "storages")

    def __init__(self, limits: ReaderLimits = DEFAULT_LIMITS) -> None:
        self.seen: set[int] = set()
        self.depth = limits.depth
        self.characters = limits.pickle_bytes
        self.stopped: str | None = None
        self.storages: list[StorageRef] = []

    def spend(self, name: str) -> bool:
        """Whether there is room for one more name."""
        self.characters -= len(name)
        if self.characters < 0:
            self.stopped = "the names of its tensors are too long"
        return self.characters >= 0


def find_tensors(
    tree: Any, name: str = "", walk: Walk | None = None
) -> Iterator[tuple[str, TensorValue]]:
    """(dotted name, tensor) for every tensor in `tree`, which is itself called `name`.

    A tensor that appears twice is given twice, under both names; a container that does, once.
    Where `walk` comes to one of its limits, the rest is left out, and `walk.stopped` says so.
    """
    walk = Walk() if walk is None else walk
    todo: list[tuple[str, _Members]] = [("", iter(((name, tree),)))]
    while todo:
        prefix, members = todo[-1]
        for key, value in members:
            kind = type(value)
            if kind in _LEAVES:
                continue
            # Most tensors have nothing but themselves; no need to look for attributes.
            plain = kind is TensorValue and value.extra is None
            below = None if plain else _members(value, walk.seen)
            if below is None and kind is not TensorValue:
                if kind is StorageRef:
                    walk.storages.append(value)
                continue
            full = prefix + (key if type(key) is str else key_text(key))
            if not walk.spend(full):
                return
            if kind is TensorValue:
                yield full, value
            if below is None:
                continue
            if len(todo) > walk.depth:
                walk.stopped = f"its content is nested more than {walk.depth:,} deep"
                continue
            todo.append((f"{full}." if full else "", below))
            break
        else:
            todo.pop()


def _members(value: Any, seen: set[int]) -> _Members | None:
    """Keys and values of a container that has not been visited; None for all else."""
    members: Iterable[tuple[Any, Any]] | None = None
    if isinstance(value, dict):
        members = value.items()
        if type(value) is OrderedMap and value.attributes:
            members = chain(members, value.attributes.items())
    elif isinstance(value, (list, tuple)):
        members = enumerate(value)
    elif isinstance(value, (set, frozenset)):
        members = ((f"({index})", item) for index, item in enumerate(value))
    elif isinstance(value, TensorValue):
        # Attributes of a subclass or of a parameter can be tensors as well.
        state = value.extra.get("state") if value.extra else None
        members = _state(state) if state else None
    elif isinstance(value, Opaque):
        members = _opaque(value)
    elif isinstance(value, NumpyArray) and isinstance(value.data, list):
        members = enumerate(value.data)
    if members is None or id(value) in seen:
        return None
    seen.add(id(value))
    return iter(members)


def key_text(key: Any) -> str:
    """A key that is no string, as part of a dotted name."""
    if isinstance(key, int) and key.bit_length() > _LONGEST_INTEGER_BITS:
        return f"(int of {key.bit_length()} bits)"
    if isinstance(key, (int, float, bool)) or key is None:
        return str(key)
    return f"({type(key).__name__})"


def _opaque(value: Opaque) -> Iterator[tuple[Any, Any]]:
    """What an object would be made of: its state under its own names, arguments by number."""
    for index, item in enumerate(value.args):
        yield f"args.{index}", item
    if isinstance(value.kwargs, dict):
        yield from value.kwargs.items()
    yield from _state(value.state)
    yield from enumerate(value.items or ())
    yield from value.pairs or ()


def _state(state: Any) -> Iterable[tuple[Any, Any]]:
    """What BUILD sets on an object: attributes by name, or a state in the class's own form.

    A class with slots has two dictionaries (copyreg, `__reduce_ex__` of protocol 2), each or None.
    """
    if isinstance(state, dict):
        return state.items()
    if type(state) is tuple and len(state) == 2:
        first, second = state
        if isinstance(second, dict) and (first is None or isinstance(first, dict)):
            return chain((first or {}).items(), second.items())
    return () if state is None else (("state", state),)
