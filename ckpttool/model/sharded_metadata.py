"""What `.metadata` of a distributed checkpoint says: tensors, their pieces, and where these lie.

It is a plain pickle of `torch.distributed.checkpoint.metadata.Metadata`, as torch 2.1 to 2.13 write
it; the static reader leaves every object of it inert, and what is needed is taken out of these by
the names of their classes and fields. What does not make sense is an anomaly.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.formats.anomaly import Anomaly
from ckpttool.formats.dtypes import BITS, storage_byte_count
from ckpttool.formats.values import GlobalRef, Opaque
from ckpttool.model.inert import what
from ckpttool.model.sharded_fields import FieldCheck

if TYPE_CHECKING:
    from collections.abc import Iterable

_LARGEST = 1 << 62
_MOST_AXES = 64  # torch's own limit

Extents = tuple[int, ...]


class Item(NamedTuple):
    """One entry of a shard: an archive of `length` bytes from `offset` on in the file `file`.

    `name` is the key in the state dict, `offsets` where the piece begins in its tensor; None for an
    object that is no tensor. `transforms` names what its bytes went through (`zstd`).
    """

    name: str
    offsets: Extents | None
    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()

    @property
    def stop(self) -> int:
        """Where it ends in its file."""
        return self.offset + self.length


class Piece(NamedTuple):
    """A part of a tensor, in elements; `item` is None where the metadata does not say where."""

    offsets: Extents
    sizes: Extents
    item: Item | None

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return prod(self.sizes)


class ShardedTensor(NamedTuple):
    """A tensor and the pieces that it is stored in. `dtype` is torch's short name, or empty."""

    name: str
    dtype: str
    shape: Extents
    pieces: list[Piece]

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that its elements take."""
        return bytes_of(self.dtype, self.numel)


class ShardedMetadata:
    """The content of `.metadata`.

    `tensors` and `objects` (what is no tensor; None where nothing says where it lies) are by name,
    in its order. `items` are all entries that it gives a place, `version` is its own (None before
    torch 2.7). `anomalies` say what makes no sense in it, each problem once with all its names.
    """

    __slots__ = ("_problems", "anomalies", "items", "objects", "tensors", "version")

    def __init__(self, tree: Any) -> None:
        self.anomalies: list[Anomaly] = []
        self._problems: dict[str, list[str]] = {}
        self.tensors: dict[str, ShardedTensor] = {}
        self.objects: dict[str, Item | None] = {}
        self.items: list[Item] = []
        self.version: str | None = None
        if class_name(tree) != "Metadata":
            self._odd(f"it holds {what(tree)} where torch's Metadata belongs")
            return
        content = fields(tree)
        version = content.get("version")
        self.version = version if isinstance(version, str) else None
        places = self._places(content.get("storage_data"))
        self._entries(content.get("state_dict_metadata"), places)
        self._note_strangers()
        for problem, name in FieldCheck().problems(content):
            self._odd(problem, name)

    def files(self) -> dict[str, list[Item]]:
        """The entries of each file, by where they begin."""
        found: dict[str, list[Item]] = {}
        for item in self.items:
            found.setdefault(item.file, []).append(item)
        for items in found.values():
            items.sort(key=lambda item: (item.offset, item.length))
        return found

    def _odd(self, problem: str, name: str | None = None) -> None:
        names = self._problems.get(problem)
        if names is None:
            names = self._problems[problem] = []
            found = Anomaly("sharded-metadata-malformed", problem=problem, names=names)
            self.anomalies.append(found)
        if name is not None:
            names.append(name)

    def _places(self, storage: Any) -> dict[tuple[str, Extents | None], Item]:
        places: dict[tuple[str, Extents | None], Item] = {}
        if not isinstance(storage, dict):
            self._odd(f"its storage_data is {what(storage)}, so nothing says where the shards are")
            return places
        for index, info in storage.items():
            item = _item(fields(index), fields(info))
            if item is None:
                self._odd("an entry of its storage_data has no name, file, offset or length")
                continue
            if (item.name, item.offsets) in places:
                self._odd("two entries of its storage_data are for the same piece", item.name)
            places[item.name, item.offsets] = item
            self.items.append(item)
        return places

    def _entries(self, entries: Any, places: dict[tuple[str, Extents | None], Item]) -> None:
        if not isinstance(entries, dict):
            self._odd(f"its state_dict_metadata is {what(entries)} where a dictionary belongs")
            return
        for name, entry in entries.items():
            kind = class_name(entry)
            if not isinstance(name, str):
                self._odd(f"a key of its state_dict_metadata is {what(name)}")
            elif kind == "BytesStorageMetadata":
                self.objects[name] = places.get((name, None))
            elif kind == "TensorStorageMetadata":
                self._tensor(name, fields(entry), places)
            else:
                self._odd(f"the entry is {what(entry)}, no description of a tensor or bytes", name)

    def _tensor(
        self, name: str, entry: dict[str, Any], places: dict[tuple[str, Extents | None], Item]
    ) -> None:
        shape, chunks = _extents(entry.get("size")), entry.get("chunks")
        dtype = _dtype(entry.get("properties"))
        if shape is None or not isinstance(chunks, (list, tuple)):
            self._odd("its description has no size, or no list of chunks", name)
            return
        if dtype not in BITS:
            self._odd("its description has no dtype that is known", name)
            return
        pieces = []
        for chunk in chunks:
            about = fields(chunk)
            offsets, sizes = _extents(about.get("offsets")), _extents(about.get("sizes"))
            if offsets is None or sizes is None or not len(offsets) == len(sizes) == len(shape):
                self._odd("a chunk has not as many offsets and sizes as the tensor", name)
                continue
            pieces.append(Piece(offsets, sizes, places.get((name, offsets))))
        self.tensors[name] = ShardedTensor(name, dtype, shape, pieces)

    def _note_strangers(self) -> None:
        """Places without an entry, and entries without a place."""
        pieces = [piece.item for tensor in self.tensors.values() for piece in tensor.pieces]
        known = {item for item in (*pieces, *self.objects.values()) if item is not None}
        for item in self.items:
            if item not in known:
                self._odd("it gives a place to something that it does not describe", item.name)
        for name, tensor in self.tensors.items():
            if any(piece.item is None for piece in tensor.pieces):
                self._odd("nothing says where a piece of it lies", name)
        for name, place in self.objects.items():
            if place is None:
                self._odd("nothing says where it lies", name)


def bytes_of(dtype: str, numel: int) -> int:
    """Bytes that so many elements take; 0 for a dtype that is not known."""
    return storage_byte_count(dtype, numel) if dtype in BITS else 0


def coverage_problems(tensors: Iterable[ShardedTensor]) -> Iterator[Anomaly]:
    """Tensors whose pieces do not cover every element exactly once."""
    for tensor in tensors:
        if problem := _coverage_problem(tensor):
            yield Anomaly("sharded-coverage", names=(tensor.name,), problem=problem)


def _coverage_problem(tensor: ShardedTensor) -> str | None:
    filled = [piece for piece in tensor.pieces if piece.numel]
    for piece in filled:
        ends = zip(piece.offsets, piece.sizes, tensor.shape, strict=True)
        if any(offset + size > extent for offset, size, extent in ends):
            shown = f"{list(piece.sizes)} at {list(piece.offsets)}"
            return f"a piece of {shown} lies outside of its shape {list(tensor.shape)}"
    if pair := _overlap(filled):
        first, second = (f"{list(piece.sizes)} at {list(piece.offsets)}" for piece in pair)
        return f"two pieces overlap: {first} and {second}"
    count = sum(piece.numel for piece in filled)
    if count != tensor.numel:
        return f"the pieces have {count:,} of its {tensor.numel:,} elements"
    return None


def _overlap(pieces: list[Piece]) -> tuple[Piece, Piece] | None:
    """Two pieces that share an element. Swept along the axis on which they differ most."""
    if len(pieces) < 2 or not pieces[0].offsets:
        return (pieces[0], pieces[1]) if len(pieces) > 1 else None
    axes = range(len(pieces[0].offsets))
    axis = max(axes, key=lambda a: len({piece.offsets[a] for piece in pieces}))
    active: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.offsets[axis]):
        start = piece.offsets[axis]
        active = [one for one in active if one.offsets[axis] + one.sizes[axis] > start]
        for other in active:
            if _meet(piece, other):
                return other, piece
        active.append(piece)
    return None


def _meet(one: Piece, other: Piece) -> bool:
    extents = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + n and b < a + m for a, m, b, n in extents)


def class_name(value: Any) -> str:
    """The name of an inert object's class, without its module, which differs between versions."""
    if isinstance(value, Opaque) and isinstance(value.target, GlobalRef):
        return value.target.name.rpartition(".")[2]
    return ""


def fields(value: Any) -> dict[str, Any]:
    """The attributes that an inert object would have; empty for anything else.

    A class with slots has its attributes in the second of two (copyreg's protocol 2).
    """
    state = value.state if isinstance(value, Opaque) else None
    if isinstance(state, tuple) and len(state) == 2:
        parts = [part for part in state if isinstance(part, dict)]
        state = {key: item for part in parts for key, item in part.items()}
    return state if isinstance(state, dict) else {}


def _item(index: dict[str, Any], info: dict[str, Any]) -> Item | None:
    name, file = index.get("fqn"), info.get("relative_path")
    offset, length = _extent(info.get("offset")), _extent(info.get("length"))
    if not isinstance(name, str) or not isinstance(file, str) or offset is None or length is None:
        return None
    begins = index.get("offset")
    transforms = info.get("transform_descriptors")
    named = transforms if isinstance(transforms, (list, tuple)) else ()
    offsets = None if begins is None else _extents(begins)
    return Item(name, offsets, file, offset, length, tuple(str(one)[:40] for one in named))


def _extent(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LARGEST:
        return None
    return value


def _extents(value: Any) -> Extents | None:
    if not isinstance(value, (tuple, list)) or len(value) > _MOST_AXES:
        return None
    numbers = [_extent(number) for number in value]
    known = tuple(number for number in numbers if number is not None)
    return known if len(known) == len(numbers) else None


def _dtype(properties: Any) -> str:
    """The short name of the dtype; TensorProperties pickle as a tuple that begins with it."""
    state = properties.state if isinstance(properties, Opaque) else None
    dtype = state[0] if isinstance(state, tuple) and state else fields(properties).get("dtype")
    if isinstance(dtype, GlobalRef) and dtype.module == "torch":
        return dtype.name
    return dtype.removeprefix("torch.") if isinstance(dtype, str) else ""
