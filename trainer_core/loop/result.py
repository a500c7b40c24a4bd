"""What a fit gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainer_core.loop.preemption import exit_code


@dataclass(frozen=True)
class TrainResult:
    """What a `fit` came to.

    `steps`, `samples` and `tokens` are absolute, with what was resumed. `final_loss` is that of the
    last step (the mean over its micro-batches), None if this fit made no step. `elapsed_s` is this
    fit's time in seconds. `metrics` are its records: `step`, `loss`, `lr`, `samples`, `tokens` and
    `elapsed_s`, one a step, evenly thinned out above 1,024. `stopped_by` is None unless the fit
    ended early because it was told to: `signal SIGTERM`, or what `Trainer.stop` was given.
    """

    steps: int
    samples: int
    tokens: int
    final_loss: float | None
    elapsed_s: float
    metrics: list[dict[str, Any]] = field(default_factory=list)
    stopped_by: str | None = None

    @property
    def exit_code(self) -> int:
        """For `sys.exit`: 0, or 75 where a scheduler is to run it again, or 130 after Ctrl-C."""
        return exit_code(self.stopped_by)
