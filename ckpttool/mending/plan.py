"""What can be got back from a damaged file, and how each record of it would be proven."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.errors import RefusedError
from ckpttool.formats.limits import DEFAULT_LIMITS, ReaderLimits
from ckpttool.io.reading import FileReader
from ckpttool.mending.losses import Loss
from ckpttool.mending.parts import LOST, UNPROVEN, Parts
from ckpttool.mending.proofs import Burst

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckpttool.io.durable import Progress
    from ckpttool.mending.container import MendedContainer
    from ckpttool.mending.skeleton import Skeleton

__all__ = ["Burst", "Loss", "Mending", "RecordState", "plan_mend"]

DEFAULT_BIT_ODDS = 0.01


class RecordState(NamedTuple):
    """A record of the mended file.

    `state` is `whole`; `rebuilt` (its structure was damaged, or it holds what is known anyway),
    `donor`, `bit` or `burst`, each with a `proof` in words; `unproven` (all there as far as anyone
    can tell, without a checksum to prove it); or `lost`. `facts` has numbers, and for `donor`,
    `bit` and `burst` what was done.
    """

    name: str
    state: str
    proof: str
    facts: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """The record as plain data."""
        return self._asdict()


class Archive(NamedTuple):
    """One of several archives in a file: where it lies, and what it holds, in words."""

    number: int
    begin: int
    stop: int
    whole: bool
    words: str


class Mending:
    """A plan; `write_mended` carries it out. It keeps the file open until it is closed.

    `healthy`: there is nothing to mend. `hopeless` says why nothing can be got back, None where
    something can. `records` are those of the file to come. `lossless`: every content is proven, and
    nothing is left out. `exact`: the mended file is expected to be what its writer wrote, byte for
    byte. `losses` are lost tensors; `unproven` names tensors that are there, with nothing to prove
    it. `dropped` is what else would be left out. `refused` lists bits that would explain a checksum
    and are not sure enough. `structure` says what is wrong with the file around its records,
    `dangers` why its pickle would be written anew. `archives` are all in the file, where there are
    several; `archive` is the number of the one that is mended. `has_known_sha256` tells whether the
    mended file would have its known SHA-256, None where that is not known or something is lost.
    `proof` sums up.
    """

    def __init__(self, path: str, kind: str, reader: FileReader, limits: ReaderLimits) -> None:
        self.path = path
        self.kind = kind
        self.reader = reader
        self.limits = limits
        self.size = reader.size
        self.healthy = False
        self.hopeless: str | None = None
        self.losses: list[Loss] = []
        self.unproven: list[str] = []
        self.dropped: list[str] = []
        self.refused: list[dict[str, Any]] = []
        self.structure: list[str] = []
        self.dangers: list[str] = []
        self.archives: list[Archive] = []
        self.archive = 1
        self.known_sha256: str | None = None
        self.has_known_sha256: bool | None = None
        self.notes: list[str] = []
        # What the writer needs. `rewrites`: the records go over as they are, pickle included.
        self.parts = Parts("", [], [])
        self.container: MendedContainer | None = None
        self.skeleton: Skeleton | None = None
        self.rewrites = True
        self.by_torch = False
        self.alignment = 64
        self.checksums = True

    @property
    def records(self) -> list[RecordState]:
        """The state of each record, in the order of the mended file."""
        parts = self.parts.parts
        return [RecordState(part.name, part.state, part.proof, part.facts) for part in parts]

    @property
    def lossless(self) -> bool:
        """Whether nothing is lost or left out, and each content is proven."""
        return (
            self.hopeless is None
            and self.has_known_sha256 is not False
            and not self.losses
            and not self.dropped
            and all(record.state not in (LOST, UNPROVEN) for record in self.records)
        )

    @property
    def loses(self) -> bool:
        """Whether something would be lost or left out, which needs to be allowed."""
        return bool(self.losses or self.dropped)

    @property
    def exact(self) -> bool:
        """Whether the mended file should be the original, byte for byte."""
        known = not any(part.facts.get("guessed") and part.crcs for part in self.parts.parts)
        if not (self.rewrites and self.lossless):
            return False
        return self.has_known_sha256 is True or (self.by_torch and known)

    @property
    def proof(self) -> str:
        """What the plan is worth, in a sentence."""
        return _proof(self)

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain data."""
        return {
            "path": self.path,
            "kind": self.kind,
            "size": self.size,
            "healthy": self.healthy,
            "hopeless": self.hopeless,
            "lossless": self.lossless,
            "exact": self.exact,
            "proof": self.proof,
            "known_sha256": self.known_sha256,
            "has_known_sha256": self.has_known_sha256,
            "archive": self.archive,
            "archives": [archive._asdict() for archive in self.archives],
            "structure": self.structure,
            "dangers": self.dangers,
            "records": [record.as_dict() for record in self.records],
            "losses": [loss._asdict() for loss in self.losses],
            "unproven": self.unproven,
            "dropped": self.dropped,
            "refused": self.refused,
            "notes": self.notes,
        }

    def close(self) -> None:
        """Closes the damaged file. It can't be written from then on."""
        self.reader.close()

    def __enter__(self) -> Mending:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def plan_mend(
    path: str | os.PathLike[str],
    *,
    siblings: Sequence[str] = (),
    bit_odds: float = DEFAULT_BIT_ODDS,
    known_sha256: str | None = None,
    bursts: Sequence[Burst] = (),
    archive: int | None = None,
    limits: ReaderLimits = DEFAULT_LIMITS,
    progress: Progress | None = None,
) -> Mending:
    """Looks at a file, and plans how to mend it. Nothing is written.

    `siblings` are files in which donors may be found, the likeliest first. One flipped bit is only
    mended where the odds that other damage looks like it are at most `bit_odds`, from 0 to 1; above
    the usual 0.01 what fits is still not proven, and never lossless. With `known_sha256`, the
    SHA-256 that the file had when it was whole, the mended file has to have it, and no odds apply.
    `bursts` are runs of damaged bits whose place is known. `archive` chooses one of several in the
    file, from 1; the last whole one if not given. `progress(done, total, label)` counts bytes.

    Raises UnreadableError if the file can't be read, RefusedError if there is no such archive,
    ValueError for odds that are none; whatever else is wrong is in the plan.
    """
    if not 0 <= bit_odds <= 1:
        raise ValueError(f"no odds from 0 to 1: {bit_odds!r}")
    where = os.fspath(path)
    reader = FileReader(where)
    try:
        report = _reporter(reader.size, os.path.basename(where), progress)
        options = Options(list(siblings), bit_odds, known_sha256, list(bursts), archive)
        return _plan(where, reader, options, limits, report)
    except BaseException:
        reader.close()
        raise


class Options(NamedTuple):
    """What the user wants; see `plan_mend`."""

    siblings: list[str]
    bit_odds: float
    known_sha256: str | None
    bursts: list[Burst]
    archive: int | None


def _plan(
    path: str,
    reader: FileReader,
    options: Options,
    limits: ReaderLimits,
    report: Callable[[int], object],
) -> Mending:
    from ckpttool.formats.sniff import sniff
    from ckpttool.mending.plan_zip import plan_zip

    found = sniff(reader, limits)
    mending = Mending(path, found.kind, reader, limits)
    mending.known_sha256 = options.known_sha256 and options.known_sha256.strip().lower()
    if found.kind in ("torch-legacy", "torch-legacy-tar"):
        from ckpttool.mending.plan_legacy import plan_legacy

        plan_legacy(mending)
    elif found.kind in ("empty", "zeros"):
        mending.hopeless = f"it is {found.words}"
    elif not plan_zip(mending, options, report):
        mending.hopeless = f"no archive of torch's is left in it: {found.words}"
    return mending


def _reporter(total: int, label: str, progress: Progress | None) -> Callable[[int], object]:
    done = 0

    def report(count: int) -> None:
        nonlocal done
        done = min(total, done + max(0, count))
        if progress is not None:
            progress(done, total, f"looking at {label}")

    return report


def _proof(mending: Mending) -> str:
    records = mending.records
    if mending.hopeless is not None:
        return f"nothing can be got back: {mending.hopeless}"
    if mending.healthy:
        return "nothing to mend"
    proven = sum(record.state not in (LOST, UNPROVEN) for record in records)
    words = f"{proven:,} of {len(records):,} records proven by checksum"
    if not mending.checksums:
        words = "no checksums were written: nothing can be proven"
    if mending.has_known_sha256 is False:
        words += "; yet the mended file would not have the SHA-256 that is recorded of it"
    if mending.exact:
        words += "; the file comes back as it was written, byte for byte"
    return words


def require_archive(number: int | None, count: int) -> None:
    """Raises RefusedError if there is no archive of this number."""
    if number is not None and not 1 <= number <= count:
        raise RefusedError(f"there is no archive {number}: the file has {count}")
