"""The plan for torch's legacy formats, the stream and the tar.

Neither keeps checksums: what is there is taken as it is, and nothing can be proven. What is written
is a zip, made from the content: the new format, with checksums from then on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.errors import FormatError
from ckpttool.formats.container import Record
from ckpttool.mending import content as contents
from ckpttool.mending.container import MendedContainer
from ckpttool.mending.losses import losses, standings, unproven
from ckpttool.mending.naming import MAIN_PICKLE
from ckpttool.mending.parts import UNPROVEN, Part, Parts
from ckpttool.mending.skeleton import Skeleton

if TYPE_CHECKING:
    from ckpttool.formats.anomaly import Anomaly
    from ckpttool.formats.torch_legacy import LegacyBase
    from ckpttool.mending.plan import Mending

NO_CHECKSUM = "the legacy format keeps no checksums: nothing can prove it"


def plan_legacy(mending: Mending) -> None:
    """Fills in the plan for a legacy file. Raises UnreadableError."""
    container = _open(mending)
    mending.checksums = False
    mending.rewrites = False
    mending.notes.append(f"{NO_CHECKSUM}; the mended file is a zip, which has them")
    odd = [item for item in container.anomalies if item.code != "no-checksums"]
    mending.structure = [_words(item) for item in odd]
    result = container.pickle_results.get(MAIN_PICKLE)
    if result is None or result.error is not None:
        reason = "is not there" if result is None else f"cannot be read: {result.error}"
        mending.hopeless = f"its pickle {reason}; without it no tensor has a name"
        return
    skeleton = mending.skeleton = Skeleton(result, result.end, mending.limits)
    # Other streams beside the main one hold numbers and names; these must not be carried over.
    mending.dangers = skeleton.dangers
    mending.parts = _parts(mending, container, skeleton)
    mending.container = _as_container(mending, container)
    standing = standings(mending.parts.parts, skeleton)
    mending.losses = losses(skeleton, standing)
    mending.unproven = unproven(skeleton, standing)
    mending.healthy = not odd and not mending.losses and not mending.dangers
    if not mending.healthy:
        from ckpttool.mending.plan_zip import note_dropped

        note_dropped(mending, standing)


def open_content(mending: Mending) -> Skeleton:
    """The content read once more, for a tree that may be changed. Raises FormatError."""
    result = _open(mending).pickle_results.get(MAIN_PICKLE)
    if result is None or result.error is not None:
        raise FormatError("the pickle cannot be read")
    return Skeleton(result, result.end, mending.limits)


def _open(mending: Mending) -> LegacyBase:
    if mending.kind == "torch-legacy-tar":
        from ckpttool.formats.torch_legacy_tar import open_legacy_tar

        return open_legacy_tar(mending.reader, mending.limits)
    from ckpttool.formats.torch_legacy import open_legacy

    return open_legacy(mending.reader, mending.limits)


def _parts(mending: Mending, container: LegacyBase, skeleton: Skeleton) -> Parts:
    """Each storage that the pickle refers to, with as much of it as the file has."""
    parts = []
    for name, size in skeleton.sizes.items():
        part = Part(name, size)
        part.facts["size"] = size
        record = container.records.get(name)
        if record is not None:
            start = record.header_offset + record.stored_size - record.size
            part.present = max(0, min(size, record.size, mending.size - start))
            part.content = contents.of_span(mending.reader, start, part.present)
        if part.present == size:
            part.state, part.proof = UNPROVEN, NO_CHECKSUM
        else:
            part.proof = f"it is cut: {part.present:,} of {size:,} bytes are there"
        parts.append(part)
    return Parts("archive", parts, [])


def _as_container(mending: Mending, container: LegacyBase) -> MendedContainer:
    mended = MendedContainer(mending.reader, mending.limits, container.byteorder)
    for part in mending.parts.parts:
        size = part.size or 0
        mended.add(Record(part.name, size, size, None, 0, 0, -1), part.content)
    return mended


def _words(item: Anomaly) -> str:
    facts = ", ".join(f"{key} {value}" for key, value in item.facts.items())[:200]
    words = item.code.replace("-", " ")
    place = f" of {item.record}" if item.record else ""
    return f"{words}{place}" + (f" ({facts})" if facts else "")
