"""Going on by oneself, for runs that a scheduler starts again and again with the same command."""

from __future__ import annotations

from typing import Any

from ckpttool.errors import UnreadableError
from ckpttool.model.directory import scan
from trainer_core.checkpoint import CheckpointManager
from trainer_core.saving.savable import CheckpointError

WAYS = ("never", "auto", "must")


def checked_way(resume: str, manager: CheckpointManager | None) -> str:
    """Raises ValueError for an unknown way, or for one that needs a manager and has none."""
    if resume not in WAYS:
        raise ValueError(f"resume must be one of {', '.join(map(repr, WAYS))}, not {resume!r}")
    if resume != "never" and manager is None:
        raise ValueError(f"resume={resume!r} needs a checkpoint_manager, to know from where")
    return resume


def newest_state(manager: CheckpointManager, resume: str) -> dict[Any, Any] | None:
    """The newest valid checkpoint of the manager's directory; None if there was never one.

    That is the one that the pointer names, or a newer one that a crash kept it from naming: see
    `trainer_core.resuming.unpointed`. A damaged newest file is passed over, with a warning. Raises
    CheckpointError where there are files but none is valid, where there is a pointer but no file,
    and for "must" without any.
    """
    state = manager.load_latest(fallback=True, unpointed=True)
    if state is not None:
        return state
    traces = manager.led(lambda: _traces(manager))
    if traces:
        raise CheckpointError(
            f"{manager.directory}: there is no checkpoint to resume from, and yet {traces}: "
            f"resume={resume!r} does not begin from zero here. Look at it with ckpttool verify, "
            "or give an empty directory"
        )
    if resume == "must":
        words = "there is no checkpoint to resume from, and resume='must' says that there is one"
        raise CheckpointError(f"{manager.directory}: {words}")
    return None


def _traces(manager: CheckpointManager) -> str:
    """What an earlier run has left, in words; empty if there is no trace of one."""
    try:
        directory = scan(manager.directory)
    except UnreadableError:
        return ""  # it is not there: what is there and unreadable was refused before
    if directory.steps:
        return f"{directory.steps[0].name} is there, which is no regular file"
    if directory.pointer.state != "missing":
        return "latest.json is there"
    return ""
