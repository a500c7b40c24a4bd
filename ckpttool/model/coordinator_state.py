"""The `coordinator` section: where a run stands in an outer loop over several machines.

The outer loop is DiLoCo (Douillard et al. 2023, arXiv 2311.08105). A boundary's pseudo-gradient
is `delta = baseline - target_state`; a `pending_upload` is one such job that was not delivered when
the checkpoint was written. Facts and contradictions only: to compare values, `checks` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ckpttool.formats.anomaly import Anomaly
from ckpttool.formats.values import TensorValue
from ckpttool.model.inert import integer, is_floating, state_tensors, stored_bytes, what
from ckpttool.model.pending_upload import Standing, pending_standing

ROLES = ("master", "worker")
_KNOWN = frozenset(
    (
        *("role", "node_id", "local_step", "last_global_step", "baseline_generation", "baseline"),
        *("last_uploaded_step", "last_dispatched_step", "last_skipped_step"),
        *("pending_upload", "pending_delta", "pending_delta_step", "outer"),
    )
)


class PendingUpload(NamedTuple):
    """The job in flight: step and base as stored, `nbytes` of its tensors."""

    step: int | None
    base_outer_step: int | None
    generation: int | None
    nbytes: int


class OuterState(NamedTuple):
    """A master's outer state: outer step, how many deltas it applied, bytes of its tensors."""

    outer_step: int | None
    applied: int | None
    nbytes: int


class CoordinatorFacts(NamedTuple):
    """What a coordinator section says of itself. Parts that are absent or malformed are None.

    `standing` says whether the pending upload can still be applied. `parts` are the bytes of each
    state dict, by its dotted name. `extra` are keys that only newer writers have, with their values
    where these are plain.
    """

    role: str | None
    node_id: str | None
    local_step: int | None
    last_global_step: int | None
    baseline_generation: int | None
    baseline_bytes: int | None
    pending_upload: PendingUpload | None
    outer: OuterState | None
    last_uploaded_step: int | None = None
    last_dispatched_step: int | None = None
    last_skipped_step: int | None = None
    standing: Standing | None = None
    parts: tuple[tuple[str, int], ...] = ()
    extra: tuple[tuple[str, Any], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The facts as plain data."""
        plain = self._asdict()
        plain["pending_upload"] = self.pending_upload and self.pending_upload._asdict()
        plain["outer"] = self.outer and self.outer._asdict()
        plain["standing"] = self.standing and self.standing._asdict()
        return {**plain, "parts": dict(self.parts), "extra": dict(self.extra)}


def coordinator_facts(section: Any) -> CoordinatorFacts | None:
    """The facts of a coordinator section, or None where there is none."""
    if not isinstance(section, dict):
        return None
    role, node = section.get("role"), section.get("node_id")
    baseline = section.get("baseline")
    return CoordinatorFacts(
        role if isinstance(role, str) else None,
        node if isinstance(node, str) else None,
        integer(section.get("local_step")),
        integer(section.get("last_global_step")),
        integer(section.get("baseline_generation")),
        stored_bytes(baseline) if isinstance(baseline, dict) else None,
        _pending_facts(section.get("pending_upload")),
        _outer_facts(section.get("outer")),
        integer(section.get("last_uploaded_step")),
        integer(section.get("last_dispatched_step")),
        integer(section.get("last_skipped_step")),
        standing=pending_standing(section),
        parts=tuple(_part_bytes(section)),
        extra=tuple(_extra(section)),
    )


def _part_bytes(section: dict[Any, Any]) -> Iterator[tuple[str, int]]:
    """Bytes of each state dict in the section."""
    for name in ("baseline", "pending_delta"):
        if isinstance(section.get(name), dict):
            yield name, stored_bytes(section[name])
    for name, inner in (
        ("pending_upload", ("delta", "target_state")),
        ("outer", ("momentum", "global_state")),
    ):
        part = section.get(name)
        held = part if isinstance(part, dict) else {}
        for key in inner:
            if isinstance(held.get(key), dict):
                yield f"{name}.{key}", stored_bytes(held[key])


def _extra(section: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Keys beyond those of the first writers; of what is no plain value only what it is."""
    for key, value in section.items():
        if isinstance(key, str) and key not in _KNOWN:
            plain = isinstance(value, (bool, float, type(None))) or integer(value) is not None
            text = value[:80] if isinstance(value, str) else what(value)
            yield key[:80], value if plain else text


def _pending_facts(job: Any) -> PendingUpload | None:
    if not isinstance(job, dict):
        return None
    return PendingUpload(
        integer(job.get("step")),
        integer(job.get("base_outer_step")),
        integer(job.get("generation")),
        stored_bytes(job),
    )


def _outer_facts(outer: Any) -> OuterState | None:
    if not isinstance(outer, dict):
        return None
    applied = outer.get("processed_deltas")
    count = len(applied) if isinstance(applied, (list, tuple)) else None
    return OuterState(integer(outer.get("outer_step")), count, stored_bytes(outer))


def coordinator_problems(section: Any, step: int | None, model: Any) -> list[Anomaly]:
    """Contradictions in a coordinator section, each a `schema-coordinator` anomaly with its key.

    `step` is the checkpoint's own, `model` its model section, which baseline and deltas must cover.
    """
    if section is None:
        return []
    if not isinstance(section, dict):
        return [_problem("", f"is {what(section)} where a dictionary or None belongs")]
    parts = (_identity, _counters, _baseline, _pending, _outer)
    tensors = state_tensors(model)
    return [problem for part in parts for problem in part(section, step, tensors)]


def _problem(key: str, words: str) -> Anomaly:
    place = f"coordinator.{key}" if key else "coordinator"
    return Anomaly("schema-coordinator", key=place, problem=words)


def _identity(section: dict[Any, Any], step: Any, model: Any) -> Iterator[Anomaly]:
    if section.get("role") not in ROLES:
        role = section.get("role")
        given = f'"{role[:40]}"' if isinstance(role, str) else what(role)
        yield _problem("role", f"is {given}, neither master nor worker")
    if not isinstance(section.get("node_id"), str) or not section["node_id"]:
        yield _problem("node_id", "is not a name")


def _counters(section: dict[Any, Any], step: int | None, model: Any) -> Iterator[Anomaly]:
    local = integer(section.get("local_step"))
    if local is None:
        yield _problem("local_step", f"is {what(section.get('local_step'))}")
    elif step is not None and local != step:
        yield _problem("local_step", f"is {local} where the checkpoint's step is {step}")
    if (number := integer(section.get("last_global_step"))) is None or number < -1:
        yield _problem("last_global_step", "is not an integer from -1 up")
    if (number := integer(section.get("baseline_generation"))) is None or number < 0:
        yield _problem("baseline_generation", "is not an integer from 0 up")
    for key in ("last_uploaded_step", "last_dispatched_step", "last_skipped_step"):
        value = section.get(key)
        if value is not None and ((number := integer(value)) is None or number < 0):
            yield _problem(key, "is neither None nor an integer from 0 up")


def _baseline(section: dict[Any, Any], step: Any, model: dict[str, TensorValue]) -> Any:
    baseline = section.get("baseline")
    if baseline is not None:  # None: saved before the first boundary's snapshot
        yield from _coverage("baseline", baseline, model, _every)


def _pending(
    section: dict[Any, Any], step: int | None, model: dict[str, TensorValue]
) -> Iterator[Anomaly]:
    legacy = section.get("pending_delta")
    if legacy is not None and not isinstance(legacy, dict):
        yield _problem("pending_delta", f"is {what(legacy)}")
    job = section.get("pending_upload")
    if job is None:
        return
    if not isinstance(job, dict):
        yield _problem("pending_upload", f"is {what(job)}")
        return
    yield from _pending_numbers(job, step, integer(section.get("baseline_generation")))
    yield from _coverage("pending_upload.delta", job.get("delta"), model, is_floating, fp32=True)
    yield from _coverage("pending_upload.target_state", job.get("target_state"), model, _every)


def _pending_numbers(
    job: dict[Any, Any], step: int | None, baseline_generation: int | None
) -> Iterator[Anomaly]:
    for key, least in (("step", 0), ("base_outer_step", -1), ("generation", 0)):
        if (number := integer(job.get(key))) is None or number < least:
            yield _problem(f"pending_upload.{key}", f"is not an integer from {least} up")
    made = integer(job.get("step"))
    if made is not None and step is not None and made > step:
        yield _problem("pending_upload.step", f"is {made}, after the checkpoint's step {step}")
    generation = integer(job.get("generation"))
    if generation is None or baseline_generation is None:
        return
    if generation > baseline_generation:
        words = f"is {generation}, above the baseline's own, {baseline_generation}"
        yield _problem("pending_upload.generation", words)


def _outer(section: dict[Any, Any], step: Any, model: dict[str, TensorValue]) -> Iterator[Anomaly]:
    outer = section.get("outer")
    if outer is None:
        return
    if section.get("role") == "worker":
        yield _problem("outer", "is there although the role is worker: only a master has it")
    if not isinstance(outer, dict):
        yield _problem("outer", f"is {what(outer)}")
        return
    if (number := integer(outer.get("outer_step"))) is None or number < 0:
        yield _problem("outer.outer_step", "is not an integer from 0 up")
    if not _is_ledger(outer.get("processed_deltas")):
        yield _problem("outer.processed_deltas", "is not a list of [node, local step, base step]")
    yield from _coverage("outer.global_state", outer.get("global_state"), model, _every)
    momentum = outer.get("momentum")
    if momentum != {} or number != 0:  # there is none before the first outer step
        yield from _coverage("outer.momentum", momentum, model, is_floating, fp32=True)


def _is_ledger(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(
        isinstance(entry, (list, tuple))
        and len(entry) == 3
        and isinstance(entry[0], str)
        and integer(entry[1]) is not None
        and integer(entry[2]) is not None
        for entry in value
    )


def _every(tensor: TensorValue) -> bool:
    return True


def _coverage(
    key: str,
    state: Any,
    model: dict[str, TensorValue],
    wanted: Callable[[TensorValue], bool],
    *,
    fp32: bool = False,
) -> Iterator[Anomaly]:
    """`state` must have the wanted keys of the model with their shapes, in FP32 where asked."""
    if not isinstance(state, dict):
        yield _problem(key, f"is {what(state)} where a state dict belongs")
        return
    if not model:
        return  # nothing to compare with; the missing model is a finding of its own
    found = state_tensors(state)
    names = {name for name, tensor in model.items() if wanted(tensor)}
    yield from _names_differ(key, names, set(found))
    shared = sorted(names & set(found))
    wrong = [name for name in shared if found[name].shape != model[name].shape]
    if wrong:
        yield _problem(key, f"has another shape than the model: {_few(wrong)}")
    narrow = [name for name in sorted(found) if fp32 and found[name].dtype != "float32"]
    if narrow:
        yield _problem(key, f"is not in float32: {_few(narrow)}")


def _names_differ(key: str, wanted: set[str], found: set[str]) -> Iterator[Anomaly]:
    if missing := sorted(wanted - found):
        yield _problem(key, f"lacks {len(missing)} of the model's tensors: {_few(missing)}")
    if surplus := sorted(found - wanted):
        yield _problem(key, f"has tensors that the model lacks: {_few(surplus)}")


def _few(names: list[str]) -> str:
    shown = ", ".join(name[:80] for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
