"""The plan for a zip: survey, names, proofs, and what is left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.errors import FormatError
from ckpttool.formats.container import Record
from ckpttool.mending.container import MendedContainer
from ckpttool.mending.content import first
from ckpttool.mending.layout import alignment_of, damaged_ends, is_by_torch
from ckpttool.mending.losses import Loss, losses, standings, unproven
from ckpttool.mending.naming import HOUSEKEEPING, MAIN_PICKLE
from ckpttool.mending.parts import LOST, UNPROVEN, WHOLE, Part, fill_well_known, gather_parts
from ckpttool.mending.plan import Archive, Mending, require_archive
from ckpttool.mending.proofs import try_known, use_bits, use_bursts, use_donors
from ckpttool.mending.regions import find_regions
from ckpttool.mending.skeleton import Skeleton, read_skeleton
from ckpttool.mending.survey import survey
from ckpttool.mending.whole_file import NOT_REBUILT, has_known_sha256, settle_doubts
from ckpttool.model.tensor import TensorRef

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpttool.mending.bits import BitMend
    from ckpttool.mending.plan import Options
    from ckpttool.mending.survey import Survey

# What the strict reader finds odd and what is no damage: nothing that a mended file would lack.
_NO_DAMAGE = frozenset(
    (
        *("bad-record-name", "case-twin-record", "checksums-off", "duplicate-record"),
        *("several-roots", "unsupported-method"),
    )
)
# Of zip's ways to compress (APPNOTE 4.4.5), those that other programs unpack.
_OTHER_METHODS = {9: "deflate64", 12: "bzip2", 14: "lzma", 93: "zstandard", 95: "xz"}
_MOST_NAMED = 8
# A pickle that hides needs few bytes to do harm.
_LONGEST_LOOK = 16 << 20
# Kinds without a pickle of their own.
_WITHOUT_PICKLE = frozenset(("pt2", "npz"))


def plan_zip(mending: Mending, options: Options, report: Callable[[int], object]) -> bool:
    """Fills in the plan; false where there is no archive in the file at all."""
    surveys = _survey_all(mending, options, report)
    chosen = surveys[mending.archive - 1] if surveys else None
    if chosen is None or not chosen.records:
        return False
    mending.alignment = alignment_of(mending.reader, chosen)
    mending.by_torch = is_by_torch(chosen, mending.alignment)
    _note_structure(mending, chosen)
    _gather(mending, chosen)
    _mend_pickle(mending, chosen, options)
    mending.checksums = any(part.crcs for part in mending.parts.parts)
    mending.dropped += mending.parts.extra
    fill_well_known(mending.parts)
    _mend_contents(mending, options)
    _judge(mending)
    settle_doubts(mending)
    if not mending.rewrites and mending.hopeless is None and mending.skeleton is not None:
        note_dropped(mending, standings(mending.parts.parts, mending.skeleton))
    return True


def _gather(mending: Mending, chosen: Survey) -> None:
    mending.parts = gather_parts(mending.reader, chosen, mending.limits, by_torch=mending.by_torch)
    mending.skeleton = chosen.skeleton


def _mend_pickle(mending: Mending, chosen: Survey, options: Options) -> None:
    """The pickle before all others: it says what the others are. Looks anew with what it says."""
    part = mending.parts.get(MAIN_PICKLE)
    if part is None or part.state != LOST:
        return
    _mend_parts(mending, [part], options)
    if part.content is None:
        return
    skeleton = read_skeleton(part.content.read(), mending.limits)
    if skeleton is None:
        return
    again = survey(mending.reader, chosen.region, mending.limits, skeleton=skeleton)
    _gather(mending, again)
    mending.parts.replace(part)


def _survey_all(
    mending: Mending, options: Options, report: Callable[[int], object]
) -> list[Survey]:
    """Surveys of all archives; the number of the one to be mended is put into the plan."""
    regions = find_regions(mending.reader)
    require_archive(options.archive, len(regions))
    surveys = [survey(mending.reader, region, mending.limits, report) for region in regions]
    if len(surveys) > 1:
        mending.archives = [
            Archive(number, *found.region, _archive_words(found))
            for number, found in enumerate(surveys, 1)
        ]
    whole = [number for number, found in enumerate(surveys, 1) if _is_complete(found)]
    mending.archive = options.archive or (whole or [len(surveys)])[-1]
    return surveys


def _is_complete(found: Survey) -> bool:
    """Whether all that the pickle of an archive refers to is proven."""
    if found.skeleton is None or not all(record.matches for record in found.records):
        return False
    names = {
        name.partition(b"/")[2].decode("utf-8", "replace")
        for r in found.records
        for name in r.names
    }
    return found.skeleton.sizes.keys() <= names


def _archive_words(found: Survey) -> str:
    state = "whole" if _is_complete(found) else "damaged"
    words = f"{state}, {len(found.records):,} records"
    tree = found.skeleton.tree if found.skeleton else None
    if isinstance(tree, dict):
        step = tree.get("step")
        words += f", step {step}" if type(step) is int else ""
        keys = ", ".join(str(key)[:40] for key in list(tree)[:6])
        words += f" ({keys}{', …' if len(tree) > 6 else ''})"
    return words


def _note_structure(mending: Mending, chosen: Survey) -> None:
    region, notes = chosen.region, mending.structure
    if mending.archives:
        count = len(mending.archives)
        notes.append(f"the file holds {count} archives; number {mending.archive} is taken")
    elif region.begin:
        notes.append(f"{region.begin:,} bytes stand before the archive")
    if not mending.archives and region.stop < mending.size:
        notes.append(f"{mending.size - region.stop:,} bytes follow the archive")
    if mending.by_torch:
        notes += damaged_ends(mending.reader, chosen)
    else:
        notes += _strict_problems(mending)
    if chosen.stopped is not None:
        notes.append(chosen.stopped)
    for part_of in _gaps(chosen):
        notes.append(part_of)


def _gaps(chosen: Survey) -> list[str]:
    """Places between records that belong to none."""
    found, position = [], chosen.region.begin
    for record in chosen.records:
        if record.offset > position:
            found.append(f"{record.offset - position:,} bytes at {position:,} belong to no record")
        position = max(position, record.following)
    limit = chosen.region.stop if chosen.directory is None else chosen.directory.start
    if limit > position:
        found.append(f"{limit - position:,} bytes at {position:,} belong to no record")
    return found


def _strict_problems(mending: Mending) -> list[str]:
    """What the strict reader has against a zip of another writer."""
    from ckpttool.formats.torch_zip import open_zip

    container = open_zip(mending.reader, mending.limits)
    odd = [*container.anomalies, *container.check_structure()]
    return sorted({item.code.replace("-", " ") for item in odd if item.code not in _NO_DAMAGE})


# Contents.


def _mend_contents(mending: Mending, options: Options) -> None:
    parts = [part for part in mending.parts.parts if part.name != MAIN_PICKLE]
    doubtful = _mend_parts(mending, parts, options)
    pickle = mending.parts.get(MAIN_PICKLE)
    if pickle is not None and pickle.state == LOST:
        doubtful |= _mend_parts(mending, [pickle], options)
    if doubtful and mending.known_sha256 and _rest_is_proven(mending.parts.parts, set(doubtful)):
        known = lambda: has_known_sha256(mending)  # noqa: E731
        if try_known(mending.reader, mending.parts.parts, doubtful, known):
            doubtful = {}
    for name, mends in doubtful.items():
        mending.refused += [_refusal(name, mend.as_dict(), len(mends)) for mend in mends]
    mending.container = _container(mending)


def _mend_parts(mending: Mending, parts: list[Part], options: Options) -> dict[str, list[BitMend]]:
    """Every way to mend contents, the surest first; gives the bits that are not sure enough."""
    container = _container(mending)
    skipped = use_donors(mending.reader, parts, container, options.siblings, mending.limits)
    notes = [f"{path}: not used as a donor: {why}" for path, why in skipped]
    names = {part.name for part in parts}
    bursts = [wanted for wanted in options.bursts if wanted.record in names]
    notes += use_bursts(mending.reader, parts, bursts, options.bit_odds)
    mending.notes += [note for note in notes if note not in mending.notes]
    tensors = _tensors(mending, container)
    order = container.byteorder
    return use_bits(mending.reader, parts, tensors, order, options.bit_odds, mending.limits)


def _refusal(name: str, mend: dict[str, Any], count: int) -> dict[str, Any]:
    if mend["refused"] is None and count > 1:
        mend["refused"] = f"{count} different bits would explain a checksum of {name}"
    return mend


def _rest_is_proven(parts: list[Part], doubtful: set[str]) -> bool:
    return all(part.is_proven for part in parts if part.name not in doubtful)


def _container(mending: Mending) -> MendedContainer:
    """The parts as a container. It has the damaged contents, too: their checksums tell."""
    parts = mending.parts.parts
    order = next((part for part in parts if part.name == "byteorder" and part.content), None)
    text = order.content.read().strip() if order is not None and order.content else b"little"
    container = MendedContainer(
        mending.reader, mending.limits, "big" if text == b"big" else "little"
    )
    for part in parts:
        found = part.found
        offset = found.offset if found is not None else -1
        crc = part.crc if part.is_proven and part.crc in part.crcs else (part.crcs or (None,))[0]
        record = Record(part.name, part.size or 0, part.size or 0, crc, 0, 0, offset)
        as_is = part.state in (WHOLE, UNPROVEN) and found is not None and found.method == 0
        as_is = as_is and "doubtful" not in part.facts
        span = (found.start, found.stored) if as_is and found is not None else None
        container.add(record, part.content, span)
    return container


def _tensors(mending: Mending, container: MendedContainer) -> list[TensorRef]:
    tensors = mending.skeleton.tensors if mending.skeleton else {}
    return [TensorRef(name, value, container) for name, value in tensors.items()]


# What is left.


def _judge(mending: Mending) -> None:
    parts = mending.parts.parts
    skeleton = mending.skeleton
    lost = [part for part in parts if part.state == LOST]
    if skeleton is None:
        _without_skeleton(mending, parts, lost)
        return
    _compare_sizes(mending, skeleton)
    lost = [part for part in parts if part.state == LOST]
    standing = standings(parts, skeleton)
    if mending.kind not in NOT_REBUILT:
        mending.dangers = [*skeleton.dangers, *_hidden_dangers(mending, skeleton)]
    mending.losses = losses(skeleton, standing)
    mending.unproven = unproven(skeleton, standing)
    pickle = next((part for part in parts if part.name == MAIN_PICKLE), None)
    if pickle is not None and pickle.state == LOST:
        why = f"{pickle.proof}; it can be read, but nothing that it says is proven"
        mending.losses.insert(0, Loss(MAIN_PICKLE, pickle.size or 0, 0, why))
    others = [part for part in lost if not _is_content(part, skeleton)]
    mending.dropped += [f"record {part.name}: {part.proof}" for part in others]
    mending.rewrites = not lost and not mending.dangers
    if mending.kind in NOT_REBUILT and not mending.rewrites:
        what = ", ".join(part.name for part in lost[:5])
        mending.hopeless = f"only a whole one of this kind can be written, and {what} is lost"
    elif mending.rewrites:
        mending.healthy = _is_healthy(mending)
        if mending.healthy:
            mending.dropped = []


def _compare_sizes(mending: Mending, skeleton: Skeleton) -> None:
    """A storage of another size than its pickle says is none of it, whatever its checksum says."""
    for name, size in skeleton.sizes.items():
        part = mending.parts.get(name)
        if part is not None and part.size not in (None, size) and part.state != LOST:
            part.proof = f"its record has {part.size:,} bytes, the pickle says {size:,}"
            part.state, part.content, part.present = LOST, None, 0


def _hidden_dangers(mending: Mending, skeleton: Skeleton) -> list[str]:
    """Records that nothing refers to and that would run code if somebody loaded them."""
    from ckpttool.formats.globals import Trust, classify
    from ckpttool.formats.static_pickle import read_pickle

    found = []
    for part in mending.parts.parts:
        if _is_content(part, skeleton) or part.content is None:
            continue
        content = first(part.content, _LONGEST_LOOK).read()
        for path, ref in read_pickle(content, limits=mending.limits).globals.items():
            if classify(ref.module, ref.name) is Trust.DANGEROUS:
                found.append(f"record {part.name} holds a pickle that names {path}")
                break
    return found


def _is_content(part: Part, skeleton: Skeleton) -> bool:
    return part.name in skeleton.sizes or part.name in (MAIN_PICKLE, *HOUSEKEEPING)


def _without_skeleton(mending: Mending, parts: list[Part], lost: list[Part]) -> None:
    """No pickle: what needs none can go over as it is; else nothing has a name any more."""
    pickle = next((part for part in parts if part.name == MAIN_PICKLE), None)
    needless = mending.kind in (NOT_REBUILT if pickle is not None else _WITHOUT_PICKLE)
    if not lost and needless:
        mending.healthy = _is_healthy(mending)
        return
    mending.hopeless = (
        f"{_why_no_pickle(pickle)}, so no tensor has a name, a shape or a type any more "
        f"({_survivors(parts)})"
    )


def _why_no_pickle(pickle: Part | None) -> str:
    if pickle is None:
        return f"it has no {MAIN_PICKLE}, without which torch loads nothing"
    copies = (pickle.found and pickle.found.local, pickle.claim)
    methods = {copy.method for copy in copies if copy is not None}
    if len(methods) == 1 and (name := _OTHER_METHODS.get(*methods)) is not None:
        return f"its pickle is compressed by {name}, which neither torch nor ckpttool reads"
    return "its pickle is lost" if pickle.state == LOST else "its pickle cannot be read"


def _survivors(parts: list[Part]) -> str:
    whole = [part for part in parts if part.is_proven and part.found is not None]
    whole.sort(key=lambda part: not part.name.startswith("data/"))
    storages = [part.size or 0 for part in whole if part.name.startswith("data/")]
    names = ", ".join(part.name for part in whole[:_MOST_NAMED])
    names += ", …" if len(whole) > _MOST_NAMED else ""
    words = f"{len(storages):,} storages of {sum(storages):,} bytes"
    return (
        f"whole are {words} and {len(whole) - len(storages):,} other records{names and ': '}{names}"
    )


def _is_healthy(mending: Mending) -> bool:
    """Whether there is nothing to mend at all."""
    if (
        mending.structure
        or mending.dangers
        or any(part.state not in (WHOLE, UNPROVEN) for part in mending.parts.parts)
        or any("doubtful" in part.facts for part in mending.parts.parts)
    ):
        return False
    from ckpttool.formats.torch_zip import open_zip

    container = open_zip(mending.reader, mending.limits)
    odd = [*container.anomalies, *container.check_structure()]
    return all(item.code in _NO_DAMAGE for item in odd)


def note_dropped(mending: Mending, standing: dict[str, Any]) -> None:
    """What a new pickle leaves out; found by trying, on a tree of its own."""
    from ckpttool.mending.prune import prune
    from ckpttool.mending.write import fresh_skeleton, is_lost_by

    skeleton = fresh_skeleton(mending)
    tree, dropped = prune(skeleton.tree, is_lost_by(standing))
    mending.dropped += dropped
    known = {MAIN_PICKLE, *HOUSEKEEPING, *skeleton.sizes}
    for part in mending.parts.parts:
        if part.name not in known and part.state != LOST:
            mending.dropped.append(f"record {part.name}: nothing refers to it")
    if tree is None and skeleton.tree is not None:
        mending.hopeless = "nothing of its content is left"
    if mending.hopeless is None:
        _check_writable(mending, tree)


def _check_writable(mending: Mending, tree: Any) -> None:
    from ckpttool.errors import UnwritableError
    from ckpttool.writing.pickled import pickled

    try:
        pickled(tree)
    except UnwritableError as error:
        mending.hopeless = f"its content cannot be written anew: {error}"
    except FormatError as error:
        mending.hopeless = str(error)
