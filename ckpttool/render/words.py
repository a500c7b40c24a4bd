"""Facts about a checkpoint as words that several pages share. All results are escaped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.checks.base import plural
from ckpttool.model.names import POINTER_NAME
from ckpttool.render.text import escape, size_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ckpttool.model.checkpoint import Checkpoint
    from ckpttool.model.coordinator_state import CoordinatorFacts
    from ckpttool.model.pointer import Pointer
    from ckpttool.model.schema import PrecisionFacts, TrainingFacts

RUNS_CODE = "weights_only=False runs code that the file chooses"
_MOST_NAMES = 4

GENERATIONS = {
    "torch-zip": "new zip format: torch 1.6 or newer reads it",
    "torch-legacy": "legacy stream of torch before 1.6: every torch reads it",
    "torch-legacy-tar": "tar format of torch 0.1: torch reads it with weights_only=False only",
    "torchscript": "TorchScript: torch.jit.load reads it, torch 1.6 or newer",
    "pt2": "exported program: torch.export.load reads it, torch 2.1 or newer",
}

LOAD_SHORT = {
    "weights-only": "weights_only=True",
    "allow-list": "allow-list",
    "weights_only=False": "weights_only=False",
    "distributed": "dcp.load",
    "distributed-runs-code": "runs code",
    "nothing": "-",
}


def load_words(checkpoint: Checkpoint) -> str:
    """What `torch.load` will do with the file, and what that means."""
    need = checkpoint.load_need
    if need == "weights-only":
        return "torch.load(weights_only=True), the default since torch 2.6, takes it"
    if need == "allow-list":
        return (
            f"weights_only=True takes it only with an allow-list ({_blocking(checkpoint)}):"
            f" torch.serialization.safe_globals; {RUNS_CODE}"
        )
    if need == "weights_only=False":
        why = _blocking(checkpoint)
        return f"weights_only=True refuses it{f' ({why})' if why else ''}; {RUNS_CODE}"
    if checkpoint.kind == "pickle":
        return "torch.load does not read it; pickle.load runs code that the file chooses"
    return "torch.load does not read it"


def _blocking(checkpoint: Checkpoint) -> str:
    """The names that stand in the way of `weights_only=True`, the worst first."""
    names = [f"{g.module}.{g.name}" for g in checkpoint.globals if g.trust.value != "torch-safe"]
    more = len(names) - _MOST_NAMES
    shown = ", ".join(map(escape, names[:_MOST_NAMES]))
    return f"{shown} and {more} more" if more > 0 else shown


def precision_words(plan: PrecisionFacts) -> str:
    """`bf16, autocast on, no scaler`."""
    autocast = {True: "autocast on", False: "autocast off", None: "autocast unknown"}
    scaler = {True: "scaler in use", False: "no scaler", None: "scaler unknown"}
    mode = escape(plan.mode or "unknown")
    return f"{mode}, {autocast[plan.autocast_enabled]}, {scaler[plan.use_scaler]}"


def counters_words(facts: TrainingFacts) -> str:
    """`step 6, 48 samples, 768 tokens`."""
    parts = [] if facts.step is None else [f"step {facts.step:,}"]
    for name in ("samples", "tokens"):
        count = getattr(facts, name)
        if count is not None:
            parts.append(f"{count:,} {name}")
    return ", ".join(parts)


def coordinator_words(
    facts: CoordinatorFacts, copies: Iterable[Sequence[str]] = (), proof: str = "by checksums"
) -> list[tuple[str, str]]:
    """The outer loop's state as labelled lines. `proof` says how `copies` are known to be such."""
    rows = [
        ("role", f"{escape(facts.role or 'unknown role')}, node {escape(facts.node_id or '?')}"),
        ("steps", f"local {_number(facts.local_step)}, global {_number(facts.last_global_step)}"),
        ("boundaries", _boundaries(facts)),
    ]
    parts = dict(facts.parts)
    if facts.baseline_bytes is not None:
        generation = _number(facts.baseline_generation)
        rows.append(("baseline", f"{size_text(facts.baseline_bytes)}, generation {generation}"))
    rows += _pending_words(facts, parts)
    if facts.outer is None:
        rows.append(("outer state", "none"))
    else:
        applied = "?" if facts.outer.applied is None else plural(facts.outer.applied, "delta")
        step = _number(facts.outer.outer_step)
        size = size_text(facts.outer.nbytes)
        inside = _inside(parts, "outer", ("momentum", "global_state"))
        rows.append(("outer state", f"outer step {step}, {applied} applied, {size}{inside}"))
    for group in copies:
        rows.append(("copies", f"{' = '.join(map(escape, group))}, identical {proof}"))
    if facts.extra:
        shown = [f"{escape(key)} {escape(str(value))}" for key, value in facts.extra[:12]]
        rows.append(("other keys", ", ".join(shown)))
    return rows


def _boundaries(facts: CoordinatorFacts) -> str:
    steps = {
        "uploaded": facts.last_uploaded_step,
        "dispatched": facts.last_dispatched_step,
        "skipped": facts.last_skipped_step,
    }
    return ", ".join(f"last {name} {step:,}" for name, step in steps.items() if step is not None)


def _pending_words(facts: CoordinatorFacts, parts: dict[str, int]) -> Iterator[tuple[str, str]]:
    job = facts.pending_upload
    if job is None:
        yield "pending upload", "none"
        return
    what = f"step {_number(job.step)} on outer step {_number(job.base_outer_step)}"
    generation = _number(job.generation)
    inside = _inside(parts, "pending_upload", ("delta", "target_state"))
    size = f"{size_text(job.nbytes)}{inside}"
    yield "pending upload", f"{what}, generation {generation}, {size}"
    if facts.standing is not None:
        yield "", facts.standing.words


def _inside(parts: dict[str, int], name: str, keys: tuple[str, ...]) -> str:
    """` (delta 15.3 KiB, target_state 15.3 KiB)`: what a part consists of."""
    found = [(key, parts.get(f"{name}.{key}")) for key in keys]
    shown = ", ".join(f"{key} {size_text(size)}" for key, size in found if size is not None)
    return f" ({shown})" if shown else ""


def _number(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"


def shape_text(shape: Any) -> str:
    """`[8, 4]`; `ragged` for a nested tensor, which has no one shape."""
    return "ragged" if shape is None else str(list(shape))


def pointer_words(pointer: Pointer) -> str:
    """What the pointer says, in one escaped line."""
    if pointer.state == "missing":
        return f"there is no {POINTER_NAME}"
    if pointer.state != "ok":
        return f"{POINTER_NAME} cannot be followed: {escape(pointer.problem or pointer.state)}"
    step = "no step" if pointer.step is None else f"step {pointer.step}"
    return f"{POINTER_NAME} names {step}, {escape(pointer.file or '')}"
