"""Takes lost tensors from another file: from its tensors of the same name, shape and type."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckpttool.errors import FormatError
from ckpttool.formats.dtypes import BITS, STORAGE_BITS
from ckpttool.formats.values import StorageRef, TensorValue
from ckpttool.mending.losses import byte_range, is_whole
from ckpttool.model.sources import sliced_source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpttool.mending.losses import Standing
    from ckpttool.mending.plan import Mending
    from ckpttool.mending.skeleton import Skeleton
    from ckpttool.model.checkpoint import Checkpoint
    from ckpttool.writing.checkpoint import StorageSource


def replace_from(
    source: str, skeleton: Skeleton, standing: dict[str, Standing], mending: Mending
) -> tuple[list[str], list[StorageSource]]:
    """Lets lost tensors of `skeleton` lie in new storages, filled from the file `source`.

    Gives the names of those that were replaced, and the storages. `standing` gets the new ones.
    Tensors that share bytes go on sharing them; where they do not lie in the other file as they lie
    here they stay lost, since it may want different values for the same bytes. So does what the
    other file lacks, or has damaged. Raises UnreadableError, and FormatError for what is no
    checkpoint.
    """
    from ckpttool.model.checkpoint import open_checkpoint

    other = open_checkpoint(source, limits=mending.limits)
    if not other.readable or other.container is None:
        other.close()
        raise FormatError(f"{source}: is no checkpoint that tensors could be taken from")
    order = mending.container.byteorder if mending.container is not None else "little"
    if other.container.byteorder != order:
        other.close()
        raise FormatError(f"{source}: its numbers have another byte order")
    return _Replacing(other, skeleton, standing).run()


class _Pair(NamedTuple):
    """A lost tensor, or a part of one, that has bytes of its own; and what may replace it.

    `start` and `stop` are its bytes in its storage. `differs` tells that the other file has it, and
    has it otherwise, or damaged.
    """

    value: TensorValue
    by: TensorValue | None
    start: int
    stop: int
    differs: bool


class _Replacing:
    def __init__(
        self, other: Checkpoint, skeleton: Skeleton, standing: dict[str, Standing]
    ) -> None:
        self.other = other
        self.skeleton = skeleton
        self.standing = standing
        self.sources: list[StorageSource] = []
        self.proven: dict[str, bool] = {}
        taken = [int(key) for key in skeleton.storages if key.isascii() and key.isdigit()]
        self.next_key = max(taken, default=-1) + 1

    def run(self) -> tuple[list[str], list[StorageSource]]:
        lost = [
            (name, value)
            for name, value in self.skeleton.tensors.items()
            if not is_whole(value, self.standing)
        ]
        by_storage: dict[str, list[_Pair]] = {}
        for name, value in lost:
            found = self.other.tensors.get(name)
            for pair in self.pairs(value, None if found is None else found.value):
                assert pair.value.storage is not None
                by_storage.setdefault(pair.value.storage.key, []).append(pair)
        for pairs in by_storage.values():
            # At best all of a storage stays together; else what overlaps must.
            if any(pair.by is None for pair in pairs) or not self.move(pairs):
                for group in _overlapping(pairs):
                    self.move(group)
        names = [name for name, value in lost if is_whole(value, self.standing)]
        return names, self.sources

    def pairs(
        self, value: TensorValue, by: TensorValue | None, *, differs: bool = False
    ) -> Iterator[_Pair]:
        """A tensor and its parts, as far as they are lost, with those of the other file."""
        if by is not None and not self.fits(value, by):
            by, differs = None, True
        others = (by.parts if by is not None else None) or {}
        for key, part in (value.parts or {}).items():
            if not is_whole(part, self.standing):
                yield from self.pairs(part, others.get(key), differs=differs)
        if value.storage is not None:
            start, stop = byte_range(value)
            if stop > self.standing[value.storage.key].present:
                yield _Pair(value, by, start, stop, differs)

    def fits(self, value: TensorValue, by: TensorValue) -> bool:
        alike = (value.shape, value.dtype, value.layout) == (by.shape, by.dtype, by.layout)
        if not alike or (value.storage is None) != (by.storage is None):
            return False
        if (value.parts or {}).keys() != (by.parts or {}).keys():
            return False
        if by.storage is None:
            return True
        record = f"data/{by.storage.key}"
        if record not in self.proven:
            self.proven[record] = self.is_proven(record)
        return self.proven[record] and by.stride is not None and self.is_there(record, by)

    def is_proven(self, record: str) -> bool:
        """Whether the other file's record is what was written; where it has no checksum, there."""
        container = self.other.container
        assert container is not None
        try:
            found = container.record(record)
            crc = container.crc32(found)
        except FormatError:
            return False
        return found.crc is None or not container.has_checksums or crc == found.crc

    def is_there(self, record: str, by: TensorValue) -> bool:
        """Whether a record, which may be cut, has all bytes of a tensor."""
        container = self.other.container
        assert container is not None
        return byte_range(by)[1] <= container.record(record).size

    def move(self, pairs: list[_Pair]) -> bool:
        """Puts tensors that lie in one storage into a new one, if the other file can fill it.

        They must lie there as they lie here, so that what shares bytes goes on sharing them, and
        no two of them want different ones. One alone may lie in any way. What the other file lacks
        comes along where it lies in the bytes of one that it has.
        """
        known = [(pair, pair.by) for pair in pairs if pair.by is not None]
        if not known or any(pair.differs for pair in pairs) or not _lie_alike(pairs, known):
            return False
        first, by = known[0]
        assert by.storage is not None
        assert first.value.storage is not None
        ranges = [byte_range(other) for _, other in known]
        start, stop = min(low for low, _ in ranges), max(high for _, high in ranges)
        shift = byte_range(by)[0] - first.start - start
        kind = first.value.storage.dtype
        bits = STORAGE_BITS.get(kind, 8)
        moved = [(pair, 8 * (pair.start + shift), BITS[pair.value.dtype]) for pair in pairs]
        if 8 * (stop - start) % bits or any(place % size for _, place, size in moved):
            return False
        key, self.next_key = str(self.next_key), self.next_key + 1
        numel = 8 * (stop - start) // bits
        ref = StorageRef(kind, key, first.value.storage.device, numel)
        self.skeleton.storages[key] = ref
        self.standing[key] = _there(stop - start)
        container = self.other.container
        assert container is not None
        self.sources.append(sliced_source(container, by.storage.key, start, stop, name=key))
        at_one_place = len(set(map(_place, pairs))) == 1
        for pair, place, size in moved:
            pair.value.storage, pair.value.offset = ref, place // size
            if at_one_place:
                pair.value.stride = by.stride
        return True


def _lie_alike(pairs: list[_Pair], known: list[tuple[_Pair, TensorValue]]) -> bool:
    """Whether tensors lie in a storage of the other file as they lie in theirs.

    Those at one place may lie at any other there, if that is one, too.
    """
    if len(set(map(_place, pairs))) == 1:
        return len({(by.storage and by.storage.key, by.offset, by.stride) for _, by in known}) == 1
    shifts = set()
    for pair, by in known:
        assert by.storage is not None
        if by.stride != pair.value.stride:
            return False
        # Without a byte, a tensor lies nowhere.
        if pair.stop > pair.start:
            shifts.add((by.storage.key, byte_range(by)[0] - pair.start))
    return len(shifts) == 1 and all(
        any(one.start <= pair.start and pair.stop <= one.stop for one, _ in known) for pair in pairs
    )


def _place(pair: _Pair) -> tuple[object, ...]:
    value = pair.value
    return (value.offset, value.shape, value.stride, value.dtype)


def _overlapping(pairs: list[_Pair]) -> list[list[_Pair]]:
    """The tensors of a storage in groups that have no byte in common."""
    groups: list[list[_Pair]] = []
    reached = -1
    for pair in sorted(pairs, key=lambda pair: pair.start):
        if pair.start >= reached:
            groups.append([])
        groups[-1].append(pair)
        reached = max(reached, pair.stop)
    return groups


def _there(size: int) -> Standing:
    from ckpttool.mending.losses import Standing

    return Standing(size, size, True, "taken from another file")
