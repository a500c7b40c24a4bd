"""The outer loop's node where that is a site: several ranks that train one model together.

Only rank 0 has a coordinator, and only it talks to the store. It works on a copy of the whole model
on the CPU, which is gathered at a boundary, and what it installs is given to all ranks.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch

from trainer_core.coordinator import SyncCoordinator
from trainer_core.diloco.coordinator import DumbDiLoCoCoordinator
from trainer_core.diloco.errors import DiLoCoError
from trainer_core.diloco.store import Store
from trainer_core.diloco.whole import Gathering, WholeModel
from trainer_core.site.ranks import site_of

logger = logging.getLogger(__name__)


def coordinator_for(
    model: torch.nn.Module, store: Store | str | os.PathLike[str], **options: Any
) -> SyncCoordinator:
    """A SitedCoordinator where several ranks train `model`, else a DumbDiLoCoCoordinator.

    Takes what these take. All ranks must call it, with the model as it is trained: in
    DistributedDataParallel, or sharded by `fully_shard`.
    """
    kind = DumbDiLoCoCoordinator if site_of(model) is None else SitedCoordinator
    return kind(model, store, **options)


class SitedCoordinator:
    """All ranks of a site as one node of the outer loop: a SyncCoordinator for each rank's Trainer.

    Takes what DumbDiLoCoCoordinator takes; the store is opened and asked on rank 0 alone. `inner`
    is its coordinator there, None on the others.

    All ranks agree in `start`, `load_state_dict`, `stop`, at the first step of a run, at each
    boundary, and where rank 0 has found that it delivered up to just this step in an earlier life:
    what rank 0 raises, all raise; whether a global model was installed and the inner optimizer is
    to be reset is one small message; then the new weights, if there are any. None of it waits for
    the network, unless `synchronous`. Between two boundaries nothing is said: what rank 0 meets
    there, an error or a wish for a reset, all ranks have at the next one.

    After an error on some rank `stop` is each rank's own, so that nobody waits for who is gone;
    steps since the last boundary then are not sent. `state_dict` is rank 0's, None elsewhere.

    Costs rank 0 one copy of the model on the CPU, and each boundary a copy of the model to it.
    Floating buffers (batch statistics) are rank 0's, and become the global model's on all ranks.

    Raises DiLoCoError for a model that one process trains alone; see there for the rest.
    """

    def __init__(
        self, model: torch.nn.Module, store: Store | str | os.PathLike[str], **options: Any
    ) -> None:
        site = site_of(model)
        if site is None:
            words = "the model is trained by one process alone: DumbDiLoCoCoordinator is for that"
            raise DiLoCoError(words)
        self.inner: DumbDiLoCoCoordinator | None = None
        self._site, self._model = site, model
        self._gathering = Gathering(model, site)
        self._whole = WholeModel(self._gathering.tensors)
        self._is_fresh, self._is_started = True, False
        self._delivered = -1
        self._wants_reset = False
        self._failure: Exception | None = None
        self._gathering.gather(model)
        self._inner_steps: int = site.first(lambda: self._make(store, options))

    def start(self) -> None:
        """See SyncCoordinator. All ranks wait for rank 0's answer from the store."""
        if self._is_fresh:
            self._gathering.gather(self._model)
        self._failure, self._wants_reset = None, False
        self._delivered = self._site.first(self._start)
        self._is_started = True

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See SyncCoordinator. Only rank 0's `state` is looked at."""
        self._gathering.gather(self._model)
        self._site.first(lambda: self._load(state))
        self._is_fresh = False

    def after_optimizer_step(self, model: torch.nn.Module, step: int) -> bool | None:
        """See SyncCoordinator; the same on all ranks."""
        is_agreed = self._is_fresh or step % self._inner_steps == 0 or step == self._delivered
        if not is_agreed:
            self._between(step)
            return False
        self._gathering.gather(model)
        wants_reset, is_installed = self._site.first(lambda: self._step(step))
        self._is_fresh = False
        if is_installed:
            self._gathering.spread(model)
        return wants_reset

    def stop(self) -> None:
        """See SyncCoordinator. Together, unless an error is on its way."""
        is_together = self._is_started and sys.exc_info()[0] is None
        self._is_started = False
        if not is_together:
            if self.inner is not None:
                self.inner.stop()
            return
        if self._site.first(lambda: self._own().has_unsent_steps):
            self._gathering.gather(self._model)
            self._whole.step = -1 if self.inner is None else self.inner.counters.local_step
        self._site.first(self._stop)

    def state_dict(self) -> dict[str, Any] | None:
        """See SyncCoordinator. Of rank 0, whose checkpoint holds it once for all."""
        return None if self.inner is None else self.inner.state_dict()

    # On rank 0

    def _make(self, store: Store | str | os.PathLike[str], options: dict[str, Any]) -> int:
        self.inner = DumbDiLoCoCoordinator(self._whole, store, **options)
        return self.inner.settings.inner_steps

    def _own(self) -> DumbDiLoCoCoordinator:
        assert self.inner is not None
        return self.inner

    def _start(self) -> int:
        self._own().start()
        return self._own().delivered_step

    def _load(self, state: Mapping[str, Any]) -> None:
        self._own().load_state_dict(state)
        self._whole.step = self._own().counters.local_step

    def _between(self, step: int) -> None:
        if self.inner is None or self._failure is not None:
            return
        try:
            self._wants_reset |= bool(self.inner.after_optimizer_step(self._whole, step))
        except Exception as error:
            logger.warning("all ranks are told at the next boundary: %s", error)
            self._failure = error

    def _step(self, step: int) -> tuple[bool, bool]:
        self._raise_failure()
        inner, before = self._own(), self._own().generation
        self._whole.step = step
        wants_reset = bool(inner.after_optimizer_step(self._whole, step)) or self._wants_reset
        self._wants_reset = False
        return wants_reset, inner.generation != before

    def _stop(self) -> None:
        self._own().stop()
        self._raise_failure()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
