"""Step files that are whole and have the name of another step: which can have their own name."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ckpttool.actions.newest import why_not_valid
from ckpttool.actions.repair.deeds import RENAME, Deed, Kept
from ckpttool.model.names import step_name_like
from ckpttool.model.records import Records

if TYPE_CHECKING:
    from ckpttool.actions.repair.look import Entry, Look
    from ckpttool.actions.repair.steps import Settled

_ERROR = "error"


def right_step(entry: Entry) -> int | None:
    """The step that a whole, misnamed file holds; None for any other file."""
    if entry.state != "wrong-step" or entry.status is None:
        return None
    errors = [finding for finding in entry.findings if finding.severity.value == _ERROR]
    held = next((f.facts.get("step") for f in errors if f.id == "SCH102"), None)
    return held if isinstance(held, int) and held >= 0 else None


def with_renames(look: Look, settled: list[Settled]) -> list[Settled]:
    """Keeps a misnamed file for the step that it holds, where that step would have no file else.

    `settled` is what was decided without it, by which it goes aside. Its right name has to be free,
    or become free before: where files have each other's names, in a ring, one of them goes aside.
    """
    by_step = {one.step: one for one in settled}
    chosen: dict[int, Entry] = {}
    for entry in sorted(look.files, key=_newer):
        step = right_step(entry)
        if step is None or not _has_no_file(by_step.get(step)) or _differs(look, entry, step):
            continue
        chosen[step] = entry
    ordered = _in_order(chosen)
    renamed = {entry.path for entry in ordered.values()}
    for one in settled:
        kept = [deed for deed in one.deeds if deed.path not in renamed]
        by_step[one.step] = one._replace(deeds=kept)
    for step, entry in ordered.items():
        deed = _rename(entry, step)
        there = by_step.get(step) or _nothing(step)
        kept_file = Kept(step, step_name_like(entry.name, step), entry, deed)
        by_step[step] = there._replace(kept=kept_file, deeds=[*there.deeds, deed])
    # In the order of the renames, so that each finds its name free.
    order = {step: at for at, step in enumerate(ordered)}
    return sorted(by_step.values(), key=lambda one: (order.get(one.step, -1), one.step))


def _newer(entry: Entry) -> tuple[int, str]:
    return (0 if entry.status is None else entry.status.st_mtime_ns), entry.name


def _nothing(step: int) -> Settled:
    from ckpttool.actions.repair.steps import Settled

    return Settled(step, None, [], [])


def _has_no_file(there: Settled | None) -> bool:
    """Whether nothing is kept for a step, and what is there is known to be no good."""
    return there is None or (there.kept is None and not there.unknown and not there.left)


def _differs(look: Look, entry: Entry, step: int) -> bool:
    """Whether what is recorded of the right name is of another file."""
    from ckpttool.io.checksum import sha256_of
    from ckpttool.io.reading import FileReader
    from ckpttool.model.manifest import read_manifest

    records = Records(look.directory.pointer, read_manifest(look.directory.path))

    def sha256() -> str:
        with FileReader(entry.recorded_path) as reader:
            return sha256_of(reader)

    try:
        size = os.lstat(entry.recorded_path).st_size
        return records.contradict(step_name_like(entry.name, step), size, sha256) is not None
    except OSError:
        return True


def _in_order(chosen: dict[int, Entry]) -> dict[int, Entry]:
    """The renames, each after the one that frees its name. A ring is broken at its oldest step."""
    waiting = dict(chosen)
    ordered: dict[int, Entry] = {}
    while waiting:
        names = {entry.name: step for step, entry in waiting.items()}
        right = {step: step_name_like(entry.name, step) for step, entry in waiting.items()}
        free = [step for step in sorted(waiting) if right[step] not in names]
        for step in free:
            ordered[step] = waiting.pop(step)
        if not free:
            del waiting[min(waiting)]
    return ordered


def _rename(entry: Entry, step: int) -> Deed:
    target = step_name_like(entry.name, step)
    return Deed(
        *(RENAME, "rename", entry.path, f"rename {entry.name} to {target}"),
        why=(why_not_valid(entry.state, entry.findings),),
        notes=("proof: it is whole, every checksum matches, and no other file is of its step",),
        status=entry.status,
        target=target,
        step=step,
    )
