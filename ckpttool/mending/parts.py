"""The records that a mended file is to have, each with its content, its state and the proof.

Here they get what their structure and torch's own habits tell; what needs donors or arithmetic is
in `proofs`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.formats.container import STORED
from ckpttool.mending import content as contents
from ckpttool.mending.layout import damaged_copies, damaged_ends
from ckpttool.mending.naming import HOUSEKEEPING, MAIN_PICKLE, Named, name_records
from ckpttool.writing import serialization_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckpttool.formats.limits import ReaderLimits
    from ckpttool.io.reading import FileReader
    from ckpttool.mending.content import Content
    from ckpttool.mending.found import Found
    from ckpttool.mending.skeleton import Skeleton
    from ckpttool.mending.survey import Survey
    from ckpttool.mending.twins import Claim

WHOLE, REBUILT, DONOR, BIT, BURST = "whole", "rebuilt", "donor", "bit", "burst"
UNPROVEN, LOST = "unproven", "lost"

# What these records hold in every file that torch has written; the usual first.
_WELL_KNOWN = {
    ".format_version": (b"1",),
    ".storage_alignment": (b"64",),
    "byteorder": (b"little", b"big"),
    "version": (b"3\n", b"2\n", b"4\n", b"1\n", b"5\n", b"6\n"),
}
_MATCHES = "its checksum matches"


class Part:
    """A record of the file to come.

    `name` is below the root. `size` counts its bytes, None where nobody knows. `content` gives
    them, None where they are lost. `crcs` are the recorded checksums, `crc` the content's own as it
    stands in the file, `present` how many of its bytes are there. `found` and `claim` are what the
    damaged file has of it. `state`, `proof` and `facts` say what it is worth; see
    `plan.RecordState`.
    """

    __slots__ = (
        "claim",
        "content",
        "crc",
        "crcs",
        "facts",
        "found",
        "name",
        "present",
        "proof",
        "size",
        "state",
    )

    def __init__(self, name: str, size: int | None) -> None:
        self.name = name
        self.size = size
        self.content: Content | None = None
        self.crcs: tuple[int, ...] = ()
        self.crc: int | None = None
        self.present = 0
        self.found: Found | None = None
        self.claim: Claim | None = None
        self.state = LOST
        self.proof = "nothing of it is in the file"
        self.facts: dict[str, Any] = {}

    @property
    def is_proven(self) -> bool:
        """Whether its content is known to be what was written."""
        return self.state not in (LOST, UNPROVEN)

    def settle(self, state: str, proof: str, content: Content, **facts: Any) -> None:
        """Gives it a content and says why."""
        self.state, self.proof, self.content = state, proof, content
        self.size = content.size
        self.facts.update(facts)

    def __repr__(self) -> str:
        return f"Part({self.name!r}, {self.size}, {self.state})"


class Parts:
    """All parts in the order of the file to come, below `root`; `extra` says what is left out."""

    def __init__(self, root: str, parts: list[Part], extra: list[str]) -> None:
        self.root = root
        self.parts = parts
        self.extra = extra

        self._by_name = {part.name: part for part in parts}

    def get(self, name: str) -> Part | None:
        """The part with this name, or None."""
        return self._by_name.get(name)

    def replace(self, part: Part) -> None:
        """Puts a part in place of the one of its name."""
        self.parts = [part if other.name == part.name else other for other in self.parts]
        self._by_name[part.name] = part


def gather_parts(
    reader: FileReader, survey: Survey, limits: ReaderLimits, *, by_torch: bool
) -> Parts:
    """What the survey found, by name, and what it should have found."""
    sizes = survey.skeleton.sizes if survey.skeleton else None
    named = name_records(survey.records, sizes)
    checksums = _has_checksums(survey)
    copies = damaged_copies(reader, survey, named, by_torch=by_torch)
    parts: list[Part] = []
    extra: list[str] = []
    for index, found in _chosen(survey, named, extra):
        part = _part(reader, found, str(named.names[index]), limits, checksums=checksums)
        part.facts.update({"damaged": copies[index]} if copies[index] else {})
        if part.state == WHOLE and copies[index]:
            part.state = REBUILT
            part.proof = f"{_MATCHES}; rebuilt: {', '.join(copies[index])}"
        parts.append(part)
    missing = _missing(reader, survey, named, {part.name for part in parts}, by_torch=by_torch)
    return Parts(named.root, _in_order(parts, missing, survey.skeleton), extra)


def _has_checksums(survey: Survey) -> bool:
    """Whether checksums were written at all: else all of them are zero."""
    filled = [found for found in survey.records if found.size and found.crcs]
    return not filled or any(any(found.crcs) for found in filled)


def _chosen(survey: Survey, named: Named, extra: list[str]) -> Iterable[tuple[int, Found]]:
    """The records that the new file takes; of namesakes the one that torch would read."""
    names = [name or f"\0{index}" for index, name in enumerate(named.names)]
    by_name: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        by_name.setdefault(name, []).append(index)
    for index, found in enumerate(survey.records):
        where = f"{found.size:,} bytes at {found.offset:,}"
        name = names[index]
        if named.names[index] is None:
            extra.append(f"a record that nothing names, {where}")
        elif index in named.outside:
            extra.append(f"record {name}, outside of the root folder, {where}")
        elif len(by_name[name]) > 1 and _of_namesakes(survey, by_name[name], names) != index:
            if found.matches:
                extra.append(f"a second record {name}, {where}")
        elif not name.endswith("/"):
            yield index, found


def _of_namesakes(survey: Survey, indices: list[int], names: list[str]) -> int:
    """The one of several records of a name that is proven; if several are, that which torch reads.

    What is not proven is where the directory says that a record is, or what a doubled block left.
    """
    from ckpttool.formats.zip_lookup import torch_choices

    proven = [index for index in indices if survey.records[index].matches]
    if len(proven) == 1:
        return proven[0]
    return torch_choices(names, [names[indices[0]]])[0]


def _part(
    reader: FileReader, found: Found, name: str, limits: ReaderLimits, *, checksums: bool
) -> Part:
    part = Part(name, found.size if found.ended else None)
    part.found, part.claim = found, found.claim
    part.crcs = found.crcs if checksums else ()
    part.crc, part.present = found.crc, found.present
    part.facts.update({"size": part.size, "present": found.present})
    content = contents.content_of(reader, found, limits)
    if found.method != STORED and not found.matches:
        part.present = 0  # one wrong bit, or a missing one, spoils all that follows
        part.proof = "it is compressed, and does not match its checksum"
    elif found.is_cut:
        size = f"{found.size:,}" if found.ended else "nobody knows how many"
        part.proof = f"it is cut: {found.present:,} of {size} bytes are there"
    elif found.matches and (checksums or not found.size):
        part.settle(WHOLE, _MATCHES, content)
    elif not part.crcs and not found.bounded:
        part.proof = "its end is where no record could end, and no checksum is left"
    elif not part.crcs and found.crc is not None:
        why = "none was written" if not checksums else "it is lost"
        part.settle(UNPROVEN, f"there is no checksum to prove it: {why}", content)
        _look_for_zeros(reader, part, found)
    else:
        part.proof = "its checksum does not match"
    return part


def _look_for_zeros(reader: FileReader, part: Part, found: Found) -> None:
    """Zeros from within the content up to where a descriptor should be are no content.

    That is what a power loss leaves of data that had not reached the disk.
    """
    behind = reader.read(found.start + found.stored, 16)
    if not found.stored or len(behind) < 16 or behind.strip(b"\0"):
        return
    from ckpttool.formats.torch_zip import trailing_zeros

    tail = trailing_zeros(reader, found.start)
    if tail < reader.size - found.start - found.stored + 1:
        return  # something follows
    part.present = reader.size - tail - found.start
    part.state, part.content = LOST, None
    part.proof = f"zeros follow the first {part.present:,} of its {found.size:,} bytes"


def _missing(
    reader: FileReader, survey: Survey, named: Named, there: set[str], *, by_torch: bool
) -> list[Part]:
    """Parts for what should be there and is not, by directory, pickle, and torch's habits."""
    wanted: dict[str, Part] = {}
    used = {found.claim.number for found in survey.records if found.claim is not None}
    directory = survey.directory
    root = f"{named.root}/".encode() if named.root else b""
    for claim in directory.claims if directory is not None else ():
        name = claim.raw_name[len(root) :].decode("utf-8", "backslashreplace")
        fresh = claim.number not in used and name not in there and claim.raw_name.startswith(root)
        if fresh and claim.sound and (survey.skeleton is None or name in _names(survey.skeleton)):
            part = wanted[name] = Part(name, claim.size)
            part.claim, part.crcs = claim, (claim.crc,)
    for name, size in (survey.skeleton.sizes if survey.skeleton else {}).items():
        if name not in there and name not in wanted:
            wanted[name] = Part(name, size)
            if not size:
                proof = "it is empty, as the pickle says"
                wanted[name].settle(REBUILT, proof, contents.of_bytes(b""))
    if by_torch and damaged_ends(reader, survey):
        for name in _usual(there):
            wanted.setdefault(name, Part(name, None))
    return list(wanted.values())


def _names(skeleton: Skeleton) -> set[str]:
    return {MAIN_PICKLE, *HOUSEKEEPING, *skeleton.sizes}


def _usual(there: set[str]) -> list[str]:
    """The records that a file with these others has, by the habit of torch's versions.

    Version 1.6 wrote the pickle, the storages and `version`; 2.1 added `byteorder` and the
    serialization id, 2.7 the format's version and the alignment.
    """
    usual = ["version"]
    if there & {"byteorder", ".format_version", ".storage_alignment"}:
        usual += ["byteorder", serialization_id.NAME]
    if there & {".format_version", ".storage_alignment"}:
        usual += [".format_version", ".storage_alignment"]
    return [name for name in usual if name not in there]


def _in_order(parts: list[Part], missing: list[Part], skeleton: Skeleton | None) -> list[Part]:
    """Found and missing parts as they would have been written one after another."""
    if not missing:
        return parts
    if all(part.claim is not None for part in missing):
        return sorted([*parts, *missing], key=_offset)
    for order in _orders(skeleton):
        rank = {name: index for index, name in enumerate(order)}
        ranks = [rank.get(part.name, len(rank)) for part in parts]
        if ranks == sorted(ranks):
            return sorted([*parts, *missing], key=lambda part: rank.get(part.name, len(rank)))
    return [*parts, *missing]


def _orders(skeleton: Skeleton | None) -> Iterator[list[str]]:
    """The orders in which torch's versions write: by the pickle, or sorted by name."""
    sizes = list(skeleton.sizes) if skeleton else []
    for storages in (sizes, sorted(sizes)):
        yield [MAIN_PICKLE, *HOUSEKEEPING[:3], *storages, *HOUSEKEEPING[3:]]


def _offset(part: Part) -> int:
    if part.found is not None:
        return part.found.offset
    return -1 if part.claim is None else part.claim.offset


def fill_well_known(parts: Parts) -> None:
    """Gives small records that are lost what torch writes into them, proven where possible."""
    for part in parts.parts:
        if part.state != LOST or part.name not in HOUSEKEEPING:
            continue
        if part.name == serialization_id.NAME:
            choices: tuple[bytes, ...] = _serialization_ids(parts)
        else:
            choices = _WELL_KNOWN[part.name]
        _fill(part, choices)
        if part.state == LOST and part.name == serialization_id.NAME:
            # Something else is lost, so the new file is another one, and gets an id of its own.
            part.state, part.proof = REBUILT, "made anew for the new file"
            part.facts.update({"made": True, "guessed": True})


def _fill(part: Part, choices: tuple[bytes, ...]) -> None:
    from ckpttool.io.checksum import crc32

    for data in choices:
        if part.crcs and crc32(data) in part.crcs and part.size in (None, len(data)):
            proof = f"what torch writes there; {_MATCHES}"
            part.settle(REBUILT, proof, contents.of_bytes(data), made=True)
            return
    if not choices:
        return
    proof = "what torch writes there; nothing depends on it"
    if part.name == "byteorder":
        proof = "what torch writes on nearly all machines"
    if part.crcs:
        proof += f" (not what it was: {part.proof})"
    part.settle(REBUILT, proof, contents.of_bytes(choices[0]), made=True, guessed=True)


def _serialization_ids(parts: Parts) -> tuple[bytes, ...]:
    """The id made again from names and checksums of the records before it, if all are there."""
    listed = []
    for part in parts.parts:
        if part.name == serialization_id.NAME:
            break
        if part.content is None or part.size is None:
            return ()
        known = part.crc if part.crc in part.crcs else None
        if known is None:
            known = contents.checksum(part.content)[0]
        listed.append((part.name, part.size, known))
    return (serialization_id.serialization_id(listed).encode(),)
