"""The first place at which two inert trees differ: what one bit of a pickle stood for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ckpttool.formats import values
from ckpttool.model.walk import key_text

_OBJECTS = (
    values.GlobalRef,
    values.NumpyArray,
    values.NumpyDtype,
    values.NumpyScalar,
    values.Opaque,
    values.StorageRef,
    values.TensorValue,
)
# Sets come in the order of their hashes: the same on both sides, where the members are.
_SEQUENCES = (list, tuple, set, frozenset)
_TEXT_CHARACTERS = 60


class Difference(NamedTuple):
    """Two trees differ at the dotted `path` (empty: at their root); `first` and `second` say how in
    words.
    """

    path: str
    first: str
    second: str


def first_difference(first: Any, second: Any) -> Difference | None:
    """Where two trees of inert values differ first, in the file's order; None if they are equal.

    Iterative, and compares no pair of objects twice, so neither depth nor sharing can hurt. Paths
    are put together only for the answer: those of all levels would be quadratic in the depth.
    """
    seen: set[tuple[int, int]] = set()
    todo: list[_Parts] = [iter((("", first, second),))]
    names: list[str] = []
    while todo:
        for name, one, other in todo[-1]:
            words, parts = _compare(one, other, seen)
            if words is not None:
                return Difference(".".join([*names[1:], name]), *words)
            if parts is not None:
                todo.append(parts)
                names.append(name)
                break
        else:
            todo.pop()
            if names:
                names.pop()
    return None


# Name, and the two values, of each part of a pair.
_Parts = Iterator[tuple[str, Any, Any]]


def _compare(
    one: Any, other: Any, seen: set[tuple[int, int]]
) -> tuple[tuple[str, str] | None, _Parts | None]:
    """How two values differ by themselves, else the pairs of their parts that remain to look at."""
    if type(one) is not type(other):
        return (_text(one), _text(other)), None
    names, others = _names(one), _names(other)
    if names is None or others is None:
        same = repr(one) == repr(other)
        return (None if same else (_text(one), _text(other))), None
    if names != others:
        return _names_differ(names, others), None
    if (id(one), id(other)) in seen:
        return None, None
    seen.add((id(one), id(other)))
    return None, zip(names, _members(one), _members(other), strict=True)


def _names_differ(names: list[str], others: list[str]) -> tuple[str, str]:
    for name, other in zip(names, others, strict=False):
        if name != other:
            return f"key {_text(name)}", f"key {_text(other)}"
    return f"{len(names)} items", f"{len(others)} items"


def _names(value: Any) -> list[str] | None:
    """What a value's parts are called; None for what has none."""
    if isinstance(value, dict):
        names = [key if isinstance(key, str) else key_text(key) for key in value]
        return [*names, "(attributes)"] if _attributes(value) else names
    if isinstance(value, _SEQUENCES):
        return [str(index) for index in range(len(value))]
    return list(type(value).__slots__) if isinstance(value, _OBJECTS) else None


def _members(value: Any) -> list[Any]:
    if isinstance(value, dict):
        attributes = _attributes(value)
        return [*value.values(), attributes] if attributes else list(value.values())
    if isinstance(value, _SEQUENCES):
        return list(value)
    return [getattr(value, name, None) for name in type(value).__slots__]


def _attributes(value: Any) -> Any:
    return value.attributes if isinstance(value, values.OrderedMap) else None


def _text(value: Any) -> str:
    if isinstance(value, (dict, *_SEQUENCES, *_OBJECTS)):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= _TEXT_CHARACTERS else text[: _TEXT_CHARACTERS - 1] + "…"
