"""What is left of a resume when a fit begins, since who needs it exists only then."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from trainer_core.callbacks import Callbacks
from trainer_core.census.attributes import Attributes
from trainer_core.checkpoint import CheckpointManager
from trainer_core.coordinator import SyncCoordinator
from trainer_core.data.feed import Feed
from trainer_core.loop.progress import tell
from trainer_core.precision import PrecisionPlan
from trainer_core.resuming.auto_resume import checked_way, newest_state
from trainer_core.resuming.resume import ResumeWarning
from trainer_core.rng import capture_rng_state, restore_rng_state
from trainer_core.site.ranks import Site
from trainer_core.site.sharded import ShardedState
from trainer_core.state import CheckpointError


class Beginning:
    """The part of a trainer that begins its fits, from a checkpoint where there is one.

    `step`, `samples` and `tokens` count what was done, with what was resumed.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    dataloader: Iterable[Any]
    device: torch.device
    scheduler: Any | None
    precision: PrecisionPlan
    config: Any
    ema: Any | None
    loss_fn: Any | None
    coordinator: SyncCoordinator | None
    checkpoint_manager: CheckpointManager | None
    accumulation_steps: int
    grad_clip: float | None
    logger: logging.Logger
    step: int
    samples: int
    tokens: int
    _site: Site | None
    _callbacks: Callbacks
    _attributes: Attributes
    _feed: Feed
    _scaler_state: Mapping[str, Any] | None
    _coordinator_state: Mapping[str, Any] | None
    _may_differ: frozenset[str]
    _has_begun: bool
    _is_fresh: bool

    def resume(self, state: Mapping[str, Any], *, allow_partial: Collection[str] = ()) -> None:
        """Goes on from a checkpoint."""
        raise NotImplementedError  # Resumable has it

    @staticmethod
    def _warn(title: str, lines: list[str], stacklevel: int = 3) -> None:
        warnings.warn("\n  - ".join([f"{title}:", *lines]), ResumeWarning, stacklevel=stacklevel)

    def _resume_as_asked(self, resume: str, allow_partial: Collection[str]) -> None:
        manager = self.checkpoint_manager
        if checked_way(resume, manager) == "never" or self._has_begun or manager is None:
            return
        state = newest_state(manager, resume)
        if state is None:
            self._tell(f"fresh start: there is no checkpoint in {manager.directory}")
            return
        path = state.path if isinstance(state, ShardedState) else manager.path_for(state["step"])
        self._tell(f"resuming from {path}")
        self.resume(state, allow_partial=allow_partial)

    def _tell(self, line: str) -> None:
        """Once for all ranks."""
        if self._site is None or self._site.leads:
            tell(self.logger, line)

    def _load_scaler(self, scaler: torch.amp.GradScaler) -> None:
        if self._scaler_state is None:
            return
        before = scaler.state_dict()
        try:
            scaler.load_state_dict(dict(self._scaler_state))
        except Exception as error:  # whatever a malformed state makes torch raise
            scaler.load_state_dict(before)
            if "scaler" not in self._may_differ:
                raise CheckpointError(f"scaler: could not be restored: {error}") from error
            self._warn("not all of the checkpoint was restored", [f"scaler: {error}"])
        self._scaler_state = None

    def _load_coordinator(self, coordinator: SyncCoordinator) -> None:
        if self._coordinator_state is None:
            return
        try:
            coordinator.load_state_dict(self._coordinator_state)
        except Exception as error:  # the coordinator is the user's
            if "coordinator" not in self._may_differ:
                raise
            self._warn("not all of the checkpoint was restored", [f"coordinator: {error}"])
        self._coordinator_state = None

    def _own_feed(self) -> Feed:
        """The feed of the loader; a new one where somebody has put another loader in its place."""
        if self._feed.loader is not self.dataloader:
            old, self._feed = self._feed, Feed(self.dataloader)
            if old.is_waiting:
                self._feed.load_state_dict(old.state_dict())
        return self._feed

    @contextmanager
    def _exact_random_numbers(self) -> Iterator[None]:
        """What the body draws, a run that was never interrupted has not drawn at this point.

        So after a resume the random numbers are restored once more, as the last act before the
        first batch. Those are kept that the caller has seeded since.
        """
        if not self._is_fresh and not self._own_feed().is_waiting:
            yield
            return
        before = capture_rng_state()
        yield
        restore_rng_state(before)
        self._is_fresh = False

    def _start_callbacks(self) -> None:
        with self._attributes.starting():
            self._callbacks.call("on_fit_start", self)
        try:
            doubts = self._attributes.set_again()
        except CheckpointError as error:
            if "attributes" not in self._may_differ:
                raise
            doubts = [str(error)]
        if doubts:
            self._warn("not all of the checkpoint was restored", doubts, stacklevel=4)

    def _go_to_place(self) -> None:
        try:
            doubts = self._own_feed().start()
        except CheckpointError as error:
            if "data" not in self._may_differ:
                raise
            doubts = [f"{error}; a new pass begins"]
        if doubts:
            title = "approximate: the data do not go on exactly where they were"
            self._warn(title, doubts, stacklevel=4)
