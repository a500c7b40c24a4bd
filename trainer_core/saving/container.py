"""A state as `torch.save` would write it, byte for byte, but faster and without a second copy.

torch spends most of a save on its checksum. Here only the pickle is torch's (its tensors know how
to be pickled); the container is written by `ckpttool.writing`, which computes the same checksum
many times faster, straight from the memory of the storages.

What this way does not know goes the usual one: storages of other devices than CPU and those that
copy to it, storages without data, and saving under `torch.serialization.skip_data`.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, BinaryIO, NamedTuple, cast

import torch

from ckpttool.writing.checkpoint import StorageSource, write_checkpoint
from trainer_core.saving.hashed import HashedFile
from trainer_core.saving.publishing import Content, Record, TorchSave, check_archive

ROOT = "archive"
PIECE = 1 << 20
"""Bytes that are handled at a time: small enough to stay in the processor's cache meanwhile."""

_BUFFER = 32 << 20
_COPIED = ("cuda", "mps", "xpu")


class Pickled(NamedTuple):
    """A state taken apart: its pickle, and the memory of the storages that this names "0", "1", ….

    Each is a tensor of uint8, [bytes], on the device where the storage is.
    """

    pickle: bytes
    storages: list[torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all storages and the pickle together."""
        return len(self.pickle) + sum(map(len, self.storages))


class _UnusualError(Exception):
    """The state holds something that only torch knows how to save. Never leaves this module."""


def content_of(state: Any) -> Content:
    """What `publish` writes for a state: the fast way where it is known, else torch's own.

    Raises what pickling raises.
    """
    taken_apart = take_apart(state)
    return TorchSave(state) if taken_apart is None else Container(taken_apart)


def take_apart(state: Any) -> Pickled | None:
    """The pickle of a state and its storages, shared ones once; None for what only torch can save.

    Nothing is copied: the memory is that of the state itself. Raises what pickling raises.
    """
    if getattr(getattr(torch.serialization, "_serialization_tls", None), "skip_data", False):
        return None
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(state)
    except _UnusualError:
        return None
    return Pickled(buffer.getvalue(), pickler.storages)


class _Pickler(pickle.Pickler):
    """Names storages as `torch.save` does (torch/serialization.py, `_save`)."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, protocol=2)
        self.storages: list[torch.Tensor] = []
        self._keys: dict[int, str] = {}
        self._dtypes: dict[int, torch.dtype] = {}

    def persistent_id(self, obj: Any) -> Any:
        """The tuple that stands for a storage in the pickle; None for everything else."""
        kind: Any
        if isinstance(obj, torch.storage.TypedStorage):
            typed: Any = obj  # what torch itself uses of it has no types
            storage, dtype = obj._untyped_storage, obj.dtype
            kind, count = getattr(torch, typed._pickle_storage_type()), typed._size()
        elif isinstance(obj, torch.UntypedStorage):
            storage, dtype = obj, torch.uint8
            kind, count = torch.UntypedStorage, obj.nbytes()
        else:
            return None
        self._refuse_unusual(obj, storage, dtype)
        key = self._keys.get(storage._cdata)
        if key is None:
            key = self._keys[storage._cdata] = str(len(self.storages))
            self.storages.append(as_bytes(storage))
        return "storage", kind, key, torch.serialization.location_tag(storage), count

    def _refuse_unusual(self, obj: Any, storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
        known = storage.device.type == "cpu" or storage.device.type in _COPIED
        if not known or type(storage) is not torch.UntypedStorage:
            raise _UnusualError
        if getattr(obj, "_fake_device", None) is not None:
            raise _UnusualError
        # One memory under two types: torch has an error of its own for that.
        if storage.nbytes() and self._dtypes.setdefault(storage.data_ptr(), dtype) != dtype:
            raise _UnusualError


class Container:
    """A state that was taken apart, to be published. Its storages must not change meanwhile."""

    beside = True

    def __init__(self, state: Pickled) -> None:
        self.nbytes = state.nbytes
        self.state = state
        self._records: dict[str, Record] = {}

    def write(self, file: HashedFile) -> None:
        """Writes the whole container."""
        sources = [
            StorageSource(str(key), len(memory), partial(pieces_of, memory, file))
            for key, memory in enumerate(self.state.storages)
        ]
        records = write_checkpoint(
            cast(BinaryIO, file),
            None,
            sources,
            root=ROOT,
            byteorder=sys.byteorder,
            pickle=self.state.pickle,
        )
        self._records = {f"{ROOT}/{name}": Record(size, crc) for name, size, crc in records}

    def check(self, path: str) -> str | None:
        """What is wrong with the file's end or its directory."""
        return check_archive(path, self._records)


def pieces_of(memory: torch.Tensor, file: HashedFile) -> Iterator[memoryview]:
    """The bytes of a tensor of uint8, as they lie there or, on another device, through a buffer.

    The buffer is used again when `file` needs nothing of it any more.
    """
    if memory.device.type == "cpu":
        yield from _slices(memory)
        return
    buffer = torch.empty(
        min(_BUFFER, len(memory)), dtype=torch.uint8, pin_memory=memory.device.type == "cuda"
    )
    yield from through(buffer, memory, file)


def through(buffer: torch.Tensor, memory: torch.Tensor, file: HashedFile) -> Iterator[memoryview]:
    """The bytes of `memory`, copied to `buffer` part by part; both are tensors of uint8."""
    for start in range(0, len(memory), max(1, len(buffer))):
        part = buffer[: len(memory) - start]
        part.copy_(memory[start : start + len(buffer)])
        yield from _slices(part)
        file.drain()


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """The memory of a storage as a tensor of uint8, [bytes]. Nothing is copied."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _slices(memory: torch.Tensor) -> Iterator[memoryview]:
    view = memoryview(cast(Any, memory.numpy()))
    return (view[at : at + PIECE] for at in range(0, len(view), PIECE))
