"""What the trainer calls: the outer loop of one node, between its optimizer steps."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainer_core.diloco.commits import CommitLog
from trainer_core.diloco.deltas import Job
from trainer_core.diloco.errors import DiLoCoError, StoreError
from trainer_core.diloco.fingerprint import Spec
from trainer_core.diloco.lanes import Lane, Outcome
from trainer_core.diloco.lease import Keeper, LeaseError
from trainer_core.diloco.mastering import HubError, MasterSide
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
from trainer_core.diloco.worker import Counters, Sender, Worker
from trainer_core.wrappers import plain_state

logger = logging.getLogger(__name__)

NODE_ID_VARIABLE = "DILOCO_NODE_ID"


class DumbDiLoCoCoordinator(MasterSide):
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
    one, TypeError for a model with tensors that can't be exchanged.
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
        self.settings = Settings(**options)
        self.session = uuid.uuid4().hex
        self._model = model
        self._samples = samples
        self._spec = Spec.of(plain_state(model))
        self._store = store if isinstance(store, Store) else Store.open(store)
        self._worker = Worker(self._spec)
        # Readers and the master's lane see the log at their own times; each keeps its own fence.
        self._reader_log = CommitLog(self._store)
        self._reader = Reader(self._store, self._spec, self._reader_log)
        self._sender = Sender(self._store, self.node_id, self._spec, CommitLog(self._store))
        self._begin_mastering(self._store, self._spec)
        self._uploads, self._polls = Lane("diloco upload"), Lane("diloco poll")
        self._rounds = Lane("diloco round")
        self._next_poll = 0.0
        self._arrived: Published | None = None
        self._is_fresh = True  # nothing was loaded, and no step was made yet
        self._is_started = False
        self._wants_reset = False
        self._versions: list[int] | None = None
        self._unforeseen: BaseException | None = None
        self._has_failed = False

    # What the trainer calls

    def start(self) -> None:
        """Contacts the store and asks what is there; leaves the model alone.

        A store that can't be reached is only reported, unless `require_hub`. Raises LeaseError in a
        master that meets another one alive, DiLoCoError for a Hub that is of another model.
        """
        if self._is_started:
            return
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
        elif step == self._sender.delivered_step:
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
        if worker.pending is None:
            worker.delivered(worker.make_job(model, step, self._total_samples()))

    # Steps

    def _require_started(self) -> None:
        if not self._is_started:
            raise DiLoCoError("the coordinator was not started")

    def _boundary(self, model: torch.nn.Module, step: int) -> None:
        settings = self.settings
        deadline = time.monotonic() + settings.sync_seconds
        self._dispatch(model, step, deadline if settings.synchronous else None)
        self._master.own_state = self._integers_of(model)
        if settings.synchronous:
            self._wait_for_global(model, deadline)
        else:
            self._install_arrived(model)

    def _dispatch(self, model: torch.nn.Module, step: int, deadline: float | None) -> None:
        worker = self._worker
        if worker.pending is not None:
            self._send(deadline)  # an older job first: none stays for ever
        if worker.pending is not None:
            worker.counters.last_skipped_step = step
            words = "step %d: the upload of step %d is still under way; this boundary is skipped"
            logger.warning(words, step, worker.pending.step)
            return
        worker.make_job(model, step, self._total_samples())
        self._send(deadline)

    def _send(self, deadline: float | None) -> None:
        job = self._worker.pending
        if job is None:
            return
        self._uploads.submit(lambda: self._sender.deliver(job))
        if deadline is not None:
            self._uploads.wait(max(0.0, deadline - time.monotonic()))
            self._harvest()

    def _wait_for_global(self, model: torch.nn.Module, deadline: float) -> None:
        """Synchronous: a round and a poll; with `await_global` until there is a newer model."""
        before = self._worker.counters.last_global_step
        while True:
            for lane, submit in (
                (self._rounds, self._submit_round),
                (self._polls, self._submit_poll),
            ):
                submit()
                lane.wait(max(0.0, deadline - time.monotonic()))
                self._harvest()
            self._install_arrived(model)
            # To adopt the model that all began with is no progress.
            is_newer = self._worker.counters.last_global_step > max(0, before)
            if is_newer or not self.settings.await_global:
                return
            left = deadline - time.monotonic()
            if left <= 0:
                words = "no newer global model than %d within %g s: going on"
                logger.warning(words, before, self.settings.sync_seconds)
                return
            time.sleep(min(left, self.settings.poll_seconds))

    def _install_arrived(self, model: torch.nn.Module) -> None:
        arrived, self._arrived = self._arrived, None
        if arrived is not None and arrived.outer_step > self._worker.counters.last_global_step:
            self._install(model, arrived, carry=self.settings.merge == "carry")

    def _install(self, model: torch.nn.Module, published: Published, *, carry: bool) -> None:
        worker, outer_step = self._worker, published.outer_step
        self._say_refused(published)
        if worker.is_origin(published.state):
            worker.adopt(outer_step)
            return
        worker.install(
            model, published.state, outer_step, carry=carry, samples=self._total_samples()
        )
        self._wants_reset |= self.settings.reset_inner != "never"
        words = "step %d: global model %d installed"
        logger.info(words, worker.counters.local_step, outer_step)

    def _say_refused(self, published: Published) -> None:
        for one in published.commit.refused:
            if one.node_id == self.node_id:
                words = "the delta of step %d of this node was refused: it %s"
                logger.warning(words, one.local_step, one.reason)

    def _background_work(self) -> None:
        now = time.monotonic()
        if self.settings.synchronous or now < self._next_poll:
            return
        self._next_poll = now + self.settings.poll_seconds
        self._send(None)
        self._submit_poll()
        self._submit_round()

    def _submit_poll(self) -> None:
        known = self._worker.counters.last_global_step
        if self._arrived is not None:
            known = max(known, self._arrived.outer_step)
        self._polls.submit(lambda: self._reader.newer_than(known))

    def _submit_round(self) -> None:
        if self.role == "master":
            self._rounds.submit(self._as_master)

    # What lanes brought

    def _harvest(self) -> None:
        if (outcome := self._uploads.take()) is not None and self._is_fine(outcome, "upload"):
            if isinstance(outcome.value, Job):
                self._worker.delivered(outcome.value)
                self._wants_reset |= self.settings.reset_inner == "delivered"
            elif isinstance(outcome.value, Published):  # a start that had not been waited for
                self._arrived = outcome.value
        if (outcome := self._polls.take()) is not None and self._is_fine(outcome, "poll"):
            self._arrived = outcome.value or self._arrived
        if (outcome := self._rounds.take()) is not None:
            self._is_fine(outcome, "outer step")
        if self._unforeseen is not None:
            error, self._unforeseen = self._unforeseen, None
            self._has_failed = True
            raise error

    def _is_fine(self, outcome: Outcome, what: str) -> bool:
        error = outcome.error
        if error is None:
            return True
        if isinstance(error, LeaseError):
            self._master.current = None
            logger.warning("%s; this node goes on as a worker", error)
        elif isinstance(error, DiLoCoError) and not isinstance(error, HubError):
            logger.warning("%s failed, to be tried again: %s", what, error)
        else:
            self._unforeseen = error
        return False

    # Stopping

    def _finish(self, deadline: float) -> None:
        self._uploads.wait(max(0.0, deadline - time.monotonic()))
        self._harvest_at_end()
        if not self._has_failed:
            self._send_last(deadline)
            self._last_round(deadline)
        for lane in (self._rounds, self._polls):
            lane.wait(max(0.0, deadline - time.monotonic()))
        self._harvest_at_end()
        self._let_go(deadline)
        if self._worker.pending is not None:
            words = "the upload of step %d is not delivered; its checkpoint will send it again"
            logger.warning(words, self._worker.pending.step)

    def _last_round(self, deadline: float) -> None:
        if self.role == "master" and self._lease.number is not None:
            self._rounds.wait(max(0.0, deadline - time.monotonic()))
            self._harvest_at_end()
            self._submit_round()

    def _send_last(self, deadline: float) -> None:
        worker, step = self._worker, self._worker.counters.local_step
        if worker.pending is not None:
            self._send(None)
            self._uploads.wait(max(0.0, deadline - time.monotonic()))
            self._harvest_at_end()
        if step <= worker.since or self._is_fresh:
            return
        words = f"steps {worker.since + 1} to {step} came after the last delivery"
        if self._model_versions() != self._versions:
            logger.warning("%s; the fit ended within a step, so they are not sent", words)
        elif self.settings.final_window == "report" or worker.pending is not None:
            logger.warning("%s and are not sent", words)
        else:
            logger.info("%s and are sent now", words)
            worker.make_job(self._model, step, self._total_samples())
            self._send(None)
            self._uploads.wait(max(0.0, deadline - time.monotonic()))
            self._harvest_at_end()

    def _harvest_at_end(self) -> None:
        """Like `_harvest`; what nobody foresaw is raised when all else is done."""
        try:
            self._harvest()
        except BaseException as error:
            self._unforeseen = error

    def _let_go(self, deadline: float) -> None:
        if not self._rounds.is_free:
            return
        self._rounds.submit(self._lease.release)
        if self._rounds.wait(max(0.0, deadline - time.monotonic())):
            with contextlib.suppress(DiLoCoError):
                outcome = self._rounds.take()
                if outcome is not None and outcome.error is not None:
                    raise outcome.error

    # Small things

    def _total_samples(self) -> int:
        step = self._worker.counters.local_step
        return self._samples() if callable(self._samples) else self._samples * step

    def _model_versions(self) -> list[int]:
        """Changes whenever a parameter does: tells whether the fit ended between two steps."""
        return [parameter._version for parameter in self._model.parameters()]

    @staticmethod
    def _integers_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        state = plain_state(model)
        return {
            k: t.detach().to("cpu", copy=True)
            for k, t in state.items()
            if not t.is_floating_point()
        }
