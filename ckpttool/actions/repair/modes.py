"""Who may read the step files: what a repair changes about that, which is little."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from ckpttool.actions.repair.deeds import MODES, Deed, Kept, Left
from ckpttool.checks.base import quoted

if TYPE_CHECKING:
    from ckpttool.actions.repair.look import Look

_OPEN = "TRU108: everybody may write here"
_PLAIN = 0o666  # of the usual mode, only reading and writing is ever given to another file


def plan_modes(look: Look, kept: list[Kept]) -> tuple[list[Deed], list[Left]]:
    """What to change about the modes of the files that stay and of the pointer.

    Writing for everybody is taken away (TRU108), but for the directory's own mode. A step file
    gets the mode that more than half of the step files have (DIR104), unless that would let more
    people write to it. Files of other users are left alone: only their owner may change them.
    """
    deeds: list[Deed] = []
    left: list[Left] = []
    kept = [file for file in kept if not file.entry.is_sharded]
    usual = usual_mode([_mode(file) & ~stat.S_IWOTH for file in kept])
    for file in kept:
        new, why = _mode_for(_mode(file), usual)
        _change(_path(look, file), file.entry.status, new, why, deeds, left)
    open_to_all = {f.place.path for f in look.report.findings if f.id == "TRU108"}
    pointer = look.directory.pointer
    if pointer.path in open_to_all and pointer.mode is not None:
        new = stat.S_IMODE(pointer.mode) & ~stat.S_IWOTH
        _change(pointer.path, os.lstat(pointer.path), new, _OPEN, deeds, left)
    if look.directory.path in open_to_all:
        how = f"chmod o-w -- {quoted(look.directory.path)}"
        left.append(Left(look.directory.path, f"{_OPEN}; a directory's mode stays: {how}"))
    return deeds, left


def usual_mode(modes: list[int]) -> int | None:
    """The mode that more than half of the files have, or None."""
    if not modes:
        return None
    best = max(set(modes), key=modes.count)
    return best if 2 * modes.count(best) > len(modes) else None


def _mode_for(mode: int, usual: int | None) -> tuple[int, str]:
    """The mode that a step file should have, and why; the same one where nothing is to be done."""
    closed = mode & ~stat.S_IWOTH
    why = "TRU108: everybody may write to it" if closed != mode else ""
    if usual is None or closed == usual:
        return closed, why
    more_writers = usual & ~closed & (stat.S_IWGRP | stat.S_IWOTH)
    if more_writers or (usual & ~closed) & ~_PLAIN:
        return closed, why
    return usual, why or f"DIR104: most step files here have the mode {usual:04o}"


def _change(
    path: str,
    status: os.stat_result | None,
    new: int,
    why: str,
    deeds: list[Deed],
    left: list[Left],
) -> None:
    if status is None or (old := stat.S_IMODE(status.st_mode)) == new:
        return
    change = f"mode {old:04o} to {new:04o}"
    if os.geteuid() not in (0, status.st_uid):
        left.append(Left(path, f"{why}; it belongs to another user, who may change {change}"))
        return
    words = f"change {os.path.basename(path) or path}: {change}"
    deeds.append(Deed(MODES, "chmod", path, words, why=(why,), status=status, mode=new))


def _mode(file: Kept) -> int:
    return 0 if file.entry.status is None else stat.S_IMODE(file.entry.status.st_mode)


def _path(look: Look, file: Kept) -> str:
    return os.path.join(look.directory.path, file.name)
