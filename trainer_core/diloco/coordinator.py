"""What the trainer calls: the outer loop of one node, between its optimizer steps."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainer_core.diloco.commits import CommitLog, Presence
from trainer_core.diloco.ending import Ending
from trainer_core.diloco.errors import DiLoCoError, StoreError
from trainer_core.diloco.fingerprint import Spec
from trainer_core.diloco.lanes import Outcome
from trainer_core.diloco.lease import Keeper
from trainer_core.diloco.names import check_node_id
from trainer_core.diloco.outer import first_outer
from trainer_core.diloco.published import Published, Reader
from trainer_core.diloco.settings import Settings
from trainer_core.diloco.state import (
    ROLES,
    Saved,
    StateError,
    from_state,
    saved_fingerprint,
    to_state,
)
from trainer_core.diloco.store import Store
from trainer_core.diloco.tensorfile import BadFileError
from trainer_core.diloco.whole import WholeModel
from trainer_core.diloco.worker import Counters, Sender, Worker
from trainer_core.wrappers import plain_state

logger = logging.getLogger(__name__)

NODE_ID_VARIABLE = "DILOCO_NODE_ID"


class DumbDiLoCoCoordinator(Ending):
    """Keeps `model` in step with other nodes through a store: a SyncCoordinator for Trainer.

    DiLoCo (arXiv 2311.08105): each node takes `inner_steps` steps of its own, then sends what they
    changed; a master averages these pseudo-gradients, takes one outer step, and publishes the
    global model, which every node installs at its next boundary.

    `store`: a Store, or a path or URL for `Store.open`. `node_id`: unique among the nodes and the
    same after a restart; by default what DILOCO_NODE_ID in the environment says. `role`: a "worker"
    trains; a "master" trains too, and makes the outer steps while it holds the lease. `samples`:
    how many samples an optimizer step takes, or a function that gives the total so far
    (`lambda: trainer.samples`); of use where deltas are weighed by samples. `options`: the fields
    of Settings.

    The model changes only in `after_optimizer_step`, on the thread that calls it. The first call
    of a fit that goes on from no checkpoint installs the global model, if there is one that differs
    from the model as it was at `start`; after that only boundaries do. What a boundary needs of the
    network happens on lanes (see `trainer_core.diloco.lanes`), and a store that fails is reported
    and tried again at the next boundary; a wrong answer of it too.

    Raises ValueError for options out of range, BadNameError (a ValueError) for a node id that isn't
    one, TypeError for options that there aren't or of the wrong kind, and for a model with tensors
    that can't be exchanged.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        store: Store | str | os.PathLike[str],
        *,
        node_id: str | None = None,
        role: str = "worker",
        samples: int | Callable[[], int] = 1,
        **options: Any,
    ) -> None:
        if role not in ROLES:
            raise ValueError(f"role must be one of {', '.join(ROLES)}, not {role!r}")
        if node_id is None:
            node_id = os.environ.get(NODE_ID_VARIABLE, "")
        self.node_id = check_node_id(node_id)
        self.role = role
        self.settings = Settings.of(options, ("node_id", "role", "samples"))
        if not callable(samples) and (type(samples) is not int or samples < 1):
            raise ValueError(
                f"samples must be a count from 1 up or a function, not {samples!r:.80}"
            )
        self.session = uuid.uuid4().hex
        self._model = model
        self._samples = samples
        self._spec = Spec.of(plain_state(model))
        self._store = store if isinstance(store, Store) else Store.open(store)
        self._worker = Worker(self._spec)
        # Readers and the master's lane see the log at their own times; each keeps its own fence.
        self._presence = presence = Presence()
        self._reader_log = CommitLog(self._store, presence=presence)
        self._begin_exchanging(
            Reader(self._store, self._spec, self._reader_log),
            Sender(
                self._store, self.node_id, self._spec, CommitLog(self._store, presence=presence)
            ),
        )
        self._begin_mastering(self._store, self._spec, presence)
        self._is_fresh = True  # nothing was loaded, and no step was made yet
        self._is_started = False
        self._versions: list[int] | None = None

    # What the trainer calls

    def start(self) -> None:
        """Contacts the store and asks what is there; leaves the model alone.

        A store that can't be reached is only reported, unless `require_hub`. Raises LeaseError in a
        master that meets another one alive, DiLoCoError for a Hub that is of another model, and
        under torch.distributed with several ranks (there: `SitedCoordinator`).
        """
        if self._is_started:
            return
        _require_one_process(self._model)
        if self._is_fresh:
            self._worker.begin(self._model)
            self._genesis = first_outer(self._worker.baseline)
        self._unforeseen, self._has_failed = None, False
        self._versions = self._model_versions()
        self._is_started = True
        self._sender.is_reconciled = False
        if not self._uploads.is_free:
            logger.warning("an upload of the fit before is still under way")
        else:
            self._uploads.submit(self._contact)
            if not self._uploads.wait(self.settings.start_seconds + self.settings.lease_seconds):
                self._alone(f"no answer within {self.settings.start_seconds:g} s")
            elif (outcome := self._uploads.take()) is not None:
                self._contacted(outcome)
        if self.role == "master":
            self._keeper = Keeper(self._lease, self.settings.lease_seconds)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave; the model must be as it was then.

        Model and baseline stay a pair: whatever newer global model there is, it is installed at the
        next boundary. Raises StateError for a state that isn't one, and for one of another node,
        role or model that `accept_other` does not name.
        """
        self._compare(state)
        saved = from_state(state, self._spec)
        worker = self._worker
        worker.counters = saved.counters
        worker.generation, worker.pending = saved.generation, saved.pending
        worker.since, worker.since_samples = saved.since, saved.since_samples
        worker.origin = saved.origin
        if saved.baseline is None:
            worker.begin(self._model)
        else:
            worker.baseline = saved.baseline
        if saved.node_id != self.node_id:
            self._take_over_from(saved)
        self._reader_log.fence = max(self._reader_log.fence, saved.fence)
        was_there = (
            saved.fence > 0 if self.role == "master" else saved.counters.last_global_step >= 0
        )
        if was_there and "hub" not in self.settings.accept_other:
            self._presence.is_known = True
        self._prepare_outer(saved, state.get("outer"))
        self._is_fresh = False
        if self._sender.is_reconciled:
            self._mark_delivered(self._model, saved.counters.local_step)

    def after_optimizer_step(self, model: torch.nn.Module, step: int) -> bool | None:
        """Counts the step; at a boundary dispatches a delta and installs what has arrived.

        True asks for a reset of the inner optimizer, as `reset_inner` says. Raises what a lane met
        that nobody foresaw.
        """
        self._require_started()
        self._worker.counters.local_step = step
        self._harvest()
        if self._is_fresh:
            self._join(model)
        if step % self.settings.inner_steps == 0:
            self._boundary(model, step)
        elif step == self._sender.delivered_step and self._is_of(model, step):
            self._mark_delivered(model, step)
        self._background_work()
        self._versions = self._model_versions()
        wants, self._wants_reset = self._wants_reset, False
        return wants

    def stop(self) -> None:
        """Sends what is left, waits for the lanes, but no longer than `stop_seconds`, and lets go.

        Steps after the last boundary are sent too (see `final_window`), unless the fit has failed
        in the midst of a step. A store that fails is only reported. Safe to call twice.
        """
        if not self._is_started:
            return
        self._is_started = False
        deadline = time.monotonic() + self.settings.stop_seconds
        try:
            self._finish(deadline)
        finally:
            if self._keeper is not None:
                self._keeper.stop()
                self._keeper = None
        if self._unforeseen is not None:
            raise self._unforeseen

    def state_dict(self) -> dict[str, Any] | None:
        """See `trainer_core.diloco.state`. None before the first `start`."""
        if not self._worker.baseline:
            return None
        return to_state(
            self._worker,
            self._outer_section(),
            node_id=self.node_id,
            role=self.role,
            session=self.session,
            fence=max(self._reader_log.fence, self._log.fence),
        )

    # What can be asked

    @property
    def counters(self) -> Counters:
        """Steps done, uploaded, dispatched, skipped, and the outer step that is installed."""
        return self._worker.counters

    @property
    def delivered_step(self) -> int:
        """The newest step up to which all is on the store, as far as is known; -1 for none."""
        return self._sender.delivered_step

    @property
    def generation(self) -> int:
        """Rises with every install of a global model."""
        return self._worker.generation

    @property
    def has_unsent_steps(self) -> bool:
        """Whether `stop` may have steps to send that no delta holds yet."""
        return self._worker.counters.local_step > self._worker.since

    # Starting

    def _contact(self) -> Published | None:
        """On a lane: who is master, what was delivered, what is the newest global model."""
        if self.role == "master" and not self._lease.attempt() and not self.settings.standby:
            self._lease.acquire(self.settings.lease_seconds + self.settings.start_seconds)
        self._sender.reconcile()
        return self._reader.newer_than(-1) if self._is_fresh else None

    def _contacted(self, outcome: Outcome) -> None:
        error = outcome.error
        if error is None:
            self._arrived = outcome.value
            return
        if isinstance(error, StoreError):
            self._alone(str(error))
            return
        if isinstance(error, BadFileError):
            self._alone(f"its newest global model is damaged: {error}")
            return
        raise error

    def _alone(self, words: str) -> None:
        if self.settings.require_hub:
            raise DiLoCoError(f"the Hub can't be reached, and require_hub is set: {words}")
        logger.warning("the Hub can't be reached; training goes on alone until it can: %s", words)

    def _join(self, model: torch.nn.Module) -> None:
        """The first step of a run that goes on from nothing."""
        self._is_fresh = False
        delivered = self._sender.delivered_step
        if delivered >= self._worker.counters.local_step:
            words = "%s has delivered up to step %d already; steps until then are not sent again"
            logger.warning(words, self.node_id, delivered)
        arrived, self._arrived = self._arrived, None
        if arrived is not None:
            self._install(model, arrived, carry=False)
        if self.settings.synchronous:
            self._submit_round()
            self._rounds.wait(self.settings.sync_seconds)
            self._harvest()

    # Going on from a checkpoint

    def _compare(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping):
            raise StateError("coordinator: is no dictionary")
        here = {"node_id": self.node_id, "role": self.role, "fingerprint": self._spec.fingerprint}
        there = {"node_id": state.get("node_id"), "role": state.get("role")}
        there["fingerprint"] = saved_fingerprint(state)
        for part, mine in here.items():
            other = there[part]
            if other is None or other == mine or part in self.settings.accept_other:
                continue
            raise StateError(
                f"coordinator: the checkpoint is of the {part} {str(other)[:80]!r}, this run has "
                f"{mine!r}; to go on from it all the same: accept_other={{{part!r}}}"
            )

    def _take_over_from(self, saved: Saved) -> None:
        """Another node may have delivered its progress itself: only the weights are taken."""
        worker = self._worker
        words = "going on from the weights of %s as %s; what it had not delivered is left out"
        logger.warning(words, saved.node_id, self.node_id)
        worker.pending = None
        worker.counters.last_uploaded_step = worker.counters.last_dispatched_step = None
        worker.counters.last_skipped_step = None
        worker.begin(self._model)
        worker.since, worker.since_samples = saved.counters.local_step, self._total_samples()

    def _mark_delivered(self, model: torch.nn.Module, step: int) -> None:
        """Up to here all was delivered in an earlier life, so the next delta begins here."""
        worker = self._worker
        if worker.since >= step or step != self._sender.delivered_step:
            return
        worker.pending = None  # whatever is in it ends before
        worker.delivered(worker.make_job(model, step, self._total_samples()))

    def _require_started(self) -> None:
        if not self._is_started:
            raise DiLoCoError("the coordinator was not started")


def _require_one_process(model: torch.nn.Module) -> None:
    """Installed on one rank only, a global model would tear the ranks of a site apart."""
    from torch import distributed

    is_used = distributed.is_available() and distributed.is_initialized()
    if is_used and distributed.get_world_size() > 1 and not isinstance(model, WholeModel):
        words = "this coordinator is one process, and this site has several ranks: SitedCoordinator"
        raise DiLoCoError(f"{words} is for all of them")
