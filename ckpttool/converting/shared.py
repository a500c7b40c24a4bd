"""Tensors that share memory, as safetensors' own convention has it.

The format has no sharing. Source: safetensors/torch.py (`save_model`, `_remove_duplicate_names`):
of tensors that overlap, one that covers all the memory they share is kept, the first by name; the
others are left out, and the file's metadata says of each which one it is in. Tensors on one storage
that do not overlap are not shared, and each is kept.

What `save_model` would leave out although it is another view of the memory (a slice, a transpose)
is refused here, unless told otherwise: nobody could get it back from the file.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from ckpttool.converting.dense import dense_size, is_contiguous
from ckpttool.converting.extents import Range, byte_range, runs
from ckpttool.formats.values import TensorValue


class Shared(NamedTuple):
    """`name` is left out for `kept`; `same` says whether it is the same view of the same bytes."""

    name: str
    kept: str
    same: bool


def find_shared(
    tensors: dict[str, TensorValue], no_aliases: Collection[str] = ()
) -> tuple[list[Shared], list[list[str]]]:
    """Which names are left out for which, and groups of names of which none covers the others.

    The metadata has no room for `no_aliases`, so that one of them is kept rather than another name.
    """
    shared: list[Shared] = []
    unclear: list[list[str]] = []
    for memory, names in _groups(tensors):
        complete = [name for name in names if _covers(tensors[name], memory)]
        if not complete:
            unclear.append(names)
            continue
        kept = next((name for name in complete if name in no_aliases), complete[0])
        for name in names:
            if name != kept:
                shared.append(Shared(name, kept, _same_view(tensors[name], tensors[kept])))
    return shared, unclear


def _groups(tensors: dict[str, TensorValue]) -> list[tuple[Range, list[str]]]:
    """Tensors that overlap, by the memory that they share: names in order, two at least."""
    by_storage: dict[str, list[tuple[Range, str]]] = {}
    for name, tensor in tensors.items():
        start, stop = byte_range(tensor)
        if tensor.storage is not None and start < stop:
            by_storage.setdefault(tensor.storage.key, []).append(((start, stop), name))
    groups = []
    for members in by_storage.values():
        if len(members) < 2:
            continue
        for memory in runs((range_ for range_, _ in members), 0):
            inside = [name for range_, name in members if memory[0] <= range_[0] < memory[1]]
            if len(inside) > 1:
                groups.append((memory, sorted(inside)))
    return groups


def _covers(tensor: TensorValue, memory: Range) -> bool:
    """torch's `_is_complete`: from the beginning on, with as many elements as there is room."""
    return byte_range(tensor)[0] == memory[0] and dense_size(tensor) == memory[1] - memory[0]


def _same_view(one: TensorValue, other: TensorValue) -> bool:
    if (one.dtype, one.offset, one.shape) != (other.dtype, other.offset, other.shape):
        return False
    lazy = [(tensor.extra or {}).get("metadata") or None for tensor in (one, other)]
    both = is_contiguous(one) and is_contiguous(other)
    return lazy[0] == lazy[1] and (both or one.stride == other.stride)
