"""A node's own side: baseline, the one pending upload, and what a new global model does to both.

Everything in `Worker` happens on the training thread. `Sender` delivers jobs, on a lane.

Memory, in copies of the model on the CPU: the baseline; at a boundary its target snapshot and the
delta (FP32), which live until the upload is delivered; a global model that was fetched and waits to
be installed (FP32). Nothing else grows with time.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer_core.diloco.commits import CommitLog
from trainer_core.diloco.deltas import (
    Job,
    delta_name,
    difference,
    folder_of,
    metadata_of,
    step_of,
)
from trainer_core.diloco.errors import PassingError
from trainer_core.diloco.fingerprint import Spec, State, is_float
from trainer_core.diloco.repeating import Rarely
from trainer_core.diloco.store import Store
from trainer_core.diloco.tensorfile import BadFileError, read_header, save, tensors_sha256
from trainer_core.wrappers import plain_state

logger = logging.getLogger(__name__)


def snapshot(model: torch.nn.Module) -> State:
    """A copy on the CPU of every tensor of the model, under names without wrappers."""
    copies: dict[tuple[Any, ...], torch.Tensor] = {}
    state: State = {}
    for name, tensor in plain_state(model).items():
        place = _place(name, tensor)
        if place not in copies:
            copies[place] = tensor.detach().to("cpu", copy=True).contiguous()
        state[name] = copies[place]
    return state


def _place(name: str, tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor lies. Tied weights are one tensor under two names, and so is their copy."""
    if not tensor.numel():
        return (name,)
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


@dataclass
class Counters:
    """The boundary bookkeeping that a checkpoint keeps; None: never yet."""

    local_step: int = 0
    last_global_step: int = -1
    last_uploaded_step: int | None = None
    last_dispatched_step: int | None = None
    last_skipped_step: int | None = None


class Worker:
    """Baseline and pending job of one node; `spec` is of its model.

    `origin` is a hash of the weights that the run began with.
    `since`: the local step from which on progress is not in any job yet, and `since_samples` the
    number of samples then.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.counters = Counters()
        self.baseline: State = {}
        self.generation = 0
        self.since = 0
        self.since_samples = 0
        self.pending: Job | None = None
        self.origin: str | None = None

    def begin(self, model: torch.nn.Module) -> None:
        """A run that begins: progress is measured from the model as it is."""
        self.baseline = snapshot(model)
        self.origin = self._identity(self.baseline)

    def make_job(self, model: torch.nn.Module, step: int, samples: int) -> Job:
        """The job of this boundary, pending from now on. `samples`: the total of this run."""
        assert self.pending is None
        target = snapshot(model)
        base = self.counters.last_global_step
        delta = difference(self.baseline, target)
        used = max(1, samples - self.since_samples)
        self.pending = Job(step, base, self.generation, delta, target, self.since, used)
        self.counters.last_dispatched_step = step
        return self.pending

    def delivered(self, job: Job) -> None:
        """The job is on the store: from its snapshot on the next one is measured.

        Not so if a global model was installed meanwhile, which moved the baseline already.
        """
        if self.pending is not job:
            return
        self.pending = None
        self.counters.last_uploaded_step = job.step
        if job.generation == self.generation:
            self.baseline = job.target_state
            self.since, self.since_samples = job.step, self.since_samples + job.samples

    def is_origin(self, state: Mapping[str, torch.Tensor]) -> bool:
        """Whether this node began with these floating values, and has installed none since."""
        return self.counters.last_global_step == -1 and self._identity(state) == self.origin

    def _identity(self, state: Mapping[str, torch.Tensor]) -> str:
        floats = {n: state[n].to(t.dtype) for n, t in self.baseline.items() if is_float(t)}
        return tensors_sha256({name: tensor.float() for name, tensor in floats.items()})

    def adopt(self, outer_step: int) -> None:
        """The global model is what this node began with: nothing to install."""
        self.counters.last_global_step = outer_step

    @torch.no_grad()
    def install(
        self, model: torch.nn.Module, state: State, outer_step: int, *, carry: bool, samples: int
    ) -> None:
        """Makes the model the global one; with `carry`, progress that is in no job stays on top.

        That is progress since the pending job's snapshot, or since the baseline where none is
        pending; a job's own is left to come back with a global model. Integers and booleans stay
        the node's own. The baseline becomes the global model in the model's precision, and the
        generation rises. `samples`: the total of this run.
        """
        start = self._undelivered_from() if carry else None
        baseline: State = {}
        done: dict[tuple[Any, ...], str] = {}
        for name, tensor in plain_state(model).items():
            first = done.setdefault(_place(name, tensor), name)
            if first != name:  # tied: it has its new values already
                baseline[name] = baseline[first]
                continue
            current = tensor.detach().to("cpu", copy=True)
            if not is_float(tensor):
                baseline[name] = current
                continue
            new = baseline[name] = state[name].to(tensor.dtype)
            if start is not None and not torch.equal(current, start[name]):
                progress = current.float() - start[name].float()
                new = (state[name] + progress).to(tensor.dtype)
            tensor.copy_(new)
        self._move_since(carry, samples)
        self.baseline = baseline
        self.generation += 1
        self.counters.last_global_step = outer_step

    def _undelivered_from(self) -> State:
        job = self.pending
        return self.baseline if job is None or self._is_older(job) else job.target_state

    def _is_older(self, job: Job) -> bool:
        return job.generation != self.generation

    def _move_since(self, carry: bool, samples: int) -> None:
        job = self.pending
        if not carry:
            self.since, self.since_samples = self.counters.local_step, samples
        elif job is not None and not self._is_older(job):
            self.since, self.since_samples = job.step, self.since_samples + job.samples


class Sender:
    """Delivers jobs, each once. `delivered_step` is the node's newest delivery that is known of.

    After a crash the store knows better than the checkpoint what was delivered: before the first
    job, and after every upload that failed, the node's folder and the log are looked at.
    """

    def __init__(self, store: Store, node_id: str, spec: Spec, log: CommitLog) -> None:
        self.delivered_step = -1
        self.is_reconciled = False
        self._rarely = Rarely(logger)
        self._store, self._node_id, self._spec, self._log = store, node_id, spec, log

    def reconcile(self) -> None:
        """Asks the store for this node's newest delivery, in its folder or dealt with already."""
        entries = self._store.entries(folder_of(self._node_id))
        steps = [step for entry in entries if (step := step_of(entry.name)) is not None]
        commit = self._log.latest()
        mark = -1 if commit is None else commit.watermarks.get(self._node_id, -1)
        self.delivered_step = max([self.delivered_step, mark, *steps])
        self.is_reconciled = True

    def deliver(self, job: Job) -> Job:
        """Puts the job on the store, unless it is there; gives it back. Raises StoreError.

        A job whose steps (or some of them) were in an earlier delivery is not sent: they would be
        applied twice.
        """
        if not self.is_reconciled:
            self.reconcile()
        name = delta_name(self._node_id, job.step)
        if self.delivered_step > job.since:
            self._say_not_sent(job)
            return job
        sha256 = tensors_sha256(job.delta)
        if not self._is_there(name, sha256):
            self._put(job, name, sha256)
        self.delivered_step = job.step
        return job

    def _say_not_sent(self, job: Job) -> None:
        words = "steps %d to %d of %s are not sent: up to step %d all is delivered"
        known = self._node_id, self.delivered_step
        if job.step <= self.delivered_step:
            self._rarely.info(words, job.since, job.step, *known, about=words)
            return
        words += ", and what came after cannot be told apart from it; the next delta begins there"
        self._rarely.warning(words, job.since, job.step, *known, about=words)

    def _is_there(self, name: str, sha256: str) -> bool:
        """Also where the content is another: what lies there was acknowledged, and stays."""
        size = self._store.size(name)
        if size is None:
            return False
        try:
            same = read_header(self._store, name, size).metadata.get("sha256") == sha256
        except BadFileError as error:
            logger.warning("%s is on the store already, and %s", name, error)
            return True
        words = "was delivered before" if same else "was delivered before, with other values"
        logger.info("%s %s: it is not sent again", name, words)
        return True

    def _put(self, job: Job, name: str, sha256: str) -> None:
        self._log.require()
        metadata = metadata_of(job, self._node_id, self.delivered_step, self._spec, sha256)
        with tempfile.TemporaryDirectory(prefix="diloco-") as folder:
            path = Path(folder, "delta.safetensors")
            save(job.delta, metadata, path)
            try:
                self._store.put(path, name)
            except PassingError:
                self.is_reconciled = False  # it may have arrived all the same
                raise
