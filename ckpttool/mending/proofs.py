"""Mends contents that do not match their checksums: by a donor, one bit turned back, or a burst.

From the surest down. Where the whole file's SHA-256 is known, it decides between candidates, and no
odds apply.
"""

from __future__ import annotations

from itertools import islice, product
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.errors import FormatError
from ckpttool.formats.container import STORED
from ckpttool.mending import content as contents
from ckpttool.mending.bits import DEFAULT_BIT_ODDS, BitMend, find_bits, share_in_words
from ckpttool.mending.crc_algebra import burst, burst_odds
from ckpttool.mending.damaged import DamagedRecord
from ckpttool.mending.donors import find_donors
from ckpttool.mending.parts import BIT, BURST, DONOR, LOST, UNPROVEN, Part

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckpttool.formats.limits import ReaderLimits
    from ckpttool.io.reading import FileReader
    from ckpttool.mending.container import MendedContainer
    from ckpttool.model.tensor import TensorRef

# So many ways to turn several records' bits back are tried against a known SHA-256.
_MOST_TRIES = 64
BY_SHA256 = "the whole file has its recorded SHA-256"


class Burst(NamedTuple):
    """A run of `bits` bits (32 at most) in `record`, from bit `start` on, that is to be mended."""

    record: str
    start: int
    bits: int


def use_donors(
    reader: FileReader,
    parts: Sequence[Part],
    container: MendedContainer,
    siblings: Sequence[str],
    limits: ReaderLimits,
) -> list[tuple[str, str]]:
    """Settles lost parts that have a donor; gives the siblings that could not be used, and why."""
    wanted: list[tuple[Part, DamagedRecord]] = []
    for part in parts:
        for crc in part.crcs if part.state == LOST and part.size else ():
            wanted.append((part, _damaged(reader, part, crc, container.byteorder)))
    if not wanted:
        return []
    search = find_donors([record for _, record in wanted], container, siblings, limits=limits)
    for (part, record), donor in zip(wanted, search.donors, strict=True):
        if donor is None or part.state != LOST:
            continue
        chunks = _chunks_of(donor, container, limits)
        content = contents.require(contents.Content(record.size, chunks), record.recorded)
        part.settle(DONOR, donor.proof, content, donor=donor.as_dict(), words=donor.words)
    return search.skipped


def _chunks_of(donor: Any, container: MendedContainer, limits: ReaderLimits) -> Callable[[], Any]:
    return lambda: donor.chunks(container, limits)


def use_bits(
    reader: FileReader,
    parts: Sequence[Part],
    tensors: Sequence[TensorRef],
    byteorder: str,
    bit_odds: float,
    limits: ReaderLimits,
) -> dict[str, list[BitMend]]:
    """Settles parts in which one bit explains the checksum; gives those that are not sure enough.

    The latter by record name: refused by the odds, or one of several bits that would do.
    """
    doubtful: dict[str, list[BitMend]] = {}
    for part in parts:
        if not _is_mismatch(part):
            continue
        found: list[BitMend] = []
        for crc in part.crcs:
            record = _damaged(reader, part, crc, byteorder)
            found += find_bits(record, tensors, bit_odds=bit_odds, limits=limits)
        if len(found) == 1 and found[0].refused is None:
            turn_bit(reader, part, found[0])
        elif found:
            doubtful[part.name] = found
    return doubtful


def turn_bit(reader: FileReader, part: Part, mend: BitMend, proof: str | None = None) -> None:
    """Settles a part with one bit turned back; `proof` is a better one than the odds."""
    content = contents.patched(_raw(reader, part), mend.offset, bytes((1 << mend.bit,)))
    odds = mend.odds if proof is None else 0.0
    facts = {"bit": mend.as_dict(), "words": mend.words}
    _settle(part, BIT, proof or mend.proof, content, odds, facts)


def _settle(
    part: Part,
    state: str,
    proof: str,
    content: contents.Content,
    odds: float,
    facts: dict[str, Any],
) -> None:
    """Settles a part whose checksum fits. By odds above the usual limit that proves nothing,
    however high the user has set theirs: `doubtful` then keeps what it would be.
    """
    if odds > DEFAULT_BIT_ODDS:
        proof = f"fits, unproven, by odds of {share_in_words(odds)}: {proof}"
        part.settle(UNPROVEN, proof, content, **facts, doubtful=state)
    else:
        part.settle(state, proof, content, **facts)


def try_known(
    reader: FileReader,
    parts: Sequence[Part],
    doubtful: dict[str, list[BitMend]],
    is_proven: Callable[[], bool],
) -> bool:
    """Tries the doubtful bits until `is_proven` says that the whole file has its SHA-256.

    Settles the parts when it does; else leaves them as they were.
    """
    by_name = {part.name: part for part in parts}
    names = list(doubtful)
    for choice in islice(product(*doubtful.values()), _MOST_TRIES):
        for name, mend in zip(names, choice, strict=True):
            turn_bit(reader, by_name[name], mend, BY_SHA256)
        if is_proven():
            return True
    for name in names:
        part = by_name[name]
        part.state, part.content, part.proof = LOST, None, "its checksum does not match"
        part.facts.pop("bit", None)
    return False


def use_bursts(
    reader: FileReader, parts: Sequence[Part], bursts: Sequence[Burst], bit_odds: float
) -> list[str]:
    """Settles parts whose damage lies where the user says; says why others are not mended.

    So many bits that they would explain damage elsewhere in more than `bit_odds` of cases prove
    too little; each place and each recorded checksum that is tried adds to that.
    """
    by_name = {part.name: part for part in parts}
    failed = []
    for wanted in bursts:
        part = by_name.get(wanted.record)
        if part is None or not _is_mismatch(part):
            failed.append(f"{wanted.record}: there is no damage of that kind in such a record")
            continue
        tried = sum(burst_odds(other.bits) for other in bursts if other.record == wanted.record)
        odds = min(1.0, tried * len(part.crcs))
        if not odds <= bit_odds:
            failed.append(
                f"{wanted.record}: {wanted.bits} bits at a known place explain any damage in "
                f"{share_in_words(odds)} of cases, which is above the limit "
                f"(--bit-odds {bit_odds:g})"
            )
        elif not _mend_burst(reader, part, wanted, odds):
            failed.append(f"{wanted.record}: no change of these {wanted.bits} bits explains it")
    return failed


def _mend_burst(reader: FileReader, part: Part, wanted: Burst, odds: float) -> bool:
    for crc in part.crcs:
        size = part.size or 0
        try:
            mask = burst(crc ^ (part.crc or 0), size, wanted.start, wanted.bits)
        except ValueError:
            return False
        if mask is None:
            continue
        first, shift = divmod(wanted.start, 8)
        raw = (mask << shift).to_bytes(8, "little").rstrip(b"\0")
        content = contents.patched(_raw(reader, part), first, raw)
        words = f"{mask.bit_count()} of {wanted.bits} bits from byte {first:,} on turned back"
        proof = "the checksum matches then; after damage elsewhere it would in "
        proof += f"{share_in_words(odds)} of cases"
        done = {"offset": first, "mask": raw.hex(), "bits": wanted.bits, "odds": odds}
        _settle(part, BURST, proof, content, odds, {"burst": done, "words": words})
        return True
    return False


def _is_mismatch(part: Part) -> bool:
    """Whether a part's content is all there, stored plainly, and has another checksum."""
    found = part.found
    return (
        part.state == LOST
        and found is not None
        and found.method == STORED
        and not found.is_cut
        and part.crc is not None
        and bool(part.crcs)
    )


def _damaged(reader: FileReader, part: Part, crc: int, byteorder: str) -> DamagedRecord:
    found = part.found
    start, present = (0, 0) if found is None else (found.start, found.present)
    if found is not None and found.method != STORED:
        present = 0  # one wrong bit spoils all that follows

    def read(offset: int, length: int) -> bytes:
        return reader.read(start + offset, max(0, min(length, present - offset)))

    computed = part.crc if _is_mismatch(part) else None
    return DamagedRecord(part.name, part.size or 0, crc, computed, read, byteorder)


def _raw(reader: FileReader, part: Part) -> contents.Content:
    found = part.found
    if found is None:
        raise FormatError(f"record {part.name!r} is not in the file", record=part.name)
    return contents.of_span(reader, found.start, found.stored)
