"""How a node's part in the outer loop ends: what is left is sent, within the time that it has."""

from __future__ import annotations

import contextlib
import logging
import time

from trainer_core.diloco.boundaries import Boundaries
from trainer_core.diloco.errors import DiLoCoError

logger = logging.getLogger(__name__)


class Ending(Boundaries):
    """What DumbDiLoCoCoordinator has of it. `_versions`: of its model, after the last step."""

    _is_fresh: bool
    _versions: list[int] | None

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
        if self._model_versions() != self._versions or not self._is_of(self._model, step):
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
