"""Everything in the inert content of a file, each object once, without recursion."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckpttool.converting.terms import canonical
from ckpttool.formats.globals import Trust, classify
from ckpttool.formats.values import (
    GlobalRef,
    NumpyArray,
    Opaque,
    OrderedMap,
    StorageRef,
    TensorValue,
)

_LEAVES = frozenset({str, int, float, bool, type(None), bytes, bytearray, complex})


def everything(tree: Any) -> Iterator[Any]:
    """All that is no plain number or text, in the order of the pickle.

    Keys, arguments of calls, attributes and the parts of tensors are looked through as well.
    """
    todo, seen = [tree], set()
    while todo:
        value = todo.pop()
        kind = type(value)
        if kind in _LEAVES or id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if kind is TensorValue and value.extra is None and value.parts is None:
            continue
        below = list(_below(value))
        todo.extend(reversed(below))


def storage_users(tree: Any) -> Iterator[TensorValue | StorageRef]:
    """Every tensor, and every storage that stands by itself."""
    return (one for one in everything(tree) if type(one) in (TensorValue, StorageRef))


def dangerous(tree: Any) -> str | None:
    """The first name or call in `tree` that can run code; None where there is none."""
    for one in everything(tree):
        if type(one) is GlobalRef and classify(one.module, one.name) is Trust.DANGEROUS:
            return canonical(one)
        if type(one) is Opaque and type(one.target) is not GlobalRef:
            return one.path
    return None


def _below(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield item
        if type(value) is OrderedMap and value.attributes:
            yield value.attributes
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    elif isinstance(value, TensorValue):
        yield from (value.parts or {}).values()
        yield from (value.extra or {}).values()
    elif isinstance(value, Opaque):
        yield from (value.target, *value.args, value.kwargs, value.state, value.items, value.pairs)
    elif isinstance(value, NumpyArray):
        yield value.data
