"""The loop against loops written by hand, bit for bit; what counts, what is saved, what is said."""

from __future__ import annotations

import collections
import io
import logging
import math
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from trainer_core import (
    Callback,
    CheckpointManager,
    PrecisionPlan,
    Trainer,
    TrainResult,
    capture_rng_state,
)
from trainer_core.callbacks import Callbacks
from trainer_core.loop.progress import Progress

FP16_SCALED = PrecisionPlan("fp16", autocast_enabled=False, use_scaler=True)
BF16 = PrecisionPlan("bf16", autocast_enabled=True, use_scaler=False)


class Net(nn.Module):
    """Regression with dropout, so that a loop which draws other random numbers is found out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.dropout = nn.Dropout(0.3)
        self.second = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(torch.relu(self.first(x)))
        return nn.functional.mse_loss(self.second(hidden), y)


def batches(count: int = 5, size: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(size, 6, generator=generator), torch.randn(size, 1, generator=generator))
        for _ in range(count)
    ]


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def trainer(loader: Any = None, **options: Any) -> Trainer:
    model = options.pop("model", None) or net()
    optimizer = options.pop("optimizer", None) or adamw(model)
    return Trainer(
        model, optimizer, batches() if loader is None else loader, device="cpu", **options
    )


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for (name, value), expected in zip(
        one.state_dict().items(), other.state_dict().values(), strict=True
    ):
        assert torch.equal(value, expected), name


def same(one: Any, other: Any) -> bool:
    """Bit equality of nested state dicts."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and one.equal(other)
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


# The same arithmetic as a loop written by hand


def test_plain_steps_are_those_of_a_bare_loop() -> None:
    ours = trainer()
    torch.manual_seed(11)
    result = ours.fit(7)

    theirs = net()
    optimizer = adamw(theirs)
    torch.manual_seed(11)
    theirs.train()
    losses = []
    for step in range(7):
        x, y = batches()[step % 5]
        optimizer.zero_grad()
        loss = theirs(x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    assert_equal(ours.model, theirs)
    assert same(ours.optimizer.state_dict(), optimizer.state_dict())
    assert [record["loss"] for record in result.metrics] == losses
    assert result.final_loss == losses[-1]
    assert (result.steps, result.samples, result.tokens) == (7, 28, 0)


def test_accumulation_clipping_and_schedule_are_those_of_a_bare_loop() -> None:
    def parts() -> tuple[Net, torch.optim.Optimizer, Any]:
        model = net()
        # Two groups, so that the order of the optimizer's parameters is not the model's.
        groups = [{"params": model.second.parameters()}, {"params": model.first.parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    model, optimizer, scheduler = parts()
    ours = trainer(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        accumulation_steps=3,
        grad_clip=0.05,
    )
    torch.manual_seed(11)
    result = ours.fit(5)

    theirs, optimizer, scheduler = parts()
    torch.manual_seed(11)
    stream = [batches()[i % 5] for i in range(15)]
    norms = []
    for step in range(5):
        total = torch.tensor(0.0)
        for x, y in stream[3 * step : 3 * step + 3]:
            loss = theirs(x, y)
            (loss / 3).backward()
            total += loss.detach()
        norms.append(nn.utils.clip_grad_norm_(theirs.parameters(), 0.05).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    assert min(norms) > 0.05  # else nothing was clipped
    assert_equal(ours.model, theirs)
    assert result.final_loss == (total / 3).item()
    assert ours.optimizer.param_groups[0]["lr"] == 0.1 * 0.5**2
    assert [record["lr"] for record in result.metrics] == [0.1, 0.1, 0.05, 0.05, 0.025]
    assert result.samples == 5 * 3 * 4


def test_the_norm_that_clips_is_taken_in_the_models_order() -> None:
    def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(20)))
        groups = [{"params": layer.parameters()} for layer in reversed(list(model))]
        return model, torch.optim.SGD(groups, lr=10.0)

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        losses = [layer(batch[0]).square().mean() for layer in model.children()]
        return torch.stack(losses).sum()

    model, optimizer = parts()
    trainer(model=model, optimizer=optimizer, loss_fn=loss_fn, grad_clip=0.5).fit(20)
    theirs, optimizer = parts()
    for step in range(20):
        loss_fn(theirs, batches()[step % 5]).backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(model, theirs)


def test_only_what_the_optimizer_trains_is_clipped() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.second.parameters(), lr=1.0)
    one = trainer(
        [torch.ones(2, 6)],
        model=model,
        optimizer=optimizer,
        grad_clip=1.0,
        loss_fn=lambda m, x: 1e6 * m.first(x).sum() + 3 * m.second.weight.sum(),
    )
    before = model.second.weight.detach().clone()
    one.fit(1)
    # The gradient is 3 in each of 8 places, its norm 6 sqrt 2; clipped, each is 1 / sqrt 8.
    torch.testing.assert_close(before - model.second.weight, torch.full((1, 8), 8**-0.5))


def test_a_learning_rate_that_is_a_tensor_is_noted_as_it_was() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    result = trainer(model=model, optimizer=optimizer, scheduler=scheduler).fit(30)
    assert [record["lr"] for record in result.metrics] == [0.5 ** (1 + step) for step in range(30)]


def test_bfloat16_autocast_is_that_of_a_bare_loop() -> None:
    ours = trainer(precision="bf16")
    assert ours.precision == BF16
    torch.manual_seed(11)
    ours.fit(4)

    theirs = net()
    plain = net()
    optimizer = adamw(theirs)
    torch.manual_seed(11)
    for step in range(4):
        x, y = batches()[step]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = theirs(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(ours.model, theirs)
    assert next(iter(ours.model.parameters())).dtype == torch.float32
    assert not torch.equal(theirs.first.weight, plain.first.weight)


def test_a_dataloader_draws_the_same_random_numbers_as_in_a_bare_loop() -> None:
    data = TensorDataset(*(torch.cat(side) for side in zip(*batches(), strict=True)))
    ours = trainer(DataLoader(data, batch_size=4, shuffle=True))
    torch.manual_seed(11)
    ours.fit(12)

    theirs = net()
    optimizer = adamw(theirs)
    torch.manual_seed(11)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    step = 0
    while step < 12:
        for x, y in loader:
            theirs(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == 12:
                break
    assert_equal(ours.model, theirs)


def test_gradients_left_from_before_do_not_count() -> None:
    ours, theirs = trainer(), trainer()
    x, y = batches()[0]
    theirs.model(x, 100 * y).backward()
    for each in (ours, theirs):
        torch.manual_seed(11)
        each.fit(2)
    assert_equal(ours.model, theirs.model)


# What a batch may be, and what a model may return


class Recorder(nn.Module):
    """Takes anything, remembers it, and answers as it is told."""

    def __init__(self, answer: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.answer = answer or (lambda loss: loss)
        self.seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append((args, kwargs))
        return self.answer(self.weight * 2)


Pair = collections.namedtuple("Pair", ["left", "right"])
ROWS, IDS = torch.ones(3, 2), torch.arange(8).reshape(2, 4)


@pytest.mark.parametrize(
    ("batch", "args", "kwargs"),
    [
        (ROWS, (ROWS,), {}),
        ([ROWS], (ROWS,), {}),
        ((ROWS, 5), (ROWS, 5), {}),
        (Pair(ROWS, "name"), (ROWS, "name"), {}),
        ({"x": ROWS, "more": {"y": [IDS]}}, (), {"x": ROWS, "more": {"y": [IDS]}}),
        (collections.OrderedDict(x=ROWS), (), {"x": ROWS}),
    ],
    ids=["tensor", "list", "tuple", "namedtuple", "dict", "ordered"],
)
def test_how_the_model_is_called(batch: Any, args: Any, kwargs: Any) -> None:
    model = Recorder()
    one = trainer([batch], model=model)
    assert one.fit(1).final_loss == 2.0
    assert same(model.seen[0][0], args) and same(model.seen[0][1], kwargs)


def test_types_of_a_batch_stay_on_the_way_to_the_device() -> None:
    class Own(dict[str, Any]):
        pass

    class Movable:
        moved_to: Any = None

        def to(self, device: torch.device) -> Movable:
            self.moved_to = device
            return self

    movable = Movable()
    batch = [Own(a=Pair(ROWS, (IDS, None))), movable, "words", 3]
    seen: list[Any] = []

    def loss_fn(model: nn.Module, given: Any) -> torch.Tensor:
        seen.append(given)
        return next(model.parameters()).sum()

    Trainer(
        Recorder(),
        torch.optim.SGD([torch.ones(())], lr=1.0),
        [batch],
        device="cpu",
        loss_fn=loss_fn,
    ).fit(1)
    (given,) = seen
    assert type(given) is list and type(given[0]) is Own and type(given[0]["a"]) is Pair
    assert given[0]["a"].left is ROWS and given[0]["a"].right == (IDS, None)
    assert given[1] is movable and movable.moved_to == torch.device("cpu")
    assert given[2:] == ["words", 3]


def test_the_device_moves_model_and_every_tensor_of_a_batch() -> None:
    from trainer_core.loop.batches import to_device

    meta = torch.device("meta")
    moved = to_device({"a": (ROWS, [IDS]), "b": Pair(ROWS, "x")}, meta)
    assert moved["a"][0].is_meta and moved["a"][1][0].is_meta and moved["b"].left.is_meta
    assert moved["b"].right == "x"
    model = nn.Linear(2, 2)
    parameter = model.weight
    Trainer(model, torch.optim.SGD(model.parameters()), [], device="cpu")
    assert model.weight is parameter


@pytest.mark.parametrize(
    ("batch", "samples", "tokens"),
    [
        (IDS, 2, 8),
        ((IDS, IDS), 2, 8),
        ({"labels": torch.ones(5), "input_ids": IDS}, 2, 8),
        ({"x": torch.ones(5, 3), "y": IDS}, 5, 0),
        (torch.ones(3, 7), 3, 0),
        (torch.zeros(6, 3, 8, 8, dtype=torch.uint8), 6, 0),
        (torch.ones(4, 2, dtype=torch.bool), 4, 0),
        (torch.tensor(1.0), 1, 0),
        (["a", {"deep": [None, torch.ones(9)]}], 9, 0),
        ("nothing", 1, 0),
    ],
)
def test_what_counts_as_samples_and_tokens(batch: Any, samples: int, tokens: int) -> None:
    one = Trainer((model := Recorder()), adamw(model), [batch], device="cpu", accumulation_steps=2)
    result = one.fit(3)
    assert (result.samples, result.tokens) == (2 * 3 * samples, 2 * 3 * tokens)


class WithLoss:
    def __init__(self, loss: Any) -> None:
        self.loss = loss


@pytest.mark.parametrize(
    "answer",
    [
        lambda loss: loss,
        lambda loss: loss.reshape(1),
        lambda loss: {"logits": ROWS, "loss": loss},
        lambda loss: (loss, ROWS),
        lambda loss: [loss],
        lambda loss: ({"loss": loss}, ROWS),
        WithLoss,
    ],
)
def test_what_a_model_may_return(answer: Any) -> None:
    one = trainer([ROWS], model=Recorder(answer))
    assert one.fit(2).metrics[0]["loss"] == 2.0


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (lambda loss: loss * torch.ones(3), ValueError, r"shape \(3,\).*mean"),
        (lambda loss: loss * torch.ones(0), ValueError, r"shape \(0,\)"),
        (lambda loss: {"logits": loss}, TypeError, "without 'loss'.*'logits'"),
        (lambda loss: None, TypeError, "not None"),
        (lambda loss: (), TypeError, "an empty tuple"),
        (lambda loss: 2.5, TypeError, "a float"),
    ],
)
def test_what_is_no_loss_is_said_clearly(answer: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        trainer([ROWS], model=Recorder(answer)).fit(1)


def test_loss_fn_replaces_call_and_loss() -> None:
    model = Recorder(lambda loss: "not a loss")
    one = trainer([ROWS], model=model, loss_fn=lambda m, batch: (m.weight * batch.sum(), "more"))
    assert one.fit(1).final_loss == 6.0
    assert model.seen == []


# How long, and over which data


def test_max_steps_is_absolute() -> None:
    one = trainer(max_steps=3)
    assert one.fit().steps == 3
    assert one.fit(5).steps == 5
    again = one.fit(4)
    assert (again.steps, again.samples, again.final_loss, again.metrics) == (5, 20, None, [])
    assert trainer(start_step=10).fit(12).samples == 2 * 4


def test_the_step_to_train_to_is_needed() -> None:
    with pytest.raises(ValueError, match="max_steps is needed"):
        trainer().fit()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_steps": 0}, ValueError),
        ({"max_steps": -1}, ValueError),
        ({"max_steps": 2.5}, TypeError),
        ({"start_step": -1}, ValueError),
        ({"accumulation_steps": 0}, ValueError),
        ({"accumulation_steps": True}, ValueError),
        ({"grad_clip": 0.0}, ValueError),
        ({"grad_clip": math.inf}, ValueError),
        ({"grad_clip": math.nan}, ValueError),
        ({"precision": "fp8"}, ValueError),
        ({"coordinator": object()}, TypeError),
        ({"callbacks": [3]}, TypeError),
        ({"config": 3}, TypeError),
        ({"optimizer": "adam"}, TypeError),
    ],
)
def test_what_cannot_be_is_refused_at_once(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        trainer(**options)


@pytest.mark.parametrize("value", [10.0, True, "10", [1], math.nan, -3, torch.ones(2)])
@pytest.mark.parametrize("name", ["max_steps", "start_step", "accumulation_steps", "grad_clip"])
def test_a_number_that_is_none_is_refused_by_its_name(name: str, value: Any) -> None:
    if name == "grad_clip" and type(value) is float and value == 10:
        value = math.inf
    with pytest.raises((TypeError, ValueError), match=f"^{name} must be a ") as caught:
        trainer(**{name: value})
    assert str(caught.value).endswith(f", not {value!r}")
    if name == "max_steps":
        with pytest.raises(type(caught.value), match="^max_steps must be a whole number, at least"):
            trainer().fit(value)


def test_numbers_of_other_libraries_are_numbers() -> None:
    one = trainer(accumulation_steps=torch.tensor(2), grad_clip=torch.tensor(0.5))
    assert (one.accumulation_steps, one.fit(torch.tensor(1)).steps) == (2, 1)  # type: ignore[arg-type]


class Needs(torch.optim.SGD):
    """An optimizer that is told more at each step."""

    def step(self, loss: Any, *more: Any, closure: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError


@pytest.mark.parametrize(
    ("kind", "words"), [(torch.optim.LBFGS, r"^LBFGS\.step needs closure,"), (Needs, "needs loss,")]
)
def test_an_optimizer_that_asks_for_more_is_refused_at_once(kind: Any, words: str) -> None:
    model = net()
    optimizer = kind(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=words):
        trainer(model=model, optimizer=optimizer)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)  # it wraps `step`
    with pytest.raises(TypeError, match=words):
        trainer(model=model, optimizer=optimizer, scheduler=schedule)


def test_a_fit_or_a_resume_within_a_fit_is_refused_at_once() -> None:
    one = trainer()
    state = one.state_dict()
    said = []

    class Nests(Callback):
        def tries(self) -> None:
            for call in (lambda: one.fit(9), lambda: one.resume(state)):
                with pytest.raises(RuntimeError, match="was called within a fit") as caught:
                    call()
                said.append(str(caught.value).split()[0])

        def on_fit_start(self, trainer: Trainer) -> None:
            self.tries()

        def on_step_end(self, trainer: Trainer, step: int, metrics: dict[str, Any]) -> None:
            self.tries()

        def on_fit_end(self, trainer: Trainer, result: TrainResult) -> None:
            if result.steps < 4:
                trainer.fit(4)  # all of the first is done

    one._callbacks = Callbacks([Nests()])
    assert one.fit(2).steps == 2 and one.step == 4
    assert said == ["fit", "resume"] * 6
    one._callbacks = Callbacks([lambda trainer, step, metrics: trainer.fit(9)])
    with pytest.raises(RuntimeError, match="within a fit"):
        one.fit(5)
    one._callbacks = Callbacks([])
    assert one.fit(6).steps == 6  # and it may be gone on with


def test_a_scheduler_that_wants_a_metric_is_refused_at_once() -> None:
    model = net()
    optimizer = adamw(model)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(TypeError, match="ReduceLROnPlateau"):
        trainer(model=model, optimizer=optimizer, scheduler=plateau)


def test_a_scheduler_that_could_not_be_saved_is_refused_at_once() -> None:
    class Moves:
        def step(self) -> None: ...

    with pytest.raises(TypeError, match="Moves is no scheduler: it has no state_dict"):
        trainer(scheduler=Moves())


def test_a_fit_of_no_step_is_refused() -> None:
    with pytest.raises(ValueError, match="max_steps"):
        trainer().fit(0)


@pytest.mark.parametrize("loader", [[], iter(()), DataLoader(TensorDataset(torch.ones(0, 6)))])
def test_an_empty_loader_is_a_clear_error(loader: Any) -> None:
    with pytest.raises(ValueError, match="gave no batch"):
        trainer(loader).fit(1)


def test_a_used_up_iterator_is_a_clear_error() -> None:
    one = trainer(iter(batches(2)))
    one.fit(2)
    with pytest.raises(ValueError, match="used up"):
        one.fit(3)


def test_an_iterator_that_ends_early_ends_the_fit_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path, every_steps=2)
    one = trainer(
        iter(batches(7)), accumulation_steps=2, checkpoint_manager=manager, save_final=True
    )
    torch.manual_seed(0)
    result = one.fit(10)
    assert (result.steps, result.samples) == (3, 24)
    assert "ended after step 3, before step 10" in caplog.text
    assert [path.name for path in sorted(tmp_path.glob("*.pt"))] == [
        "step_000000000002.pt",
        "step_000000000003.pt",
    ]
    # The odd batch at the end leaves neither a step nor gradients.
    assert all(parameter.grad is None for parameter in one.model.parameters())
    whole = trainer(iter(batches(6)), accumulation_steps=2)
    torch.manual_seed(0)
    whole.fit(3)
    assert_equal(one.model, whole.model)


class Once(IterableDataset[Any]):
    """A generator behind a dataset: it gives its batches in the first pass only."""

    def __init__(self) -> None:
        self.source = iter(batches(3))

    def __iter__(self) -> Iterator[Any]:
        return self.source


def test_a_generator_behind_a_dataloader_ends_the_fit(caplog: pytest.LogCaptureFixture) -> None:
    assert trainer(DataLoader(Once(), batch_size=None)).fit(10).steps == 3
    assert "ended after step 3" in caplog.text


# Checkpoints


def saved_steps(directory: Path) -> list[int]:
    return sorted(int(path.stem[5:]) for path in directory.glob("step_*.pt"))


def test_only_exact_intervals_are_saved(tmp_path: Path) -> None:
    trainer(checkpoint_manager=CheckpointManager(tmp_path, every_steps=2)).fit(5)
    assert saved_steps(tmp_path) == [2, 4]


@pytest.mark.parametrize(("last", "saved"), [(5, [2, 4, 5]), (4, [2, 4])])
def test_save_final_saves_the_last_step_once(tmp_path: Path, last: int, saved: list[int]) -> None:
    saves: list[int] = []

    class Note(Callback):
        def on_save(self, trainer: Trainer, step: int, path: Path) -> None:
            assert path == tmp_path / f"step_{step:012d}.pt" and path.is_file()
            saves.append(step)

    manager = CheckpointManager(tmp_path, every_steps=2)
    one = trainer(checkpoint_manager=manager, save_final=True, callbacks=[Note()])
    one.fit(last)
    assert saved_steps(tmp_path) == saved == saves
    one.fit(last)
    assert saves == saved


def test_a_manager_that_is_off_saves_nothing(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "no", every_steps=1, enabled=False)
    trainer(checkpoint_manager=manager, save_final=True).fit(2)
    assert not (tmp_path / "no").exists()


def test_a_checkpoint_holds_what_torch_says(tmp_path: Path) -> None:
    model = net()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    one = trainer(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        config={"lr": 0.01, "token": "hunter2"},
        checkpoint_manager=CheckpointManager(tmp_path, every_steps=3),
    )
    one.fit(3)
    state = torch.load(tmp_path / "step_000000000003.pt", weights_only=True)
    assert list(state) == [
        *("model", "optimizer", "scaler", "scheduler", "step", "samples", "tokens", "config"),
        *("rng", "coordinator", "precision", "data", "modes", "environment"),
        *("settings", "attributes"),
        "optimizer_names",
        *("run_id", "parent_step"),
    ]
    assert same(state["model"], model.state_dict())
    assert same(state["optimizer"], optimizer.state_dict())
    assert same(state["scheduler"], scheduler.state_dict())
    assert (state["step"], state["samples"], state["tokens"]) == (3, 12, 0)
    assert state["config"]["lr"] == 0.01 and "hunter2" not in repr(state)
    assert same(state["rng"], capture_rng_state())  # nothing was drawn after the last step
    assert state["scaler"] is None and state["coordinator"] is None
    assert state["precision"] == {"mode": "fp32", "autocast_enabled": False, "use_scaler": False}


def test_an_error_in_a_step_ends_the_fit_at_the_last_whole_step(tmp_path: Path) -> None:
    calls = iter(range(100))

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        if next(calls) == 5:
            raise RuntimeError("no power")
        loss: torch.Tensor = model(*batch)
        return loss

    one = trainer(loss_fn=loss_fn, checkpoint_manager=CheckpointManager(tmp_path, every_steps=2))
    with pytest.raises(RuntimeError, match="no power"):
        one.fit(10)
    assert one.step == 5 and saved_steps(tmp_path) == [2, 4]
    assert one.fit(6).steps == 6


# The coordinator


class Coordinator:
    """A small real one: it counts, writes down every call, and fails where it is told to."""

    def __init__(self, fails_in: str = "", reset_at: int = 0) -> None:
        self.calls: list[Any] = []
        self.local_step = 0
        self.fails_in, self.reset_at = fails_in, reset_at

    def _note(self, name: str, *more: Any) -> None:
        self.calls.append((name, *more) if more else name)
        if name in self.fails_in.split():
            raise ConnectionError(f"{name} failed")

    def start(self) -> None:
        self._note("start")

    def after_optimizer_step(self, model: nn.Module, step: int) -> bool | None:
        self._note("after", step)
        self.local_step = step
        return step == self.reset_at or None

    def stop(self) -> None:
        self._note("stop")

    def state_dict(self) -> dict[str, Any] | None:
        self._note("state_dict")
        return {"local_step": self.local_step, "role": "worker", "node_id": "w1"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._note("load_state_dict", state["local_step"])
        self.local_step = state["local_step"]


def coordinated(tmp_path: Path, coordinator: Coordinator, **options: Any) -> Trainer:
    manager = CheckpointManager(tmp_path, every_steps=1)
    return trainer(coordinator=coordinator, checkpoint_manager=manager, **options)


def test_call_order_of_a_fresh_run(tmp_path: Path) -> None:
    coordinator = Coordinator()
    one = coordinated(tmp_path, coordinator)
    one.fit(2)
    run = ["start", ("after", 1), "state_dict", ("after", 2), "state_dict", "stop"]
    assert coordinator.calls == run
    saved = torch.load(tmp_path / "step_000000000002.pt", weights_only=True)["coordinator"]
    assert saved == {"local_step": 2, "role": "worker", "node_id": "w1"}
    one.fit(3)  # anew
    assert coordinator.calls[len(run) :] == ["start", ("after", 3), "state_dict", "stop"]


@pytest.mark.parametrize("fails_in", ["start", "after", "state_dict"])
def test_a_failing_coordinator_ends_the_fit_with_its_error_and_is_stopped(
    tmp_path: Path, fails_in: str
) -> None:
    coordinator = Coordinator(fails_in)
    with pytest.raises(ConnectionError, match=f"{fails_in} failed"):
        coordinated(tmp_path, coordinator).fit(2)
    assert coordinator.calls[-1] == "stop" and coordinator.calls.count("stop") == 1


def test_a_failing_stop_costs_no_checkpoint(tmp_path: Path) -> None:
    one = trainer(
        coordinator=Coordinator("stop"),
        checkpoint_manager=CheckpointManager(tmp_path, every_steps=2),
        save_final=True,
    )
    with pytest.raises(ConnectionError, match="stop failed"):
        one.fit(3)
    assert saved_steps(tmp_path) == [2, 3] and one.step == 3


def test_a_failing_stop_does_not_hide_the_first_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConnectionError, match="after failed"):
        coordinated(tmp_path, Coordinator("after stop")).fit(3)
    assert "stop failed" in caplog.text


def test_an_interrupt_stops_the_coordinator(tmp_path: Path) -> None:
    def interrupt(trainer: Trainer, step: int, metrics: Any) -> None:
        raise KeyboardInterrupt

    coordinator = Coordinator()
    with pytest.raises(KeyboardInterrupt):
        coordinated(tmp_path, coordinator, callbacks=[interrupt]).fit(3)
    assert coordinator.calls == ["start", ("after", 1), "stop"]


def test_a_true_answer_resets_the_inner_optimizer(tmp_path: Path) -> None:
    one = coordinated(tmp_path, Coordinator(reset_at=2))
    one.fit(2)
    assert one.optimizer.state_dict()["state"] == {}
    one.fit(3)
    assert one.optimizer.state_dict()["state"][0]["step"] == 1


# The loss scaler


def spoiling(bad: set[int]) -> Any:
    """A loss whose gradients are infinite in the given calls."""
    calls = iter(range(10_000))

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = model(*batch)
        return loss * math.inf if next(calls) in bad else loss

    return loss_fn


@pytest.mark.parametrize("grad_clip", [None, 0.01])
def test_a_step_that_the_scaler_skips_does_not_count(grad_clip: float | None) -> None:
    def parts() -> tuple[Net, torch.optim.Optimizer, Any]:
        model = net()
        model.dropout.p = 0.0
        optimizer = adamw(model)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)

    model, optimizer, scheduler = parts()
    one = trainer(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        precision=FP16_SCALED,
        grad_clip=grad_clip,
        loss_fn=spoiling({0, 2, 3}),
    )
    result = one.fit(4)
    assert (result.steps, result.samples) == (4, 16)
    assert scheduler.last_epoch == 4
    assert optimizer.state_dict()["state"][0]["step"] == 4

    theirs, optimizer, scheduler = parts()
    for index in (1, 4, 5, 6):  # the batches whose steps were taken
        x, y = batches()[index % 5]
        (theirs(x, y) * 65536.0).backward()
        for parameter in theirs.parameters():
            assert parameter.grad is not None
            parameter.grad /= 65536.0
        if grad_clip is not None:
            nn.utils.clip_grad_norm_(theirs.parameters(), grad_clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    for ours, other in zip(one.model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours, other)
    scale = one.state_dict()["scaler"]["scale"]
    assert scale == 65536.0 * 0.5**3  # halved by each skip


def test_endless_skips_end_in_an_error() -> None:
    one = trainer(precision=FP16_SCALED, loss_fn=spoiling(set(range(1000))))
    with pytest.raises(RuntimeError, match="100 optimizer steps in a row"):
        one.fit(1)
    assert one.step == 0 and one.samples == 0


def test_the_scaler_goes_on_in_a_later_fit() -> None:
    one = trainer(precision=FP16_SCALED, loss_fn=spoiling({0}))
    one.fit(1)
    one.fit(2)
    state = one.state_dict()["scaler"]
    assert state["scale"] == 32768.0 and state["_growth_tracker"] == 2


# Callbacks


def test_callbacks_are_called_in_order() -> None:
    calls: list[Any] = []

    class Everything:
        def on_fit_start(self, trainer: Trainer) -> None:
            calls.append(("start", trainer.step))

        def on_step_end(self, trainer: Trainer, step: int, metrics: dict[str, Any]) -> None:
            assert trainer.step == step == metrics["step"]
            assert isinstance(metrics["loss"], torch.Tensor)
            calls.append(("step", step, metrics["samples"], metrics["lr"]))

        def on_fit_end(self, trainer: Trainer, result: TrainResult) -> None:
            calls.append(("end", result.steps))

    def plain(trainer: Trainer, step: int, metrics: dict[str, Any]) -> None:
        calls.append(step)

    one = trainer(callbacks=[Everything(), plain, Callback()])
    one.fit(2)
    expected = [("start", 0), ("step", 1, 4, 0.01), 1, ("step", 2, 8, 0.01), 2, ("end", 2)]
    assert calls == expected
    one.fit(2)  # nothing left to do
    assert calls == expected


def test_what_a_callback_raises_ends_the_fit() -> None:
    def enough(trainer: Trainer, step: int, metrics: dict[str, Any]) -> None:
        if step == 2:
            raise StopIteration("enough")

    one = trainer(callbacks=[enough])
    with pytest.raises(StopIteration):
        one.fit(5)
    assert one.step == 2


# What is said


def test_plain_lines_go_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("a run")
    with caplog.at_level(logging.INFO, "a run"):
        result = trainer(logger=logger).fit(30)
    lines = [record.message for record in caplog.records if record.name == "a run"]
    steps = [int(line.split()[1].split("/")[0]) for line in lines]
    assert steps == [1, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30]
    assert lines[-1].startswith(f"step 30/30  loss {result.final_loss:.4f}  lr 0.01  ")
    assert lines[-1].endswith(" steps/s")


def in_new_process(code: str) -> subprocess.CompletedProcess[str]:
    head = "import sys, torch\nfrom torch import nn\nfrom trainer_core import *\n"
    program = head + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_without_any_logging_lines_go_to_standard_error() -> None:
    done = in_new_process(
        """
        model = nn.Linear(2, 1)
        Trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.5), [torch.ones(2, 2)], device="cpu",
            loss_fn=lambda m, b: m(b).mean(),
        ).fit(3)
        """
    )
    lines = done.stderr.splitlines()
    assert done.returncode == 0 and done.stdout == ""
    assert [line.split("  ")[0] for line in lines] == ["step 1/3", "step 2/3", "step 3/3"]
    assert "lr 0.5" in lines[0]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_there_is_a_bar() -> None:
    screen = Terminal()
    progress = Progress(logging.getLogger("a run"), 10, 20, stream=screen)
    for step in range(11, 21):
        progress.note(step, torch.tensor(1.5), 0.25, step, 0)
    assert progress.finish() == 1.5
    progress.close()
    last = screen.getvalue().rstrip().split("\r")[-1]
    assert "20/20" in last and "loss 1.5000" in last and "lr 0.25" in last and "steps/s" in last


def test_a_loss_that_is_not_finite_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    one = trainer([ROWS], model=Recorder(lambda loss: loss * math.nan))
    result = one.fit(600)
    told = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.message for record in told] == ["the loss is nan at step 1"]
    assert result.final_loss is not None and math.isnan(result.final_loss)


def test_records_stay_few_in_a_long_run() -> None:
    progress = Progress(logging.getLogger("a run"), 0, 5000, stream=io.StringIO())
    for step in range(1, 5001):
        progress.note(step, torch.tensor(float(step)), 0.1, step, 0)
    assert progress.finish() == 5000.0
    steps = [record["step"] for record in progress.records]
    assert steps == list(range(1, 5001, 8))
    assert all(record["loss"] == record["step"] for record in progress.records)


def test_losses_are_right_where_a_model_reuses_their_memory() -> None:
    buffer = torch.zeros(())  # as a captured CUDA graph does, each step writes to the same memory

    class Reuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
            buffer.add_(1)
            return buffer.view(())

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return torch.zeros(())

    model = Recorder()
    one = trainer(
        [ROWS],
        model=model,
        loss_fn=lambda m, b: Reuses.apply(m.weight),  # type: ignore[no-untyped-call]
    )
    losses = [record["loss"] for record in one.fit(25).metrics]
    assert losses == [float(step) for step in range(1, 26)]
