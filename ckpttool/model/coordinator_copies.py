"""State dicts of a coordinator that are copies of each other: told by checksums, or by bytes.

After a delivered upload the baseline is the model; a fresh node's baseline is the global state. Two
parts are copies where they have the same names with the same dtypes, shapes and layouts, and each
storage of one is the other's storage, or has a record of the same size and checksum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ckpttool.errors import FormatError
from ckpttool.formats.values import TensorValue
from ckpttool.model.inert import state_tensors

if TYPE_CHECKING:
    from ckpttool.formats.container import Container
    from ckpttool.formats.values import StorageRef

_CHUNK_BYTES = 1 << 20

# Whether the contents of two storages are equal.
Same = Callable[["StorageRef", "StorageRef"], bool]


def copies_by_checksum(tree: Any, container: Container | None) -> list[tuple[str, ...]]:
    """Groups of parts that are copies, as the checksums that are stored say; nothing is read."""
    if container is None:
        return []
    return _groups(tree, lambda one, other: _same_checksum(container, one, other))


def copies_by_bytes(tree: Any, container: Container | None) -> list[tuple[str, ...]]:
    """The same, with every byte compared."""
    if container is None:
        return []
    return _groups(tree, lambda one, other: _same_bytes(container, one, other))


def _groups(tree: Any, same: Same) -> list[tuple[str, ...]]:
    groups: list[list[tuple[str, dict[str, TensorValue]]]] = []
    for name, tensors in _parts(tree):
        for group in groups:
            if _equal(group[0][1], tensors, same):
                group.append((name, tensors))
                break
        else:
            groups.append([(name, tensors)])
    return [tuple(name for name, _ in group) for group in groups if len(group) > 1]


def _parts(tree: Any) -> Iterator[tuple[str, dict[str, TensorValue]]]:
    """The state dicts that can be copies of the model, and the model itself, by dotted names."""
    section = tree.get("coordinator") if isinstance(tree, dict) else None
    if not isinstance(section, dict):
        return
    job, outer = section.get("pending_upload"), section.get("outer")
    parts = {
        "model": tree.get("model"),
        "baseline": section.get("baseline"),
        "pending_upload.target_state": job.get("target_state") if isinstance(job, dict) else None,
        "outer.global_state": outer.get("global_state") if isinstance(outer, dict) else None,
    }
    for name, part in parts.items():
        if tensors := state_tensors(part):
            yield name, tensors


def _equal(one: dict[str, TensorValue], other: dict[str, TensorValue], same: Same) -> bool:
    if one.keys() != other.keys():
        return False
    return all(_equal_tensor(one[name], other[name], same) for name in one)


def _equal_tensor(one: TensorValue, other: TensorValue, same: Same) -> bool:
    described = [(t.dtype, t.layout, t.shape, t.stride, t.offset) for t in (one, other)]
    if described[0] != described[1] or one.layout != "strided":
        return False
    if one.storage is None or other.storage is None:
        return False
    return one.storage.key == other.storage.key or same(one.storage, other.storage)


def _same_checksum(container: Container, one: StorageRef, other: StorageRef) -> bool:
    if not container.has_checksums:
        return False
    found = [container.records.get(container.storage_record(ref.key)) for ref in (one, other)]
    first, second = found
    if first is None or second is None or first.crc is None:
        return False
    return (first.size, first.crc) == (second.size, second.crc)


def _same_bytes(container: Container, one: StorageRef, other: StorageRef) -> bool:
    if container.has_checksums and not _same_checksum(container, one, other):
        return False
    try:
        spans = [container.span(container.storage_record(ref.key)) for ref in (one, other)]
    except FormatError:
        return False
    first, second = spans
    if first is None or second is None or first[1] != second[1]:
        return False
    for start in range(0, first[1], _CHUNK_BYTES):
        length = min(_CHUNK_BYTES, first[1] - start)
        pieces = [container.reader.read(span[0] + start, length) for span in (first, second)]
        if pieces[0] != pieces[1]:
            return False
    return True
