"""The copy of a state that a save works from while training goes on."""

from __future__ import annotations

import torch

from trainer_core.saving.container import Pickled

_ALIGNMENT = 64


class Staging:
    """Memory of our own that states are copied into, one after the other.

    It grows to the largest state and stays. What was copied before is gone with the next copy.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes up."""
        return len(self._buffer)

    def copy(self, state: Pickled) -> Pickled:
        """The same state, its memory being copies here; storages that were shared stay shared."""
        starts, end = [], 0
        for memory in state.storages:
            starts.append(end)
            end += -(-len(memory) // _ALIGNMENT) * _ALIGNMENT
        devices = {memory.device for memory in state.storages} - {torch.device("cpu")}
        self._grow(end, pin=any(device.type == "cuda" for device in devices))
        copies, pinned = [], self._buffer.is_pinned()
        for start, memory in zip(starts, state.storages, strict=True):
            copies.append(self._buffer[start : start + len(memory)])
            copies[-1].copy_(memory, non_blocking=pinned)
        for device in devices:
            torch.accelerator.synchronize(device)
        return Pickled(state.pickle, copies)

    def _grow(self, size: int, *, pin: bool) -> None:
        if size <= len(self._buffer):
            return
        self._buffer = torch.empty(0, dtype=torch.uint8)  # so that never both are there
        self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
