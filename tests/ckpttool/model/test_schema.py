"""The training schema: facts of a tree, and each contradiction in it, one at a time."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from ckpttool.formats.values import (
    GlobalRef,
    NumpyArray,
    NumpyScalar,
    Opaque,
    OrderedMap,
    StorageRef,
    TensorValue,
)
from ckpttool.model.schema import KEYS, training_facts

_keys = iter(range(1_000_000))


def tensor(*shape: int, dtype: str = "float32", storage: StorageRef | None = None) -> TensorValue:
    count = 1
    for extent in shape:
        count *= extent
    ref = storage or StorageRef(dtype, str(next(_keys)), "cpu", count)
    strides = tuple([1] * len(shape))
    return TensorValue(ref, 0, shape, strides, False, dtype)


def model() -> OrderedMap:
    return OrderedMap(
        {"w": tensor(3, 2), "bias": tensor(3, dtype="bfloat16"), "steps": tensor(dtype="int64")}
    )


def adamw() -> dict[str, Any]:
    group = {"lr": 0.25, "betas": (0.9, 0.95), "eps": 1e-8, "amsgrad": False, "params": [0, 1]}
    group |= {"decoupled_weight_decay": True}
    return {"state": {0: {"exp_avg": tensor(3, 2)}}, "param_groups": [group]}


def checkpoint() -> dict[str, Any]:
    words = NumpyArray()
    words.shape = (624,)
    return {
        "model": model(),
        "optimizer": adamw(),
        "scaler": None,
        "scheduler": {"T_max": 8, "eta_min": 0.0, "last_epoch": 4, "_last_lr": [0.125]},
        "step": 4,
        "samples": 8,
        "tokens": 128,
        "config": {"run": {"name": "a", "token": "<redacted>"}},
        "rng": {
            "python": random.Random(7).getstate(),
            "numpy": ("MT19937", words, 624, 0, 0.0),
            "torch": tensor(5056, dtype="uint8"),
        },
        "coordinator": None,
        "precision": {"mode": "fp32", "autocast_enabled": False, "use_scaler": False},
    }


def coordinator() -> dict[str, Any]:
    floating = {"w": tensor(3, 2), "bias": tensor(3)}
    return {
        "node_id": "m1",
        "role": "master",
        "local_step": 4,
        "last_global_step": 1,
        "last_uploaded_step": None,
        "last_dispatched_step": 4,
        "last_skipped_step": None,
        "baseline": model(),
        "baseline_generation": 2,
        "pending_upload": {
            "step": 4,
            "base_outer_step": 1,
            "generation": 2,
            "delta": dict(floating),
            "target_state": model(),
        },
        "pending_delta": None,
        "pending_delta_step": None,
        "outer": {
            "outer_step": 2,
            "processed_deltas": [["m1", 2, 0], ["w1", 2, 1]],
            "momentum": dict(floating),
            "global_state": model(),
        },
    }


def problems(tree: Any) -> list[tuple[str, str]]:
    return [(item.code, str(item.facts["key"])) for item in training_facts(tree).problems]


def test_a_whole_checkpoint_has_no_problem_and_gives_its_facts() -> None:
    facts = training_facts(checkpoint())
    assert facts.problems == []
    assert (facts.is_training, facts.follows_schema) == (True, True)
    assert (facts.step, facts.samples, facts.tokens) == (4, 8, 128)
    assert facts.present == KEYS
    assert (facts.missing, facts.extra) == ((), ())
    assert facts.precision == ("fp32", False, False)
    assert facts.rng == ["python", "numpy", "torch"]
    assert facts.coordinator is None
    assert facts.optimizer is not None
    assert facts.optimizer.line() == "AdamW, 1 group, 2 parameters, 1 with state, lr 0.25"
    assert facts.scheduler is not None
    assert facts.scheduler.line() == "CosineAnnealingLR, step 4, lr 0.125"


def test_extra_keys_are_allowed() -> None:
    facts = training_facts({**checkpoint(), "ema": {}, 7: 1})
    assert facts.problems == []
    assert facts.extra == ("ema", 7)


def test_coordinator_facts_count_each_storage_once() -> None:
    state = coordinator()
    shared = state["baseline"]["w"].storage
    state["pending_upload"]["target_state"]["w"] = tensor(3, 2, storage=shared)
    facts = training_facts({**checkpoint(), "coordinator": state})
    assert facts.problems == []
    got = facts.coordinator
    assert got is not None
    assert (got.role, got.node_id, got.local_step, got.last_global_step) == ("master", "m1", 4, 1)
    # w: 6 float32 = 24 bytes, bias: 3 bfloat16 = 6, steps: one int64 = 8.
    assert got.baseline_bytes == 24 + 6 + 8
    # delta in float32: 24 + 12.
    assert got.pending_upload == (4, 1, 2, (24 + 12) + (24 + 6 + 8))
    assert got.outer == (2, 2, (24 + 12) + (24 + 6 + 8))


@pytest.mark.parametrize("tree", [None, 7, [], "text", Opaque(GlobalRef("m", "Net"), opcode="OBJ")])
def test_what_is_no_dictionary_has_no_facts_and_no_problems(tree: Any) -> None:
    facts = training_facts(tree)
    assert (facts.is_training, facts.follows_schema, facts.step) == (False, False, None)
    assert facts.problems == []
    assert facts.missing == KEYS


def test_other_layouts_with_a_step_do_not_follow_the_schema() -> None:
    tree = {"model": model(), "optimizer": adamw(), "step": 3, "rng": {}, "config": None}
    facts = training_facts(tree)
    assert (facts.is_training, facts.follows_schema) == (True, False)


Change = Callable[[dict[str, Any]], Any]


def broken(*changes: Change) -> dict[str, Any]:
    tree = checkpoint()
    tree["coordinator"] = coordinator()
    for change in changes:
        change(tree)
    return tree


def put(place: str, value: Any) -> Change:
    *path, last = place.split(".")

    def change(tree: dict[str, Any]) -> None:
        at: Any = tree
        for key in path:
            at = at[key]
        at[last] = value

    return change


def drop(place: str) -> Change:
    *path, last = place.split(".")

    def change(tree: dict[str, Any]) -> None:
        at: Any = tree
        for key in path:
            at = at[key]
        del at[last]

    return change


def test_the_base_of_the_broken_ones_is_sound() -> None:
    assert problems(broken()) == []


SECTION_CASES = [
    (drop("model"), ("schema-model-missing", "model")),
    (drop("scheduler"), ("schema-sections-missing", "scheduler")),
    (drop("samples"), ("schema-sections-missing", "samples")),
    (put("samples", -1), ("schema-counter", "samples")),
    (put("tokens", 3.0), ("schema-counter", "tokens")),
    (put("tokens", True), ("schema-counter", "tokens")),
    (put("samples", 1 << 64), ("schema-counter", "samples")),
    (put("model", Opaque(GlobalRef("m", "Net"), opcode="NEWOBJ")), ("schema-section", "model")),
    (put("scaler", 7), ("schema-section", "scaler")),
    (put("scheduler", []), ("schema-section", "scheduler")),
    (put("precision", None), ("schema-precision", "precision")),
    (put("precision.mode", "int3"), ("schema-precision", "precision.mode")),
    (put("precision.mode", 16), ("schema-precision", "precision.mode")),
    (put("precision.use_scaler", 1), ("schema-precision", "precision.use_scaler")),
    (drop("precision.autocast_enabled"), ("schema-precision", "precision.autocast_enabled")),
    (put("precision.use_scaler", True), ("schema-scaler-missing", "scaler")),
    (put("optimizer", []), ("schema-optimizer", "optimizer")),
    (put("optimizer.param_groups", {}), ("schema-optimizer", "optimizer.param_groups")),
    (put("optimizer.param_groups", [7]), ("schema-optimizer", "optimizer.param_groups")),
    (put("optimizer.param_groups", [{}]), ("schema-optimizer", "optimizer.param_groups")),
    (put("optimizer.state", None), ("schema-optimizer", "optimizer.state")),
    (put("optimizer.state", {2: {}}), ("schema-optimizer", "optimizer.state")),
    (put("config.run.token", "abc"), ("schema-secrets", "config")),
    (put("rng", "garbage"), ("schema-rng-malformed", "rng")),
    (drop("rng.torch"), ("schema-rng-missing", "rng")),
    (put("rng.python", None), ("schema-rng-missing", "rng")),
    (put("rng.python", [3, [0] * 624, None]), ("schema-rng-malformed", "rng.python")),
    (put("rng.python", (9, [0] * 625, None)), ("schema-rng-malformed", "rng.python")),
    (put("rng.python", (3, [-1] * 625, None)), ("schema-rng-malformed", "rng.python")),
    (put("rng.python", (3, [1 << 32] * 625, None)), ("schema-rng-malformed", "rng.python")),
    (put("rng.python", (3, "0" * 625, None)), ("schema-rng-malformed", "rng.python")),
    (put("rng.python", (3, [0] * 625, "x")), ("schema-rng-malformed", "rng.python")),
    (put("rng.numpy", "x"), ("schema-rng-malformed", "rng.numpy")),
    (put("rng.numpy", ("PCG", [0] * 624, 0, 0, 0.0)), ("schema-rng-malformed", "rng.numpy")),
    (put("rng.numpy", ("MT19937", [0], 0, 0, 0.0)), ("schema-rng-malformed", "rng.numpy")),
    (put("rng.numpy", ("MT19937", [0] * 624, 999, 0, 0.0)), ("schema-rng-malformed", "rng.numpy")),
    (put("rng.numpy", {"bit_generator": 4}), ("schema-rng-malformed", "rng.numpy")),
    (put("rng.torch", tensor(5056)), ("schema-rng-malformed", "rng.torch")),
    (put("rng.torch", tensor(16, dtype="uint8")), ("schema-rng-malformed", "rng.torch")),
    (put("rng.torch", [1, 2]), ("schema-rng-malformed", "rng.torch")),
    (put("rng.cuda", tensor(16, dtype="uint8")), ("schema-rng-malformed", "rng.cuda")),
    (put("rng.cuda", [tensor(16)]), ("schema-rng-malformed", "rng.cuda")),
    (put("rng.mps", 1), ("schema-rng-malformed", "rng.mps")),
]

COORDINATOR_CASES: list[tuple[Change, str]] = [
    (put("coordinator", 7), "coordinator"),
    (put("coordinator.role", "chief"), "coordinator.role"),
    (put("coordinator.role", None), "coordinator.role"),
    (put("coordinator.node_id", ""), "coordinator.node_id"),
    (put("coordinator.local_step", 3), "coordinator.local_step"),
    (put("coordinator.local_step", None), "coordinator.local_step"),
    (put("coordinator.last_global_step", -2), "coordinator.last_global_step"),
    (put("coordinator.last_uploaded_step", "4"), "coordinator.last_uploaded_step"),
    (put("coordinator.last_skipped_step", -1), "coordinator.last_skipped_step"),
    (put("coordinator.baseline_generation", None), "coordinator.baseline_generation"),
    (put("coordinator.baseline", []), "coordinator.baseline"),
    (drop("coordinator.baseline.w"), "coordinator.baseline"),
    (drop("coordinator.baseline.steps"), "coordinator.baseline"),
    (put("coordinator.baseline.w", tensor(2, 3)), "coordinator.baseline"),
    (put("coordinator.baseline.new", tensor(2)), "coordinator.baseline"),
    (put("coordinator.pending_delta", 7), "coordinator.pending_delta"),
    (put("coordinator.pending_upload", 7), "coordinator.pending_upload"),
    (put("coordinator.pending_upload.step", 5), "coordinator.pending_upload.step"),
    (put("coordinator.pending_upload.step", None), "coordinator.pending_upload.step"),
    (put("coordinator.pending_upload.generation", 3), "coordinator.pending_upload.generation"),
    (
        put("coordinator.pending_upload.base_outer_step", -2),
        "coordinator.pending_upload.base_outer_step",
    ),
    (put("coordinator.pending_upload.delta", None), "coordinator.pending_upload.delta"),
    (drop("coordinator.pending_upload.delta.bias"), "coordinator.pending_upload.delta"),
    (put("coordinator.pending_upload.delta.steps", tensor()), "coordinator.pending_upload.delta"),
    (
        put("coordinator.pending_upload.delta.w", tensor(3, 2, dtype="float16")),
        "coordinator.pending_upload.delta",
    ),
    (drop("coordinator.pending_upload.target_state.w"), "coordinator.pending_upload.target_state"),
    (put("coordinator.outer", 7), "coordinator.outer"),
    (put("coordinator.role", "worker"), "coordinator.outer"),
    (put("coordinator.outer.outer_step", -1), "coordinator.outer.outer_step"),
    (put("coordinator.outer.processed_deltas", {}), "coordinator.outer.processed_deltas"),
    (put("coordinator.outer.processed_deltas", [["m1", 2]]), "coordinator.outer.processed_deltas"),
    (put("coordinator.outer.processed_deltas", [[1, 2, 0]]), "coordinator.outer.processed_deltas"),
    (drop("coordinator.outer.momentum.w"), "coordinator.outer.momentum"),
    (put("coordinator.outer.momentum", {}), "coordinator.outer.momentum"),
    (drop("coordinator.outer.global_state.bias"), "coordinator.outer.global_state"),
]


@pytest.mark.parametrize(("change", "expected"), SECTION_CASES)
def test_each_fault_is_found_alone(change: Change, expected: tuple[str, str]) -> None:
    tree = checkpoint()
    change(tree)
    assert problems(tree) == [expected]


@pytest.mark.parametrize(("change", "key"), COORDINATOR_CASES)
def test_each_contradiction_of_the_coordinator_is_found_alone(change: Change, key: str) -> None:
    assert problems(broken(change)) == [("schema-coordinator", key)]


@pytest.mark.parametrize(
    "change",
    [
        put("optimizer.state", {}),  # an inner boundary
        put("coordinator.last_global_step", -1),  # before the first
        put("coordinator.outer.outer_step", 7),  # a master's last global step may lag
        put("coordinator.pending_upload", None),
        put("coordinator.pending_upload.generation", 1),  # measured from an older baseline
        put("coordinator.pending_upload.base_outer_step", -1),
        put("coordinator.outer", None),
        put("coordinator.baseline", None),
        put("scaler", {"scale": 65536.0}),
        put("config", None),
        put("config.run.token", None),
        put("config.run.token", ""),
        put("config.run.token", "***"),
        put("config.run.token", 7),
        put("samples", NumpyScalar(None, b"", 8)),
        put("rng.python", [3, list(range(625)), 0.5]),
        put("rng.numpy", ("MT19937", [0] * 624, 3, 1, 0.25)),
        put("rng.numpy", {"bit_generator": "PCG64", "state": {"state": 1}}),
        drop("rng.numpy"),
        put("rng.cuda", [tensor(16, dtype="uint8")] * 2),
    ],
)
def test_what_real_files_show_is_no_fault(change: Change) -> None:
    assert problems(broken(change)) == []


def test_momentum_may_be_empty_before_the_first_outer_step() -> None:
    first = broken(put("coordinator.outer.momentum", {}), put("coordinator.outer.outer_step", 0))
    assert problems(first) == []


def test_secrets_are_found_at_any_depth_and_never_shown() -> None:
    options = Opaque(GlobalRef("argparse", "Namespace"), opcode="NEWOBJ")
    options.state = {"hf_token": "hf_SECRET", "lr": 0.1}
    config = {
        "options": options,
        "apiKey": "SECRET",
        "list": [{"db-password": "SECRET"}, {"wandb_api_key": b"SECRET"}],
        "credentials": {"user": "SECRET", "none": None},
        "tokenizer": "gpt2",
        "num_tokens": 512,
        "max_tokens": "512",
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "monkey": "x",
        "key": "x",
        "secret": "[REDACTED]",
        "password": "",
    }
    (problem,) = training_facts({**checkpoint(), "config": config}).problems
    assert sorted(problem.facts["keys"]) == [
        "config.apiKey",
        "config.credentials.user",
        "config.list.0.db-password",
        "config.list.1.wandb_api_key",
        "config.options.hf_token",
    ]
    assert "SECRET" not in repr(problem)


def test_a_hostile_config_costs_little_and_raises_nothing() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"x": [deep]}
    loop: list[Any] = []
    loop.append(loop)
    doubling: Any = "leaf"
    for _ in range(60):
        doubling = [doubling, doubling]
    config = {"deep": deep, "loop": loop, "double": doubling, "token": "/" * 1_000_000}
    config["a" * 1_000_000] = 10**5000
    facts = training_facts({**checkpoint(), "config": config, "samples": 10**5000})
    assert [problem.code for problem in facts.problems] == ["schema-counter", "schema-secrets"]
    while deep:  # freed by hand: the interpreter frees nested objects by recursion
        deep = deep["x"].pop()


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"betas": 0, "eps": 0, "amsgrad": 0}, "Adam"),
        ({"momentum": 0, "dampening": 0, "nesterov": 0}, "SGD"),
        ({"something": 0}, "unknown kind"),
    ],
)
def test_the_kind_of_optimizer_is_guessed_from_its_options(options: Any, kind: str) -> None:
    optimizer = {"state": {}, "param_groups": [{"params": [], **options}]}
    facts = training_facts({"step": 1, "optimizer": optimizer}).optimizer
    assert facts is not None
    assert facts.kind == kind
