"""Run by itself, with torch: loads pairs of files and says where the second differs.

    python torch_compares.py ANSWERS.json PAIRS.json

Everything counts: types, values, order, dtypes, strides, attributes, which objects are one and the
same, and which tensors lie in one storage. It shares nothing with the tool.
"""

from __future__ import annotations

import collections
import copyreg
import ctypes
import enum
import json
import pickle
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))
# What some files of the corpus expect to find in `__main__`.
from torch_says import DC, IE, NT, E, Slot, Sub, parts_of, raw  # noqa: F401

_ATOMS = (int, float, complex, str, bytes, bytearray, bool, type(None), range, slice)
_VALUES = (tuple, frozenset, torch.device, torch.dtype, torch.layout, np.generic, np.dtype)
_FIXED = (type, types.FunctionType, types.BuiltinFunctionType, type(...), type(NotImplemented))


class Different(Exception):
    """Where and how two objects differ."""


class Comparison:
    """One pair of files: pairs of objects that correspond, and pairs of storages."""

    def __init__(self) -> None:
        self.pairs: dict[int, Any] = {}
        self.storages: dict[int, int] = {}
        self.keep: list[Any] = []
        self.tensors = 0

    def same(self, a: Any, b: Any, where: str) -> None:
        if type(a) is not type(b):
            raise Different(f"{where}: {type(a)} and {type(b)}")
        if isinstance(a, enum.Enum):
            return self.check(a is b, where, "enum")
        if type(a) in _ATOMS:
            return self.check(repr(a) == repr(b), where, f"{a!r:.80} and {b!r:.80}")
        if isinstance(a, _FIXED):
            return self.check(a is b, where, "another class or function")
        if id(a) in self.pairs:
            return self.check(self.pairs[id(a)] is b or is_value(a), where, "not the same object")
        self.pairs[id(a)] = b
        self.keep += [a, b]
        if isinstance(a, torch.nn.parameter.UninitializedTensorMixin):
            return self.check(a.requires_grad == b.requires_grad, where, "requires_grad")
        if isinstance(a, torch.Tensor):
            return self.tensor(a, b, where)
        if isinstance(a, torch.storage.TypedStorage):
            self.storage(a._untyped_storage, b._untyped_storage, where)
            return self.check(a.dtype == b.dtype, where, "dtype of storage")
        if isinstance(a, torch.UntypedStorage):
            return self.storage(a, b, where)
        if isinstance(a, torch.Generator):
            return self.same(a.get_state(), b.get_state(), where)
        return self.container(a, b, where)

    def container(self, a: Any, b: Any, where: str) -> None:
        if type(a) in (set, frozenset):
            a, b = sorted(a, key=repr), sorted(b, key=repr)
        if isinstance(a, dict):
            self.several(list(a), list(b), f"{where}(keys)")
            for key, other in zip(list(a), list(b), strict=True):
                self.same(a[key], b[other], f"{where}.{key}")
            return self.same(
                getattr(a, "__dict__", None), getattr(b, "__dict__", None), f"{where}!"
            )
        if type(a) in (list, tuple, torch.Size):
            return self.several(list(a), list(b), where)
        if type(a) in (torch.dtype, torch.layout, torch.device, torch.memory_format):
            return self.check(a == b, where, f"{a} and {b}")
        one, two = reduced(a), reduced(b)
        if isinstance(one, str):
            return self.check(one == two, where, "reduces to other text")
        for index, (x, y) in enumerate(zip(one, two, strict=True)):
            if index > 2 and x is not None:
                x, y = list(x), list(y)
            self.same(x, y, f"{where}/{index}")
        return None

    def several(self, a: list[Any], b: list[Any], where: str) -> None:
        self.check(len(a) == len(b), where, f"{len(a)} and {len(b)} items")
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            self.same(x, y, f"{where}.{index}")

    def tensor(self, a: torch.Tensor, b: torch.Tensor, where: str) -> None:
        self.tensors += 1
        for fact in ("dtype", "layout", "requires_grad", "device", "is_nested", "is_quantized"):
            self.same(getattr(a, fact), getattr(b, fact), f"{where}:{fact}")
        if not a.is_nested:
            self.same(vars(a), vars(b), f"{where}:vars")
        if not a.is_nested:
            self.check(a.shape == b.shape, where, f"{a.shape} and {b.shape}")
        if hasattr(type(a), "__tensor_flatten__"):
            # The rest of what it says holds counters that differ from one loading to the next.
            inner, _ = a.__tensor_flatten__()
            self.same(inner, b.__tensor_flatten__()[0], f"{where}:flat")
            for name in inner:
                self.same(getattr(a, name), getattr(b, name), f"{where}.{name}")
            return
        if a.is_quantized:
            self.check(a.qscheme() == b.qscheme(), where, "qscheme")
            if a.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
                self.same((a.q_scale(), a.q_zero_point()), (b.q_scale(), b.q_zero_point()), where)
            else:
                self.same(a.q_per_channel_axis(), b.q_per_channel_axis(), where)
        if a.layout is torch.sparse_coo:
            self.same(a.is_coalesced(), b.is_coalesced(), f"{where}:coalesced")
        one, two = parts_of(a), parts_of(b)
        for name in one:
            self.same(raw(one[name]), raw(two[name]), f"{where}.{name}")
        if a.layout is torch.strided and not a.is_nested and not a.is_meta:
            self.dense(a, b, where)

    def dense(self, a: torch.Tensor, b: torch.Tensor, where: str) -> None:
        extent = (a.stride(), a.storage_offset(), a.is_conj(), a.is_neg())
        other = (b.stride(), b.storage_offset(), b.is_conj(), b.is_neg())
        self.check(extent == other, where, f"{extent} and {other}")
        self.storage(a.untyped_storage(), b.untyped_storage(), where)

    def storage(self, a: torch.UntypedStorage, b: torch.UntypedStorage, where: str) -> None:
        """Equal content, and shared by the same tensors."""
        self.keep += [a, b]
        self.check(a.nbytes() == b.nbytes(), where, "size of storage")
        if a.nbytes():
            known = self.storages.setdefault(a.data_ptr(), b.data_ptr())
            self.check(known == b.data_ptr(), where, "not the same storage")
        if a._cdata not in self.pairs:
            self.pairs[a._cdata] = None
            self.check(memory(a) == memory(b), where, "content of storage")

    def check(self, equal: bool, where: str, how: str) -> None:
        if not equal:
            raise Different(f"{where}: {how}")


def memory(storage: torch.UntypedStorage) -> bytes:
    """All that a storage holds."""
    return ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""


def is_value(a: Any) -> bool:
    """What Python itself may merge or split at will."""
    return isinstance(a, _VALUES) or type(a).__module__ == "datetime"


def reduced(a: Any) -> Any:
    """What pickle would write for an object."""
    reducer = copyreg.dispatch_table.get(type(a))
    return reducer(a) if reducer else a.__reduce_ex__(4)


def load(path: str, **options: Any) -> Any:
    if path.endswith(".pkl"):
        with open(path, "rb") as file:
            return pickle.load(file)
    return torch.load(path, map_location="cpu", **options)


def compare(one: str, two: str) -> dict[str, Any]:
    """What the two files have in common."""
    answer: dict[str, Any] = {"weights_only": [], "mmap": None, "different": None}
    for path in (one, two):
        try:
            load(path, **({} if path.endswith(".pkl") else {"weights_only": True}))
            answer["weights_only"].append(True)
        except Exception as error:
            answer["weights_only"].append(False)
            answer["why"] = f"{type(error).__name__}: {error}"[:300]
    options = {} if one.endswith(".pkl") else {"weights_only": answer["weights_only"][0]}
    try:
        first = load(one, **options)
    except Exception as error:
        answer["unreadable"] = f"{type(error).__name__}: {error}"[:300]
        return answer
    weights_only = answer["weights_only"][1]
    for mmap in (False, True):
        comparison = Comparison()
        try:
            second = load(two, weights_only=weights_only, mmap=mmap)
            comparison.same(first, second, "")
            answer["tensors"] = comparison.tensors
            answer["mmap"] = mmap
        except Exception as error:
            answer["different"] = f"mmap={mmap}: {type(error).__name__}: {error}"[:500]
            break
    return answer


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    collections.deque()  # the corpus has some
    pairs = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    answers = {two: compare(one, two) for one, two in pairs}
    Path(sys.argv[1]).write_text(json.dumps(answers), encoding="utf-8")
