"""Which run a directory's checkpoints belong to, so that two runs never mix by mistake.

Every run has an id. It is written into its checkpoints (`run_id`, beside `parent_step`, the step
that the run saved or resumed from before) and into the pointer. Whoever loads a checkpoint of the
directory goes on with that run; whoever does not is another run, and may not write there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from ckpttool.errors import CkptToolError
from ckpttool.model.directory import CheckpointDirectory, StepFile
from ckpttool.model.pointer import read_pointer
from trainer_core.state import CheckpointError

KEYS = ("run_id", "parent_step")


def new_run_id() -> str:
    """`20261129T194042Z-3f9a2c71`: when it began, and chance that no seed repeats."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.urandom(4).hex()}"


class Owner(NamedTuple):
    """The run that a directory belongs to, and the newest of its steps that is known."""

    run_id: str
    step: int | None


class RunIdentity:
    """Id and last step of the run that one manager writes for.

    Without `run_id` a new one is made, and given up for that of a checkpoint which is resumed from
    where the directory belongs to it. A `run_id` that was asked for stays.
    """

    def __init__(self, run_id: str | None = None) -> None:
        if run_id is not None and (not isinstance(run_id, str) or not run_id):
            raise ValueError(f"run_id must be a text that is not empty, not {run_id!r}")
        self.run_id = run_id or new_run_id()
        self.parent_step: int | None = None
        self._is_fixed = run_id is not None
        self._resumed: set[str] = set()

    def resumed_from(self, state: Mapping[str, Any]) -> None:
        """Takes note of a checkpoint that was loaded to go on from."""
        step, run_id = state.get("step"), state.get("run_id")
        self.parent_step = step if type(step) is int else None
        if isinstance(run_id, str):
            self._resumed.add(run_id)

    def settle(self, directory: str, owner: Owner | None) -> None:
        """Takes over the id of a directory's owner if that was resumed from.

        Raises CheckpointError where the directory belongs to another run.
        """
        if owner is None or owner.run_id == self.run_id:
            return
        if owner.run_id not in self._resumed:
            raise CheckpointError(self._refusal(directory, owner))
        if not self._is_fixed:
            self.run_id = owner.run_id

    def marked(self, state: Any) -> Any:
        """A training checkpoint with the keys of this run; anything else as it is."""
        if type(state) is not dict or "step" not in state or "model" not in state:
            return state
        return {**state, "run_id": self.run_id, "parent_step": self.parent_step}

    def owns(self, run_id: Any) -> bool:
        """Whether a file that says `run_id` is this run's; one that says nothing is."""
        return not isinstance(run_id, str) or run_id == self.run_id or run_id in self._resumed

    def _refusal(self, directory: str, owner: Owner) -> str:
        newest = "" if owner.step is None else f" (step {owner.step})"
        return (
            f"{directory}: holds checkpoints of run {owner.run_id}{newest}, and this is run "
            f"{self.run_id}, which has not resumed from them. Resume from them (load_latest), "
            f"or use another directory, or say run_id={owner.run_id!r} to write on as that run."
        )


def owner_by_pointer(directory: str) -> Owner | None:
    """The run that the pointer names, if it names one."""
    pointer = read_pointer(directory)
    run_id = pointer.extra.get("run_id")
    return Owner(run_id, pointer.step) if isinstance(run_id, str) else None


def owner_of(directory: CheckpointDirectory) -> Owner | None:
    """The run that the pointer names, or else the newest step file; None where none is named."""
    run_id = directory.pointer.extra.get("run_id")
    if isinstance(run_id, str):
        return Owner(run_id, directory.pointer.step)
    for file in sorted(directory.steps, reverse=True):
        if file.is_regular:
            found = _run_inside(file)
            return None if found is None else Owner(found, file.step)
    return None


def _run_inside(file: StepFile) -> str | None:
    """The run id in a step file, read without loading it."""
    from ckpttool.model.checkpoint import open_checkpoint

    try:
        with open_checkpoint(file.path) as checkpoint:
            tree = checkpoint.tree
    except (CkptToolError, OSError):
        return None
    run_id = tree.get("run_id") if isinstance(tree, dict) else None
    return run_id if isinstance(run_id, str) else None
