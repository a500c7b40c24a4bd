"""Writing a safetensors file piece by piece, and proving it through the library.

The library's `serialize_file` wants every tensor in memory at once, so header and data are laid out
here, as its format says (https://huggingface.co/docs/safetensors): eight bytes of length, a JSON
header padded with spaces to a multiple of eight, then the tensors without gaps, those with the
widest elements first, each width by name. What was written is opened through the library, whose
parser checks the header against the file and must find every tensor with its dtype and shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from ckpttool.converting.storages import Chunk
from ckpttool.errors import CkptToolError, FormatError, WriteError

if TYPE_CHECKING:
    from ckpttool.io.durable import Progress

# torch's names of dtypes to the format's (safetensors/src/tensor.rs).
DTYPES = {
    "bool": "BOOL",
    "float4_e2m1fn_x2": "F4",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex64": "C64",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}
RESERVED_NAME = "__metadata__"
_LARGEST_HEADER = 100_000_000  # the library refuses longer ones
_COMPARE_BYTES = 1 << 20


class MissingLibraryError(CkptToolError, ImportError):
    """The safetensors library is not installed."""


class Entry(NamedTuple):
    """A tensor to be written: `dtype` as torch calls it; each call of `chunks` gives its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    chunks: Callable[[], Iterable[Chunk]]


def require_library() -> Any:
    """The safetensors library. Raises MissingLibraryError with the command that installs it."""
    try:
        import safetensors
    except ImportError as error:
        raise MissingLibraryError(
            "export needs the safetensors library: pip install 'ckpttool[export]'"
        ) from error
    return safetensors


def ordered(entries: Iterable[Entry]) -> list[Entry]:
    """The entries in the order of the file: wide elements first, so that all are aligned."""
    from ckpttool.formats.dtypes import BITS

    return sorted(entries, key=lambda entry: (-BITS[entry.dtype], entry.name))


def header(entries: list[Entry], metadata: dict[str, str]) -> bytes:
    """The first bytes of the file. Raises FormatError if the format allows no header so long."""
    import json

    table: dict[str, Any] = {RESERVED_NAME: metadata}
    offset = 0
    for entry in entries:
        span = [offset, offset + entry.nbytes]
        table[entry.name] = {
            "dtype": DTYPES[entry.dtype],
            "shape": logical_shape(entry),
            "data_offsets": span,
        }
        offset = span[1]
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _LARGEST_HEADER:
        raise FormatError(f"the names of its tensors take {len(text):,} bytes, more than allowed")
    return len(text).to_bytes(8, "little") + text


def logical_shape(entry: Entry) -> list[int]:
    """The shape in elements: torch counts pairs of float4, which share a byte, as one."""
    shape = list(entry.shape)
    if entry.dtype == "float4_e2m1fn_x2":
        shape[-1] *= 2
    return shape


def write(
    file: BinaryIO, entries: list[Entry], metadata: dict[str, str], progress: Progress | None
) -> None:
    """Writes the whole file. Raises FormatError where a tensor has not the bytes that it says."""
    file.write(header(entries, metadata))
    done, total = 0, sum(entry.nbytes for entry in entries)
    for entry in entries:
        before = done
        for chunk in entry.chunks():
            file.write(chunk)
            done += len(chunk)
            if progress is not None:
                progress(done, total, "writing")
        if done - before != entry.nbytes:
            raise FormatError(f"{entry.name} has {done - before:,} bytes, not {entry.nbytes:,}")


def prove(
    out: str,
    path: str,
    entries: list[Entry],
    metadata: dict[str, str],
    progress: Progress | None,
) -> None:
    """Opens `path` through the library, and compares every byte with the source once more.

    Raises WriteError, about `out`, whose temporary `path` is.
    """
    _ask_library(out, path, entries, metadata)
    done, total = 0, sum(entry.nbytes for entry in entries)
    with open(path, "rb", buffering=0) as file:
        file.seek(len(header(entries, metadata)))
        for entry in entries:
            for chunk in blocks(entry.chunks()):
                # bytes compare at memory speed, memoryviews one element at a time.
                if bytes(chunk) != file.read(len(chunk)):
                    raise WriteError(out, f"{entry.name} was read back with other bytes")
                done += len(chunk)
                if progress is not None:
                    progress(done, total, "comparing")
        if file.read(1):
            raise WriteError(out, "is longer than what was written")


def _ask_library(out: str, path: str, entries: list[Entry], metadata: dict[str, str]) -> None:
    safetensors = require_library()
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            found = {name: _described(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118
            about = file.metadata()
    except (safetensors.SafetensorError, OSError, ValueError, TypeError) as error:
        version = getattr(safetensors, "__version__", "of an unknown version")
        raise WriteError(out, f"safetensors {version} does not take it: {error}") from error
    expected = {entry.name: (DTYPES[entry.dtype], logical_shape(entry)) for entry in entries}
    if found != expected or about != metadata:
        raise WriteError(out, "safetensors finds other tensors in it than were written")


def _described(piece: Any) -> tuple[str, list[int]]:
    return str(piece.get_dtype()), list(piece.get_shape())


def blocks(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """The chunks, none longer than a megabyte."""
    for chunk in chunks:
        view = memoryview(chunk)
        for start in range(0, len(view), _COMPARE_BYTES):
            yield view[start : start + _COMPARE_BYTES]
