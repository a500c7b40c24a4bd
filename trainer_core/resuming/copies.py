"""A copy of any state that a checkpoint can hold.

`copy.deepcopy` refuses tensors that were computed (only leaves of the graph), and sparse ones in
compressed layouts; all of them can be saved.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def copied(value: Any) -> Any:
    """`value` with nothing in it that is shared; what was shared within it still is.

    Tensors that were computed come without what they were computed from. What cannot be copied in
    memory is saved and loaded instead, so that whatever can be saved can be copied. Raises what
    that raises for anything else.
    """
    memo: dict[int, Any] = {}
    for tensor in _tensors(value, set()):
        if not _is_deep_copyable(tensor):
            memo[id(tensor)] = _copy_of(tensor, memo)
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a class of the user's, told to torch as safe to load
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        return torch.load(file, map_location=None, weights_only=True)


def _is_deep_copyable(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_leaf and not tensor.is_nested


def _copy_of(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    plain = tensor.detach()
    ordinary = plain.layout is torch.strided and not plain.is_nested
    # Of two views of one storage the copies are that, too.
    new: torch.Tensor = copy.deepcopy(plain, memo) if ordinary else plain.clone()
    return new.requires_grad_(tensor.requires_grad)


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple, set)) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item, seen)
