"""What makes two models the same one to an outer loop: names, shapes and kinds of their tensors.

Precision is left out: a node in bfloat16 and one in float32 exchange the same FP32 tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

FLOAT = "F32"
_CODES = {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

State = dict[str, torch.Tensor]
Shapes = Mapping[str, tuple[str, tuple[int, ...]]]


class Spec:
    """The tensors of a model: `tensors` gives dtype (safetensors' word) and shape by name.

    Every floating dtype counts as F32. Raises TypeError for complex and quantised tensors.
    """

    def __init__(self, tensors: Shapes) -> None:
        self.tensors = dict(sorted(tensors.items()))
        self.floats = {name: one for name, one in self.tensors.items() if one[0] == FLOAT}
        plain = [[name, code, list(shape)] for name, (code, shape) in self.tensors.items()]
        self.fingerprint = hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:32]

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Spec:
        """Of a state dict; what is no tensor in it (a module's extra state) is refused."""
        return cls(
            {name: (_code(name, value), tuple(value.shape)) for name, value in state.items()}
        )

    def problem(self, found: Shapes, *, only_floats: bool) -> str | None:
        """Why a file with these tensors does not fit the model, in words; None if it does."""
        wanted = self.floats if only_floats else self.tensors
        missing, surplus = wanted.keys() - found.keys(), found.keys() - wanted.keys()
        if missing:
            return f"lacks {len(missing)} tensors of the model, {min(missing)[:80]} for one"
        if surplus:
            return f"has {len(surplus)} tensors that the model lacks, {min(surplus)[:80]} for one"
        for name, one in wanted.items():
            if found[name] != one:
                return f"has {name[:80]} as {_words(found[name])} where {_words(one)} belongs"
        return None


def is_float(tensor: torch.Tensor) -> bool:
    """Whether a tensor takes part in the outer loop's arithmetic."""
    return tensor.is_floating_point()


def _code(name: str, value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: is a {type(value).__name__}, no tensor that could be exchanged")
    if hasattr(value, "full_tensor"):
        raise TypeError(
            f"{name}: is sharded over several processes, which SitedCoordinator puts together"
        )
    if value.is_floating_point():
        return FLOAT
    if value.dtype not in _CODES:
        raise TypeError(f"{name}: tensors of {value.dtype} can't be exchanged")
    return _CODES[value.dtype]


def _words(one: tuple[str, tuple[int, ...]]) -> str:
    return f"{one[0]} {list(one[1])}"
