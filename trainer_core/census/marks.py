"""What a value was at one moment, cheaply, so that it can be told later whether it has changed.

Plain values and small containers are known by value, tensors by the object and its version (neither
copied nor read: what is changed behind torch's back, through `.data` or numpy, is not seen), small
numpy arrays by a hash, generators by their state, and anything else by which object it is.
"""

from __future__ import annotations

import array
import enum
import itertools
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from trainer_core.census.plain_forms import BY_VALUE
from trainer_core.data.generators import is_generator, state_of

SCALARS = (
    *(int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.layout),
    *BY_VALUE,
)
BYTES = (bytearray, array.array)
CONTAINERS = (list, tuple, dict, set, frozenset, deque)

_MOST_ITEMS = 1_000  # in one container, with those within; a longer one is data
_MOST_HASHED = 1 << 20
_SAMPLES = 64


class Mark(Protocol):
    """What one value was."""

    def same(self, value: Any) -> bool:
        """Whether `value` is still that."""


# What the method is for, the protocol says.
# ruff: noqa: D102


class _Absent:
    """Of an attribute that was not there."""

    def same(self, value: Any) -> bool:
        return value is self

    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()


class Value:
    """A scalar: `value` is what it was."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def same(self, value: Any) -> bool:
        if type(value) is not type(self.value):
            return False
        if isinstance(value, (str, bytes, int, enum.Enum, *BY_VALUE)):
            return bool(value == self.value)
        return repr(value) == repr(self.value)  # -0.0 is another number than 0.0, and nan is nan


class _Object:
    """Any object: not what is in it."""

    __slots__ = ("_object",)

    def __init__(self, value: Any) -> None:
        try:
            self._object: Any = weakref.ref(value)
        except TypeError:
            self._object = lambda: value

    def same(self, value: Any) -> bool:
        return self._object() is value

    def is_it(self, value: Any) -> bool:
        """Whether it is this very object, however it has changed."""
        return self._object() is value


class _Counter(_Object):
    """An `itertools.count`, which tells where it is."""

    __slots__ = ("_seen",)

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._seen = repr(value)

    def same(self, value: Any) -> bool:
        return super().same(value) and self._seen == repr(value)


class _Iterator(_Object):
    """What is gone through, and does not tell where it is."""

    def same(self, value: Any) -> bool:
        return False


def _is_iterator(value: Any) -> bool:
    if type(value).__module__ not in ("builtins", "itertools", "torch.utils.data.dataloader"):
        return False
    return isinstance(value, Iterator)


class _Tensor(_Object):
    __slots__ = ("_seen",)

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__(value)
        self._seen = _version(value), _some_of(value)

    def same(self, value: Any) -> bool:
        if not super().same(value) or self._seen[0] is None or self._seen[0] != _version(value):
            return False
        return self._seen[1] == _some_of(value)


def _version(tensor: torch.Tensor) -> tuple[int, int] | None:
    """None for one that does not tell (made under inference_mode)."""
    try:
        version = tensor._version
    except RuntimeError:
        return None
    try:
        return version, tensor.data_ptr()
    except Exception:  # subclasses without memory of their own
        return version, 0


def _some_of(tensor: torch.Tensor) -> bytes:
    """Some numbers of one that learns: torch's fused optimizers change no version."""
    if not (tensor.requires_grad and tensor.is_leaf) or tensor.layout is not torch.strided:
        return b""
    try:
        plain = tensor.detach()
        if type(plain) is not torch.Tensor:  # of one that is shared out all ranks would have to ask
            return b""
        flat = plain.reshape(-1)
        some = flat[:: max(1, flat.numel() // _SAMPLES)]
        return bytes(some.cpu().contiguous().view(torch.uint8).tolist())
    except Exception:  # subclasses, and tensors without data
        return b""


class _Generator:
    __slots__ = ("_kind", "_state")

    def __init__(self, value: Any) -> None:
        self._kind, self._state = type(value), state_of(value)

    def same(self, value: Any) -> bool:
        if type(value) is not self._kind:
            return False
        state = state_of(value)
        if isinstance(state, torch.Tensor):
            return torch.equal(state, self._state)
        return bool(state == self._state)


class _Ignored:
    def same(self, value: Any) -> bool:
        return is_generator(value)


class _ById:
    """What has no weak reference, and changes in place: known by its id, while it lives."""

    __slots__ = ("_id",)

    def __init__(self, value: Any) -> None:
        self._id = id(value)

    def is_it(self, value: Any) -> bool:
        """Whether it is this very object, however it has changed."""
        return id(value) == self._id


class _Array(_ById):
    """One of numpy's: of a big one some items, of one that maps a file none."""

    __slots__ = ("_digest",)

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._digest = _array_digest(value)

    def same(self, value: Any) -> bool:
        return is_array(value) and _array_digest(value) == self._digest


class _Bytes(_ById):
    """Bytes, or numbers, that can be changed: of many some."""

    __slots__ = ("_digest",)

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._digest = _bytes_digest(value)

    def same(self, value: Any) -> bool:
        return isinstance(value, BYTES) and _bytes_digest(value) == self._digest


def _bytes_digest(value: Any) -> tuple[Any, ...]:
    kind = type(value), getattr(value, "typecode", ""), len(value)
    some = value if len(value) <= _MOST_HASHED else value[:: len(value) // _MOST_HASHED]
    return *kind, hash(bytes(some))


def is_array(value: Any) -> bool:
    """Whether it is an array of numpy's, or a number of numpy's."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def _array_digest(value: Any) -> tuple[Any, ...]:
    kind = type(value), value.dtype.str, value.shape
    if maps_a_file(value):
        return *kind, id(value)
    if value.nbytes <= _MOST_HASHED:
        return *kind, hash(value.tobytes())
    stride = max(1, value.size // _SAMPLES)
    some = [value.flat[i].tobytes() for i in range(0, value.size, stride)]
    return *kind, id(value), hash(tuple(some))


def maps_a_file(value: Any) -> bool:
    """Whether an array is a file, or a part of one: data that has a place."""
    while value is not None:
        if type(value).__name__ in ("memmap", "mmap"):
            return True
        value = getattr(value, "base", None)
    return False


class Container(_ById):
    """`keys` are those of a mapping, else None; `marks` are those of the items, in order."""

    __slots__ = ("keys", "kind", "marks")

    def __init__(self, value: Any, keys: list[Any] | None, marks: list[Mark]) -> None:
        super().__init__(value)
        self.kind: Any = type(value)
        self.keys, self.marks = keys, marks

    def same(self, value: Any) -> bool:
        if type(value) is not self.kind or len(value) != len(self.marks):
            return False
        if self.keys is not None and list(value) != self.keys:
            return False
        return all(mark.same(item) for mark, item in zip(self.marks, _items(value), strict=True))

    def of(self, key: Any) -> Mark:
        """What an item was: by key in a mapping, else by its number."""
        if self.keys is None:
            return self.marks[key] if key < len(self.marks) else ABSENT
        for index, known in enumerate(self.keys):
            if known is key or known == key:
                return self.marks[index]
        return ABSENT


class _Long(_ById):
    """A container with too many items to look at all."""

    __slots__ = ("_seen",)

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._seen = _some(value)

    def same(self, value: Any) -> bool:
        return isinstance(value, CONTAINERS) and _some(value) == self._seen


def _some(value: Any) -> tuple[Any, ...]:
    if isinstance(value, (list, tuple)):
        stride = max(1, len(value) // _SAMPLES)
        items = [value[i] for i in range(0, len(value), stride)]
    else:
        items = list(itertools.islice(value, _SAMPLES))
    seen = [item if type(item) in (int, float, str, bytes) else id(item) for item in items]
    return type(value), id(value), len(value), seen


def _items(value: Any) -> Iterator[Any]:
    return iter(value.values() if isinstance(value, Mapping) else value)


class Marker:
    """Makes marks.

    `covered`: whether a tensor belongs to what a state dict has, and changes with that. Without
    `generators`, whatever has been drawn from one is no change.
    """

    def __init__(self, covered: Callable[[torch.Tensor], bool], *, generators: bool) -> None:
        self._covered, self._generators = covered, generators
        self._left = 0

    def mark(self, value: Any) -> Mark:
        """What the value is now. Keeps no object alive that can be known by a weak reference."""
        if value is None:
            return NONE
        if isinstance(value, SCALARS):
            return Value(value)
        if isinstance(value, CONTAINERS):
            self._left = _MOST_ITEMS
            try:
                return self._container(value, 0)
            except OverflowError:
                return _Long(value)
        return self._single(value)

    def _single(self, value: Any) -> Mark:
        if isinstance(value, torch.Tensor):
            return _Object(value) if self._covered(value) else _Tensor(value)
        if is_generator(value):
            return _Generator(value) if self._generators else _Ignored()
        if is_array(value):
            return _Array(value)
        if _is_iterator(value):
            return _Counter(value) if type(value) is itertools.count else _Iterator(value)
        return _Bytes(value) if isinstance(value, BYTES) else _Object(value)

    def _container(self, value: Any, depth: int) -> Mark:
        self._left -= len(value)
        if self._left < 0 or depth > 20:
            raise OverflowError
        marks = [self._item(item, depth) for item in _items(value)]
        keys = list(value) if isinstance(value, Mapping) else None
        return Container(value, keys, marks)

    def _item(self, value: Any, depth: int) -> Mark:
        if value is None:
            return NONE
        if isinstance(value, SCALARS):
            return Value(value)
        if isinstance(value, CONTAINERS):
            return self._container(value, depth + 1)
        return self._single(value)


NONE = Value(None)


def value_of(mark: Mark) -> Any:
    """What it was, where a mark knows that: scalars, and containers of such.

    Raises LookupError.
    """
    if isinstance(mark, Value):
        return mark.value
    if isinstance(mark, Container):
        items = [value_of(item) for item in mark.marks]
        if mark.keys is None and mark.kind in (list, tuple, set, frozenset):
            return mark.kind(items)
        if mark.keys is not None and mark.kind in (dict, OrderedDict):
            return mark.kind(zip(mark.keys, items, strict=True))
    raise LookupError("only what it was not is known")


def was_nothing(mark: Mark) -> bool:
    """Whether there was nothing yet: what is there now was made since."""
    return mark is ABSENT or mark is NONE


def was_replaced(mark: Mark, value: Any) -> bool:
    """Whether another object was there than `value`, of those that can change in place."""
    return isinstance(mark, (_Object, _ById)) and not mark.is_it(value)
