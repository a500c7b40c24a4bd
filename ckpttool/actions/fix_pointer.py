"""Points `latest.json` at the newest valid step, or at one that is asked for."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Any, BinaryIO

from ckpttool.actions.newest import Judged, Newest, find_newest_valid, judge_step, steps_at
from ckpttool.actions.plan import Action, Plan
from ckpttool.errors import RefusedError, UnreadableError, WriteError
from ckpttool.model.names import POINTER_NAME
from ckpttool.model.pointer import read_pointer

if TYPE_CHECKING:
    from ckpttool.io.durable import Progress
    from ckpttool.model.directory import CheckpointDirectory, StepFile
    from ckpttool.model.pointer import Pointer


class WritePointer(Action):
    """Writes a pointer to `file` of `step`, keeping the mode of the one that it replaces."""

    __slots__ = ("file", "replace", "seen", "step")
    kind = "write-pointer"

    def __init__(
        self,
        directory: str,
        step: int,
        file: str,
        *,
        replace: bool = True,
        seen: Pointer | None = None,
    ) -> None:
        super().__init__(os.path.join(directory, POINTER_NAME))
        self.step = step
        self.file = file
        self.replace = replace
        self.seen = seen  # the pointer on which the plan rests, where it rests on one

    def describe(self) -> str:
        """`write latest.json: step 6, step_000000000006.pt`."""
        return f"write {POINTER_NAME}: step {self.step}, {self.file}"

    def facts(self) -> dict[str, Any]:
        """Step and file name."""
        return {"step": self.step, "file": self.file}

    def apply(self, progress: Progress | None = None) -> None:
        """Writes it durably, then reads it again. A link is replaced, never followed."""
        from ckpttool.io.durable import write_durably

        self._refuse_stale_plan()

        def write(file: BinaryIO) -> None:
            file.write(pointer_bytes(self.step, self.file))

        def check(_: str) -> None:
            self._refuse_stale_plan()  # syncing takes time, and not every trainer keeps the lock

        mode = _mode_of(self.path)
        write_durably(self.path, write, mode=mode, replace=self.replace, check=check)
        now = self._read()
        if (now.state, now.step, now.file) != ("ok", self.step, self.file):
            raise WriteError(self.path, f"was written, but now reads otherwise: {now.problem}")

    def _read(self) -> Pointer:
        return read_pointer(os.path.dirname(self.path) or ".")

    def _refuse_stale_plan(self) -> None:
        """A trainer at work may have moved the pointer, or pruned the file, since we looked."""
        if not os.path.lexists(os.path.join(os.path.dirname(self.path), self.file)):
            raise UnreadableError(self.file, "was deleted since it was verified")
        if self.seen is not None and self._read().as_dict() != self.seen.as_dict():
            raise RefusedError(f"{self.path}: has changed since it was read; run it again")


class PointerFix:
    """What `fix-pointer` found and is about to do.

    `target` is where the pointer belongs, None if there is no valid step or nobody knows which is
    the newest; `right_already` that it is there. `newest` holds what was looked at.
    """

    __slots__ = ("directory", "newest", "plan", "right_already", "target")

    def __init__(
        self, directory: CheckpointDirectory, newest: Newest, target: StepFile | None
    ) -> None:
        self.directory = directory
        self.newest = newest
        self.target = target
        self.right_already = target is not None and _points_at(directory.pointer, target)
        self.plan = Plan()
        if target is not None and not self.right_already:
            self.plan.actions.append(
                WritePointer(directory.path, target.step, target.name, seen=directory.pointer)
            )


def pointer_bytes(step: int, file: str) -> bytes:
    """The content of a pointer, as the training core writes it."""
    import json

    return json.dumps({"step": step, "file": file}, indent=2).encode("ascii")


def plan_fix_pointer(
    path: str, *, step: int | None = None, progress: Progress | None = None
) -> PointerFix:
    """Verifies, and plans a pointer to the newest valid step, or to `step`.

    Nothing is planned where a step above the newest valid one could not be checked.
    Raises RefusedError where `step` is not valid, or where something stands in the pointer's place
    that cannot be replaced; UnreadableError where the directory, or the file of `step`, can't be
    read.
    """
    directory = steps_at(path)
    if step is None:
        newest = find_newest_valid(directory, progress=progress)
    else:
        newest = Newest(require_valid(directory, step, progress=progress), [])
    fix = PointerFix(directory, newest, newest.sure.file if newest.sure else None)
    if fix.plan.actions:
        refuse_directory(directory.pointer.path)
    return fix


def require_valid(
    directory: CheckpointDirectory, step: int, *, progress: Progress | None = None
) -> Judged:
    """What is meant by `step`, verified. RefusedError where it is missing or not valid."""
    judged = judge_step(directory, step, progress=progress)
    if judged is None:
        raise RefusedError(f"{directory.path}: there is no step file for step {step}")
    if judged.unchecked:
        raise UnreadableError(judged.file.path, f"could not be checked: {judged.why()}")
    if not judged.is_valid:
        raise RefusedError(f"step {step} is not valid ({judged.file.name}: {judged.why()})")
    return judged


def _points_at(pointer: Pointer, file: StepFile) -> bool:
    return (pointer.state, pointer.step, pointer.file) == ("ok", file.step, file.name)


def refuse_directory(path: str) -> None:
    """RefusedError where a directory stands in the pointer's place `path`."""
    if os.path.isdir(path) and not os.path.islink(path):
        raise RefusedError(f"{path}: is a directory, which a pointer cannot replace: move it away")


def _mode_of(path: str) -> int | None:
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return None
    return stat.S_IMODE(mode) if stat.S_ISREG(mode) else None
