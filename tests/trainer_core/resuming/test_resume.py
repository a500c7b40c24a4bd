"""Going on from a checkpoint: bit for bit, all or nothing, and never in silence."""

from __future__ import annotations

import copy
import logging
import math
import random
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from trainer_core import (
    CheckpointError,
    CheckpointManager,
    PrecisionPlan,
    ResumeWarning,
    Trainer,
)

SEED_RUNS = Path(__file__).parents[3] / "fixtures/corpus/seed-runs"
FP16_SCALED = PrecisionPlan("fp16", autocast_enabled=False, use_scaler=True)


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.3)
        self.second = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(torch.relu(self.norm(self.first(x))))
        loss: torch.Tensor = self.second(hidden).square().mean()
        return loss


class Stream(IterableDataset[torch.Tensor]):
    """Endless batches out of three generators, all of which a checkpoint holds."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            batch = torch.randn(4, 6)
            batch[0] += random.random()
            batch[1] += np.random.random()
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {}  # it holds nothing itself

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert state == {}


def endless() -> DataLoader[torch.Tensor]:
    return DataLoader(Stream(), batch_size=None)


def new(loader: Any = None, *, seed: int = 0, **options: Any) -> Trainer:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model = options.pop("model", None) or Net()
    optimizer = options.pop("optimizer", None)
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    make_scheduler = options.pop("make_scheduler", None)
    return Trainer(
        model,
        optimizer,
        endless() if loader is None else loader,
        device="cpu",
        scheduler=None if make_scheduler is None else make_scheduler(optimizer),
        **options,
    )


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and one.equal(other)
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (one != one and other != other)


def assert_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    assert [key for key in one if not same(one[key], other[key])] == []


def frozen(trainer: Trainer) -> dict[str, Any]:
    return copy.deepcopy(trainer.state_dict())


def said(trainer: Trainer, state: Any, **options: Any) -> str:
    """The words of the one warning of a resume."""
    with pytest.warns(ResumeWarning) as caught:
        trainer.resume(state, **options)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    return str(caught[0].message)


# Bit for bit


def warm_up_and_cosine(optimizer: torch.optim.Optimizer) -> Any:
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, 9)
    return lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[3])


SCHEDULERS = [
    warm_up_and_cosine,
    lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=13),
    lambda optimizer: lr_scheduler.StepLR(optimizer, 4),
]


@pytest.mark.parametrize("make_scheduler", SCHEDULERS, ids=["sequential", "lambda", "one", "step"])
def test_resumed_at_any_step_a_run_ends_as_if_uninterrupted(
    tmp_path: Path, make_scheduler: Any
) -> None:
    options = {"make_scheduler": make_scheduler, "accumulation_steps": 2, "grad_clip": 0.5}
    manager = CheckpointManager(tmp_path, every_steps=1, keep_last=None)
    whole = new(checkpoint_manager=manager, **options)
    records = whole.fit(12).metrics
    for step in range(1, 12):
        again = new(seed=99, **options)  # other weights, other random numbers
        again.resume(torch.load(manager.path_for(step), weights_only=True))
        assert again.step == step
        result = again.fit(12)
        assert [r["loss"] for r in result.metrics] == [r["loss"] for r in records[step:]]
        assert [r["lr"] for r in result.metrics] == [r["lr"] for r in records[step:]]
        assert (result.samples, result.tokens) == (12 * 8, 0)
        assert_same(again.state_dict(), whole.state_dict())


def test_at_the_end_of_a_pass_over_finite_data_it_is_exact_too() -> None:
    data = TensorDataset(torch.arange(48.0).reshape(8, 6).sin())

    def loader() -> DataLoader[Any]:
        return DataLoader(data, batch_size=2, shuffle=True)

    whole = new(loader())
    whole.fit(4)
    state = frozen(whole)
    whole.fit(12)
    again = new(loader(), seed=99)
    again.resume(state)
    again.fit(12)
    assert_same(again.state_dict(), whole.state_dict())


def test_random_numbers_that_the_caller_seeds_after_resuming_are_kept() -> None:
    first = new()
    first.fit(2)
    state = frozen(first)
    ends = []
    for seed in (1, 2):
        again = new(seed=99)
        again.resume(state)
        torch.manual_seed(seed)
        again.fit(3)
        ends.append(again.state_dict()["model"])
    assert not same(ends[0], ends[1])


def test_restored_at_once_and_not_shared_with_what_was_given() -> None:
    first = new(make_scheduler=SCHEDULERS[1])
    first.fit(3)
    state = frozen(first)
    as_given = copy.deepcopy(state)
    again = new(seed=99, make_scheduler=SCHEDULERS[1])
    again.resume(state)
    assert_same(again.state_dict(), as_given)
    again.fit(5)
    assert_same(state, as_given)


def test_a_checkpoint_of_the_original_system_resumes(tmp_path: Path) -> None:
    manager = CheckpointManager(SEED_RUNS / "plain")
    state = manager.load_latest()
    assert state is not None and state["step"] == 8
    model = Named(state["model"])
    trained = [model.weights[i] for i, tensor in enumerate(state["model"].values()) if i < 1]
    norms = [w for w in model.weights if w.ndim == 1]
    optimizer = torch.optim.AdamW([*trained, *norms], lr=1.0)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    one = Trainer(model, optimizer, [torch.ones(2)], device="cpu", scheduler=scheduler)
    assert said(one, state).splitlines()[1:] == [
        "  - data: approximate: the checkpoint does not say where in the data it was"
    ]
    assert (one.step, one.samples, one.tokens) == (8, 16, 256)
    assert same(dict(model.state_dict()), dict(state["model"]))
    assert optimizer.param_groups[0]["lr"] == 2.6999999999999996e-05
    assert same(optimizer.state_dict()["state"], state["optimizer"]["state"])
    assert random.getstate() == state["rng"]["python"]
    assert one.fit(9).samples == 18


class Named(nn.Module):
    """Parameters with given names, dots and all; one loss over them."""

    def __init__(self, shapes: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.weights: list[nn.Parameter] = []
        for name, tensor in shapes.items():
            *path, last = name.split(".")
            home: nn.Module = self
            for part in path:
                if part not in home._modules:
                    home.add_module(part, nn.Module())
                home = home.get_submodule(part)
            self.weights.append(nn.Parameter(torch.zeros_like(tensor)))
            home.register_parameter(last, self.weights[-1])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return sum((weight.square().sum() for weight in self.weights), torch.zeros(()))


# The optimizer's state keeps its bits


class Odd(torch.optim.Optimizer):
    """Holds state of kinds that torch's loading casts to the parameter's dtype."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["rng"] = torch.randint(0, 256, (16,), dtype=torch.uint8)
                    state["count"] = torch.tensor(2**53 + 1)
                    state["master"] = parameter.float() + 1e-4
                    state["nested"] = {"double": [torch.tensor(1 / 3, dtype=torch.float64)]}
                state["count"] += 1
                parameter.sub_(parameter.grad, alpha=group["lr"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_optimizer_state_of_any_dtype_is_kept_bit_for_bit(dtype: torch.dtype) -> None:
    def made(seed: int) -> Trainer:
        torch.manual_seed(seed)
        model = nn.Linear(3, 2).to(dtype)
        batch = torch.ones(2, 3, dtype=dtype)
        return new(
            [batch], model=model, optimizer=Odd(model.parameters()), loss_fn=lambda m, b: m(b).sum()
        )

    first = made(0)
    first.fit(2)
    state = frozen(first)
    assert state["optimizer"]["state"][0]["count"].item() == 2**53 + 3
    again = made(1)
    again.resume(state)
    assert_same(again.state_dict(), state)
    assert again.state_dict()["optimizer"]["state"][0]["rng"].dtype == torch.uint8


def test_float32_moments_of_bfloat16_parameters_stay_float32() -> None:
    def made() -> Trainer:
        model = nn.Linear(3, 2).to(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return new([torch.ones(1)], model=model, optimizer=optimizer)

    state = frozen(made())
    moments = {key: torch.full((2, 3), 1 + 2**-20) for key in ("exp_avg", "exp_avg_sq")}
    state["optimizer"]["state"] = {0: {"step": torch.tensor(7.0), **moments}}
    again = made()
    again.resume(state)
    loaded = again.optimizer.state_dict()["state"][0]
    assert same(loaded, {"step": torch.tensor(7.0), **moments})


# All or nothing


def unchanged_by(trainer: Trainer, state: Any, error: type[Exception], words: str) -> None:
    """A resume that fails with torch's or our words, and changes nothing at all."""
    before, generators = frozen(trainer), (random.getstate(), torch.get_rng_state())
    moments = copy.deepcopy(trainer.optimizer.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResumeWarning)
        with pytest.raises(error, match=words):
            trainer.resume(state)
    assert_same(trainer.state_dict(), before)
    assert same(trainer.optimizer.state_dict(), moments)
    assert random.getstate() == generators[0] and torch.equal(torch.get_rng_state(), generators[1])
    trainer.fit(trainer.step + 1)  # and it still works


@pytest.fixture
def running() -> Trainer:
    one = new(make_scheduler=SCHEDULERS[3])
    one.fit(2)
    return one


@pytest.fixture
def state() -> dict[str, Any]:
    other = new(seed=5, make_scheduler=SCHEDULERS[3])
    other.fit(5)
    return frozen(other)


@pytest.mark.parametrize("missing", ["model", "optimizer", "step"])
def test_without_a_needed_key_nothing_changes(
    running: Trainer, state: dict[str, Any], missing: str
) -> None:
    del state[missing]
    unchanged_by(running, state, CheckpointError, f"{missing}: is missing")


@pytest.mark.parametrize("what", [None, [], 3, {"model": 3}])
def test_what_is_no_checkpoint_is_refused(running: Trainer, what: Any) -> None:
    unchanged_by(running, what, CheckpointError, "not a training checkpoint")


def test_parameter_groups_that_do_not_fit_change_nothing(
    running: Trainer, state: dict[str, Any]
) -> None:
    (group,) = state["optimizer"]["param_groups"]
    one, other = {**group, "params": [0, 1]}, {**group, "params": [2, 3, 4, 5]}
    state["optimizer"]["param_groups"] = [one, other]
    unchanged_by(running, state, ValueError, "different number of parameter groups")
    state["optimizer"]["param_groups"] = [{**group, "params": [0, 1, 2]}]
    unchanged_by(running, state, ValueError, "doesn't match the size of optimizer's group")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.pop("first.weight"), 'Missing key.*"first.weight"'),
        (lambda m: m.update(extra=torch.ones(1)), 'Unexpected key.*"extra"'),
        (
            lambda m: m.update({"second.weight": torch.ones(1, 9)}),
            "size mismatch for second.weight",
        ),
        (lambda m: m.update({"second.weight": "words"}), "second.weight"),
    ],
)
def test_a_model_that_does_not_fit_changes_nothing(
    running: Trainer, state: dict[str, Any], change: Any, words: str
) -> None:
    change(state["model"])
    unchanged_by(running, state, RuntimeError, f"(?s)Error.*in loading state_dict.*{words}")


def test_moments_that_do_not_fit_change_nothing(running: Trainer, state: dict[str, Any]) -> None:
    state["optimizer"]["state"][0]["exp_avg"] = torch.ones(6, 8)
    unchanged_by(
        running, state, CheckpointError, r"exp_avg has shape \(6, 8\).*first.weight.*\(8, 6\)"
    )


def test_optimizer_state_that_is_no_mapping_changes_nothing(
    running: Trainer, state: dict[str, Any]
) -> None:
    state["optimizer"]["state"][0] = 3
    unchanged_by(running, state, CheckpointError, r"optimizer\.state\.0: is a int, not a mapping")


def test_a_scheduler_that_refuses_changes_nothing(state: dict[str, Any]) -> None:
    class Refuses(lr_scheduler.StepLR):
        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            if state_dict["last_epoch"] == 5:
                raise KeyError("no such thing")

    one = new(make_scheduler=lambda optimizer: Refuses(optimizer, 4))
    one.fit(2)
    unchanged_by(one, state, CheckpointError, "scheduler: does not fit: 'no such thing' ")


def test_hooks_that_make_an_old_model_fit_may_do_so(
    running: Trainer, state: dict[str, Any]
) -> None:
    old = {name.replace("first", "former"): value for name, value in state["model"].items()}
    expected = dict(state["model"])

    def rename(module: Any, loaded: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in [name for name in loaded if name.startswith("former")]:
            loaded[name.replace("former", "first")] = loaded.pop(name)

    running.model.register_load_state_dict_pre_hook(rename)  # type: ignore[no-untyped-call]
    state["model"] = old
    assert "only saved: former.weight, former.bias" in said(running, state)
    assert same(dict(running.model.state_dict()), expected)


def test_a_schedulers_lists_are_not_shared_with_what_was_given(state: dict[str, Any]) -> None:
    class Remembers(lr_scheduler.StepLR):
        past: list[float]

        def step(self, epoch: int | None = None) -> None:
            self.past = getattr(self, "past", [])
            self.past.append(self.last_epoch)
            super().step()

    one = new(make_scheduler=lambda optimizer: Remembers(optimizer, 4))
    state["scheduler"]["past"] = [1, 2]
    one.resume(state)
    one.fit(6)
    assert state["scheduler"]["past"] == [1, 2]
    assert one.state_dict()["scheduler"]["past"] == [1, 2, 5]


def quantized(weight: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer torch deprecates making them
        return torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda w: w.to_sparse(), "is a sparse_coo real tensor"),
        (lambda w: w.to("meta"), "is a tensor on the meta device"),
        (lambda w: w.to(torch.complex64), "is a dense complex tensor"),
        (
            quantized,
            "is a dense quantized tensor",
        ),
    ],
    ids=["sparse", "meta", "complex", "quantized"],
)
def test_a_weight_that_is_not_dense_changes_nothing(
    running: Trainer, state: dict[str, Any], make: Any, words: str
) -> None:
    state["model"]["second.weight"] = make(state["model"]["second.weight"])
    unchanged_by(running, state, CheckpointError, rf"^model\.second\.weight: {words}")


def test_a_hook_that_raises_after_the_copying_changes_nothing(
    running: Trainer, state: dict[str, Any]
) -> None:
    def refuse(module: Any, keys: Any) -> None:
        if same(module.first.weight, state["model"]["first.weight"]):
            raise LookupError("not these weights")

    running.model.register_load_state_dict_post_hook(refuse)  # type: ignore[no-untyped-call]
    unchanged_by(running, state, CheckpointError, "model: does not fit: not these weights ")


def test_a_buffer_that_cannot_be_copied_into_changes_no_weight(state: dict[str, Any]) -> None:
    model = Net()
    model.register_buffer("wide", torch.ones(1).expand(3))
    one = new(model=model, make_scheduler=SCHEDULERS[3])
    before = frozen(one)["model"]["first.weight"]
    state["model"]["wide"] = torch.ones(3)
    with pytest.raises(RuntimeError, match="wide"):
        one.resume(state)
    assert same(model.first.weight.detach(), before) and one.step == 0


# The optimizer that saved and the one that goes on


def stepped(kind: Any, steps: int = 2, **options: Any) -> Trainer:
    model = Net()
    one = new(model=model, optimizer=kind(model.parameters(), lr=0.01, **options))
    if steps:
        one.fit(steps)
    return one


OPTIM = torch.optim
DENSE: list[tuple[Any, dict[str, Any]]] = [
    (OPTIM.SGD, {}),
    (OPTIM.SGD, {"momentum": 0.9}),
    (OPTIM.Adam, {}),
    (OPTIM.AdamW, {"amsgrad": True}),
    (OPTIM.NAdam, {}),
    (OPTIM.RAdam, {}),
    (OPTIM.Adamax, {}),
    (OPTIM.Adadelta, {}),
    (OPTIM.Adagrad, {}),
    (OPTIM.ASGD, {}),
    (OPTIM.RMSprop, {}),
    (OPTIM.RMSprop, {"momentum": 0.9, "centered": True}),
    (OPTIM.Rprop, {}),
    (OPTIM.Adafactor, {}),
]


@pytest.mark.parametrize(("kind", "options"), DENSE)
def test_each_of_torchs_optimizers_goes_on_from_its_own(
    tmp_path: Path, kind: Any, options: Any
) -> None:
    whole = stepped(kind, 0, **options)
    whole.checkpoint_manager = CheckpointManager(tmp_path, every_steps=2)
    whole.fit(4)
    state = torch.load(whole.checkpoint_manager.path_for(2), weights_only=True)
    again = stepped(kind, 0, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.resume(state)
    again.fit(4)
    assert_same(again.state_dict(), whole.state_dict())


@pytest.mark.parametrize(("kind", "options"), DENSE)
def test_what_resumes_can_be_stepped_whoever_saved_it(kind: Any, options: Any) -> None:
    refused = []
    for saver, its in DENSE:
        state = frozen(stepped(saver, **its))
        one = stepped(kind, 1, **options)
        before = frozen(one)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResumeWarning)
            try:
                one.resume(state)
            except CheckpointError:
                assert_same(one.state_dict(), before)
                refused.append(saver)
        target = one.step + 1
        assert one.fit(target).steps == target
    assert kind not in refused and len(set(refused)) > 7


@pytest.mark.parametrize(
    ("saver", "kind", "words"),
    [
        (OPTIM.AdamW, OPTIM.SGD, "momentum, dampening, nesterov, which SGD needs"),
        (OPTIM.SGD, OPTIM.AdamW, "betas, eps, amsgrad, which AdamW needs"),
        (OPTIM.AdamW, OPTIM.Adamax, r"optimizer\.state\.0\.exp_inf: is missing"),
    ],
)
def test_another_kind_of_optimizer_changes_nothing(saver: Any, kind: Any, words: str) -> None:
    unchanged_by(stepped(kind), frozen(stepped(saver)), CheckpointError, words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s[0].update(exp_avg=None), r"state\.0\.exp_avg: is None, not a tensor"),
        (lambda s: s[1].update(exp_avg_sq=[1.0]), r"state\.1\.exp_avg_sq: is a list"),
        (lambda s: s[1].pop("exp_avg"), r"state\.1\.exp_avg: is missing"),
        (lambda s: s[1].update(step=None), r"state\.1\.step: is None, not a number"),
        (lambda s: s[1].update(step=3), r"state\.1\.step: is a number here, a tensor there"),
        (lambda s: s[1].update(step=torch.ones(2)), r"state\.1\.step: is a Tensor, not a num"),
        (lambda s: s[1].update(exp_avg=torch.tensor(1.0)), r"exp_avg has shape \(\)"),
        (lambda s: s[1].update(exp_avg=s[1]["exp_avg"].to("meta")), r"exp_avg: .* meta device"),
        (lambda s: s[1].update(exp_avg=s[1]["exp_avg"].to_sparse()), r"exp_avg: is a sparse_coo"),
        (lambda s: s[1].update(exp_avg=s[1]["exp_avg"].long()), r"exp_avg: is .* of int64"),
    ],
)
def test_state_that_could_not_be_stepped_changes_nothing(
    running: Trainer, state: dict[str, Any], change: Any, words: str
) -> None:
    change(state["optimizer"]["state"])
    unchanged_by(running, state, CheckpointError, words)


@pytest.mark.parametrize(("name", "value"), [("lr", None), ("betas", 0.9), ("betas", (0.9,))])
def test_options_of_another_kind_change_nothing(
    running: Trainer, state: dict[str, Any], name: str, value: Any
) -> None:
    state["optimizer"]["param_groups"][0][name] = value
    words = rf"optimizer\.param_groups\[0\]\.{name}: is .*, which AdamW cannot use"
    unchanged_by(running, state, CheckpointError, words)


def test_amsgrad_without_its_moments_changes_nothing(
    running: Trainer, state: dict[str, Any]
) -> None:
    state["optimizer"]["param_groups"][0]["amsgrad"] = True
    unchanged_by(running, state, CheckpointError, "max_exp_avg_sq: is missing")


def test_options_that_older_files_lack_stay_as_they_are_here(state: dict[str, Any]) -> None:
    (group,) = state["optimizer"]["param_groups"]
    for name in ("foreach", "maximize", "capturable", "differentiable", "fused"):
        del group[name]
    group.pop("decoupled_weight_decay", None)
    del state["settings"]
    model = Net()
    optimizer = OPTIM.AdamW(model.parameters(), lr=0.01, maximize=True, foreach=False)
    one = new(model=model, optimizer=optimizer, make_scheduler=SCHEDULERS[3])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one.resume(state)
    (loaded,) = optimizer.param_groups
    assert (loaded["maximize"], loaded["foreach"], loaded["fused"]) == (True, False, None)
    assert one.fit(6).steps == 6


def test_options_that_nothing_uses_here_are_told() -> None:
    words = said(stepped(OPTIM.RAdam, 0), frozen(stepped(OPTIM.AdamW)))
    assert "parameter group 0: options that only the saved one has: amsgrad" in words


def test_no_state_or_none_for_frozen_parameters_is_honest(
    running: Trainer, state: dict[str, Any]
) -> None:
    del state["optimizer"]["state"][0]
    running.resume(state)
    assert running.fit(6).steps == 6
    state["optimizer"]["state"] = {}
    running.resume(state)
    assert running.fit(6).steps == 6


def test_an_optimizer_that_lacks_an_option_after_loading_changes_nothing() -> None:
    def made() -> Trainer:
        model = nn.Linear(3, 2)
        optimizer = Odd(model.parameters())
        return new([torch.ones(1, 3)], model=model, optimizer=optimizer, loss_fn=total)

    def total(model: nn.Module, batch: Any) -> torch.Tensor:
        out: torch.Tensor = model(batch)
        return out.sum()

    state = frozen(made())
    del state["optimizer"]["param_groups"][0]["lr"]
    unchanged_by(made(), state, CheckpointError, "has no lr, which Odd needs")


def test_momentum_of_sparse_gradients_is_honest() -> None:
    def made() -> Trainer:
        model = nn.EmbeddingBag(5, 2, sparse=True, mode="sum")
        optimizer = OPTIM.SGD(model.parameters(), lr=0.01, momentum=0.9)
        batch = torch.tensor([[1, 2]])
        return new([batch], model=model, optimizer=optimizer, loss_fn=lambda m, b: m(b).sum())

    first = made()
    first.fit(1)
    state = frozen(first)
    assert state["optimizer"]["state"][0]["momentum_buffer"].is_sparse
    again = made()
    again.resume(state)
    (weight,) = again.model.parameters()
    before = weight.detach().clone()
    again.fit(2)
    # The gradient is 1 for the rows 1 and 2: momentum 0.9 * 1 + 1, times the rate of 0.01.
    step = torch.tensor([0.0, 0.019, 0.019, 0.0, 0.0])[:, None].expand(5, 2)
    torch.testing.assert_close(before - weight.detach(), step)


def test_an_adagrad_without_its_sums_changes_nothing() -> None:
    state = frozen(stepped(OPTIM.Adagrad))
    state["optimizer"]["state"] = {}  # it makes them when it is made, never later
    words = r"optimizer\.state\.0\.step: is missing"
    unchanged_by(stepped(OPTIM.Adagrad), state, CheckpointError, words)


def test_a_nested_weight_changes_nothing(running: Trainer, state: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    state["model"]["second.weight"] = nested
    unchanged_by(running, state, CheckpointError, r"model\.second\.weight: is a nested")


# What differs is said, in one warning, before anything else


def test_nothing_is_said_where_nothing_differs(running: Trainer, state: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        running.resume(state)


def test_config_and_precision() -> None:
    config = {"lr": 0.1, "data": {"path": "a", "sizes": (1, 2)}, "token": "x", "nan": math.nan}
    one = new(config=config)
    state = frozen(one)
    config = {"lr": 0.2, "data": {"path": "a", "sizes": [1, 2]}, "token": "y", "nan": math.nan}
    words = said(new(config={**config, "new": None}, precision="bf16"), state)
    assert words.splitlines() == [
        "the checkpoint of step 0 and this run differ:",
        "  - precision.mode: 'fp32' was saved, 'bf16' is in use",
        "  - precision.autocast_enabled: False was saved, True is in use",
        "  - config.lr: 0.1 was saved, it is 0.2 here",
        "  - config.new: was not saved, it is None here",
    ]


def test_a_config_on_one_side_only_is_no_difference() -> None:
    state = frozen(new(config={"lr": 0.1}))
    new().resume(state)
    new(config={"lr": 0.1}).resume(frozen(new()))


def test_many_differences_are_cut_short() -> None:
    state = frozen(new(config={f"k{i}": 0 for i in range(30)}))
    words = said(new(config={f"k{i}": 1 for i in range(30)}), state)
    assert words.count("\n") == 9 and words.endswith("config: 22 more differences")


def groups(model: Net, *names: str) -> torch.optim.Optimizer:
    named = [
        {"params": getattr(model, name).named_parameters(prefix=name), "name": name}
        for name in names
    ]
    return torch.optim.SGD(named, lr=0.1)


def test_parameter_groups_by_name_and_size() -> None:
    model = Net()
    state = frozen(new(model=model, optimizer=groups(model, "first", "norm", "second")))

    model = Net()
    one = new(model=model, optimizer=groups(model, "first", "second"))
    with pytest.raises(ValueError, match="number of param") as caught:
        one.resume(state)
    assert str(caught.value).splitlines()[1:] == [
        "  - optimizer: 3 parameter groups of 2, 2, 2 parameters saved, 2 groups of 2, 2 here",
        "  - optimizer, parameter group 1 ('norm'): named 'norm' when saved, 'second' here",
        "  - optimizer, parameter group 1 ('norm'): only saved: norm.weight, norm.bias",
        "  - optimizer, parameter group 1 ('norm'): only here: second.weight, second.bias",
    ]


def test_parameter_groups_without_names_are_told_by_the_models() -> None:
    def made(*left_out: str) -> Trainer:
        model = Net()
        kept = [p for name, p in model.named_parameters() if name not in left_out]
        return new(model=model, optimizer=torch.optim.SGD(kept, lr=0.1))

    one = made("norm.bias")
    with pytest.raises(ValueError, match="doesn't match") as caught:
        one.resume(frozen(made()))
    assert "parameter group 0: 6 parameters saved, 5 here (first.weight, first.bias" in str(
        caught.value
    )


def test_parameters_in_another_order_are_refused() -> None:
    def made(*order: str) -> Trainer:
        model = Net()
        parameters = dict(model.named_parameters())
        named = [(name, parameters[name]) for name in order]
        return new(model=model, optimizer=torch.optim.SGD(named, lr=0.1))

    saved = frozen(made("norm.bias", "first.bias"))
    with pytest.raises(CheckpointError, match="first.bias where norm.bias was"):
        made("first.bias", "norm.bias").resume(saved)
    del saved["optimizer_names"]  # an older file: only torch's own names tell
    words = said(made("first.bias", "norm.bias"), saved)
    assert "the same parameters in another order" in words


def test_a_model_of_another_dtype_is_told(state: dict[str, Any]) -> None:
    one = new(model=Net().double(), make_scheduler=SCHEDULERS[3])
    assert "model.first.weight: float32 saved, cast to float64 here" in said(one, state)


def test_a_missing_or_unused_scheduler_is_told(state: dict[str, Any]) -> None:
    assert "scheduler: saved, but this run has none" in said(new(), state)
    words = said(new(make_scheduler=SCHEDULERS[3]), {**state, "scheduler": None})
    assert "scheduler: no state saved" in words


def test_random_numbers_that_cannot_be_restored_change_nothing(
    running: Trainer, state: dict[str, Any]
) -> None:
    rng = {**state["rng"], "python": "garbage", "torch": 3}
    unchanged_by(running, {**state, "rng": rng}, CheckpointError, r"rng\.python: .*rng\.torch: ")


def test_random_numbers_may_differ_where_that_is_allowed(
    state: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    one = new(make_scheduler=SCHEDULERS[3])
    rng = {**state["rng"], "python": "garbage", "torch": 3}
    words = said(one, {**state, "rng": rng}, allow_partial=("rng",)).splitlines()
    assert words[0] == "not all of the checkpoint of step 5 was restored:"
    assert words[1].startswith("  - rng.python: ") and words[2].startswith("  - rng.torch: ")
    assert "python" in caplog.text
    assert one.step == 5 and same(dict(one.model.state_dict()), dict(state["model"]))
    assert np.random.get_state()[1].tolist() == list(state["rng"]["numpy"][1])


def test_random_numbers_that_were_never_saved_are_told(state: dict[str, Any]) -> None:
    one = new(make_scheduler=SCHEDULERS[3])
    rng = {part: value for part, value in state["rng"].items() if part != "numpy"}
    words = said(one, {**state, "rng": rng})
    assert words.splitlines()[1:] == ["  - rng.numpy: the checkpoint holds no state for it"]
    words = said(one, {key: value for key, value in state.items() if key != "rng"})
    assert "  - rng: holds nothing where a mapping belongs" in words


# What is deferred: scaler and coordinator


def scaled(**options: Any) -> Trainer:
    return new(precision=FP16_SCALED, **options)


SCALER = {
    "scale": 1024.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "_growth_tracker": 7,
}


def scaled_state(step: int = 4) -> dict[str, Any]:
    one = scaled(start_step=step)
    return {**frozen(one), "scaler": dict(SCALER)}


def test_the_scalers_state_is_applied_when_fit_makes_it() -> None:
    one = scaled()
    one.resume(scaled_state())
    assert one.state_dict()["scaler"] == SCALER  # not lost while it waits
    one.fit(6)
    assert one.state_dict()["scaler"] == {**SCALER, "_growth_tracker": 9}


def test_a_scaler_that_this_plan_does_not_use_is_kept_and_told(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, every_steps=1)
    one = new(checkpoint_manager=manager)
    words = said(one, scaled_state())
    assert "scaler: saved, not used by this precision plan; later checkpoints keep it" in words
    one.fit(6)
    state = manager.load_latest()
    assert state is not None and state["step"] == 6 and state["scaler"] == SCALER


@pytest.mark.parametrize("saved", [None, {}])
def test_without_a_scalers_state_scaling_starts_afresh(saved: Any) -> None:
    one = scaled()
    one.fit(1)
    assert "scaler: no state saved" in said(one, {**scaled_state(), "scaler": saved})
    one.fit(5)
    scaler = one.state_dict()["scaler"]
    assert (scaler["scale"], scaler["_growth_tracker"]) == (65536.0, 1)


class Coordinator:
    def __init__(self, fails_to_load: bool = False) -> None:
        self.calls: list[Any] = []
        self.held: dict[str, Any] = {}
        self.fails_to_load = fails_to_load

    def start(self) -> None:
        self.calls.append("start")

    def after_optimizer_step(self, model: nn.Module, step: int) -> bool | None:
        self.calls.append(("after", step))
        self.held["local_step"] = step
        return None

    def stop(self) -> None:
        self.calls.append("stop")

    def state_dict(self) -> dict[str, Any] | None:
        self.calls.append("state_dict")
        return dict(self.held) or None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.calls.append("load_state_dict")
        if self.fails_to_load:
            raise ConnectionError("not now")
        self.held = dict(state)


HELD = {"local_step": 4, "baseline": {"w": torch.ones(2)}, "pending_upload": {"step": 4}}


def coordinated_state() -> dict[str, Any]:
    return {**frozen(new(start_step=4)), "coordinator": HELD}


def test_the_coordinators_state_is_applied_after_start(tmp_path: Path) -> None:
    coordinator = Coordinator()
    manager = CheckpointManager(tmp_path, every_steps=2)
    one = new(coordinator=coordinator, checkpoint_manager=manager)
    one.resume(coordinated_state())
    assert coordinator.calls == []
    one.fit(6)
    steps = [("after", 5), ("after", 6)]
    assert coordinator.calls == ["start", "load_state_dict", *steps, "state_dict", "stop"]
    saved = manager.load_latest()
    assert saved is not None and same(saved["coordinator"], {**HELD, "local_step": 6})


def test_at_the_target_nothing_is_rewritten_started_or_lost(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, every_steps=2)
    state = {**coordinated_state(), "scaler": dict(SCALER), "precision": FP16_SCALED.as_dict()}
    path = manager.save(4, state)
    before = (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino)
    coordinator = Coordinator()
    one = scaled(coordinator=coordinator, checkpoint_manager=manager, save_final=True)
    loaded = manager.load_latest()
    assert loaded is not None
    one.resume(loaded)
    for target in (4, 3):
        assert one.fit(target).steps == 4
    assert coordinator.calls == []
    assert (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino) == before
    assert same(one.state_dict()["coordinator"], HELD)
    assert one.state_dict()["scaler"] == SCALER
    one.fit(5)  # and later it is all still there to be applied
    assert coordinator.calls[:3] == ["start", "load_state_dict", ("after", 5)]
    assert same(coordinator.held["pending_upload"], {"step": 4})
    assert one.state_dict()["scaler"]["_growth_tracker"] == 8


def test_a_state_that_could_not_be_applied_waits_for_the_next_fit() -> None:
    coordinator = Coordinator(fails_to_load=True)
    one = new(coordinator=coordinator)
    one.resume(coordinated_state())
    with pytest.raises(ConnectionError):
        one.fit(6)
    assert coordinator.calls == ["start", "load_state_dict", "stop"]
    assert same(one.state_dict()["coordinator"], HELD)
    coordinator.fails_to_load = False
    one.fit(6)
    assert coordinator.held["pending_upload"] == {"step": 4}


def test_a_coordinators_state_without_a_coordinator_is_told_and_not_kept_past_a_step() -> None:
    one = new()
    assert "coordinator: saved, but this run has none" in said(one, coordinated_state())
    assert same(one.state_dict()["coordinator"], HELD)
    one.fit(5)
    assert one.state_dict()["coordinator"] is None  # its baseline belongs to step 4


def test_a_coordinator_without_a_saved_state_is_told() -> None:
    coordinator = Coordinator()
    one = new(coordinator=coordinator)
    assert "coordinator: no state saved" in said(one, frozen(new(start_step=4)))
    one.fit(5)
    assert "load_state_dict" not in coordinator.calls


def test_a_log_line_says_that_nothing_was_left_to_do(caplog: pytest.LogCaptureFixture) -> None:
    one = new(start_step=4)
    with caplog.at_level(logging.INFO):
        one.fit(4)
    assert "step 4 of 4 is done already" in caplog.text
