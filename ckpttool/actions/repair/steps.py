"""What becomes of each step: the file that is kept for it, and what goes out of its way."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.actions.repair.deeds import (
    MEND,
    SET_ASIDE,
    SHARDS,
    TEMPORARIES,
    Deed,
    Kept,
    Left,
    set_aside,
)
from ckpttool.checks.base import command, few, plural
from ckpttool.checks.directory import lacking
from ckpttool.checks.sharded_places import FileElsewhere

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckpttool.actions.repair.deeds import Options
    from ckpttool.actions.repair.look import Entry, Leftover
    from ckpttool.mending.plan import Mending

    # What can be got back of a file; None where nothing can.
    Mender = Callable[[Entry], Mending | None]


class Settled(NamedTuple):
    """What is decided for one step. `unknown`: it may be valid, but nobody could check."""

    step: int
    kept: Kept | None
    deeds: list[Deed]
    left: list[Left]
    unknown: bool = False


def settle(
    step: int,
    files: list[Entry],
    leftovers: list[Leftover],
    options: Options,
    mender: Mender,
    *,
    accept: str | None = None,
) -> Settled:
    """Decides for `step` from the files with its number and the leftovers of dead writers.

    In this order: a valid file stays; a whole temporary is published; a sharded step gets its files
    back that lie elsewhere; a file, then a temporary, is mended without loss (the one at `accept`
    with loss, too). What is not kept is set aside. What
    could not be checked is not touched, and nothing takes the place of such a step file, nor of one
    that is meant rather than a valid one. Of several valid ones the one that is meant stays: see
    `records.Precedence`.
    """
    left = [_unchecked(entry) for entry in files if entry.unchecked]
    known = [entry for entry in files if not entry.unchecked]
    valid = sorted((entry for entry in known if entry.is_valid), key=lambda entry: entry.rank())
    unknown = max((entry.rank() for entry in files if entry.unchecked), default=None)
    if unknown is not None and (not valid or unknown > valid[-1].rank()):
        return Settled(step, None, [], left, unknown=True)
    temporaries, unchecked = _dead(leftovers)
    left += unchecked
    if valid:
        keeper = valid[-1]
        kept: Kept | None = Kept(step, keeper.name, keeper)
    else:
        kept = _published(step, known, temporaries, options) or _arranged(step, known, options)
        kept = kept or _mended(step, known, temporaries, options, mender, accept)
    deeds = list(_aside(known, temporaries, kept, options, mender))
    if kept is not None and kept.deed is not None:
        deeds.append(kept.deed)
    return Settled(step, kept, deeds, left)


def _unchecked(entry: Entry) -> Left:
    words = f"could not be checked, so it stays: {entry.why()}"
    if any(finding.id == "FIL124" for finding in entry.findings):
        words += "; to do without it, move it away by hand"
        if entry.name == entry.target:
            home = os.path.dirname(entry.path) or os.curdir
            words += f", or go back to an earlier step: {command('rollback', home)} --to STEP"
    return Left(entry.path, words, unchecked=True)


def _dead(leftovers: list[Leftover]) -> tuple[list[Entry], list[Left]]:
    """The temporaries of dead writers, and what is to be said of those that stay."""
    entries = [leftover.entry for leftover in leftovers if leftover.entry is not None]
    unchecked = [_unchecked(entry) for entry in entries if entry.unchecked]
    return [entry for entry in entries if not entry.unchecked], unchecked


def _published(
    step: int, files: list[Entry], temporaries: list[Entry], options: Options
) -> Kept | None:
    """A whole temporary in the place of a step file that is missing or not valid."""
    whole = [entry for entry in temporaries if entry.is_valid]
    if not whole or TEMPORARIES not in options.only:
        return None
    best = max(whole, key=lambda entry: entry.status.st_mtime_ns if entry.status else 0)
    before = next((entry for entry in files if entry.name == best.target), None)
    lost = "is missing" if before is None else f"is not valid ({before.why()})"
    deed = Deed(
        *(TEMPORARIES, "publish", best.path, f"publish {best.name} as {best.target}"),
        why=(f"DIR101: a writer died before it gave it its name, and {best.target} {lost}",),
        notes=("proof: it is whole and valid, every checksum matches",),
        status=best.status,
        target=best.target,
        step=step,
    )
    return Kept(step, best.target, best, deed)


def _arranged(step: int, files: list[Entry], options: Options) -> Kept | None:
    """A sharded step whose files lie elsewhere, known by the size and SHA-256 recorded of them."""
    entry = next((entry for entry in files if entry.places), None)
    if entry is None or SHARDS not in options.only:
        return None
    names = sorted(entry.places)
    deed = Deed(
        *(SHARDS, "arrange", entry.path, f"put {few(names)} of {entry.name} in place"),
        why=tuple(f"{f.id}: {f.words}" for f in entry.findings if f.id == FileElsewhere.id),
        notes=("proof: size and SHA-256 are the recorded ones, and with these the step is valid",),
        status=entry.status,
        step=step,
        places=entry.places,
    )
    return Kept(step, entry.name, entry, deed)


def _mended(
    step: int,
    files: list[Entry],
    temporaries: list[Entry],
    options: Options,
    mender: Mender,
    accept: str | None,
) -> Kept | None:
    """The first file, or else temporary, that comes back whole, or that is accepted as it is."""
    if MEND not in options.only:
        return None
    candidates = sorted(files, key=lambda entry: entry.rank(), reverse=True)
    if TEMPORARIES in options.only:
        candidates += temporaries
    for entry in candidates:
        mending = mender(entry) if entry.can_be_mended else None
        if mending is not None and (mending.lossless or entry.path == accept):
            return Kept(step, entry.target, entry, mend(entry, mending))
    return None


def mend(entry: Entry, mending: Mending) -> Deed:
    """The deed that puts a mended copy of a file in its place."""
    into = "" if entry.name == entry.target else f" into {entry.target}"
    return Deed(
        *(MEND, "mend", entry.path, f"mend {entry.name}{into}"),
        why=(entry.why(),),
        loses=tuple(_losses(mending)),
        notes=(*mending.structure[:5], *_mended_records(mending), mending.proof),
        status=entry.status,
        target=entry.target,
        step=entry.step,
        mending=mending,
    )


def _mended_records(mending: Mending) -> list[str]:
    changed = [record for record in mending.records if record.state not in ("whole", "lost")]
    lines = [
        f"{record.facts.get('words') or record.name}; {record.proof}" for record in changed[:5]
    ]
    more = len(changed) - len(lines)
    return [*lines, f"and {plural(more, 'more record')}"] if more > 0 else lines


def _losses(mending: Mending) -> list[str]:
    if mending.lossless:
        return []
    lost = [
        f"{loss.tensor} ({loss.survived:,} of {loss.nbytes:,} bytes survive)"
        for loss in mending.losses
    ]
    lost += [f"{name} (cannot be carried over)" for name in mending.dropped]
    return lost + [f"{name} (all there, but nothing proves it)" for name in mending.unproven]


def _aside(
    files: list[Entry],
    temporaries: list[Entry],
    kept: Kept | None,
    options: Options,
    mender: Mender,
) -> list[Deed]:
    """Everything of a step that is not kept. What publishing replaces goes first."""
    deeds: list[Deed] = []
    deed = None if kept is None else kept.deed
    for entry in files:
        replaced = kept is not None and deed is not None and entry.name == kept.name
        by_mending = replaced and deed is not None and deed.verb == "mend"
        if (kept is not None and kept.entry is entry) or by_mending:
            continue  # what a mended file replaces is kept by the mending itself
        aside = set_aside(TEMPORARIES if replaced else SET_ASIDE, entry, _why_aside(entry, kept))
        if entry.can_be_mended and kept is None and MEND in options.only:
            aside.mending = mender(entry)
            aside.notes = tuple(_what_is_left(entry, aside.mending))
        deeds.append(aside)
    for entry in temporaries:
        if kept is None or kept.entry is not entry:
            aside = set_aside(TEMPORARIES, entry, _why_leftover(entry, kept))
            aside.notes = tuple(_needed(entry, files)) if kept is None else ()
            deeds.append(aside)
        elif deed is not None and deed.verb == "mend":
            why = "DIR101: its mended content is put in place"
            deeds.append(set_aside(TEMPORARIES, entry, why))
    return deeds


def _needed(leftover: Entry, files: list[Entry]) -> Iterator[str]:
    """What a sharded step lacks and a leftover holds."""
    for entry in files if leftover.is_sharded else ():
        names = lacking(entry.findings, leftover.path) if entry.is_sharded else []
        if names and not entry.is_valid:
            words = "moved into it before a repair, they may make it whole (DIR116)"
            yield f"it holds {few(names)}, which {entry.name} lacks: {words}"


def _why_aside(entry: Entry, kept: Kept | None) -> str:
    if kept is not None and entry.is_valid:
        return f"DIR106: {kept.name} is of the same step, and valid, too"
    return entry.why()


def _why_leftover(entry: Entry, kept: Kept | None) -> str:
    if kept is not None and kept.deed is None:
        return f"DIR101: a writer died and left it; {kept.name} is valid without it"
    if entry.is_valid:
        return "DIR101: a writer died and left it"
    return f"DIR101: a writer died and left it; {entry.why()}"


def _refused(mending: Mending) -> list[str]:
    """Single bits that would explain the damage, and are not sure enough."""
    return [
        f"{one.get('record')}: one bit would explain it, but other damage looks like that in"
        f" {one.get('odds', 0):.1%} of cases (--bit-odds)"
        for one in mending.refused[:3]
    ]


def _what_is_left(entry: Entry, mending: Mending | None) -> list[str]:
    """Which tensors are damaged, and how many are not."""
    if mending is None and entry.state == "dangerous":
        return ["not mended: whoever made it dangerous may have chosen its tensors, too"]
    if mending is None:
        return ["nothing of it can be got back"]
    names = [loss.tensor for loss in mending.losses]
    total = len(mending.skeleton.tensors) if mending.skeleton is not None else None
    of_all = f" of {plural(total, 'tensor')}" if total is not None else ""
    lines = [f"{len(names):,}{of_all} damaged: {few(names)}"] if names else []
    lines += _refused(mending)
    if mending.dropped:
        lines.append(f"not to be carried over: {few(mending.dropped)}")
    return lines
