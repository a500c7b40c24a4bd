"""The master's side: collect deltas, check, average, step, commit, clean. All on one lane.

Memory, in copies of the model in FP32: global model and momentum, those of the next step while it
is made, the sum of deltas, and one delta. Deltas wait on the local disk.
"""

from __future__ import annotations

import logging
import math
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from trainer_core.diloco.collecting import Candidate, Collector, Current
from trainer_core.diloco.commit import Applied, Commit, File, Refused, shortened, tensor_name
from trainer_core.diloco.commits import CommitLog
from trainer_core.diloco.deltas import norm
from trainer_core.diloco.errors import DiLoCoError, MissingError, StoreError
from trainer_core.diloco.fingerprint import Spec, State, is_float
from trainer_core.diloco.lease import Lease
from trainer_core.diloco.outer import Average, Outer, nesterov
from trainer_core.diloco.published import fetch_tensors
from trainer_core.diloco.repeating import Rarely
from trainer_core.diloco.settings import Settings
from trainer_core.diloco.store import Store
from trainer_core.diloco.tensorfile import (
    BadFileError,
    file_sha256,
    load,
    save,
    tensors_sha256,
)

logger = logging.getLogger(__name__)


class Checked(NamedTuple):
    """A delta whose body was fetched to `path` and fits."""

    candidate: Candidate
    path: Path
    sha256: str
    norm: float


class Master:
    """One node's work as the master. `current` is what is committed; None before `open`.

    Everything but reading `current` belongs on one lane. `own_state` is the model of this node as
    of its newest boundary: integers and booleans of the global model come from there.
    """

    def __init__(
        self,
        store: Store,
        node_id: str,
        spec: Spec,
        settings: Settings,
        lease: Lease,
        log: CommitLog,
    ) -> None:
        self.current: Current | None = None
        self.own_state: State | None = None
        self._store, self._node_id, self._spec = store, node_id, spec
        self._settings, self._lease, self._log = settings, lease, log
        self._collector = Collector(store, spec, settings)
        self._kept: set[str] | None = None  # what the kept commits name, once for each commit
        self._waiting_since: float | None = None
        self._said_how_few = 0
        self._rarely = Rarely(logger)
        # The lane of an earlier fit may still be at work when the next one begins.
        self._lock = threading.Lock()

    def open(self, first: Outer | None, applied: Iterable[tuple[str, int]] = ()) -> None:
        """Begins from the newest commit; where there is none, commits `first`.

        `applied`: node and local step of deltas that `first` has in it already. Needs the lease.
        Raises DiLoCoError where there is neither.
        """
        with self._lock:
            self._lease.check()
            self._reload(first)
            if self.current is None:
                self._log.require()
                if first is None:
                    raise DiLoCoError("the Hub has no global model yet")
                marks: dict[str, int] = {}
                for node_id, step in applied:
                    marks[node_id] = max(step, marks.get(node_id, -1))
                commit = self._commit(first, None, [], [], marks)
                if not self._log.append(commit):
                    self._reload()
                else:
                    self.current = Current(commit, first)
            assert self.current is not None
            self._lease.raise_above(self.current.commit.fence, self.current.commit.session)
            self._mend_pointer(self.current.commit)

    def round(self) -> Commit | None:
        """One outer step, if there are deltas for it. Gives what it committed.

        Raises LeaseError when another node is the master now, StoreError; then nothing was
        committed, or it will be found by whoever goes on.
        """
        with self._lock:
            current = self.current
            assert current is not None
            self._lease.check()
            candidates, old = self._collector.collect(current)
            self._remove(old)
            if not self._is_quorum(candidates):
                self._mend_pointer(current.commit)
                return None
            with tempfile.TemporaryDirectory(prefix="diloco-") as folder:
                checked = self._in_bounds(self._checked(candidates, Path(folder)))
                checked = [one for one in checked if not self._collector.is_held(one.candidate)]
                if not self._is_quorum([one.candidate for one in checked]):
                    return None
                return self._step(current, checked)

    @property
    def is_waiting(self) -> bool:
        """Whether the last round found something that is to be looked at once more."""
        return self._collector.is_waiting

    # A round

    def _mend_pointer(self, newest: Commit) -> None:
        """A write of it that was given up, here or by a master before, may still land later."""
        pointer = self._log.pointer()
        if pointer is None or pointer.outer_step != newest.outer_step:
            self._log.point_to(newest)

    def _is_quorum(self, candidates: list[Candidate]) -> bool:
        nodes = {one.facts.node_id for one in candidates}
        if not nodes:
            self._waiting_since = None
            return False
        if self._waiting_since is None:
            self._waiting_since = time.monotonic()
        patience = self._settings.quorum_seconds
        self._say_how_few(nodes)
        waited = time.monotonic() - self._waiting_since
        return len(nodes) >= self._settings.quorum or (patience is not None and waited >= patience)

    def _say_how_few(self, nodes: set[str]) -> None:
        """Once for each number of nodes: a quorum of more than there are is waited for for ever."""
        assert self.current is not None
        ever, quorum = len(nodes | set(self.current.commit.watermarks)), self._settings.quorum
        if (
            ever >= quorum
            or ever == self._said_how_few
            or self._settings.quorum_seconds is not None
        ):
            return
        self._said_how_few = ever
        words = "a round waits for its quorum of %d nodes, but only %d have ever sent anything"
        logger.warning(words, quorum, ever)

    def _checked(self, candidates: list[Candidate], folder: Path) -> list[Checked]:
        """Those whose body is what its header promises, finite, and not too large."""
        checked = []
        for number, candidate in enumerate(candidates):
            if self._collector.is_held(candidate):
                continue
            try:
                checked.append(self._body(candidate, folder / f"{number}.safetensors"))
            except BadFileError as error:
                self._collector.refuse(candidate, str(error))
            except MissingError:
                facts, words = candidate.facts, "is gone, although its header was there"
                self._collector.miss(facts.node_id, facts.local_step, words)
        return checked

    def _body(self, candidate: Candidate, path: Path) -> Checked:
        self._store.fetch(candidate.name, path)
        if path.stat().st_size != candidate.size:
            raise BadFileError(
                f"has {path.stat().st_size} bytes where {candidate.size} were listed"
            )
        delta = load(path)
        found = {name: ("F32", tuple(tensor.shape)) for name, tensor in delta.items()}
        if (problem := self._spec.problem(found, only_floats=True)) is not None:
            raise BadFileError(problem)
        said = candidate.facts.sha256
        if said is not None and tensors_sha256(delta) != said:
            raise BadFileError("has other values than the SHA-256 in its header is of")
        size = norm(delta)
        if not math.isfinite(size):
            raise BadFileError("has values that are not finite")
        limit = self._settings.max_norm
        if limit is not None and size > limit:
            raise BadFileError(f"has the norm {size:.4g}, above {limit:.4g}")
        return Checked(candidate, path, file_sha256(path), size)

    def _in_bounds(self, checked: list[Checked]) -> list[Checked]:
        ratio = self._settings.max_norm_ratio
        if ratio is None or len(checked) < 3:
            return checked
        median = statistics.median(one.norm for one in checked)
        for one in checked:
            if one.norm > ratio * median:
                words = f"has the norm {one.norm:.4g}, above {ratio:g} times the median"
                self._collector.refuse(one.candidate, f"{words} {median:.4g}")
        return [one for one in checked if one.norm <= ratio * median]

    def _step(self, current: Current, checked: list[Checked]) -> Commit | None:
        weights = self._weights(checked)
        gradient = self._mean(checked, weights)
        settings = self._settings
        outer = nesterov(
            current.outer, gradient, lr=settings.outer_lr, momentum=settings.outer_momentum
        )
        del gradient
        if not all(tensor.isfinite().all() for tensor in outer.state.values()):
            raise DiLoCoError("the outer step would give weights that are not finite")
        outer = outer._replace(state=self._with_own_integers(outer.state))
        applied = [_applied(one, weights[one.candidate.facts.node_id]) for one in checked]
        refused = self._collector.refusals(one.name for one in applied)
        marks = dict(current.commit.watermarks)
        dealt_with = [(one.node_id, one.local_step) for one in applied]
        for node_id, step in dealt_with + [(one.node_id, one.local_step) for one in refused]:
            marks[node_id] = max(step, marks.get(node_id, -1))
        commit = self._commit(outer, current.commit, applied, refused, marks)
        self._lease.beat()
        if not self._log.append(commit):
            words = "outer step %d was committed by another master: going on from there"
            logger.warning(words, commit.outer_step)
            self._reload()
            return None
        self._committed(Current(commit, outer))
        return commit

    def _committed(self, current: Current) -> None:
        self.current = current
        self._kept = None
        self._waiting_since = None
        words = "outer step %d committed: %d deltas applied, %d refused"
        commit = current.commit
        logger.info(words, commit.outer_step, len(commit.applied), len(commit.refused))
        self._log.point_to(commit)
        keep = self._settings.keep_commits
        if keep is not None:
            try:
                self._log.clean(commit, keep)
            except StoreError as error:
                self._rarely.info("what is not needed any more stays for now: %s", error)

    # Its parts

    def _weights(self, checked: list[Checked]) -> dict[str, float]:
        """Of each node, in the order of their names."""
        samples: dict[str, int] = defaultdict(int)
        for one in checked:
            samples[one.candidate.facts.node_id] += one.candidate.facts.samples or 0
        equal = self._settings.weighting == "equal"
        return {node_id: 1.0 if equal else float(samples[node_id]) for node_id in sorted(samples)}

    @staticmethod
    def _mean(checked: list[Checked], weights: dict[str, float]) -> State:
        average = Average()
        for one in checked:
            average.add(load(one.path), weights[one.candidate.facts.node_id])
        return average.mean(weights.values())

    def _with_own_integers(self, state: State) -> State:
        own = self.own_state
        if own is None:
            return state
        return {name: t if is_float(t) else own[name].clone() for name, t in state.items()}

    def _commit(
        self,
        outer: Outer,
        before: Commit | None,
        applied: list[Applied],
        refused: list[Refused],
        marks: dict[str, int],
    ) -> Commit:
        """Writes the tensors, and makes the commit that names them."""
        assert self._lease.number is not None
        settings = self._settings
        return Commit(
            outer.outer_step,
            self._lease.number,
            self._node_id,
            self._spec.fingerprint,
            self._put("model", outer.outer_step, outer.state),
            self._put("momentum", outer.outer_step, outer.momentum) if outer.momentum else None,
            tuple(applied),
            shortened(refused),
            marks,
            float(settings.outer_lr),
            float(settings.outer_momentum),
            None if before is None else before.sha256,
            self._lease.session,
        )

    def _put(self, kind: str, outer_step: int, tensors: State) -> File:
        with tempfile.TemporaryDirectory(prefix="diloco-") as folder:
            path = Path(folder, "tensors.safetensors")
            sha256 = _written(tensors, outer_step, path)
            size = path.stat().st_size
            name = tensor_name(kind, outer_step, sha256)
            if self._store.size(name) != size:
                self._store.put(path, name)
        return File(name, size, sha256)

    def _reload(self, known: Outer | None = None) -> None:
        """Takes the newest commit from the store, as another master may have made it.

        `known`: an outer state. If it is that of the commit, whose files are not there any more as
        they were committed, they are written again.
        """
        commit = self._log.latest()
        if commit is None:
            return
        if commit.fingerprint != self._spec.fingerprint:
            words = f"the Hub's global model has the fingerprint {commit.fingerprint}, this model"
            raise DiLoCoError(f"{words} {self._spec.fingerprint}: they are not the same model")
        try:
            outer = self._fetched(commit)
        except (MissingError, BadFileError) as error:
            if known is None or not self._has_put_back(commit, known):
                raise DiLoCoError(
                    f"outer step {commit.outer_step} can't be gone on from: {error}. The master "
                    "writes its files again if it goes on from its own checkpoint of that outer "
                    "step; else put them back from a copy"
                ) from error
            logger.warning("files of outer step %d were put back: %s", commit.outer_step, error)
            outer = self._fetched(commit)
        self.current = Current(commit, outer)
        self._kept = None

    def _fetched(self, commit: Commit) -> Outer:
        state = fetch_tensors(self._store, commit.model, self._spec, only_floats=False)
        momentum: State = {}
        if commit.momentum is not None:
            momentum = fetch_tensors(self._store, commit.momentum, self._spec, only_floats=True)
        return Outer(commit.outer_step, state, momentum)

    def _has_put_back(self, commit: Commit, known: Outer) -> bool:
        """Whether that outer state gives the very files of the commit, which then are written."""
        if known.outer_step != commit.outer_step:
            return False
        files = [(commit.model, known.state), (commit.momentum, known.momentum)]
        with tempfile.TemporaryDirectory(prefix="diloco-") as folder:
            for number, (file, tensors) in enumerate(files):
                path = Path(folder, f"{number}.safetensors")
                if file is not None and _written(tensors, known.outer_step, path) != file.sha256:
                    return False
            for number, (file, _) in enumerate(files):
                if file is not None:
                    self._store.put(Path(folder, f"{number}.safetensors"), file.name)
        return True

    def _remove(self, names: list[str]) -> None:
        """Deltas that were dealt with: those of kept commits stay as long as these do."""
        keep, current = self._settings.keep_commits, self.current
        if keep is None or current is None or not names:
            return
        if self._kept is None:
            self._kept = self._log.named(current.commit, keep)
        for name in names:
            if name not in self._kept:
                self._store.remove(name)


def _written(tensors: State, outer_step: int, path: Path) -> str:
    """Writes the file that belongs to an outer step; gives its SHA-256."""
    # One entry only: the order of several is chance, and the same step gives the same file.
    save(tensors, {"outer_step": str(outer_step)}, path)
    return file_sha256(path)


def _applied(one: Checked, weight: float) -> Applied:
    facts, name = one.candidate.facts, one.candidate.name
    return Applied(facts.node_id, facts.local_step, facts.base_outer_step, name, one.sha256, weight)
