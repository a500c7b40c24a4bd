"""The part of a coordinator that is about being master: the lease, and rounds on a lane."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer_core.diloco.commits import CommitLog, Presence
from trainer_core.diloco.errors import DiLoCoError
from trainer_core.diloco.fingerprint import Spec
from trainer_core.diloco.lease import Keeper, Lease
from trainer_core.diloco.master import Master
from trainer_core.diloco.outer import Outer, first_outer
from trainer_core.diloco.settings import Settings
from trainer_core.diloco.state import Saved, outer_to_state
from trainer_core.diloco.store import Store
from trainer_core.diloco.worker import Worker


class HubError(DiLoCoError):
    """The Hub does not belong to this checkpoint."""


class MasterSide:
    """What DumbDiLoCoCoordinator has of it. In a worker it is there, and never used."""

    node_id: str
    role: str
    session: str
    settings: Settings
    _worker: Worker

    def _begin_mastering(self, store: Store, spec: Spec, presence: Presence) -> None:
        """The constructor's part."""
        seconds = self.settings.lease_seconds
        self._log = CommitLog(store, seconds, presence)
        self._lease = Lease(store, self.node_id, self.session, seconds, require=self._log.require)
        self._master = Master(store, self.node_id, spec, self.settings, self._lease, self._log)
        self._keeper: Keeper | None = None
        # Where the Hub has no commit yet, it begins with these.
        self._genesis: Outer | None = None
        self._genesis_applied: tuple[tuple[str, int], ...] = ()
        self._saved_outer: Mapping[str, Any] | None = None

    @property
    def is_master(self) -> bool:
        """Whether this node holds the lease, as far as it knows."""
        return self._lease.number is not None

    @property
    def outer_step(self) -> int | None:
        """The newest outer step that this node, as the master, knows to be committed."""
        current = self._master.current
        return None if current is None else current.outer.outer_step

    def _prepare_outer(self, saved: Saved, outer: Mapping[str, Any] | None) -> None:
        """For a Hub that is empty, or can't be reached yet; else its own newest commit counts."""
        self._saved_outer = outer
        self._genesis, self._genesis_applied = saved.outer, saved.applied
        if saved.outer is None:
            last = max(0, saved.counters.last_global_step)
            self._genesis = first_outer(self._worker.baseline, last)

    def _outer_section(self) -> Mapping[str, Any] | None:
        """A master's own outer state, or what it was resumed with until it has one."""
        if self.role != "master":
            return None
        current = self._master.current
        return self._saved_outer if current is None else outer_to_state(current)

    # On the master's lane

    def _as_master(self) -> None:
        if not self._lease.attempt():
            return
        if self._master.current is None:
            self._open()
        while self._master.round() is not None:
            continue

    def _open(self) -> None:
        genesis = self._genesis
        assert genesis is not None
        self._master.open(genesis, self._genesis_applied)
        current = self._master.current
        assert current is not None
        newest, was = current.outer.outer_step, genesis.outer_step
        if newest < was and "hub" not in self.settings.accept_other:
            self._master.current = None
            raise HubError(
                f"the Hub's newest outer step is {newest}, the checkpoint has {was}: it is another "
                "Hub or an older copy; to go on from it all the same: accept_other={'hub'}"
            )
