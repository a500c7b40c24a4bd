"""Run by itself, with torch: makes files, loads files, and writes down what torch finds in them.

    python torch_says.py OUT.json NEW_FOLDER FILE...

This walk over a loaded object is its own and shares nothing with the tool's.
"""

from __future__ import annotations

import collections
import ctypes
import enum
import json
import os
import pickle
import sys
import warnings
from typing import Any

import numpy as np
import torch


# What `py_objects.pt` and `tensor_subclass.pt` of the corpus expect to find in `__main__`.
class DC:
    pass


class Slot:
    __slots__ = ("x", "y")


class E(enum.Enum):
    A = "a"


class IE(enum.IntEnum):
    A = 5


NT = collections.namedtuple("NT", "a b")


class Sub(torch.Tensor):
    pass


def raw(tensor: torch.Tensor) -> bytes | None:
    """The elements in order, as they lie in memory; None where there is no such thing."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        return None
    if hasattr(type(tensor), "__tensor_flatten__"):
        return None  # a wrapper around others
    if tensor.is_quantized:
        if tensor.dtype in (torch.quint4x2, torch.quint2x4):
            return None
        tensor = tensor.int_repr()
    tensor = torch.Tensor.detach(tensor).resolve_conj().resolve_neg()
    fresh = tensor.clone(memory_format=torch.contiguous_format)
    size = fresh.numel() * fresh.element_size()
    return ctypes.string_at(fresh.data_ptr(), size) if size else b""


def parts_of(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The plain tensors that one of another layout is built from."""
    if tensor.is_nested:
        return {
            "buffer": tensor.values(),
            "sizes": tensor._nested_tensor_size(),
            "strides": tensor._nested_tensor_strides(),
            "storage_offsets": tensor._nested_tensor_storage_offsets(),
        }
    if tensor.is_quantized:
        if tensor.qscheme() is torch.per_tensor_affine:
            return {}
        return {
            "scale": tensor.q_per_channel_scales(),
            "zero_point": tensor.q_per_channel_zero_points(),
        }
    if tensor.layout is torch.sparse_coo:
        return {"indices": tensor._indices(), "values": tensor._values()}
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return {
            "crow_indices": tensor.crow_indices(),
            "col_indices": tensor.col_indices(),
            "values": tensor.values(),
        }
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return {
            "ccol_indices": tensor.ccol_indices(),
            "row_indices": tensor.row_indices(),
            "values": tensor.values(),
        }
    return {}


def describe(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    """A tensor in plain data, under the names that `ckpttool inspect --json` has."""
    facts: dict[str, Any] = {
        "name": name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": None if tensor.is_nested else list(tensor.shape),
        "layout": str(tensor.layout).removeprefix("torch."),
        "requires_grad": tensor.requires_grad,
        "subclass": None,
        "stride": None,
        "offset": None,
        "storage_nbytes": None,
        "raw": None,
    }
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        facts["subclass"] = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    if tensor.is_quantized:
        facts["layout"] = "quantized"
    if tensor.is_nested:
        facts["layout"] = "nested"
    if tensor.is_meta:
        facts["layout"] = "meta"
    if hasattr(type(tensor), "__tensor_flatten__"):
        facts["layout"] = "wrapper"
    facts["parts"] = {part: describe(part, value) for part, value in parts_of(tensor).items()}
    content = raw(tensor)
    if content is not None:
        facts["raw"] = content.hex()
        facts["stride"] = list(tensor.stride())
        facts["offset"] = tensor.storage_offset()
        facts["storage_nbytes"] = tensor.untyped_storage().nbytes()
    return facts


def walk(root: Any) -> list[dict[str, Any]]:
    """Every tensor in an object, each name once; an object's attributes by their names."""
    found, seen, todo = [], set(), [("", root)]
    while todo:
        name, value = todo.pop()
        children: list[tuple[Any, Any]] = []
        if isinstance(value, torch.Tensor):
            found.append(describe(name, value))
            children = list(vars(value).items())
        elif id(value) in seen:
            continue
        elif isinstance(value, torch.jit.ScriptModule):
            children = list(value.state_dict(keep_vars=True).items())
        elif isinstance(value, dict):
            children = [*value.items(), *getattr(value, "__dict__", {}).items()]
        elif isinstance(value, (list, tuple, collections.deque)):
            children = list(enumerate(value))
        elif isinstance(value, (set, frozenset)):
            children = [(f"({index})", item) for index, item in enumerate(value)]
        elif isinstance(value, np.ndarray) and value.dtype == object:
            children = list(enumerate(value.flat))
        elif isinstance(value, type) or (
            callable(value) and not isinstance(value, torch.nn.Module)
        ):
            continue
        else:
            children = list(getattr(value, "__dict__", {}).items())
            children += [
                (s, getattr(value, s))
                for s in getattr(type(value), "__slots__", ())
                if hasattr(value, s)
            ]
        seen.add(id(value))
        keep.append(value)
        prefix = f"{name}." if name else ""
        todo.extend((f"{prefix}{key}", child) for key, child in reversed(children))
    return found


keep: list[Any] = []  # so that no address is used twice


def attempt(path: str) -> dict[str, Any]:
    """What torch makes of a file."""
    answer: dict[str, Any] = {"weights_only": True, "loads": True, "tensors": []}
    try:
        torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        answer["weights_only"] = False
        answer["why"] = f"{type(error).__name__}: {error}"[:300]
    try:
        answer["tensors"] = walk(load(path))
    except Exception as error:
        answer["loads"] = False
        answer["error"] = f"{type(error).__name__}: {error}"[:300]
    return answer


def load(path: str) -> Any:
    with open(path, "rb") as file:
        head = file.read(2)
    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except RuntimeError as error:
        if (
            "torch.jit.load" in str(error)
            or "TorchScript" in str(error)
            or "constants.pkl" in str(error)
        ):
            return torch.jit.load(path, map_location="cpu")
        if head[:1] == b"\x80" and not path.endswith(".pt"):
            with open(path, "rb") as file:
                return pickle.load(file)
        raise


def make(folder: str) -> list[str]:
    """Files in every way of writing that torch has, and what the corpus lacks."""
    base = torch.arange(48, dtype=torch.float32).reshape(6, 8)
    per_channel = torch.quantize_per_channel(
        base, torch.full((6,), 0.5, dtype=torch.float64), torch.arange(6), 0, torch.qint8
    )
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.note = "an attribute"
    holder = torch.ones(2)
    holder.inner = torch.full((3,), 2.0)
    from torch.testing._internal.two_tensor import TwoTensor

    complexes = torch.view_as_complex(torch.randn(4, 2))
    states: dict[str, Any] = {
        "views": {
            "whole": base, "row": base[2], "column": base[:, 3], "block": base[1:4, 2:7:2],
            "turned": base.t(), "expanded": base[0, :1].expand(4), "scalar": base[3, 4],
            "none of it": base[:0], "zero rows": torch.empty(0, 3), "flipped": base.flip(0),
            "conj": complexes.conj(), "neg": torch.randn(4, dtype=torch.complex64).conj().imag, "conj view": complexes.conj()[1:],
            "both": {"a": base[:2], "b": [base[4:], (base,)]},
            "bits": torch.tensor([0x7FC00001, -1, 1], dtype=torch.int32).view(torch.float32),
        },
        "dtypes": {
            **{
                str(dtype): torch.arange(-3, 9).to(dtype) if dtype is not torch.bool else torch.tensor([True, False])
                for dtype in (
                    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128,
                    torch.complex64, torch.complex32, torch.int64, torch.int32, torch.int16, torch.int8,
                    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
                    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
                    torch.float8_e8m0fnu,
                )
            },
            **{
                str(dtype): torch.arange(7, dtype=torch.uint8).view(dtype)
                for dtype in (torch.float4_e2m1fn_x2,)
            },
        },
        "built": {
            "per tensor": torch.quantize_per_tensor(base, 0.5, 3, torch.quint8),
            "qint32": torch.quantize_per_tensor(base, 0.5, 3, torch.qint32),
            "per channel": per_channel,
            "quint4x2": torch.quantize_per_channel(base, torch.ones(6), torch.zeros(6), 0, torch.quint4x2),
            "coo": base.to_sparse(), "csr": base.to_sparse_csr(), "csc": base.to_sparse_csc(),
            "bsr": base.to_sparse_bsr((2, 2)), "bsc": base.to_sparse_bsc((2, 2)),
            "nested": torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]),
            "meta": torch.empty(5, 2, device="meta"),
            "parameter": torch.nn.Parameter(torch.ones(3)), "frozen": torch.nn.Parameter(torch.ones(3), False),
            "buffer": torch.nn.Buffer(torch.ones(3)), "with attribute": parameter, "with tensor": holder,
            "size": torch.Size((2, 3)), "dtype": torch.bfloat16, "device": torch.device("cuda", 1),
            "storage": torch.ones(4).untyped_storage(), "typed": torch.ones(4).storage(),
        },
        "wrapped": {"two": TwoTensor(torch.ones(2, 2), torch.zeros(2, 2))},
    }  # fmt: skip
    paths = []

    def save(name: str, state: Any, **options: Any) -> None:
        paths.append(os.path.join(folder, name))
        torch.save(state, paths[-1], **options)

    for name, state in states.items():
        save(f"{name}.pt", state)
        save(f"{name}-protocol4.pt", state, pickle_protocol=4)
        save(f"{name}-legacy.pt", state, _use_new_zipfile_serialization=False)
    for protocol in range(6):
        save(f"empty-{protocol}.pt", [], pickle_protocol=protocol)
    save("one.pt", torch.ones(2, 3))
    return paths


def main(out: str, folder: str, *files: str) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    answers = {path: attempt(path) for path in [*files, *make(folder)]}
    with open(out, "w", encoding="utf-8") as target:
        json.dump(answers, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
