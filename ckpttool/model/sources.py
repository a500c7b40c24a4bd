"""The storages of an open file as sources that a new file can be written from, piece by piece."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ckpttool.errors import FormatError
from ckpttool.formats.dtypes import storage_byte_count
from ckpttool.model.walk import Walk, find_tensors
from ckpttool.writing.checkpoint import StorageSource

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from ckpttool.formats.container import Container
    from ckpttool.formats.values import StorageRef
    from ckpttool.model.checkpoint import Checkpoint


def storage_sources(
    checkpoint: Checkpoint, keys: Collection[str] | None = None
) -> list[StorageSource]:
    """A source for each storage that the content refers to, in the order of the file's records.

    Any kind of container will do; its bytes are read when they are asked for, so it has to stay
    open. `keys` leaves out all others. A storage of the legacy formats that is a view of another
    one has a source of its own, where it stands without a tensor. Raises FormatError for a storage
    that has no record; one of damaged content is only found out while it is read.
    """
    container = checkpoint.container
    if container is None:
        if checkpoint.storages:
            raise FormatError(f"{checkpoint.path}: there is no container to read storages from")
        return []
    place = {record.name: index for index, record in enumerate(container.entries)}
    wanted = [key for key in checkpoint.storages if keys is None or key in keys]
    wanted.sort(key=lambda key: place.get(container.storage_record(key), len(place)))
    sources = [whole_source(container, key) for key in wanted]
    if container.format != "torch-zip":
        taken = set(checkpoint.storages)
        for ref in _lone_views(checkpoint):
            if ref.view[0] not in taken and (keys is None or ref.view[0] in keys):
                sources.append(view_source(container, ref))
                taken.add(ref.view[0])
    return sources


def whole_source(container: Container, key: str) -> StorageSource:
    """The storage with this key. Raises FormatError if it has no record."""
    record = container.record(container.storage_record(key))
    return StorageSource(key, record.size, partial(container.chunks, record))


def sliced_source(
    container: Container, key: str, start: int, stop: int, *, name: str | None = None
) -> StorageSource:
    """The bytes from `start` up to `stop` of the storage with this key, as a storage `name`.

    The name is the key where none is given. Only these bytes are read where the record lies in the
    file as it is; a compressed one is unpacked up to `stop`. Raises FormatError where there is no
    such record, or it has no such bytes.
    """
    record = container.record(container.storage_record(key))
    if not 0 <= start <= stop <= record.size:
        words = f"record {record.name!r} has no bytes from {start:,} to {stop:,}"
        raise FormatError(words, record=record.name)
    chunks = partial(_part, container, record.name, start, stop)
    return StorageSource(key if name is None else name, stop - start, chunks)


def _part(container: Container, record: str, start: int, stop: int) -> Iterator[memoryview | bytes]:
    span = container.span(record)
    if span is not None:
        yield from container.reader.chunks(span[0] + start, stop - start)
        return
    position = 0
    for chunk in container.chunks(record):
        if position >= stop:
            return
        piece = memoryview(chunk)[max(0, start - position) : stop - position]
        position += len(chunk)
        if piece:
            yield piece


def _lone_views(checkpoint: Checkpoint) -> list[StorageRef]:
    """Views of storages that stand without a tensor."""
    walk = Walk(checkpoint.limits)
    for _ in find_tensors(checkpoint.tree, walk=walk):
        pass
    return [ref for ref in walk.storages if ref.view is not None]


def view_source(container: Container, ref: StorageRef) -> StorageSource:
    """The part of a storage that a view of it shows, as a storage of the view's own key."""
    name, offset, numel = ref.view
    start = storage_byte_count(ref.dtype, offset)
    stop = start + storage_byte_count(ref.dtype, numel)
    return sliced_source(container, ref.key, start, stop, name=name)
