"""Deletes old step files: valid ones that no rule keeps, oldest first, and nothing else.

Damaged files neither count nor go: they may be all that is left to salvage, and `verify` must go on
naming them. While any file could not be checked nothing goes at all. Links, directories,
foreign names and temporaries are never touched.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.actions.newest import Judged, is_gone, judge
from ckpttool.actions.plan import Action, Plan
from ckpttool.errors import UnreadableError, WriteError
from ckpttool.io.folder import Folder
from ckpttool.model.directory import scan
from ckpttool.model.pointer import read_pointer
from ckpttool.model.records import read_records

if TYPE_CHECKING:
    from collections.abc import Collection

    from ckpttool.io.durable import Progress
    from ckpttool.model.directory import CheckpointDirectory, StepFile
    from ckpttool.model.pointer import Pointer


class Kept(NamedTuple):
    """A valid step file that stays, and why."""

    file: StepFile
    reasons: list[str]

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return {"step": self.file.step, "file": self.file.name, "reasons": self.reasons}


class DeleteStep(Action):
    """Deletes one step, unless it is no longer what was verified.

    `outcome` says what came of it: `deleted`, `gone`, `changed` or `pointed-at`.
    """

    __slots__ = ("directory", "file", "outcome")
    kind = "delete"

    def __init__(self, directory: str, file: StepFile) -> None:
        super().__init__(file.path)
        self.directory = directory
        self.file = file
        self.outcome: str | None = None

    def describe(self) -> str:
        """`delete step_000000000002.pt`."""
        return f"delete {self.file.name}"

    def facts(self) -> dict[str, Any]:
        """Step, size in bytes, and what came of it."""
        return {"step": self.file.step, "size": self.file.size, "outcome": self.outcome}

    def apply(self, progress: Progress | None = None) -> None:
        """Deletes by name in the open directory, so that no path can lead elsewhere meanwhile."""
        with Folder(self.directory) as home:
            self.outcome = self._delete(home)

    def _delete(self, home: Folder) -> str:
        from ckpttool.io.durable_tree import remove_step

        name = self.file.name
        if read_pointer(self.directory).file == name:  # a trainer may have moved it meanwhile
            return "pointed-at"
        try:
            now = home.status(name)
            if now is not None and not self.file.is_still(now):
                return "changed"
            remove_step(home, name, os.getpid())
        except FileNotFoundError:
            return "gone"  # another prune at the same time, or the trainer's own
        return "deleted"


class SyncDirectory(Action):
    """Makes the deletions durable."""

    __slots__ = ()
    kind = "sync-directory"

    def describe(self) -> str:
        """`make the deletions durable`."""
        return "make the deletions durable"

    def apply(self, progress: Progress | None = None) -> None:
        """One fsync of the directory."""
        from ckpttool.io.durable import fsync_directory

        fsync_directory(self.path)


class PrunePlan:
    """What `prune` found and is about to do.

    `deletions` are oldest first, `kept` and `passed_over` (what is not valid, and stays) ascend, of
    one step the one that is meant last.
    `unchecked` are those of `passed_over` that could not be checked; while there are any, nothing
    is deleted. `newest_valid` is None where nothing is valid, or nobody knows which is the newest;
    then there is nothing to delete either.
    """

    __slots__ = ("deletions", "kept", "newest_valid", "passed_over", "plan", "unchecked")

    def __init__(
        self,
        directory: CheckpointDirectory,
        kept: list[Kept],
        going: list[StepFile],
        passed_over: list[Judged],
    ) -> None:
        self.kept = kept
        self.passed_over = passed_over
        self.unchecked = [judged for judged in passed_over if judged.unchecked]
        self.newest_valid = kept[-1].file if kept else None
        if self.newest_valid and any(
            judged.file.step > self.newest_valid.step for judged in self.unchecked
        ):
            self.newest_valid = None
        self.deletions = [DeleteStep(directory.path, file) for file in going]
        self.plan = Plan([*self.deletions])
        if going:
            self.plan.actions.append(SyncDirectory(directory.path))

    @property
    def frees(self) -> int:
        """How many bytes the deletions give back, by the files' sizes."""
        return sum(action.file.size for action in self.deletions)


def plan_prune(
    path: str,
    *,
    keep_last: int,
    keep_every: int | None = None,
    keep: Collection[int] = (),
    progress: Progress | None = None,
) -> PrunePlan:
    """Verifies every step file of the directory `path`, and plans which of the valid ones go.

    Kept are the `keep_last` newest valid steps, steps that are multiples of `keep_every`, those in
    `keep`, and always the newest valid step and whatever the pointer names; and everything, where
    a step file could not be checked. Raises UnreadableError
    where the directory or its pointer can't be read, ValueError for a `keep_last` below 1.
    """
    if keep_last < 1 or (keep_every is not None and keep_every < 1):
        raise ValueError("keep_last and keep_every must be at least 1")
    directory = scan(path)
    pointer = directory.pointer
    if pointer.state == "unreadable":
        # It may name any file here, so none can be deleted safely.
        raise UnreadableError(pointer.path, f"could not be read: {pointer.problem}")
    records = read_records(path)
    judged = [judge(file, records=records, progress=progress) for file in directory.steps]
    # What another process deleted meanwhile is nobody's concern any more.
    judged = [one for one in judged if not is_gone(one)]
    valid = [one.file for one in judged if one.is_valid]
    valid.sort(key=lambda file: (file.step, records.precedence(file.name)))
    reasons = _reasons(valid, pointer, keep_last, keep_every, set(keep))
    if any(one.unchecked for one in judged):
        # It may be the newest, or one that the others were to be kept beside.
        for why in reasons.values():
            why.append("a step file could not be checked")
    kept = [Kept(file, reasons[file.name]) for file in valid if reasons[file.name]]
    going = [file for file in valid if not reasons[file.name]]
    return PrunePlan(directory, kept, going, [one for one in judged if not one.is_valid])


def carry_out(prune: PrunePlan, progress: Progress | None = None) -> None:
    """Deletes. Raises WriteError where the system refuses, after what went before it is durable."""
    try:
        prune.plan.apply(progress)
    except WriteError:
        sync = prune.plan.actions[-1]
        if isinstance(sync, SyncDirectory):
            sync.apply()
        raise


def _reasons(
    valid: list[StepFile],
    pointer: Pointer,
    keep_last: int,
    keep_every: int | None,
    keep: set[int],
) -> dict[str, list[str]]:
    """Why each valid file stays, by name; nothing for one that goes."""
    last = set(sorted({file.step for file in valid})[-keep_last:])
    newest = max((file.step for file in valid), default=None)
    reasons: dict[str, list[str]] = {}
    for file in valid:
        tests = {
            "newest valid step": file.step == newest,
            # By both of its keys: where they disagree, either may be what somebody relies on.
            "the pointer names it": file.name == pointer.file or file.step == pointer.step,
            f"among the last {keep_last}": file.step in last,
            f"multiple of {keep_every}": keep_every is not None and file.step % keep_every == 0,
            "asked for": file.step in keep,
        }
        reasons[file.name] = [words for words, applies in tests.items() if applies]
    return reasons
