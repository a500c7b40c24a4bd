"""Copies one valid step to a directory or a name: payload first, pointer last."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ckpttool.actions.fix_pointer import WritePointer, refuse_directory, require_valid
from ckpttool.actions.newest import Newest, find_newest_valid, steps_at
from ckpttool.actions.plan import Action, MakeDirectory, Plan
from ckpttool.errors import RefusedError, UnreadableError, WriteError
from ckpttool.model.directory import scan
from ckpttool.model.names import POINTER_NAME, parse_step_file_name, parse_step_name
from ckpttool.model.sharded_listing import METADATA_NAME, holds_shards, list_sharded

if TYPE_CHECKING:
    from ckpttool.io.durable import Progress
    from ckpttool.model.directory import StepFile


class CopyFile(Action):
    """Copies a step durably, and reads the copy back before it gets its name."""

    __slots__ = ("file", "force")
    kind = "copy-file"

    def __init__(self, file: StepFile, destination: str, force: bool) -> None:
        super().__init__(destination)
        self.file = file
        self.force = force

    def describe(self) -> str:
        """`copy … to …`."""
        return f"copy {self.file.path} to {self.path}"

    def facts(self) -> dict[str, Any]:
        """Where from, and how many bytes."""
        return {"source": self.file.path, "size": self.file.size}

    def apply(self, progress: Progress | None = None) -> None:
        """Copies bytes, permission bits and modification time."""
        if not self.file.is_still(os.lstat(self.file.path)):
            raise UnreadableError(self.file.path, "has changed since it was verified")
        try:
            self._copy(progress)
        except FileExistsError as error:
            raise _exists(self.path) from error

    def _copy(self, progress: Progress | None) -> None:
        from ckpttool.io.durable import copy_durably

        if not self.file.is_sharded:
            copy_durably(self.file.path, self.path, force=self.force, progress=progress)
            return
        from ckpttool.io.durable_tree import copy_directory_durably

        copy_directory_durably(
            self.file.path,
            self.path,
            last=METADATA_NAME,
            force=self.force,
            check=self._check,
            progress=progress,
        )

    def _check(self, copy: str) -> None:
        """Each file was read back; this is for what came or went while they were copied."""
        if list_sharded(copy).sizes != list_sharded(self.file.path).sizes:
            raise UnreadableError(self.file.path, "changed while it was being copied")


class CopyPlan:
    """What `copy` found and is about to do. `source` is None where there is no step to copy.

    That is so without a valid step, and where one above it could not be checked.
    """

    __slots__ = ("newest", "plan", "source")

    def __init__(self, source: str | None, newest: Newest, plan: Plan) -> None:
        self.source = source
        self.newest = newest
        self.plan = plan


def plan_copy(
    source: str,
    destination: str,
    *,
    step: int | None = None,
    with_pointer: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> CopyPlan:
    """Verifies the source and plans its copy.

    `source` is a directory, of which the newest valid step is taken, or `step`; or a step. Nothing
    is planned where a step above the newest valid one could not be checked. `destination` is a
    directory (one that does not exist yet ends in `/`) or a new name. Raises RefusedError for a
    source that is not valid, for a destination with the pointer's name, and for what would
    overwrite something, or make a second file of its step, without `force`; UnreadableError and
    WriteError where a path is not what it should be.
    """
    directory = steps_at(source)
    if step is None:
        newest = find_newest_valid(directory, progress=progress)
    else:
        newest = Newest(require_valid(directory, step, progress=progress), [])
    if newest.sure is None:
        return CopyPlan(None, newest, Plan())
    file = newest.sure.file
    _refuse_pointer_name(destination)
    _refuse_itself(file, destination)
    into = os.path.isdir(destination) or destination.endswith(os.sep)
    if into and holds_shards(destination):
        _refuse_inside(file, destination)
        into = False
    if with_pointer and not into:
        raise WriteError(destination, "is not a directory, so it can have no pointer")
    target = os.path.join(destination, file.name) if into else destination
    if not into and not os.path.isdir(parent := os.path.dirname(target) or os.curdir):
        there = os.path.lexists(parent)
        raise WriteError(parent, "is not a directory" if there else "does not exist: make it first")
    _check_target(file.path, target, force)
    plan = Plan()
    if into and not os.path.isdir(destination):
        plan.actions.append(MakeDirectory(destination))
    plan.actions.append(CopyFile(file, target, force))
    if with_pointer:
        plan.actions.append(_pointer_action(destination, file.step, file.name, force))
    return CopyPlan(file.path, newest, plan)


def _check_target(source: str, target: str, force: bool) -> None:
    ours, theirs = (parse_step_name(os.path.basename(path)) for path in (source, target))
    if theirs is not None and theirs != ours:
        raise RefusedError(f"{target}: its name would say step {theirs}, but it holds step {ours}")
    sharded = os.path.isdir(source)
    named_as_file = parse_step_file_name(os.path.basename(target)) is not None
    if (theirs is not None and named_as_file == sharded) or (sharded and target.endswith(".pt")):
        raise RefusedError(
            f"{target}: only a file's name ends in .pt, only a sharded step's does not"
        )
    if os.path.isdir(target) and not sharded:
        raise RefusedError(f"{target}: is a directory")
    if os.path.exists(target) and os.path.samefile(source, target):
        raise RefusedError(f"{target}: is the very file that is to be copied")
    if force:
        return
    if os.path.lexists(target):
        raise _exists(target)
    if theirs is not None:
        _refuse_second_file(theirs, target)


def _refuse_pointer_name(destination: str) -> None:
    # In any case, as some file systems do not tell cases apart. With --force, too: a checkpoint in
    # the pointer's place is never what is meant.
    if os.path.basename(destination.rstrip(os.sep)).lower() == POINTER_NAME:
        raise RefusedError(f"{destination}: is the pointer's name, which no copy can have")


def _refuse_inside(file: StepFile, destination: str) -> None:
    """A directory of shards is a checkpoint: it is replaced by another, and holds no steps."""
    if not file.is_sharded or destination.endswith(os.sep):
        words = "is a sharded step itself, into which nothing is copied"
        raise RefusedError(f"{destination}: {words}")


def _refuse_itself(file: StepFile, destination: str) -> None:
    """A directory is not copied into itself, where it would be a part of what is copied."""
    inside = os.path.realpath(destination) + os.sep
    if file.is_sharded and inside.startswith(os.path.realpath(file.path) + os.sep):
        raise RefusedError(f"{destination}: is the very step that is to be copied, or lies in it")


def _refuse_second_file(step: int, target: str) -> None:
    """Of two files of one step in a directory nobody knows which is meant."""
    directory, name = os.path.split(target)
    if not os.path.isdir(directory or "."):
        return
    for file in scan(directory or ".").steps:
        if file.step == step and file.name != name:
            words = f"{file.name} beside it is of step {step} already; --force makes a second file"
            raise RefusedError(f"{target}: {words}")


def _pointer_action(directory: str, step: int, name: str, force: bool) -> Action:
    pointer = os.path.join(directory, POINTER_NAME)
    refuse_directory(pointer)
    if os.path.lexists(pointer) and not force:
        raise _exists(pointer)
    return WritePointer(directory, step, name, replace=force)


def _exists(path: str) -> RefusedError:
    return RefusedError(f"{path}: exists already, and is overwritten only with --force")
