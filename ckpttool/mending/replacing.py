"""Takes lost tensors from another file: from its tensors of the same name, shape and type."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.errors import FormatError
from ckpttool.formats.dtypes import STORAGE_BITS
from ckpttool.formats.values import StorageRef, TensorValue
from ckpttool.mending.losses import byte_range, is_whole
from ckpttool.model.sources import sliced_source
from ckpttool.model.storages import count_and_reach

if TYPE_CHECKING:
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
    Tensors that share their place go on sharing it. One that the other file lacks, or has damaged,
    stays lost. Raises UnreadableError, and FormatError for what is no checkpoint.
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


class _Replacing:
    def __init__(
        self, other: Checkpoint, skeleton: Skeleton, standing: dict[str, Standing]
    ) -> None:
        self.other = other
        self.skeleton = skeleton
        self.standing = standing
        self.names: list[str] = []
        self.sources: list[StorageSource] = []
        self.places: dict[tuple[object, ...], StorageRef] = {}
        self.proven: dict[str, bool] = {}
        taken = [int(key) for key in skeleton.storages if key.isascii() and key.isdigit()]
        self.next_key = max(taken, default=-1) + 1

    def run(self) -> tuple[list[str], list[StorageSource]]:
        seen: set[int] = set()
        for name, value in self.skeleton.tensors.items():
            if is_whole(value, self.standing):
                if id(value) in seen:
                    self.names.append(name)  # the same object under another name
                continue
            if self.replace(name, value):
                self.names.append(name)
                seen.add(id(value))
        return self.names, self.sources

    def replace(self, name: str, value: TensorValue) -> bool:
        """Whether a tensor, with all its parts, could be replaced."""
        found = self.other.tensors.get(name)
        return found is not None and self._replace(value, found.value)

    def _replace(self, value: TensorValue, by: TensorValue) -> bool:
        parts, others = value.parts or {}, by.parts or {}
        if parts.keys() != others.keys() or not self._fits(value, by):
            return False
        if not all(
            is_whole(part, self.standing) or self._replace(part, others[key])
            for key, part in parts.items()
        ):
            return False
        if value.storage is not None:
            self._move(value, by)
        return True

    def _fits(self, value: TensorValue, by: TensorValue) -> bool:
        alike = (value.shape, value.dtype, value.layout) == (by.shape, by.dtype, by.layout)
        if not alike or (value.storage is None) != (by.storage is None):
            return False
        if by.storage is None:
            return True
        record = f"data/{by.storage.key}"
        if record not in self.proven:
            self.proven[record] = self._is_proven(record)
        return self.proven[record] and by.stride is not None

    def _is_proven(self, record: str) -> bool:
        """Whether the other file's record is what was written; where it has no checksum, there."""
        container = self.other.container
        assert container is not None
        try:
            found = container.record(record)
            crc = container.crc32(found)
        except FormatError:
            return False
        return found.crc is None or not container.has_checksums or crc == found.crc

    def _move(self, value: TensorValue, by: TensorValue) -> None:
        """Puts a tensor into a storage of its own, or into that of one with the same place."""
        assert value.storage is not None and by.storage is not None
        place = (value.storage.key, value.offset, value.shape, value.stride, value.dtype)
        ref = self.places.get(place)
        start, stop = byte_range(by)
        reach = count_and_reach(by.shape, by.stride)[1]
        if ref is None:
            size = (stop - start) * 8 // STORAGE_BITS[by.dtype] if reach else 0
            key = str(self.next_key)
            self.next_key += 1
            kind = value.storage.dtype
            numel = size if kind == value.dtype else size * STORAGE_BITS[by.dtype] // 8
            ref = self.places[place] = StorageRef(kind, key, value.storage.device, numel)
            self.skeleton.storages[key] = ref
            self.standing[key] = _there(stop - start)
            container = self.other.container
            assert container is not None
            source = sliced_source(container, by.storage.key, start, stop, name=key)
            self.sources.append(source)
        value.storage, value.offset, value.stride = ref, 0, by.stride


def _there(size: int) -> Standing:
    from ckpttool.mending.losses import Standing

    return Standing(size, size, True, "taken from another file")
