"""What the trainer needs of whatever keeps several machines in step (DiLoCo, arXiv 2311.08105)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch


@runtime_checkable
class SyncCoordinator(Protocol):
    """Synchronises a model with other machines between optimizer steps.

    `Trainer.fit` calls `start`, then `load_state_dict` where a resumed checkpoint holds a state,
    then `after_optimizer_step` after each step, `state_dict` for each checkpoint, and `stop` at the
    end, also after a failure. A later `fit` starts anew. What `start`, `after_optimizer_step` or
    `state_dict` raises ends the fit; what `stop` raises never costs the last checkpoint.
    """

    def start(self) -> None:
        """Connects, before the first step of a fit."""

    def after_optimizer_step(self, model: torch.nn.Module, step: int) -> bool | None:
        """Called when `step` optimizer steps are done; may change the model's parameters in place.

        A true return asks the trainer to reset the inner optimizer's state.
        """

    def stop(self) -> None:
        """Disconnects; must be safe to call after a failed `start`, and twice."""

    def state_dict(self) -> dict[str, Any] | None:
        """What a checkpoint needs to go on from here: plain values and CPU tensors, or None."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave, after `start`."""
