"""What a checkpoint can hold: values that load under `torch.load(weights_only=True)`.

What can't be kept fails when it is saved, and by its path; not when it is needed.
"""

from __future__ import annotations

import enum
import os
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter


class CheckpointError(RuntimeError):
    """A checkpoint is not what it should be, cannot be made, or is not there.

    It is a RuntimeError, as what torch raises for a model that a state dict does not fit.
    """


def to_plain(value: Any, path: str) -> Any:
    """`value` with nothing in it that `torch.load(weights_only=True)` refuses.

    Containers that need no change are kept as they are, and so are tensors. Numpy's numbers,
    subclasses of numbers and strings, paths and enums become plain values, numpy's arrays of
    numbers tensors that share their memory, and empty bytes an empty bytearray. Raises
    CheckpointError naming the path (`scheduler.lr_lambdas[0]`) for anything that has no exact plain
    form. Looks at every item, but into no tensor.
    """
    return _Plainer().convert(value, path)


_ALREADY_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray)
_TORCH_PLAIN = (torch.dtype, torch.device, torch.Size, torch.layout)
_MOST_DEPTH = 150  # three calls a level, and Python stops at a thousand


class _Plainer:
    """Walks one value; what occurs twice is converted once, so that sharing is kept."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[Any, Any]] = {}  # keeps the original, so that its id stays its
        self._depth = 0

    def convert(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind is bytes and not value:
            return bytearray()  # of bytes torch refuses the empty ones alone
        if kind is torch.Tensor or kind in _ALREADY_PLAIN or kind in _TORCH_PLAIN:
            return value
        known = self._done.get(id(value))
        if known is not None:
            return known[1]
        if self._depth > _MOST_DEPTH:
            raise CheckpointError(f"{path[:200]}: is nested too deeply, or contains itself")
        self._depth += 1
        plain = self._compound(value, path)
        self._depth -= 1
        self._done[id(value)] = value, plain
        return plain

    def _compound(self, value: Any, path: str) -> Any:
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        if type(value) in (list, tuple):
            items = [self.convert(item, f"{path}[{i}]") for i, item in enumerate(value)]
            unchanged = all(new is old for new, old in zip(items, value, strict=True))
            return value if unchanged else type(value)(items)
        if isinstance(value, enum.Enum):
            return self.convert(value.value, path)
        if isinstance(value, torch.Tensor):
            return _tensor(value, path)
        if type(value) is set:
            items = [self.convert(item, f"{path} (an item)") for item in value]
            try:
                return set(items)
            except TypeError:
                raise _refusal(path, "a set with empty bytes in it") from None
        if type(value).__module__ == "numpy" and hasattr(value, "dtype"):
            return _numpy_value(value, path)
        return _scalar(value, path)

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        items = [
            (self.convert(key, f"{path} (a key)"), self.convert(item, f"{path}.{key}"))
            for key, item in value.items()
        ]
        if type(value) in (dict, OrderedDict, Counter):
            pairs = zip(items, value.items(), strict=True)
            if all(key is k and item is i for (key, item), (k, i) in pairs):
                return value
        try:
            return OrderedDict(items) if isinstance(value, OrderedDict) else dict(items)
        except TypeError:
            raise _refusal(path, "a dictionary with empty bytes in a key") from None


def _tensor(value: torch.Tensor, path: str) -> torch.Tensor:
    kind = type(value)
    if kind in (torch.nn.Parameter, torch.nn.Buffer) or kind in _registered():
        return value
    if isinstance(value, (UninitializedParameter, UninitializedBuffer)):
        raise CheckpointError(
            f"{path}: has no shape yet, as its lazy layer has never been run: run one batch "
            "through the model before the first checkpoint"
        )
    raise CheckpointError(
        f"{path}: is a {_type_name(value)}, which torch.load refuses unless it is registered with "
        "torch.serialization.add_safe_globals"
    )


def _scalar(value: Any, path: str) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, torch.storage.UntypedStorage) or type(value) in _registered():
        return value
    raise _refusal(path, f"{_kind(value)} ({_type_name(value)})")


def _numpy_value(value: Any, path: str) -> Any:
    """A number of numpy's as Python's, an array as a tensor of the same numbers."""
    if not hasattr(value, "__array_finalize__"):  # a number, or a string
        plain = value.item()
        if type(plain) not in _ALREADY_PLAIN:
            raise _refusal(path, f"a numpy.{type(value).__name__}")
        return plain
    try:
        if value.dtype.kind not in "biufc" or not value.dtype.isnative:
            raise TypeError
        shareable = value.flags.writeable and all(step >= 0 for step in value.strides)
        return torch.from_numpy(value if shareable else value.copy())
    except (TypeError, ValueError):  # a kind of number, or strides, that torch has not
        raise _refusal(path, f"an array of {value.dtype}") from None


def _refusal(path: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: is {what}, which a checkpoint cannot hold: only plain values, lists, "
        "dictionaries and tensors"
    )


def _registered() -> list[Any]:
    """Classes that the user has told torch to trust."""
    return list(torch.serialization.get_safe_globals())


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
