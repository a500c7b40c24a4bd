"""Leaves things out of an inert tree: lost tensors, and whatever must not be written again.

Out of dictionaries their keys go, too; in lists and tuples, where places count, None takes their
place. The tree is changed where it stands, so what is shared stays shared; iterative, as files may
nest as deep as they like.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.formats.globals import Trust, classify
from ckpttool.formats.values import (
    GlobalRef,
    NumpyArray,
    Opaque,
    OrderedMap,
    StorageRef,
    TensorValue,
)
from ckpttool.model.walk import key_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_GONE = object()


def unsafe(value: Any) -> str | None:
    """Why a value must not be carried over into a new pickle; None if it may be."""
    if isinstance(value, GlobalRef):
        trust = classify(value.module, value.name)
        return None if trust.rank <= Trust.BENIGN.rank else f"{value.path} is {trust.value}"
    if isinstance(value, Opaque):
        if not isinstance(value.target, GlobalRef):
            return f"a call of what is no global {value.path}"
        if value.opcode == "REDUCE" and value.target.rebuild is not None:
            return f"a call of {value.path} that makes no sense"
        return unsafe(value.target)
    if isinstance(value, NumpyArray) and value.subclass:
        module, _, name = value.subclass.rpartition(".")
        return unsafe(GlobalRef(module, name))
    return None


def prune(tree: Any, is_lost: Callable[[Any], bool]) -> tuple[Any, list[str]]:
    """The tree without what `is_lost` (asked of tensors and storages) or `unsafe` names.

    Gives the new tree (None if nothing of it is left), and each unsafe thing that was left out with
    its dotted name and the reason.
    """
    return _Pruning(is_lost).run(tree)


class _Pruning:
    def __init__(self, is_lost: Callable[[Any], bool]) -> None:
        self.is_lost = is_lost
        self.dropped: list[str] = []
        self.done: dict[int, Any] = {}  # by identity: what stands for a value
        self.kept: list[Any] = []  # so that no identity is given away
        self.open: set[int] = set()
        self.labels: list[str] = []  # of what is open; a path is put together where one is told

    def run(self, tree: Any) -> tuple[Any, list[str]]:
        """Depth first: a value is settled once all its parts are."""
        stack: list[tuple[Any, Iterator[tuple[str, Any]]]] = []
        self._enter(tree, "", stack)
        while stack:
            value, parts = stack[-1]
            for label, part in parts:
                if id(part) not in self.done and id(part) not in self.open:
                    self._enter(part, label, stack)
                    break
            else:
                stack.pop()
                self.open.discard(id(value))
                self._settle(value, self._rebuilt(value))
                self.labels.pop()
        result = self._of(tree)
        return (None if result is _GONE else result), self.dropped

    def _enter(
        self, value: Any, label: str, stack: list[tuple[Any, Iterator[tuple[str, Any]]]]
    ) -> None:
        """Settles a value at once, or puts it on the stack if it has parts."""
        reason = unsafe(value)
        if reason is not None:
            self._drop(reason, label)
            self._settle(value, _GONE)
        elif isinstance(value, (TensorValue, StorageRef)) and self.is_lost(value):
            self._settle(value, _GONE)
        else:
            parts = _parts(value)
            if parts is None:
                return
            self.open.add(id(value))
            self.labels.append(label)
            stack.append((value, iter(parts)))

    def _drop(self, reason: str, *below: str) -> None:
        """Notes what is left out: the innermost open value, or what is `below` it."""
        path = ".".join([*self.labels, *below][1:])
        self.dropped.append(f"{path or 'the content'}: {reason}")

    def _settle(self, value: Any, result: Any) -> None:
        self.done[id(value)] = result
        self.kept.append(value)

    def _of(self, value: Any) -> Any:
        return self.done.get(id(value), value)

    def _in_place(self, value: Any) -> Any:
        """What stands for an item of a list or tuple."""
        result = self._of(value)
        return None if result is _GONE else result

    def _rebuilt(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, dict):
            self._dictionary(value)
            if isinstance(value, OrderedMap) and value.attributes:
                self._dictionary(value.attributes)
            return value
        if isinstance(value, list):
            value[:] = [self._in_place(item) for item in value]
            return value
        if isinstance(value, tuple):
            items = [self._in_place(item) for item in value]
            same = all(a is b for a, b in zip(items, value, strict=True))
            return value if same else _same_kind(value, items)
        if isinstance(value, (set, frozenset)):
            items = [self._of(item) for item in value]
            same = all(a is b for a, b in zip(items, value, strict=True))
            return value if same else kind(item for item in items if item is not _GONE)
        if isinstance(value, Opaque):
            return self._opaque(value)
        if isinstance(value, TensorValue):
            return self._tensor(value)
        if isinstance(value, NumpyArray):
            value.data = self._of(value.data)
        return value

    def _dictionary(self, value: dict[Any, Any]) -> None:
        items = [(self._of(key), self._of(item)) for key, item in value.items()]
        old = list(value.items())
        same = all(a is c and b is d for (a, b), (c, d) in zip(items, old, strict=True))
        if not same:
            value.clear()
            value.update((k, v) for k, v in items if k is not _GONE and v is not _GONE)

    def _opaque(self, value: Opaque) -> Any:
        given = [*value.args, *(value.kwargs or {}).values()]
        if any(self._of(item) is not item and _holds_gone(self._of(item)) for item in given):
            self._drop(f"{value.path} lacks what it is made of")
            return _GONE
        value.args = tuple(self._of(item) for item in value.args)
        if value.kwargs:
            value.kwargs = {key: self._of(item) for key, item in value.kwargs.items()}
        state = self._of(value.state)
        value.state = None if state is _GONE else state
        if value.items is not None:
            value.items = [self._in_place(item) for item in value.items]
        if value.pairs is not None:
            pairs = [(self._of(key), self._of(item)) for key, item in value.pairs]
            value.pairs = [pair for pair in pairs if _GONE not in pair]
        return value

    def _tensor(self, value: TensorValue) -> Any:
        """A tensor that is kept: without a class or state that must not be written again."""
        extra = value.extra or {}
        kind = extra.get("class")
        subclass = extra.get("subclass")
        reason = None
        if kind is not None:
            reason = unsafe(kind)
        elif subclass is not None:
            module, _, name = str(subclass).rpartition(".")
            reason = unsafe(GlobalRef(module, name))
        if reason is not None:
            if value.storage is None:
                self._drop(reason)
                return _GONE
            self._drop(f"its class, since {reason}; the tensor itself is kept")
            extra = {k: v for k, v in extra.items() if k not in ("class", "subclass", "state")}
        elif "state" in extra:
            state = self._of(extra["state"])
            extra = {**extra, "state": None if state is _GONE else state}
        value.extra = extra or None
        return value


def _parts(value: Any) -> list[tuple[str, Any]] | None:
    """What a value holds, with labels; None for what holds nothing."""
    if isinstance(value, dict):
        parts = [(_label(key), item) for key, item in value.items()]
        parts += [("(key)", key) for key in value if not isinstance(key, (str, int))]
        if type(value) is OrderedMap and value.attributes:
            parts += [(_label(key), item) for key, item in value.attributes.items()]
        return parts
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(str(index), item) for index, item in enumerate(value)]
    if isinstance(value, Opaque):
        given = [*value.args, *(value.kwargs or {}).values(), value.state, *(value.items or ())]
        parts = [(f"({index})", item) for index, item in enumerate(given)]
        return parts + [(_label(k), p) for k, v in value.pairs or () for p in (k, v)]
    if isinstance(value, TensorValue):
        state = (value.extra or {}).get("state")
        return [("state", state)] if state is not None else []
    if isinstance(value, NumpyArray):
        return [("data", value.data)]
    return None


def _label(key: Any) -> str:
    return key if isinstance(key, str) else key_text(key)


def _holds_gone(value: Any) -> bool:
    return value is _GONE or value is None or isinstance(value, tuple)


def _same_kind(value: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    kind = type(value)
    return tuple(items) if kind is tuple else kind(items)
