"""A master that does not train: applies what nodes deliver to a Hub that has a global model.

It needs no model code: names and shapes come from the newest commit's weights.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

from trainer_core.diloco.commit import Commit
from trainer_core.diloco.commits import CommitLog
from trainer_core.diloco.errors import DiLoCoError, PassingError
from trainer_core.diloco.fingerprint import Spec
from trainer_core.diloco.lease import Keeper, Lease
from trainer_core.diloco.master import Master
from trainer_core.diloco.names import check_node_id
from trainer_core.diloco.published import header_of
from trainer_core.diloco.repeating import Rarely
from trainer_core.diloco.settings import Settings
from trainer_core.diloco.store import Store

logger = logging.getLogger(__name__)


class Until(NamedTuple):
    """When a service ends; None means never for this reason.

    `rounds`: outer steps that it has made. `idle`: seconds without one; 0 means at the first look
    that leaves nothing to be looked at again. `is_stopped`: asked between two looks.
    """

    rounds: int | None = None
    idle: float | None = None
    is_stopped: Callable[[], bool] = lambda: False


class Service:
    """One master on one store. `settings`: those of use to a master; see `settings_of`.

    Takes the lease in the ordinary way when it is entered as a context: a living master makes it
    raise LeaseError, unless `standby`. Gives it back at the end. Raises DiLoCoError where the Hub
    has no global model yet, which only a node with a model can give it.
    """

    def __init__(self, store: Store, node_id: str, settings: Settings) -> None:
        self.settings = settings
        log = CommitLog(store, settings.lease_seconds)
        node_id = check_node_id(node_id)
        session, seconds = uuid.uuid4().hex, settings.lease_seconds
        self._lease = Lease(store, node_id, session, seconds, require=log.require)
        self._master = Master(store, node_id, spec_of(store), settings, self._lease, log)
        self._keeper: Keeper | None = None
        self._rarely = Rarely(logger)
        self._is_settled = False  # whether the last look left nothing to be looked at again

    def __enter__(self) -> Service:
        patience = self.settings.lease_seconds + self.settings.start_seconds
        if not self._lease.attempt() and not self.settings.standby:
            self._lease.acquire(patience)
        self._keeper = Keeper(self._lease, self.settings.lease_seconds)
        return self

    def __exit__(self, *_: object) -> None:
        if self._keeper is not None:
            self._keeper.stop()
        try:
            self._lease.release()
        except DiLoCoError as error:
            logger.info("the lease was not given back: %s", error)

    def run(self, until: Until, told: Callable[[Commit], None]) -> int:
        """Makes outer steps until it is to end; `told` of each commit. Gives their number.

        A store that fails for a passing reason is waited for, and with `standby` the lease. Raises
        LeaseError where another master has taken over, PermanentError.
        """
        made, since = 0, time.monotonic()
        while not until.is_stopped():
            commit = self._look()
            if commit is not None:
                made, since = made + 1, time.monotonic()
                told(commit)
                if until.rounds is not None and made >= until.rounds:
                    break
                continue
            waited = time.monotonic() - since
            if until.idle is not None and self._is_settled and waited >= until.idle:
                break
            self._wait(until)
        return made

    def _look(self) -> Commit | None:
        self._is_settled = False
        try:
            if not self._lease.attempt():
                return None
            if self._master.current is None:
                self._master.open(None)
            commit = self._master.round()
        except PassingError as error:
            self._rarely.warning("outer step failed, to be tried again: %s", error)
            return None
        self._is_settled = not self._master.is_waiting
        return commit

    def _wait(self, until: Until) -> None:
        end = time.monotonic() + self.settings.poll_seconds
        while not until.is_stopped() and (left := end - time.monotonic()) > 0:
            time.sleep(min(0.2, left))


def spec_of(store: Store) -> Spec:
    """Names, shapes and kinds of the global model's tensors, from its file's header."""
    commit = _newest(store)
    spec = Spec(header_of(store, commit.model).tensors)
    if spec.fingerprint != commit.fingerprint:
        words = f"{commit.model.name} has not the tensors of the fingerprint {commit.fingerprint}"
        raise DiLoCoError(f"{words} that its commit gives")
    return spec


def settings_of(store: Store, **given: Any) -> Settings:
    """The master's settings: as `given`; learning rate and momentum as in the newest commit."""
    commit = _newest(store)
    begin = {"outer_lr": commit.outer_lr, "outer_momentum": commit.outer_momentum}
    return Settings.of(begin | given)


def _newest(store: Store) -> Commit:
    commit = CommitLog(store).latest()
    if commit is None:
        words = f"{store.url} has no global model yet: a node with a model must be the first master"
        raise DiLoCoError(words)
    return commit
