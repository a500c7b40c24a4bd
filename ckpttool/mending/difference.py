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

    Iterative, and compares no pair of objects twice, so neither depth nor sharing can hurt.
    """
    seen: set[tuple[int, int]] = set()
    todo: list[Iterator[tuple[str, Any, Any]]] = [iter((("", first, second),))]
    while todo:
        for path, one, other in todo[-1]:
            difference, parts = _compare(path, one, other, seen)
            if difference is not None:
                return difference
            if parts is not None:
                todo.append(parts)
                break
        else:
            todo.pop()
    return None


def _compare(
    path: str, one: Any, other: Any, seen: set[tuple[int, int]]
) -> tuple[Difference | None, Iterator[tuple[str, Any, Any]] | None]:
    """How two values differ by themselves, else the pairs of their parts that remain to look at."""
    if type(one) is not type(other):
        return Difference(path, _text(one), _text(other)), None
    names, others = _names(one), _names(other)
    if names is None or others is None:
        same = repr(one) == repr(other)
        return (None if same else Difference(path, _text(one), _text(other))), None
    if names != others:
        return _names_differ(path, names, others), None
    if (id(one), id(other)) in seen:
        return None, None
    seen.add((id(one), id(other)))
    stem = f"{path}." if path else ""
    pairs = zip(names, _members(one), _members(other), strict=True)
    return None, ((stem + name, a, b) for name, a, b in pairs)


def _names_differ(path: str, names: list[str], others: list[str]) -> Difference:
    for name, other in zip(names, others, strict=False):
        if name != other:
            return Difference(path, f"key {_text(name)}", f"key {_text(other)}")
    return Difference(path, f"{len(names)} items", f"{len(others)} items")


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
