"""The coordinator's part of a checkpoint: keys, and what is looked at before they are believed.

`node_id`, `role`, `local_step`, `last_global_step`, `last_uploaded_step`, `last_dispatched_step`,
`last_skipped_step`, `baseline`, `baseline_generation`, `pending_upload` (`step`,
`base_outer_step`, `generation`, `delta`, `target_state`) and `outer` (`outer_step`,
`processed_deltas`, `momentum`, `global_state`) are those of earlier writers, whose files load;
`pending_delta` and `pending_delta_step` are theirs alone, always None here. Ours in addition:
`fingerprint` of the model, `session` (this process's life), `fence` (highest fencing number seen),
`since` and `since_samples` (from where the next delta is counted), `origin` (a hash of the weights
that the run began with), the pending upload's `since` and
`samples`, and `outer`'s `watermarks`. Of `processed_deltas` only those of the newest commit are
kept; the watermarks say the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainer_core.diloco.collecting import Current
from trainer_core.diloco.deltas import Job
from trainer_core.diloco.errors import BadNameError, DiLoCoError
from trainer_core.diloco.fingerprint import Spec, State, is_float
from trainer_core.diloco.names import check_node_id
from trainer_core.diloco.outer import Outer
from trainer_core.diloco.worker import Counters, Worker

ROLES = ("master", "worker")
_MOST = 10**15
"""Of a step or count: more digits have no place in names and files on the store."""
_NUMBERS = ("last_uploaded_step", "last_dispatched_step", "last_skipped_step")


class StateError(DiLoCoError, ValueError):
    """A coordinator's state that can't be gone on from here; the words say why and the way out."""


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds, checked. `applied`: node and local step of what `outer` took in."""

    node_id: str
    role: str
    counters: Counters
    baseline: State | None
    generation: int
    since: int
    since_samples: int
    pending: Job | None
    outer: Outer | None
    applied: tuple[tuple[str, int], ...]
    fence: int
    origin: str | None


def to_state(
    worker: Worker,
    outer: Mapping[str, Any] | None,
    *,
    node_id: str,
    role: str,
    session: str,
    fence: int,
) -> dict[str, Any]:
    """The checkpoint's part. Its tensors are never changed in place afterwards."""
    counters, job = worker.counters, worker.pending
    return {
        "node_id": node_id,
        "role": role,
        "local_step": counters.local_step,
        "last_global_step": counters.last_global_step,
        "last_uploaded_step": counters.last_uploaded_step,
        "last_dispatched_step": counters.last_dispatched_step,
        "last_skipped_step": counters.last_skipped_step,
        "baseline": dict(worker.baseline),
        "baseline_generation": worker.generation,
        "pending_upload": None if job is None else dict(vars(job)),
        "pending_delta": None,
        "pending_delta_step": None,
        "outer": outer,
        "fingerprint": worker.spec.fingerprint,
        "session": session,
        "fence": fence,
        "since": worker.since,
        "since_samples": worker.since_samples,
        "origin": worker.origin,
    }


def outer_to_state(current: Current) -> dict[str, Any]:
    """The outer state of a master."""
    outer, commit = current.outer, current.commit
    applied = [[one.node_id, one.local_step, one.base_outer_step] for one in commit.applied]
    return {
        "outer_step": outer.outer_step,
        "processed_deltas": applied,
        "momentum": dict(outer.momentum),
        "global_state": dict(outer.state),
        "watermarks": dict(commit.watermarks),
    }


def from_state(state: Mapping[str, Any], spec: Spec) -> Saved:
    """The checkpoint's part, checked. Raises StateError.

    Tensors are compared with the model of `spec`, whose fingerprint a state must have.
    """
    _require(isinstance(state, Mapping), "coordinator", "is no dictionary")
    try:
        node_id = check_node_id(state.get("node_id", ""))
    except BadNameError as error:
        raise StateError(f"coordinator.node_id: {error}") from None
    _require(state.get("role") in ROLES, "role", f"is none of {', '.join(ROLES)}")
    counters = _counters(state)
    baseline = state.get("baseline")
    generation = _count(state, "baseline_generation")
    pending = _pending(state, counters, spec)
    outer, applied = _outer(state.get("outer"), spec)
    since = counters.last_uploaded_step or 0
    return Saved(
        node_id,
        state["role"],
        counters,
        None if baseline is None else _tensors(baseline, "baseline", spec),
        generation,
        _count(state, "since") if "since" in state else min(since, counters.local_step),
        _count(state, "since_samples") if "since_samples" in state else 0,
        pending,
        outer,
        applied,
        _count(state, "fence") if "fence" in state else 0,
        state["origin"] if isinstance(state.get("origin"), str) else None,
    )


def saved_fingerprint(state: Mapping[str, Any]) -> str | None:
    """That of the model in the state; worked out from the baseline where older files lack it."""
    said, baseline = state.get("fingerprint"), state.get("baseline")
    if isinstance(said, str):
        return said
    if not isinstance(baseline, Mapping):
        return None
    try:
        return Spec.of(baseline).fingerprint
    except TypeError as error:
        raise StateError(f"coordinator.baseline: {error}") from None


def _counters(state: Mapping[str, Any]) -> Counters:
    last = state.get("last_global_step")
    is_step = type(last) is int and -1 <= last < _MOST
    _require(is_step, "last_global_step", "is no number from -1 up")
    numbers = [None if state.get(key) is None else _count(state, key) for key in _NUMBERS]
    return Counters(_count(state, "local_step"), int(last or 0), *numbers)


def _pending(state: Mapping[str, Any], counters: Counters, spec: Spec) -> Job | None:
    job = state.get("pending_upload")
    if job is None:
        job = _older_pending(state)
    if job is None:
        return None
    where = "pending_upload"
    _require(isinstance(job, Mapping), where, "is no dictionary")
    step, base = _count(job, "step", where), job.get("base_outer_step")
    is_base = type(base) is int and -1 <= base < _MOST
    _require(is_base, f"{where}.base_outer_step", "is no outer step")
    generation = _count(job, "generation", where)
    _require(step <= counters.local_step, f"{where}.step", "lies after local_step")
    delta = _tensors(job.get("delta"), f"{where}.delta", spec, only_floats=True)
    target = _tensors(job.get("target_state"), f"{where}.target_state", spec)
    since = _count(job, "since", where) if "since" in job else max(0, step - 1)
    samples = _count(job, "samples", where) if "samples" in job else step
    return Job(step, int(base or 0), generation, delta, target, since, max(1, samples))


def _older_pending(state: Mapping[str, Any]) -> Any:
    """A file of the first version has the delta, alone or as the whole job, under other names."""
    delta, baseline = state.get("pending_delta"), state.get("baseline")
    if delta is None:
        return None
    _require(isinstance(delta, Mapping), "pending_delta", "is no dictionary")
    if "delta" in delta:
        return delta
    _require(isinstance(baseline, Mapping), "baseline", "is missing, but a delta is pending")
    assert isinstance(baseline, Mapping)
    target = {name: t - delta[name] if name in delta else t for name, t in baseline.items()}
    return {
        "step": state.get("pending_delta_step"),
        "base_outer_step": state.get("last_global_step"),
        "generation": state.get("baseline_generation"),
        "delta": delta,
        "target_state": target,
    }


def _outer(outer: Any, spec: Spec) -> tuple[Outer | None, tuple[tuple[str, int], ...]]:
    if outer is None:
        return None, ()
    _require(isinstance(outer, Mapping), "outer", "is no dictionary")
    step = _count(outer, "outer_step", "outer")
    state = _tensors(outer.get("global_state"), "outer.global_state", spec)
    momentum = outer.get("momentum") or {}
    if momentum:
        momentum = _tensors(momentum, "outer.momentum", spec, only_floats=True)
    cast = {name: tensor.float() if is_float(tensor) else tensor for name, tensor in state.items()}
    return Outer(step, cast, momentum), _ledger(outer)


def _ledger(outer: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    marks = outer.get("watermarks") or {}
    try:
        entries = [(node, step) for node, step, _ in outer.get("processed_deltas") or ()]
        entries += list(marks.items())
        for node, step in entries:
            check_node_id(node)
            is_step = type(step) is int and 0 <= step < _MOST
            _require(is_step, "outer", "has a ledger without local steps")
    except (TypeError, ValueError, AttributeError) as error:
        raise StateError(f"coordinator.outer: its ledger can't be read: {error}") from None
    return tuple(entries)


def _tensors(value: Any, key: str, spec: Spec, *, only_floats: bool = False) -> State:
    _require(isinstance(value, Mapping), key, "is no state dict")
    try:
        found = Spec.of(value)
    except TypeError as error:
        raise StateError(f"coordinator.{key}: {error}") from None
    if (problem := spec.problem(found.tensors, only_floats=only_floats)) is not None:
        raise StateError(f"coordinator.{key}: {problem}")
    tensors: dict[str, torch.Tensor] = dict(value)
    if only_floats:
        return {name: tensor.detach().cpu().float() for name, tensor in tensors.items()}
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}


def _count(state: Mapping[str, Any], key: str, where: str = "") -> int:
    value = state.get(key)
    is_count = type(value) is int and 0 <= value < _MOST
    _require(is_count, f"{where}.{key}" if where else key, f"is {str(value)[:40]}, no count")
    return int(value or 0)


def _require(is_right: bool, key: str, words: str) -> None:
    if not is_right:
        raise StateError(f"coordinator.{key}: {words}")
