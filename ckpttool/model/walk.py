"""One walk over the inert content of a file: its tensors by dotted name, in the file's order.

The walk is iterative and visits each shared object once, so neither nesting nor doubling can blow
it up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ckpttool.formats.values import NumpyArray, Opaque, OrderedMap, TensorValue

_LEAVES = frozenset({str, int, float, bool, type(None), bytes, bytearray, complex})


def find_tensors(
    tree: Any, name: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, TensorValue]]:
    """(dotted name, tensor) for every tensor in `tree`, which is itself called `name`.

    A tensor that appears twice is given twice, under both names; a container that does, once.
    `seen` carries over, from walk to walk, the containers that have been visited.
    """
    if type(tree) is TensorValue:
        yield name, tree
        return
    seen = set() if seen is None else seen
    todo = [_members(name, tree, seen)]
    while todo:
        for below, value in todo[-1]:
            kind = type(value)
            if kind is TensorValue:
                yield below, value
            elif kind not in _LEAVES:
                todo.append(_members(below, value, seen))
                break
        else:
            todo.pop()


def _members(name: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """The named members of a container that has not been visited; of all else, nothing."""
    if id(value) in seen:
        return iter(())
    seen.add(id(value))
    prefix = f"{name}." if name else ""
    if isinstance(value, dict):
        members = _pairs(prefix, value.items())
        if type(value) is OrderedMap and value.attributes:
            members += _pairs(prefix, value.attributes.items())
        return iter(members)
    if isinstance(value, (list, tuple)):
        return ((f"{prefix}{index}", item) for index, item in enumerate(value))
    if isinstance(value, (set, frozenset)):
        return ((f"{prefix}({index})", item) for index, item in enumerate(value))
    if isinstance(value, Opaque):
        return iter(_opaque(prefix, value))
    if isinstance(value, NumpyArray) and isinstance(value.data, list):
        return ((f"{prefix}{index}", item) for index, item in enumerate(value.data))
    return iter(())


def _pairs(prefix: str, pairs: Iterable[tuple[Any, Any]]) -> list[tuple[str, Any]]:
    return [(prefix + (key if type(key) is str else key_text(key)), value) for key, value in pairs]


def key_text(key: Any) -> str:
    """A key that is no string, as part of a dotted name."""
    if isinstance(key, (int, float, bool)) or key is None:
        return str(key)
    return f"({type(key).__name__})"


def _opaque(prefix: str, value: Opaque) -> list[tuple[str, Any]]:
    """What an object would be made of: its state under its own names, arguments by number."""
    members = [(f"{prefix}args.{index}", item) for index, item in enumerate(value.args)]
    if isinstance(value.kwargs, dict):
        members += _pairs(prefix, value.kwargs.items())
    if isinstance(value.state, dict):
        members += _pairs(prefix, value.state.items())
    elif value.state is not None:
        members.append((f"{prefix}state", value.state))
    members += [(f"{prefix}{index}", item) for index, item in enumerate(value.items or ())]
    return members + _pairs(prefix, value.pairs or ())
