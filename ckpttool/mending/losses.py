"""Which tensors are lost with the records that cannot be mended, and which are not."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckpttool.formats.dtypes import BITS
from ckpttool.mending.parts import LOST, UNPROVEN
from ckpttool.model.storages import count_and_reach
from ckpttool.model.tensor import nbytes_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckpttool.formats.values import StorageRef, TensorValue
    from ckpttool.mending.parts import Part
    from ckpttool.mending.skeleton import Skeleton


class Loss(NamedTuple):
    """A tensor that is lost: its name, its bytes, and how many of them are in the file.

    Where a checksum fails nobody knows which bytes are wrong: then none counts as surviving. `why`
    says what became of them.
    """

    tensor: str
    nbytes: int
    survived: int
    why: str


class Standing(NamedTuple):
    """What can be said of a storage: of its first `present` bytes, none of which is proven unless
    `proven`. `why` says it in words.
    """

    present: int
    size: int
    proven: bool
    why: str


def standings(parts: Iterable[Part], skeleton: Skeleton) -> dict[str, Standing]:
    """How each storage that the pickle refers to stands, by key."""
    by_name = {part.name: part for part in parts}
    found = {}
    for key in skeleton.storages:
        size = skeleton.sizes[f"data/{key}"]
        found[key] = _standing(by_name.get(f"data/{key}"), size)
    return found


def _standing(part: Part | None, size: int) -> Standing:
    if part is None:
        return Standing(0, size, False, "its record is not in the file")
    if part.state == LOST:
        cut = part.found is not None and part.present < (part.size or 0)
        mismatch = part.crc is not None and not cut
        return Standing(0 if mismatch else part.present, size, False, part.proof)
    present = min(size, part.size or 0)
    if present < size:
        proof = f"its record has {present:,} bytes, the pickle says {size:,}"
        return Standing(present, size, part.is_proven, proof)
    return Standing(size, size, part.state != UNPROVEN, part.proof)


def losses(skeleton: Skeleton, storages: dict[str, Standing]) -> list[Loss]:
    """The tensors that are not wholly there, and storages that stand alone and are not."""
    lost, seen = [], set()
    for name, value in skeleton.tensors.items():
        loss = _loss(name, value, storages)
        seen |= {ref.key for ref in storages_of(value)}
        if loss is not None:
            lost.append(loss)
    for key in skeleton.storages:
        standing = storages[key]
        if key not in seen and standing.present < standing.size:
            lost.append(Loss(f"storage {key}", standing.size, standing.present, standing.why))
    return lost


def unproven(skeleton: Skeleton, storages: dict[str, Standing]) -> list[str]:
    """Tensors that are there, but in a record that no checksum proves."""
    return [
        name
        for name, value in skeleton.tensors.items()
        if _loss(name, value, storages) is None
        and any(not storages[ref.key].proven for ref in storages_of(value))
    ]


def is_whole(value: TensorValue, storages: dict[str, Standing]) -> bool:
    """Whether every byte of a tensor, and of its parts, is there."""
    return _loss("", value, storages) is None


def storages_of(value: TensorValue) -> Iterator[StorageRef]:
    """The storages of a tensor and of all its parts."""
    if value.storage is not None:
        yield value.storage
    for part in (value.parts or {}).values():
        yield from storages_of(part)


def byte_range(value: TensorValue) -> tuple[int, int]:
    """The first byte in its storage that a tensor reaches, and one past the last."""
    bits = BITS.get(value.dtype, 0)
    start = value.offset * bits // 8
    reach = count_and_reach(value.shape, value.stride)[1]
    return start, -(-(value.offset + reach) * bits // 8) if reach else start


def _loss(name: str, value: TensorValue, storages: dict[str, Standing]) -> Loss | None:
    nbytes, survived, why = nbytes_of(value), 0, ""
    own: list[TensorValue] = [value, *(value.parts or {}).values()]
    for part in own:
        if part is not value and part.parts:
            inner = _loss(name, part, storages)
            why = why or (inner.why if inner is not None else "")
        if part.storage is None:
            continue
        standing = storages[part.storage.key]
        start, stop = byte_range(part)
        if stop > standing.present:
            why = why or standing.why
        elements = nbytes_of(part) if part is not value or not part.parts else stop - start
        survived += max(0, min(standing.present - start, elements))
    return Loss(name, nbytes, min(survived, nbytes), why) if why else None
