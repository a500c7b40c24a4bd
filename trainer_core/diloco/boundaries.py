"""What a node does at a boundary and between two: send, ask, install, take what lanes brought.

All of it on the training thread; what needs the network is given to lanes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from trainer_core.diloco.deltas import Job
from trainer_core.diloco.errors import DiLoCoError
from trainer_core.diloco.lanes import Lane, Outcome
from trainer_core.diloco.lease import LeaseError
from trainer_core.diloco.mastering import HubError, MasterSide
from trainer_core.diloco.published import Published, Reader
from trainer_core.diloco.repeating import Rarely
from trainer_core.diloco.whole import WholeModel
from trainer_core.diloco.worker import Sender
from trainer_core.wrappers import plain_state

logger = logging.getLogger(__name__)


class Boundaries(MasterSide):
    """What DumbDiLoCoCoordinator has of it, on top of what it has as a master."""

    _model: torch.nn.Module
    _samples: int | Callable[[], int]
    _reader: Reader
    _sender: Sender

    def _begin_exchanging(self, reader: Reader, sender: Sender) -> None:
        """The constructor's part."""
        self._reader, self._sender = reader, sender
        self._uploads, self._polls = Lane("diloco upload"), Lane("diloco poll")
        self._rounds = Lane("diloco round")
        self._next_poll = 0.0
        self._arrived: Published | None = None
        self._wants_reset = False
        self._unforeseen: BaseException | None = None
        self._has_failed = False
        self._rarely = Rarely(logger)

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
        if step == self._sender.delivered_step and self._is_of(model, step):
            worker.pending = None  # an earlier life has delivered its steps, and all until here
        if worker.pending is not None:
            worker.counters.last_skipped_step = step
            words = "step %d: the upload of step %d is still under way; this boundary is skipped"
            self._rarely.warning(words, step, worker.pending.step, about=words)
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
                self._rarely.warning(words, before, self.settings.sync_seconds, about=words)
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
            words = "%s; this node goes on as a worker"
            self._rarely.warning(words, error, about=f"lease of {error.holder}")
        elif isinstance(error, DiLoCoError) and not isinstance(error, HubError):
            self._rarely.warning("%s failed, to be tried again: %s", what, error)
        else:
            self._unforeseen = error
        return False

    # Small things

    def _total_samples(self) -> int:
        step = self._worker.counters.local_step
        return self._samples() if callable(self._samples) else self._samples * step

    def _model_versions(self) -> list[int]:
        """Changes whenever a parameter does: tells whether the fit ended between two steps."""
        return [parameter._version for parameter in self._model.parameters()]

    @staticmethod
    def _is_of(model: torch.nn.Module, step: int) -> bool:
        """Whether the model is that of this step: a copy may be of an earlier one."""
        return not isinstance(model, WholeModel) or model.step == step

    @staticmethod
    def _integers_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        state = plain_state(model)
        return {
            k: t.detach().to("cpu", copy=True)
            for k, t in state.items()
            if not t.is_floating_point()
        }
