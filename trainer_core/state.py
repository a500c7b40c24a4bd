"""The training checkpoint: every key of it, in the one module that both builds and checks it.

A checkpoint is a dictionary with these keys:

| key           | value                                                                   |
|---------------|-------------------------------------------------------------------------|
| `model`       | `model.state_dict()`                                                    |
| `optimizer`   | `optimizer.state_dict()`: a mapping with `state` and `param_groups`     |
| `scaler`      | the GradScaler's state dict, or None                                    |
| `scheduler`   | the scheduler's state dict, or None                                     |
| `step`        | int, optimizer steps done                                               |
| `samples`     | int, samples seen                                                       |
| `tokens`      | int, tokens seen                                                        |
| `config`      | plain data with its secrets redacted, or None                           |
| `rng`         | what `capture_rng_state` gave                                           |
| `coordinator` | the coordinator's state dict, or None                                   |
| `precision`   | `PrecisionPlan.as_dict()`: `mode`, `autocast_enabled`, `use_scaler`     |

Beside them stand what makes going on exact. Readers of the keys above need not know them, and a
file without them resumes:

| key            | value                                                                  |
|----------------|------------------------------------------------------------------------|
| `data`         | the place in the data: see `trainer_core.data.feed`                         |
| `modes`        | which modules train and which evaluate: see `trainer_core.resuming.modes`       |
| `environment`  | versions and settings to compare: see `trainer_core.resuming.facts`             |
| `settings`     | what the program gave: see `trainer_core.resuming.settings`                     |
| `attributes`   | what no state dict has: see `trainer_core.census.sections`                |
| `callbacks`    | the states of callbacks by name, where some have one                   |
| `ema`          | the state dict of the averaged weights, where there are some           |
| `accumulation` | micro-batches of a step that was not whole, only where there were some |

Other keys may be there too. What `build_checkpoint` gives loads under
`torch.load(weights_only=True)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from trainer_core.precision import PrecisionPlan
from trainer_core.redaction import REDACTED, redact
from trainer_core.rng import capture_rng_state
from trainer_core.saving.savable import CheckpointError, to_plain

__all__ = [
    "KEYS",
    "REDACTED",
    "REQUIRED_KEYS",
    "CheckpointError",
    "build_checkpoint",
    "check_checkpoint",
    "checkpoint_problems",
    "redact",
    "to_plain",
]

REQUIRED_KEYS = ("model", "optimizer", "step")
"""Without these nothing can be resumed."""

KEYS = (
    *("model", "optimizer", "scaler", "scheduler", "step", "samples", "tokens", "config", "rng"),
    *("coordinator", "precision"),
)
"""Every key, in the order in which they are stored."""


def build_checkpoint(
    *,
    model: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    step: int,
    samples: int,
    tokens: int,
    precision: PrecisionPlan,
    scaler: Mapping[str, Any] | None = None,
    scheduler: Mapping[str, Any] | None = None,
    config: Any = None,
    rng: Mapping[str, Any] | None = None,
    coordinator: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Puts state dicts and counters together into a checkpoint. Tensors are taken as they are.

    `extra` holds the keys that stand beside those of the schema. `config` is redacted (see
    `redact`). `rng` is captured now unless given. Numpy scalars, paths and enums inside the state
    dicts become plain values. Raises CheckpointError, naming the key path, for what is no plain
    value and so could not be loaded safely (a function, an array), and
    for what `check_checkpoint` would refuse.
    """
    state = {
        "model": to_plain(model, "model"),
        "optimizer": to_plain(optimizer, "optimizer"),
        "scaler": to_plain(scaler, "scaler"),
        "scheduler": to_plain(scheduler, "scheduler"),
        "step": to_plain(step, "step"),
        "samples": to_plain(samples, "samples"),
        "tokens": to_plain(tokens, "tokens"),
        "config": redact(config),
        "rng": to_plain(capture_rng_state() if rng is None else rng, "rng"),
        "coordinator": to_plain(coordinator, "coordinator"),
        "precision": precision.as_dict(),
    }
    state |= {key: to_plain(value, key) for key, value in (extra or {}).items()}
    check_checkpoint(state, complete=True)
    return state


def check_checkpoint(state: Any, *, complete: bool = False) -> None:
    """Raises a CheckpointError that names the key path of whatever is wrong. See the other one."""
    problems = checkpoint_problems(state, complete=complete)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise CheckpointError(f"not a training checkpoint: {problems[0]}{more}")


def checkpoint_problems(state: Any, *, complete: bool = False) -> list[str]:
    """What keeps `state` from being a training checkpoint, each beginning with its key path.

    With `complete` every key must be there; otherwise `REQUIRED_KEYS`, while the rest may be
    missing but not wrong. Other keys are allowed. Looks at shapes of dictionaries and at counters,
    not into tensors.
    """
    if not isinstance(state, Mapping):
        return [f"it is {_kind(state)}, not a dictionary"]
    wanted = KEYS if complete else REQUIRED_KEYS
    problems = [f"{key}: is missing" for key in wanted if key not in state]
    for key, check in _CHECKS.items():
        if key in state:
            problems.extend(check(key, state[key]))
    if not problems:
        problems.extend(_coordinator_step(state))
    return problems


def _mapping(key: str, value: Any) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield f"{key}: is {_kind(value)}, not a mapping"


def _mapping_or_none(key: str, value: Any) -> Iterator[str]:
    if value is not None:
        yield from _mapping(key, value)


def _model(key: str, value: Any) -> Iterator[str]:
    yield from _mapping(key, value)
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                yield f"{key}: has the key {name!r}, which is {_kind(name)}, not a string"


def _optimizer(key: str, value: Any) -> Iterator[str]:
    yield from _mapping(key, value)
    if not isinstance(value, Mapping):
        return
    for part, kind in (("state", Mapping), ("param_groups", (list, tuple))):
        if part not in value:
            yield f"{key}.{part}: is missing"
        elif not isinstance(value[part], kind):
            yield f"{key}.{part}: is {_kind(value[part])}"
    groups = value.get("param_groups")
    for index, group in enumerate(groups if isinstance(groups, (list, tuple)) else ()):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), (list, tuple)):
            yield f"{key}.param_groups[{index}]: is not a mapping with a list of params"


def _counter(key: str, value: Any) -> Iterator[str]:
    if not _is_int(value):
        yield f"{key}: is {_kind(value)}, not an integer"
    elif value < 0:
        yield f"{key}: is {value}, below zero"


def _precision(key: str, value: Any) -> Iterator[str]:
    yield from _mapping(key, value)
    if isinstance(value, Mapping):
        for part, kind in (("mode", str), ("autocast_enabled", bool), ("use_scaler", bool)):
            if not isinstance(value.get(part), kind):
                yield f"{key}.{part}: is {_kind(value.get(part))}, not a {kind.__name__}"


def _coordinator(key: str, value: Any) -> Iterator[str]:
    """Types of the keys that outer-loop coordinators share; any may be absent, others may be."""
    yield from _mapping_or_none(key, value)
    if not isinstance(value, Mapping):
        return
    for part, kinds in _COORDINATOR_KINDS.items():
        item = value.get(part)
        right = _is_int(item) if kinds is int else isinstance(item, kinds)
        if part in value and not right and not (item is None and part not in _NEVER_NONE):
            yield f"{key}.{part}: is {_kind(item)}, not {kinds.__name__.lower()}"


def _coordinator_step(state: Mapping[str, Any]) -> Iterator[str]:
    coordinator = state.get("coordinator")
    local = coordinator.get("local_step") if isinstance(coordinator, Mapping) else None
    if local is not None and local != state["step"]:
        yield f"coordinator.local_step: is {local}, while step is {state['step']}"


_COORDINATOR_KINDS: dict[str, type] = {
    "node_id": str,
    "role": str,
    "local_step": int,
    "last_global_step": int,
    "last_uploaded_step": int,
    "last_dispatched_step": int,
    "last_skipped_step": int,
    "baseline": Mapping,
    "baseline_generation": int,
    "pending_upload": Mapping,
    "outer": Mapping,
}
_NEVER_NONE = frozenset({"local_step", "last_global_step", "baseline_generation"})

_CHECKS: dict[str, Callable[[str, Any], Iterable[str]]] = {
    "model": _model,
    "optimizer": _optimizer,
    "scaler": _mapping_or_none,
    "scheduler": _mapping_or_none,
    "step": _counter,
    "samples": _counter,
    "tokens": _counter,
    "config": _mapping_or_none,
    "rng": _mapping_or_none,
    "coordinator": _coordinator,
    "precision": _precision,
}


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
