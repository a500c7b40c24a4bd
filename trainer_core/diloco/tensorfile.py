"""Tensors in a safetensors file: written with metadata, judged by the header before the body.

Format: 8 bytes little endian, the length of a JSON header, then tensors at the offsets that it
names (https://huggingface.co/docs/safetensors). The header alone tells whether a file can fit.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from trainer_core.diloco.errors import DiLoCoError, MissingError
from trainer_core.diloco.fingerprint import State
from trainer_core.diloco.store import Store

FIRST_READ = 64 << 10
MOST_HEADER = 16 << 20
"""Bytes; a model of 100,000 tensors has a header of about 10 MB."""
_WIDTHS = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}


class BadFileError(DiLoCoError):
    """A file on the store is not what it should be; the words say in what way."""


class Header(NamedTuple):
    """What the header says: dtype and shape of each tensor, and the metadata."""

    tensors: dict[str, tuple[str, tuple[int, ...]]]
    metadata: dict[str, str]


def save(tensors: State, metadata: Mapping[str, str], path: str | os.PathLike[str]) -> None:
    """Writes a local file. Tensors that share memory are written each for itself."""
    from safetensors.torch import save_file

    seen: set[int] = set()
    apart: State = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if storage in seen else tensor.contiguous()
        seen.add(storage)
    save_file(apart, path, dict(metadata))


def load(path: str | os.PathLike[str]) -> State:
    """The tensors of a local file. Raises BadFileError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: State = load_file(path)
    except SafetensorError as error:
        raise BadFileError(f"is no whole safetensors file: {error}") from None
    return tensors


def file_sha256(path: str | os.PathLike[str]) -> str:
    """In hexadecimal, of the whole file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(4 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def tensors_sha256(tensors: State) -> str:
    """Of the tensors' bytes in the order of their names: a delta's identity, whoever wrote it."""
    digest = hashlib.sha256()
    for _, tensor in sorted(tensors.items()):
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_header(store: Store, name: str, size: int) -> Header:
    """Reads only the header of a file of `size` bytes. Raises BadFileError, StoreError."""
    first = store.read(name, 0, min(size, FIRST_READ))
    if len(first) < 8:
        raise BadFileError("is shorter than a safetensors header")
    length = int.from_bytes(first[:8], "little")
    if length > MOST_HEADER or 8 + length > size:
        raise BadFileError(f"says that its header has {length} bytes, which can't be")
    rest = 8 + length - len(first)
    if rest > 0:
        first += store.read(name, len(first), 8 + length)
    if len(first) < 8 + length:
        raise MissingError(f"{name} became shorter while it was read")
    return _parsed(first[8 : 8 + length], size - 8 - length)


def _parsed(raw: bytes, body: int) -> Header:
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        raise BadFileError("has a header that is no JSON") from None
    if not isinstance(document, dict):
        raise BadFileError("has a header that is no JSON object")
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(x, str) for x in metadata.values()):
        raise BadFileError("has metadata that are not texts")
    tensors = {name: _tensor(name, one) for name, one in document.items()}
    needed = sum(end - start for _, _, start, end in tensors.values())
    if needed != body:
        raise BadFileError(f"has {body} bytes of tensors where its header says {needed}")
    return Header({name: (one[0], one[1]) for name, one in tensors.items()}, metadata)


def _tensor(name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    try:
        code, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, start, end]
    except (TypeError, KeyError, ValueError):
        raise BadFileError(f"describes {name[:80]!r} in no known way") from None
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
        raise BadFileError(f"has no sizes for {name[:80]!r}")
    count = 1
    for length in shape:
        count *= length
    if not isinstance(code, str) or end - start != count * _WIDTHS.get(code, -1):
        raise BadFileError(f"gives {name[:80]!r} a length that its shape does not have")
    return code, tuple(shape), start, end
