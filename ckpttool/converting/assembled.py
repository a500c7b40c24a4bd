"""A tensor put together from its pieces, in C order, without ever being in memory as a whole.

Each piece gives its elements in C order; within the whole they come in that same order. So the
whole is made in blocks of rows, for which every piece that has some of these rows gives its next
elements. Memory is bounded by a block, or a row where that is larger; by a piece where its elements
do not lie in C order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.converting.dense import dense_chunks
from ckpttool.converting.storages import Chunk, StorageBytes
from ckpttool.errors import FormatError
from ckpttool.formats.dtypes import BITS
from ckpttool.formats.values import TensorValue
from ckpttool.io.reading import FileReader, WindowReader
from ckpttool.model.checkpoint import Checkpoint

if TYPE_CHECKING:
    import numpy as np

    from ckpttool.formats.limits import ReaderLimits
    from ckpttool.model.sharded_metadata import Piece, ShardedTensor

_BLOCK_BYTES = 4 << 20

OpenShard = Callable[[str], FileReader]


class _Source(NamedTuple):
    """A piece without the leading axes of one element: where it begins, and its bytes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stream: _Stream

    @property
    def stop(self) -> int:
        """The row behind its last."""
        return self.offsets[0] + self.sizes[0]


class _Stream:
    """Bytes that come in chunks of any size, taken in the sizes that are needed."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self._chunks = iter(chunks)
        self._rest = bytearray()

    def take(self, count: int) -> bytearray:
        """The next `count` bytes. FormatError where there are fewer."""
        while len(self._rest) < count:
            chunk = next(self._chunks, None)
            if chunk is None:
                raise FormatError("a shard ends in the middle of a tensor")
            self._rest += chunk
        taken = self._rest[:count]
        del self._rest[:count]
        return taken


def assembled_chunks(
    tensor: ShardedTensor, open_shard: OpenShard, limits: ReaderLimits
) -> Iterator[Chunk]:
    """The elements of a tensor in C order, little-endian, in pieces of a few megabytes.

    `open_shard` gives the open file of a shard by its name. Raises FormatError where a shard does
    not hold what the metadata says, UnreadableError.
    """
    if not tensor.numel:
        return
    axis = next((a for a, extent in enumerate(tensor.shape) if extent > 1), len(tensor.shape))
    shape = tensor.shape[axis:] or (1,)
    pieces = sorted(
        (piece for piece in tensor.pieces if piece.numel), key=lambda piece: piece.offsets
    )
    sources = [
        _Source(
            piece.offsets[axis:] or (0,),
            piece.sizes[axis:] or (1,),
            _Stream(_piece_chunks(tensor, piece, open_shard, limits)),
        )
        for piece in pieces
    ]
    if len(sources) == 1:
        yield from _piece_chunks(tensor, pieces[0], open_shard, limits)
        return
    yield from _rows(shape, sources, BITS[tensor.dtype] // 8)


def _rows(shape: tuple[int, ...], sources: list[_Source], width: int) -> Iterator[bytes]:
    """Block after block of rows; none spans the edge of a piece."""
    import numpy as np

    edges = sorted({0, shape[0], *(s.offsets[0] for s in sources), *(s.stop for s in sources)})
    most = max(1, _BLOCK_BYTES // (prod(shape[1:]) * width))
    for low, high in pairwise(edges):
        here = [source for source in sources if source.offsets[0] <= low and source.stop >= high]
        for start in range(low, high, most):
            count = min(most, high - start)
            block = np.empty((count, *shape[1:]), f"V{width}")
            for source in here:
                _fill(block, source, width)
            yield block.tobytes()


def _fill(block: np.ndarray[Any, Any], source: _Source, width: int) -> None:
    """Puts a source's next rows where they belong in a block."""
    import numpy as np

    part = (len(block), *source.sizes[1:])
    raw = source.stream.take(prod(part) * width)
    inner = zip(source.offsets[1:], source.sizes[1:], strict=True)
    where = (slice(None), *(slice(offset, offset + size) for offset, size in inner))
    block[where] = np.frombuffer(raw, f"V{width}").reshape(part)


def _piece_chunks(
    tensor: ShardedTensor, piece: Piece, open_shard: OpenShard, limits: ReaderLimits
) -> Iterator[Chunk]:
    item = piece.item
    if item is None:
        raise FormatError(f"{tensor.name}: nothing says where a piece of it lies")
    window = WindowReader(open_shard(item.file), item.offset, item.length)
    archive = Checkpoint(item.file, window, limits)
    held = archive.tree
    if not isinstance(held, TensorValue) or archive.container is None or held.storage is None:
        raise FormatError(f"{tensor.name}: {item.file} holds no tensor where one should be")
    if (held.dtype, held.shape, held.layout) != (tensor.dtype, piece.sizes, "strided"):
        raise FormatError(f"{tensor.name}: {item.file} holds another tensor than it should")
    container = archive.container
    yield from dense_chunks(held, StorageBytes(container), container.byteorder)
