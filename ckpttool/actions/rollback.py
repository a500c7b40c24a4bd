"""Makes an earlier step the latest: whatever is later is set aside, and can be brought back.

The order keeps every moment usable. First what is later goes, newest first, but for the file that
the pointer names; then the pointer moves, to a file that was verified; then its old target goes. So
the pointer names a file that exists at every moment, and until it moves the run is where it was.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Any

from ckpttool.actions.journal.moves import MovePointer, SetAside
from ckpttool.actions.newest import judge_step
from ckpttool.errors import RefusedError, UnreadableError
from ckpttool.io.processes import may_be_writing
from ckpttool.model.directory import scan
from ckpttool.model.manifest import read_manifest
from ckpttool.model.names import POINTER_NAME, has_full_width, parse_step_name
from ckpttool.model.pointer import POINTER_BYTES

if TYPE_CHECKING:
    from ckpttool.actions.journal.undoable import UndoableAction
    from ckpttool.io.durable import Progress
    from ckpttool.model.directory import CheckpointDirectory, Other, StepFile


class RollbackPlan:
    """What `rollback` found and is about to do: `target` becomes the latest step.

    `later` are the step files above it, newest first. `actions` is empty where it is the latest
    already.
    """

    __slots__ = ("actions", "directory", "later", "target")

    def __init__(
        self,
        directory: CheckpointDirectory,
        target: StepFile,
        later: list[StepFile],
        actions: list[UndoableAction],
    ) -> None:
        self.directory = directory
        self.target = target
        self.later = later
        self.actions = actions

    @property
    def why(self) -> str:
        """What the journal says of it."""
        return f"back to step {self.target.step}"


def plan_rollback(path: str, step: int, *, progress: Progress | None = None) -> RollbackPlan:
    """Verifies `step`, and plans to make it the latest of the directory `path`.

    Raises UnreadableError where there is no file for it, or it can't be checked, RefusedError where
    it is not valid, or a process that is alive seems to be writing a later one.
    """
    directory = scan(path)
    judged = judge_step(directory, step, progress=progress)
    if judged is None:
        raise UnreadableError(directory.path, f"there is no step file for step {step}")
    target = judged.file
    if judged.unchecked:
        raise UnreadableError(target.path, f"could not be checked: {judged.why()}")
    if not judged.is_valid:
        raise RefusedError(f"step {step} is not valid ({target.name}: {judged.why()})")
    later = sorted((file for file in directory.steps if file.step > step), key=_rank, reverse=True)
    leftovers = [other for other in directory.others if _is_later(other, step)]
    _refuse_living(leftovers)
    actions = _actions(directory, target, later, leftovers, progress)
    return RollbackPlan(directory, target, later, actions)


def _rank(file: StepFile) -> tuple[int, bool, str]:
    return file.step, has_full_width(file.name), file.name


def _is_later(other: Other, step: int) -> bool:
    """Whether it is a writer's temporary that was to become a later step."""
    if other.temporary is None:
        return False
    of_step = parse_step_name(other.temporary.target)
    return of_step is not None and of_step > step


def _refuse_living(leftovers: list[Other]) -> None:
    """A trainer that keeps no lock may be at work all the same."""
    for other in leftovers:
        assert other.temporary is not None
        try:
            changed = os.lstat(other.path).st_ctime
        except OSError:
            continue
        if may_be_writing(other.temporary.pid, changed):
            words = f"process {other.temporary.pid}, which is alive, may be writing it"
            raise RefusedError(f"{other.path}: {words}: end it first")


def _actions(
    directory: CheckpointDirectory,
    target: StepFile,
    later: list[StepFile],
    leftovers: list[Other],
    progress: Progress | None,
) -> list[UndoableAction]:
    why = f"later than step {target.step}"
    pointed = directory.pointer.file if directory.pointer.target is not None else None
    first = [file.name for file in later if file.name != pointed]
    first += [other.name for other in leftovers]
    last = [file.name for file in later if file.name == pointed]
    where = directory.path
    return [
        *(SetAside(where, name, why) for name in first),
        *_pointer_actions(directory, target, progress),
        *(SetAside(where, name, why) for name in last),
    ]


def _pointer_actions(
    directory: CheckpointDirectory, target: StepFile, progress: Progress | None
) -> list[UndoableAction]:
    pointer = directory.pointer
    if (pointer.state, pointer.step, pointer.file) == ("ok", target.step, target.name):
        return []
    if pointer.state == "unreadable":
        raise UnreadableError(pointer.path, f"could not be read: {pointer.problem}")
    new = pointer_content(directory.path, target, progress)
    old = _current_content(pointer.path)
    if old == new:
        return []
    where = directory.path
    if old is None and os.path.lexists(pointer.path):
        words = "no pointer, but something in its place"
        return [SetAside(where, POINTER_NAME, words), MovePointer(where, None, new)]
    return [MovePointer(where, old, new)]


def pointer_content(directory: str, file: StepFile, progress: Progress | None = None) -> bytes:
    """A pointer to `file`, as the training core writes it.

    Where the manifest records the file, and it still is what was recorded, by size and SHA-256, its
    keys `size`, `sha256` and `run_id` are there too. Raises UnreadableError.
    """
    import json

    content: dict[str, Any] = {"step": file.step, "file": file.name}
    entry = read_manifest(directory).entries.get(file.name)
    if entry is not None and entry.sha256 is not None and entry.size == file.recorded_size:
        from ckpttool.io.checksum import sha256_of
        from ckpttool.io.reading import FileReader

        with FileReader(file.recorded_path) as reader:
            sha256 = sha256_of(reader)
        if sha256 == entry.sha256:
            content.update(size=file.recorded_size, sha256=sha256)
            if entry.run_id is not None:
                content["run_id"] = entry.run_id
    return json.dumps(content, indent=2).encode("ascii") + b"\n"


def _current_content(path: str) -> bytes | None:
    """What a pointer that is a regular file of a sane size holds, else None."""
    try:
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_size > POINTER_BYTES:
            return None
        with open(path, "rb") as file:
            return file.read(POINTER_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnreadableError(path, error.strerror or str(error)) from error
