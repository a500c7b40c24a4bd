"""`.metadata` of a sharded step, proven harmless before torch gets it.

torch unpickles this file, which lets it run any code. So it is first read statically, then by an
unpickler that knows nothing but torch's own descriptions of tensors, both from the same bytes; and
what came out is checked: names of files that lead elsewhere are refused.
"""

from __future__ import annotations

import io
import os
import pickle
import re
from typing import Any

import torch

from trainer_core.saving.savable import CheckpointError

METADATA_NAME = ".metadata"
MOST_BYTES = 1 << 29

_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES = {
    _METADATA: frozenset(
        {"Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties"}
        | {"ChunkStorageMetadata", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING"}
        | {"TensorProperties.MEM_FORMAT_ENCODING"}
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "collections": frozenset({"OrderedDict"}),
    # Where the checkpoint was written, as torch's own writer notes it.
    "pathlib": frozenset({"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}),
    "pathlib._local": frozenset({"PosixPath", "WindowsPath"}),
}
_SHARD = re.compile(r"__[0-9]+_[0-9]+\.distcp\Z")


def read_metadata(directory: str | os.PathLike[str]) -> Any:
    """torch's `Metadata` of the sharded step in `directory`.

    Raises CheckpointError for a file that names anything but torch's descriptions of tensors, or
    that makes no sense; OSError where it cannot be read.
    """
    path = os.path.join(directory, METADATA_NAME)
    with open(path, "rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise CheckpointError(f"{path}: is larger than {MOST_BYTES:,} bytes")
    _refuse_strange(path, data)
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # a pickle may fail in any way
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    problem = _problem(metadata)
    if problem:
        raise CheckpointError(f"{path}: {problem}")
    return metadata


def _refuse_strange(path: str, data: bytes) -> None:
    from ckpttool.formats.static_pickle import read_pickle

    found = read_pickle(data)
    if found.error is not None:
        raise CheckpointError(f"{path}: cannot be read: {found.error}") from found.error
    strange = [use.path for use in found.globals.values() if not _is_known(use.module, use.name)]
    if strange:
        words = ", ".join(sorted(strange)[:5])
        raise CheckpointError(f"{path}: is refused: it needs {words}, and could run code")


def _is_known(module: str, name: str) -> bool:
    if module == "torch":
        return name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)
    return name in _CLASSES.get(module, ())


class _Unpickler(pickle.Unpickler):
    """Finds the known classes and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """The class, or UnpicklingError."""
        if not _is_known(module, name):
            raise pickle.UnpicklingError(f"{module}.{name} is not known")
        return super().find_class(module, name)


def _problem(metadata: Any) -> str:
    """What makes the metadata useless, in words; empty if nothing does."""
    from torch.distributed.checkpoint import metadata as known

    if not isinstance(metadata, known.Metadata):
        return f"holds a {type(metadata).__name__}, not torch's Metadata"
    entries: Any = metadata.state_dict_metadata  # a pickle keeps to no types
    places: Any = metadata.storage_data
    if not isinstance(entries, dict) or not isinstance(places, dict):
        return "says nothing of tensors, or not where they are"
    kinds = known.TensorStorageMetadata, known.BytesStorageMetadata
    for name, entry in entries.items():
        if not isinstance(name, str) or not isinstance(entry, kinds):
            return f"the entry {str(name)[:80]!r} describes no tensor"
    for index, place in places.items():
        if not isinstance(index, known.MetadataIndex):
            return "a place has no name"
        words = _place_problem(place)
        if words:
            return f"{index.fqn!s:.80}: {words}"
    return ""


def _place_problem(place: Any) -> str:
    file, numbers = getattr(place, "relative_path", None), []
    for name in ("offset", "length"):
        numbers.append(getattr(place, name, None))
    if not isinstance(file, str) or not _SHARD.match(file):
        return f"lies in {str(file)[:80]!r}, which is no shard beside it"
    if not all(type(number) is int and number >= 0 for number in numbers):
        return "has no place in its shard"
    if getattr(place, "transform_descriptors", None):
        return "is stored in a transformed way, which is not known here"
    return ""
