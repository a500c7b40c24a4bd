"""Whether a schedule is long enough for the steps that are left."""

from __future__ import annotations

from typing import Any

from torch.optim import lr_scheduler


def check_horizon(scheduler: Any, steps: int, *, done: int | None = None) -> None:
    """Raises ValueError if `steps` more steps go past the end of a schedule that has one.

    A OneCycleLR refuses the step after its last, which would else be found out only then. Others
    have no end. `done`: steps that it has behind it, by default what it says itself.
    """
    if isinstance(scheduler, lr_scheduler.OneCycleLR):
        done, total = scheduler.last_epoch if done is None else done, scheduler.total_steps
        if done + steps > total:
            raise ValueError(
                f"the schedule is too short: OneCycleLR has {total} steps in all, {done} of them "
                f"are done, and {steps} more are wanted"
            )
    elif isinstance(scheduler, lr_scheduler.ChainedScheduler):
        for part in scheduler._schedulers:
            check_horizon(part, steps)
    elif isinstance(scheduler, lr_scheduler.SequentialLR):
        _check_sequence(scheduler, steps)


def _check_sequence(sequence: Any, steps: int) -> None:
    starts = [0, *sequence._milestones]
    ends = [*sequence._milestones, sequence.last_epoch + steps + 1]
    for part, start, end in zip(sequence._schedulers, starts, ends, strict=True):
        first, last = max(start, sequence.last_epoch + 1), min(end - 1, sequence.last_epoch + steps)
        if last < first:
            continue
        if start > sequence.last_epoch:  # its first step only takes it to its beginning
            check_horizon(part, last - first, done=0)
        else:
            check_horizon(part, last - first + 1)
