"""Newer steps that a crash kept the pointer from naming.

A save renames the step's file first and writes the pointer after it. A crash between the two, or a
pointer that could not be written, leaves a whole newer step of the run that nothing points to: the
newest state that can be proven good. A pointer that was moved back on purpose looks almost the
same, and is to be obeyed. What tells them apart is who wrote the pointer, and when:

- A trainer's pointer says run and SHA-256. One by hand, or by `ckpttool fix-pointer`, `repair` and
  `rollback` (which sets what is newer aside), says neither: it is obeyed.
- The step was written after the pointer, by its time and by the order of the manifest's lines. A
  pointer that was written when the step was there already did not mean it.
- The step is of the run that the pointer names, and goes on from the pointer's step, by the
  `parent_step` in each file. Steps of an older course that was given up do not.

Where the pointer is behind already, `fix-pointer --step` finds it right and writes nothing: it is
`rollback --to` that goes back for good, from any state.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpttool.errors import CkptToolError
from ckpttool.model.pointer import Pointer
from trainer_core.saving.kept_steps import KeptSteps
from trainer_core.saving.retention import newest_first, scan_if_there

if TYPE_CHECKING:
    from ckpttool.model.directory import StepFile


def unpointed(directory: Path, pointer: Pointer) -> list[Path]:
    """Those steps, newest first, by what they say; whether they are whole is not looked at.

    Opens the files that are newer than the pointer, and loads nothing. Raises CheckpointError for a
    directory that cannot be read.
    """
    run_id, written = pointer.extra.get("run_id"), _time_of(pointer.path)
    by_trainer = isinstance(run_id, str) and isinstance(pointer.extra.get("sha256"), str)
    if pointer.target is None or pointer.step is None or written is None or not by_trainer:
        return []
    listing = scan_if_there(directory)
    newer = [
        file
        for file in (newest_first(listing) if listing is not None else [])
        if file.step > pointer.step and file.mtime_ns >= written
    ]
    places = _places(directory) if newer else {}
    least = places.get(str(pointer.file), -1)
    parents = {}
    for file in newer:
        parent = _parent(file, run_id)
        if parent is not None and places.get(file.name, least + 1) > least:
            parents[file.step] = parent
    return [
        Path(file.path)
        for file in newer
        if file.step in parents and _leads_to(pointer.step, file.step, parents)
    ]


def _leads_to(step: int, later: int, parents: dict[int, int]) -> bool:
    while later > step and later in parents:
        if parents[later] >= later:
            return False
        later = parents[later]
    return later == step


def _parent(file: StepFile, run_id: Any) -> int | None:
    """The step that this one goes on from, if it is of that run."""
    from ckpttool.model.checkpoint import open_checkpoint

    inside = os.path.join(file.path, "trainer.pt") if file.is_sharded else file.path
    try:
        with open_checkpoint(inside) as checkpoint:
            tree = checkpoint.tree
    except (CkptToolError, OSError):
        return None
    if not isinstance(tree, dict) or tree.get("run_id") != run_id:
        return None
    parent = tree.get("parent_step")
    return parent if type(parent) is int else None


def _places(directory: Path) -> dict[str, int]:
    """The number of each file's last line in the manifest."""
    try:
        return KeptSteps(directory).places()
    except OSError:
        return {}


def _time_of(path: str | os.PathLike[str]) -> int | None:
    try:
        return os.lstat(path).st_mtime_ns
    except OSError:
        return None
