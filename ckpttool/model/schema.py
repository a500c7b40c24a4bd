"""The training schema: what the top-level keys of a checkpoint say, and what contradicts them.

A training checkpoint is a dictionary with an integer `step`; a complete one has every key of
`KEYS`. Other keys are allowed. All of this works on the inert tree that the static reader makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ckpttool.formats.anomaly import Anomaly
from ckpttool.formats.values import NumpyScalar
from ckpttool.model.coordinator_state import (
    CoordinatorFacts,
    coordinator_facts,
    coordinator_problems,
)
from ckpttool.model.inert import integer, key_text, what
from ckpttool.model.rng_state import rng_parts, rng_problems
from ckpttool.model.secrets import unredacted_secrets

SECTIONS = ("model", "optimizer", "scaler", "scheduler")
COUNTERS = ("step", "samples", "tokens")
KEYS = (*SECTIONS, *COUNTERS, "config", "rng", "coordinator", "precision")

MODES = ("fp32", "bf16", "fp16", "auto")


class PrecisionFacts(NamedTuple):
    """The precision plan that was in force; parts of another type than they should be are None."""

    mode: str | None
    autocast_enabled: bool | None
    use_scaler: bool | None


class OptimizerFacts(NamedTuple):
    """An optimizer's state dict in figures. `kind` is a guess from the options of its groups."""

    kind: str
    groups: int
    parameters: int
    with_state: int
    learning_rates: tuple[float, ...]

    def line(self) -> str:
        """The same on one line."""
        rates = ", ".join(f"{rate:g}" for rate in self.learning_rates[:4])
        rates = f", lr {rates}" if rates else ""
        groups = "1 group" if self.groups == 1 else f"{self.groups} groups"
        counted = f"{self.parameters} parameters, {self.with_state} with state"
        return f"{self.kind}, {groups}, {counted}{rates}"


class SchedulerFacts(NamedTuple):
    """A scheduler's state dict in figures. `kind` is a guess from its keys."""

    kind: str
    last_epoch: int | None
    learning_rates: tuple[float, ...]

    def line(self) -> str:
        """The same on one line."""
        rates = ", ".join(f"{rate:g}" for rate in self.learning_rates[:4])
        step = "" if self.last_epoch is None else f", step {self.last_epoch}"
        return f"{self.kind}{step}" + (f", lr {rates}" if rates else "")


class TrainingFacts:
    """What a tree says as a training checkpoint.

    `is_training`: it is a dictionary with an integer `step`. `present`, `missing` and `extra` sort
    its keys by `KEYS`. `problems` are anomalies whose codes begin with `schema-`; each has the fact
    `key`, a dotted key, and mostly `problem`, words that continue "the key …". `copies` are groups
    of the model and the coordinator's state dicts that are copies of each other, filled in by
    whoever has the container.
    """

    __slots__ = (
        "config",
        "coordinator",
        "copies",
        "extra",
        "is_training",
        "missing",
        "optimizer",
        "precision",
        "present",
        "problems",
        "rng",
        "samples",
        "scheduler",
        "step",
        "tokens",
    )

    def __init__(self, tree: Any) -> None:
        content: dict[Any, Any] = tree if isinstance(tree, dict) else {}
        self.step = integer(content.get("step"))
        self.samples = integer(content.get("samples"))
        self.tokens = integer(content.get("tokens"))
        self.is_training = self.step is not None
        self.present = tuple(key for key in KEYS if key in content)
        self.missing = tuple(key for key in KEYS if key not in content)
        self.extra = tuple(key for key in content if key not in KEYS)
        self.precision = _precision(content.get("precision"))
        self.scheduler = _scheduler(content.get("scheduler"))
        self.optimizer = _optimizer(content.get("optimizer"))
        self.rng: list[str] = rng_parts(content.get("rng"))
        self.coordinator: CoordinatorFacts | None = coordinator_facts(content.get("coordinator"))
        self.config = content.get("config")
        self.problems: list[Anomaly] = []
        self.copies: list[tuple[str, ...]] = []

    @property
    def follows_schema(self) -> bool:
        """Whether this is a checkpoint of this schema rather than some other one that has a step.

        The coordinator and precision keys are this schema's own; of the others at least all but two
        have to be there.
        """
        own = "coordinator" in self.present and "precision" in self.present
        return self.is_training and "model" in self.present and own and len(self.missing) <= 2


def training_facts(tree: Any) -> TrainingFacts:
    """Facts and problems of the inert `tree` of a file; none of what has no step."""
    facts = TrainingFacts(tree)
    if isinstance(tree, dict) and "step" in tree:
        facts.problems = list(_problems(tree, facts))
    return facts


def _problems(tree: dict[Any, Any], facts: TrainingFacts) -> Iterator[Anomaly]:
    elsewhere = isinstance(tree.get("sharded"), dict)  # then tensors are in shards, rng with ranks
    if missing := tuple(key for key in facts.missing if not (elsewhere and key == "rng")):
        yield from _missing(missing)
    for key in COUNTERS:
        if key in tree:
            yield from _counter(key, tree[key])
    for key, (check, code) in _SECTION_CHECKS.items():
        if key in tree and not (elsewhere and tree[key] == {}):
            for place, words in check(tree[key]):
                yield Anomaly(code, key=place, problem=words)
    if facts.precision and facts.precision.use_scaler and tree.get("scaler") is None:
        yield Anomaly("schema-scaler-missing", key="scaler")
    if "rng" in tree:
        yield from rng_problems(tree["rng"])
    yield from coordinator_problems(tree.get("coordinator"), facts.step, tree.get("model"))
    if secrets := unredacted_secrets(tree.get("config")):
        yield Anomaly("schema-secrets", key="config", keys=secrets)


def _missing(missing: tuple[str, ...]) -> Iterator[Anomaly]:
    if "model" in missing:
        yield Anomaly("schema-model-missing", key="model")
    rest = [key for key in missing if key not in ("model", "step")]
    if rest:
        yield Anomaly("schema-sections-missing", key=rest[0], keys=rest)


def _counter(key: str, value: Any) -> Iterator[Anomaly]:
    number = integer(value)
    if number is None:
        yield Anomaly("schema-counter", key=key, problem=f"is {what(value)}, not an integer")
    elif number < 0:
        yield Anomaly("schema-counter", key=key, problem=f"is negative ({number})")


Complaints = Iterator[tuple[str, str]]


def _model_check(model: Any) -> Complaints:
    if not isinstance(model, dict):
        yield "model", f"is {what(model)} where a state dict belongs"


def _scaler_check(scaler: Any) -> Complaints:
    if scaler is not None and not isinstance(scaler, dict):
        yield "scaler", f"is {what(scaler)} where a state dict or None belongs"


def _scheduler_check(scheduler: Any) -> Complaints:
    if scheduler is not None and not isinstance(scheduler, dict):
        yield "scheduler", f"is {what(scheduler)} where a state dict or None belongs"


def _precision_check(plan: Any) -> Complaints:
    if not isinstance(plan, dict):
        yield "precision", f"is {what(plan)} where a dictionary belongs"
        return
    if plan.get("mode") not in MODES:
        mode = plan.get("mode")
        given = f'"{mode[:40]}"' if isinstance(mode, str) else what(mode)
        yield "precision.mode", f"is {given}, none of {', '.join(MODES)}"
    for key in ("autocast_enabled", "use_scaler"):
        if not isinstance(plan.get(key), bool):
            yield f"precision.{key}", f"is {what(plan.get(key))} where True or False belongs"


def _optimizer_check(optimizer: Any) -> Complaints:
    if not isinstance(optimizer, dict):
        yield "optimizer", f"is {what(optimizer)} where a state dict belongs"
        return
    groups, state = optimizer.get("param_groups"), optimizer.get("state")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        yield "optimizer.param_groups", "is not a list of dictionaries"
        return
    if not all(isinstance(group.get("params"), (list, tuple)) for group in groups):
        yield "optimizer.param_groups", "has a group without its list of parameters"
        return
    if not isinstance(state, dict):
        yield "optimizer.state", f"is {what(state)} where a dictionary belongs"
        return
    listed = [key for group in groups for key in group["params"] if _is_key(key)]
    known = set(listed)
    if len(known) < len(listed):
        yield "optimizer.param_groups", "lists a parameter twice"
    strangers = [key for key in state if _is_key(key) and key not in known]
    if strangers:
        names = ", ".join(key_text(key) for key in strangers[:3])
        yield "optimizer.state", f"holds state of parameters that no group lists: {names}"


def _is_key(key: Any) -> bool:
    return isinstance(key, (int, str))


_SECTION_CHECKS: dict[str, tuple[Callable[[Any], Complaints], str]] = {
    "model": (_model_check, "schema-section"),
    "optimizer": (_optimizer_check, "schema-optimizer"),
    "scaler": (_scaler_check, "schema-section"),
    "scheduler": (_scheduler_check, "schema-section"),
    "precision": (_precision_check, "schema-precision"),
}


def _precision(plan: Any) -> PrecisionFacts | None:
    if not isinstance(plan, dict):
        return None
    mode, flags = plan.get("mode"), (plan.get("autocast_enabled"), plan.get("use_scaler"))
    known = (flag if isinstance(flag, bool) else None for flag in flags)
    return PrecisionFacts(mode if isinstance(mode, str) else None, *known)


def _optimizer(optimizer: Any) -> OptimizerFacts | None:
    if not isinstance(optimizer, dict) or not isinstance(optimizer.get("param_groups"), list):
        return None
    groups = [group for group in optimizer["param_groups"] if isinstance(group, dict)]
    lists = [group.get("params") for group in groups]
    count = sum(len(params) for params in lists if isinstance(params, (list, tuple)))
    state = optimizer.get("state")
    with_state = len(state) if isinstance(state, dict) else 0
    kind = _guess(groups[0], _OPTIMIZERS) if groups else "unknown"
    if kind == "Adam" and groups[0].get("decoupled_weight_decay") is True:
        kind = "AdamW"
    return OptimizerFacts(
        kind, len(groups), count, with_state, _numbers([group.get("lr") for group in groups])
    )


def _scheduler(scheduler: Any) -> SchedulerFacts | None:
    if not isinstance(scheduler, dict):
        return None
    rates = scheduler.get("_last_lr")
    rates = _numbers(rates) if isinstance(rates, (list, tuple)) else ()
    return SchedulerFacts(
        _guess(scheduler, _SCHEDULERS), integer(scheduler.get("last_epoch")), rates
    )


def _numbers(values: Any) -> tuple[float, ...]:
    plain = (value.value if isinstance(value, NumpyScalar) else value for value in values)
    return tuple(
        float(value) for value in plain if isinstance(value, float) or integer(value) is not None
    )


# The first whose options are all there; taken from the `defaults` of torch.optim.
_OPTIMIZERS = (
    ("NAdam", {"momentum_decay"}),
    ("Adam", {"betas", "eps", "amsgrad"}),
    ("RAdam or Adamax", {"betas", "eps"}),
    ("Lion-like", {"betas"}),
    ("SGD", {"momentum", "dampening", "nesterov"}),
    ("RMSprop", {"alpha", "centered"}),
    ("Adagrad", {"lr_decay", "initial_accumulator_value"}),
    ("Adadelta", {"rho", "eps"}),
    ("Rprop", {"etas", "step_sizes"}),
    ("ASGD", {"lambd", "alpha", "t0"}),
    ("LBFGS", {"history_size", "line_search_fn"}),
    ("Adafactor", {"beta2_decay"}),
    ("Muon", {"ns_steps"}),
)

# Likewise from the attributes that torch.optim.lr_scheduler keeps in its state dicts.
_SCHEDULERS = (
    ("SequentialLR", {"_schedulers", "_milestones"}),
    ("ChainedScheduler", {"_schedulers"}),
    ("LambdaLR", {"lr_lambdas"}),
    ("OneCycleLR", {"total_steps", "_schedule_phases"}),
    ("CosineAnnealingWarmRestarts", {"T_0", "T_mult"}),
    ("CosineAnnealingLR", {"T_max", "eta_min"}),
    ("CyclicLR", {"max_lrs", "total_size"}),
    ("ReduceLROnPlateau", {"patience", "factor"}),
    ("MultiStepLR", {"milestones", "gamma"}),
    ("StepLR", {"step_size", "gamma"}),
    ("PolynomialLR", {"power", "total_iters"}),
    ("LinearLR", {"start_factor", "end_factor"}),
    ("ConstantLR", {"factor", "total_iters"}),
    ("ExponentialLR", {"gamma"}),
)


def _guess(content: dict[Any, Any], known: tuple[tuple[str, set[str]], ...]) -> str:
    return next((name for name, keys in known if keys <= content.keys()), "unknown kind")
