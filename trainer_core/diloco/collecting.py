"""Finding new deltas: one listing of all nodes, and the header of each new file, read once."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from trainer_core.diloco.commit import Commit, Refused
from trainer_core.diloco.deltas import NODES, DeltaFacts, delta_name, judge_header, step_of
from trainer_core.diloco.errors import BadNameError, MissingError, PermanentError
from trainer_core.diloco.fingerprint import Spec
from trainer_core.diloco.names import check_node_id
from trainer_core.diloco.outer import Outer
from trainer_core.diloco.settings import Settings
from trainer_core.diloco.store import Store
from trainer_core.diloco.tensorfile import BadFileError, read_header

logger = logging.getLogger(__name__)

PATIENCE = 5
"""Rounds in which a delta that should be there, and isn't, is waited for."""


class Candidate(NamedTuple):
    """A delta whose header fits; its body was not read yet."""

    name: str
    size: int
    facts: DeltaFacts


class Current(NamedTuple):
    """The newest commit and its outer state, always of each other."""

    commit: Commit
    outer: Outer


class Collector:
    """Finds new deltas, and judges each header once.

    No local step of a node is applied twice. A node knows what it has delivered; but one that
    started again, and was shown an old listing, may send steps that a delta on the store has, too.
    So each delta says at which step it begins: one that reaches back behind what was dealt with is
    refused; and of two that share steps the one that goes further counts.
    """

    def __init__(self, store: Store, spec: Spec, settings: Settings) -> None:
        self.refused: dict[str, Refused] = {}
        self._store, self._spec, self._settings = store, spec, settings
        self._known: dict[str, Candidate] = {}
        self._said: set[str] = set()
        self._missed: Counter[str] = Counter()
        self._held: set[str] = set()
        self._covered: dict[str, str] = {}  # the name of a delta by whose steps it has

    def collect(self, current: Current) -> tuple[list[Candidate], list[str]]:
        """What could be applied now, by node and step; and names that are of no more use."""
        marks, old = current.commit.watermarks, []
        self._held.clear()
        self._forget(marks)
        for node_id, step, size in self._listed():
            if step <= marks.get(node_id, -1):
                old.append(delta_name(node_id, step))
            else:
                self._look_or_miss(node_id, step, size, "is gone, although it was listed")
        self._fill_gaps(marks)
        self._refuse_stale(current.outer.outer_step)
        self._sort_out_overlaps(marks)
        ready = [one for one in self._known.values() if one.name not in self._covered]
        return sorted((one for one in ready if not self.is_held(one)), key=_order), old

    def miss(self, node_id: str, step: int, reason: str) -> None:
        """A delta is not there, although it was: for this round its node is held.

        A store that answers with an older state shows it a moment later; if a later delta of its
        node were applied before, it would count as dealt with, and an earlier one may have steps of
        it. Refused when that goes on.
        """
        name = delta_name(node_id, step)
        self._known.pop(name, None)
        self._missed[name] += 1
        if self._missed[name] < PATIENCE:
            self._held.add(node_id)
        else:
            self._refuse(node_id, step, reason)

    def is_held(self, candidate: Candidate) -> bool:
        """Whether it must not be applied in this round."""
        return candidate.facts.node_id in self._held

    @property
    def is_waiting(self) -> bool:
        """Whether some node was held in this round, so that the next may find more."""
        return bool(self._held)

    def refuse(self, candidate: Candidate, reason: str) -> None:
        """Never looked at again."""
        self._known.pop(candidate.name, None)
        self._refuse(candidate.facts.node_id, candidate.facts.local_step, reason)
        if candidate.name in self._covered.values():
            # What was left out for its sake has its turn before this one is dealt with.
            self._held.add(candidate.facts.node_id)

    def refusals(self, applied: Iterable[str]) -> list[Refused]:
        """What the commit that applies these names is to refuse: not yet what is of held nodes."""
        names = set(applied)
        for name, cover in list(self._covered.items()):
            if cover in names:
                facts = self._known.pop(name).facts
                words = f"has steps that are part of {cover.rsplit('/', 1)[-1]}"
                self._refuse(facts.node_id, facts.local_step, words)
        return [one for one in self.refused.values() if one.node_id not in self._held]

    def _listed(self) -> Iterator[tuple[str, int, int]]:
        """Node, local step and size of each delta on the store."""
        for path, size in self._store.tree(NODES):
            node_id, _, file_name = path.partition("/")
            step = step_of(file_name)
            try:
                if step is not None:
                    yield check_node_id(node_id), step, size
            except BadNameError as error:
                if node_id not in self._said:
                    self._said.add(node_id)
                    logger.warning("a folder of %s is passed over: %s", NODES, error)

    def _look_or_miss(self, node_id: str, step: int, size: int | None, gone: str) -> None:
        """One that can't be read is as good as gone: what hinders one node must not stop all."""
        try:
            size = self._store.size(delta_name(node_id, step)) if size is None else size
            if size is None or not self._look(node_id, step, size):
                self.miss(node_id, step, gone)
        except PermanentError as error:
            self.miss(node_id, step, f"can't be read: {error}")

    def _look(self, node_id: str, step: int, size: int) -> bool:
        """Reads the header, if it was not read yet. False if there is no such delta."""
        name = delta_name(node_id, step)
        if name in self._known or name in self.refused:
            return True
        try:
            facts = judge_header(read_header(self._store, name, size), node_id, step, self._spec)
        except MissingError:
            return False
        except BadFileError as error:
            self._refuse(node_id, step, str(error))
            return True
        self._known[name] = Candidate(name, size, facts)
        if self._settings.weighting == "samples" and facts.samples is None:
            self.refuse(self._known[name], "says no number of samples, by which it would count")
        return True

    def _fill_gaps(self, marks: dict[str, int]) -> None:
        """Looks for deltas that a listing did not show.

        Each one names the delivery before it. An old listing may lack that; and once the later one
        is applied, it would be taken for dealt with.
        """
        for candidate in list(self._known.values()):
            facts, step = candidate.facts, candidate.facts.previous_step
            while step is not None and step > marks.get(facts.node_id, -1):
                step = self._before(facts.node_id, step)

    def _before(self, node_id: str, step: int) -> int | None:
        name = delta_name(node_id, step)
        if name not in self._known and name not in self.refused:
            self._look_or_miss(node_id, step, None, "is gone, although it was delivered")
        known = self._known.get(name)
        before = None if known is None else known.facts.previous_step
        return None if before is None or before >= step else before

    def _refuse_stale(self, outer_step: int) -> None:
        limit = self._settings.max_staleness
        for candidate in list(self._known.values()):
            base = candidate.facts.base_outer_step
            behind = outer_step - max(0, base)
            if base > outer_step:
                reason = f"is measured from outer step {base}, but {outer_step} is the newest"
                self.refuse(candidate, reason)
            elif limit is not None and behind > limit:
                self.refuse(candidate, f"is measured from {behind} outer steps ago, above {limit}")

    def _sort_out_overlaps(self, marks: dict[str, int]) -> None:
        """From each node's newest delta back; where two share steps, the newer one counts."""
        self._covered.clear()
        lowest: dict[str, tuple[int, str]] = {}
        for one in sorted(self._known.values(), key=_order, reverse=True):
            node_id, step, since = one.facts.node_id, one.facts.local_step, one.facts.since
            mark = marks.get(node_id, -1)
            begins, cover = lowest.get(node_id, (step, ""))
            if since is not None and since < mark:
                words = f"begins after step {since}, but up to step {mark} all was dealt with"
                self.refuse(one, words)
            elif step > begins:
                self._covered[one.name] = cover
            else:
                lowest[node_id] = (step - 1 if since is None else since), one.name

    def _forget(self, marks: dict[str, int]) -> None:
        for known in (self._known, self.refused):
            for name in [n for n, one in known.items() if _is_done(one, marks)]:
                del known[name]
                self._missed.pop(name, None)

    def _refuse(self, node_id: str, step: int, reason: str) -> None:
        self.refused[delta_name(node_id, step)] = Refused(node_id, step, reason)
        logger.warning("%s is refused: it %s", delta_name(node_id, step), reason)


def _order(candidate: Candidate) -> tuple[str, int]:
    return candidate.facts.node_id, candidate.facts.local_step


def _is_done(one: Candidate | Refused, marks: dict[str, int]) -> bool:
    facts = one.facts if isinstance(one, Candidate) else one
    return facts.local_step <= marks.get(facts.node_id, -1)
