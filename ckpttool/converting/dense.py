"""A tensor's elements as safetensors wants them: contiguous, in C order, little-endian.

Where they lie like that already, the storage's bytes are handed on piece by piece. Else the range
that the tensor reaches is read, which is at most its storage, and gathered row by row.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any

from ckpttool.converting.extents import byte_range
from ckpttool.converting.storages import Chunk, StorageBytes, contiguous_stride
from ckpttool.errors import FormatError
from ckpttool.formats.dtypes import BITS
from ckpttool.formats.values import TensorValue

if TYPE_CHECKING:
    import numpy as np

_BLOCK_BYTES = 1 << 22


def dense_size(tensor: TensorValue) -> int:
    """Bytes of the elements, each written out."""
    return prod(tensor.shape or ()) * BITS[tensor.dtype] // 8


def is_contiguous(tensor: TensorValue) -> bool:
    """Whether the elements lie one after the other, in C order (torch's `is_contiguous`)."""
    shape, stride = tensor.shape or (), tensor.stride or ()
    if 0 in shape:
        return True
    wanted = contiguous_stride(shape)
    return all(e == 1 or s == w for e, s, w in zip(shape, stride, wanted, strict=True))


def dense_chunks(tensor: TensorValue, storages: StorageBytes, byteorder: str) -> Iterator[Chunk]:
    """The elements of a strided tensor, in pieces; each is valid until the next is asked for.

    `byteorder` is that of the storages. Raises FormatError where the bytes are not there.
    """
    if 0 in (tensor.shape or ()):
        return
    assert tensor.storage is not None
    start, stop = byte_range(tensor)
    swap = byteorder == "big" and BITS[tensor.dtype] > 8
    if is_contiguous(tensor) and not swap and not _lazy_bits(tensor):
        yield from storages.chunks(tensor.storage.key, start, stop - start)
        return
    raw = bytearray()
    for chunk in storages.chunks(tensor.storage.key, start, stop - start):
        raw += chunk
    yield from _gathered(tensor, raw, swap)


def _lazy_bits(tensor: TensorValue) -> dict[Any, Any]:
    """torch's conjugation and negation that are still to be applied."""
    bits = (tensor.extra or {}).get("metadata")
    return {k: v for k, v in bits.items() if v} if isinstance(bits, dict) else {}


def _gathered(tensor: TensorValue, raw: bytearray, swap: bool) -> Iterator[bytes]:
    """The elements, some rows at a time. `raw` begins with the tensor's first element."""
    import numpy as np

    step = BITS[tensor.dtype] // 8
    shape, stride = tensor.shape or (), tensor.stride or ()
    elements = np.frombuffer(raw, f"V{step}")
    steps = tuple(n * step if extent > 1 else 0 for extent, n in zip(shape, stride, strict=True))
    try:
        array = np.lib.stride_tricks.as_strided(elements, shape, steps, writeable=False)
    except (ValueError, OverflowError) as error:  # too many dimensions or elements for numpy
        raise FormatError(f"a tensor that numpy cannot hold: {error}") from error
    for block in _blocks(array):
        dense = np.ascontiguousarray(block)
        if swap:
            width = step // 2 if tensor.dtype.startswith("complex") else step
            dense = dense.view(f"u{width}").byteswap()
        yield _resolved(dense, tensor).tobytes()


def _blocks(array: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """Parts of the array that follow one another in C order, each of a few megabytes at most."""
    if array.ndim == 0 or array.nbytes <= _BLOCK_BYTES:
        yield array.reshape(1) if array.ndim == 0 else array
        return
    row = array.nbytes // len(array)
    if row > _BLOCK_BYTES:
        for part in array:
            yield from _blocks(part)
        return
    step = max(1, _BLOCK_BYTES // max(row, 1))
    for start in range(0, len(array), step):
        yield array[start : start + step]


def _resolved(dense: np.ndarray[Any, Any], tensor: TensorValue) -> np.ndarray[Any, Any]:
    """The values that torch would give: conjugated or negated where that was put off."""
    bits = _lazy_bits(tensor)
    if not bits:
        return dense
    import numpy as np

    from ckpttool.model.tensor import numpy_dtype

    # On a little-endian machine as on a big one: the bytes are little-endian by now.
    values: np.ndarray[Any, Any] = dense.view(numpy_dtype(tensor.dtype).newbyteorder("<"))
    if bits.get("conj"):
        values = values.conj()
    if bits.get("neg"):
        values = np.negative(values)
    return values
