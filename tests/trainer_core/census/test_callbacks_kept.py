"""What callbacks, optimizers and schedules remember beside any state dict goes on as it was."""

from __future__ import annotations

import copy
import functools
import io
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

from tests.trainer_core.census.test_census import BATCHES, Model, saved, trainer, words
from trainer_core import CheckpointError, Trainer


class EarlyStopping:
    """As everybody writes it: no state_dict, and it moves the learning rate."""

    def __init__(self) -> None:
        self.best, self.bad, self.history = math.inf, 0, [0.0]
        self.trainer: Any = None
        self.began: float | None = None
        self.writer: Any = None
        self.log = logging.getLogger("early")

    def on_fit_start(self, trainer: Trainer) -> None:
        self.trainer, self.model, self.layer = trainer, trainer.model, trainer.model.layer
        self.file = io.StringIO()
        self.started = time.time()

    def on_step_end(self, trainer: Trainer, step: int, metrics: dict[str, Any]) -> None:
        loss = float(metrics["loss"])
        self.began = self.began or time.perf_counter()
        self.writer = self.writer or Writer()
        self.history.append(loss)
        self.best, self.bad = (loss, 0) if loss < self.best else (self.best, self.bad + 1)
        if self.bad:
            trainer.optimizer.param_groups[0]["lr"] *= 0.5


class Resetting(EarlyStopping):
    def on_fit_start(self, trainer: Trainer) -> None:
        super().on_fit_start(trainer)
        self.best, self.bad, self.history = math.inf, 0, [0.0]


def weight_of(trainer: Trainer) -> torch.Tensor:
    return trainer.model.get_parameter("layer.weight")


class Writer(logging.StreamHandler):  # type: ignore[type-arg]  # takes none before Python 3.11
    """With a lock, and a stream."""


Writer.__module__ = "logging"  # of another package


def with_callback(make: Callable[[], Any], **options: Any) -> Trainer:
    torch.manual_seed(4)
    return trainer(Model(), callbacks=[make()], **options)


def only(one: Trainer) -> Any:
    return next(iter(one._callbacks.others.values()))


@pytest.mark.parametrize("kind", [EarlyStopping, Resetting])
def test_an_early_stopper_goes_on_at_every_step(tmp_path: Path, kind: Any) -> None:
    whole = with_callback(kind)
    whole.fit(7)
    for at in range(1, 7):
        one, again = with_callback(kind), with_callback(kind)
        one.fit(at)
        assert words(again, saved(one, tmp_path)) == []
        assert only(again).history == only(one).history
        again.fit(7)
        assert torch.equal(weight_of(again), weight_of(whole))
        mine, its = vars(only(again)), vars(only(whole))
        assert [mine[name] for name in ("best", "bad", "history")] == [
            its[name] for name in ("best", "bad", "history")
        ]


def test_what_is_no_state_is_neither_kept_nor_talked_about(tmp_path: Path) -> None:
    one = with_callback(EarlyStopping)
    one.fit(3)
    section = saved(one, tmp_path)["attributes"]
    assert section["callbacks.EarlyStopping"].keys() == {""}
    assert section["callbacks.EarlyStopping"][""].keys() <= {"best", "bad", "history"}
    assert "unkept" not in section
    assert [path for path in section["remade"] if "writer" in path] == [
        "callbacks.EarlyStopping.writer"
    ]


def test_a_second_fit_forgets_nothing_of_the_first(tmp_path: Path) -> None:
    whole, one, again = (with_callback(EarlyStopping) for _ in range(3))
    whole.fit(6)
    for done in (2, 4):
        one.fit(done)
    assert words(again, saved(one, tmp_path)) == []
    again.fit(6)
    assert only(again).history == only(whole).history


def test_functions_go_on_with_what_they_have_from_outside(tmp_path: Path) -> None:
    def counting() -> Any:
        total, losses = 0.0, ["none"]

        def count(one: Trainer, step: int, metrics: dict[str, Any]) -> None:
            nonlocal total
            total += step
            losses.append(f"{total}")
            count.calls = getattr(count, "calls", 0) + 1  # type: ignore[attr-defined]  # a function has any
            one.model.note = [total, list(losses), count.calls]  # type: ignore[attr-defined]  # as above

        return count

    one, again = with_callback(counting), with_callback(counting)
    one.fit(3)
    state = saved(one, tmp_path)
    assert state["attributes"]["callbacks.count"][""] == {
        "calls": 3,
        "losses": ["none", "1.0", "3.0", "6.0"],
        "total": 6.0,
    }
    assert words(again, state) == []
    again.fit(4)
    note: Any = again.model.note
    assert note == [10.0, ["none", "1.0", "3.0", "6.0", "10.0"], 4]


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def note(self, *arguments: Any) -> None:
        self.calls += 1


def test_methods_and_partial_functions_go_on_too(tmp_path: Path) -> None:
    def two() -> tuple[list[Counter], Trainer]:
        counters = [Counter(), Counter()]

        def second(counter: Counter, *arguments: Any) -> None:
            counter.calls += 2

        partial = functools.partial(second, counters[1])
        return counters, trainer(Model(), callbacks=[counters[0].note, partial])

    (_, one), (counters, again) = two(), two()
    one.fit(2)
    assert words(again, saved(one, tmp_path)) == []
    assert [counter.calls for counter in counters] == [2, 4]


def test_of_several_of_a_class_each_has_its_own(tmp_path: Path) -> None:
    def several() -> Trainer:
        return trainer(Model(), callbacks=[EarlyStopping(), lambda *a: None, EarlyStopping()])

    one, again = several(), several()
    one.fit(2)
    first, second = (one._callbacks.others[f"EarlyStopping{n}"] for n in ("", "#2"))
    second.bad = 9
    assert words(again, saved(one, tmp_path)) == []
    mine = [again._callbacks.others[f"EarlyStopping{n}"].bad for n in ("", "#2")]
    assert mine == [first.bad, 9]


def test_what_a_callback_cannot_be_given_back_is_said() -> None:
    class Best:
        def __init__(self) -> None:
            self.model: Any = None

        def on_step_end(self, one: Trainer, step: int, metrics: Any) -> None:
            self.model = Model()

    one = with_callback(Best)
    one.fit(1)
    state = one.state_dict()
    assert words(with_callback(Best), state) == [
        "approximate: callbacks.Best.model: a Model object, which is not kept"
    ]
    one = with_callback(EarlyStopping)
    one.fit(1)
    assert words(trainer(Model()), one.state_dict()) == [
        "callbacks.EarlyStopping: has attributes saved, is not here"
    ]


def test_a_parameter_or_layer_that_is_pointed_at_is_the_same_one(tmp_path: Path) -> None:
    class Pointing:
        def __init__(self) -> None:
            self.layer: Any = None
            self.seen: list[Any] = []

        def on_step_end(self, one: Trainer, step: int, metrics: Any) -> None:
            self.layer = one.model.layer
            self.seen = [weight_of(one), one]

    one, again = with_callback(Pointing), with_callback(Pointing)
    one.fit(1)
    assert words(again, saved(one, tmp_path)) == []
    mine = only(again)
    assert mine.layer is again.model.layer
    assert mine.seen[0] is weight_of(again) and mine.seen[1] is again


class SecondOptimizer:
    """Trains a net of its own, and the learning rate hangs on that."""

    def __init__(self) -> None:
        self.net = nn.Linear(2, 1)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def on_step_end(self, one: Trainer, step: int, metrics: Any) -> None:
        self.optimizer.zero_grad()
        (self.net(torch.ones(2)) - step).square().sum().backward()
        self.optimizer.step()
        self.schedule.step()
        one.optimizer.param_groups[0]["lr"] = 0.01 * abs(float(self.net.bias.detach()))


@pytest.mark.parametrize("at", [1, 3])
def test_a_second_optimizer_goes_on(tmp_path: Path, at: int) -> None:
    whole, one, again = (with_callback(SecondOptimizer) for _ in range(3))
    whole.fit(5)
    one.fit(at)
    assert words(again, saved(one, tmp_path)) == []
    again.fit(5)
    assert torch.equal(weight_of(again), weight_of(whole))
    assert only(again).schedule.last_epoch == 5


# Optimizers and schedules


class OwnOptimizer(torch.optim.Optimizer):
    """Remembers outside of `state`."""

    def __init__(self, parameters: Any) -> None:
        self.calls = 0
        self.velocity: Any = None
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        own = self.param_groups[0]["params"]
        self.velocity = self.velocity or [torch.zeros_like(one) for one in own]
        for one, velocity in zip(own, self.velocity, strict=True):
            velocity.mul_(0.9).add_(one.grad)
            one.sub_(velocity * self.param_groups[0]["lr"] / self.calls)


class OwnSchedule:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.moved, self.factor = optimizer, 0, 1.0

    def step(self) -> None:
        self.moved += 1
        self.factor *= 0.9
        self.optimizer.param_groups[0]["lr"] = 0.01 * self.factor + self.moved / 1000

    def state_dict(self) -> dict[str, Any]:
        return {"moved": self.moved}  # and forgets the other

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moved = state["moved"]


@pytest.mark.parametrize("at", range(1, 6))
def test_an_optimizer_and_a_schedule_of_ones_own_go_on(tmp_path: Path, at: int) -> None:
    def begun() -> Trainer:
        torch.manual_seed(4)
        model = Model()
        optimizer = OwnOptimizer(model.parameters())
        return Trainer(model, optimizer, BATCHES, device="cpu", scheduler=OwnSchedule(optimizer))

    whole, one, again = begun(), begun(), begun()
    whole.fit(6)
    one.fit(at)
    state = saved(one, tmp_path)
    assert "moved" not in state["attributes"]["scheduler"][""]  # which its state dict has
    assert words(again, state) == []
    again.fit(6)
    assert torch.equal(weight_of(again), weight_of(whole))
    assert vars(again.optimizer)["calls"] == 6


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_parameters_that_only_the_optimizer_has_are_kept(tmp_path: Path, options: Any) -> None:
    def begun() -> tuple[Trainer, nn.Parameter]:
        torch.manual_seed(4)
        model, scale = Model(), nn.Parameter(torch.ones(2))
        optimizer = torch.optim.AdamW([*model.parameters(), scale], lr=0.1, **options)
        loss = functools.partial(scaled, scale)
        return Trainer(model, optimizer, BATCHES, device="cpu", loss_fn=loss), scale

    (whole, expected), (one, _), (again, scale) = begun(), begun(), begun()
    whole.fit(6)
    one.fit(2)
    assert words(again, saved(one, tmp_path)) == []
    assert not torch.equal(scale, torch.ones(2))
    again.fit(6)
    assert torch.equal(scale, expected)


def scaled(scale: Any, model: nn.Module, batch: Any) -> Any:
    return (model(batch) * scale.exp() - scale).sum()


def test_torchs_own_optimizers_and_schedules_cost_no_bytes() -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    one = Trainer(model, optimizer, BATCHES, device="cpu", scheduler=schedule)
    one.fit(3)
    assert one.state_dict()["attributes"].keys() == {"model", "made"}


# Data behind torch's own classes


class Counted(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read += 1
        return torch.full((2,), float(index * self.read))


def test_a_dataset_within_a_subset_goes_on(tmp_path: Path) -> None:
    def begun() -> Trainer:
        torch.manual_seed(4)
        subset, order = Subset(Counted(), [5, 1, 3, 7]), torch.Generator().manual_seed(5)
        loader = DataLoader(subset, batch_size=1, shuffle=True, generator=order)
        return trainer(Model(), loader)

    whole, one, again = begun(), begun(), begun()
    whole.fit(7)
    one.fit(3)
    assert words(again, saved(one, tmp_path)) == []
    again.fit(7)
    assert torch.equal(weight_of(again), weight_of(whole))


# What is said, and when


def test_of_an_older_file_it_is_said_once_what_training_changes() -> None:
    one, again, plain = with_callback(EarlyStopping), with_callback(EarlyStopping), trainer(Model())
    one.fit(1)
    state = one.state_dict()
    del state["attributes"]
    assert words(again, state) == [] and words(plain, state) == []
    again.fit(2)
    with pytest.warns(UserWarning, match="is of an older version") as caught:
        again.state_dict()
    assert "callbacks.EarlyStopping.best, callbacks.EarlyStopping.history" in str(caught[0].message)
    again.state_dict()  # not again


@pytest.mark.filterwarnings("error")
def test_a_resume_that_is_refused_says_nothing_of_what_then_does_not_happen() -> None:
    def begun(kind: Any, **options: Any) -> Trainer:
        model = Model()
        return Trainer(model, kind(model.parameters(), **options), BATCHES, device="cpu")

    one = begun(torch.optim.AdamW, lr=0.5)
    one.fit(1)
    with pytest.raises(CheckpointError, match="another kind of optimizer saved it"):
        begun(torch.optim.Adagrad, lr=0.1).resume(one.state_dict())


def test_a_warning_that_is_an_error_leaves_all_as_it_was() -> None:
    import warnings

    one, again = trainer(Model(lambda model: setattr(model, "a", 1), a=0)), trainer(Model(a=0))
    one.fit(1)
    one.optimizer.param_groups[0]["lr"] = 0.5
    state = one.state_dict()
    state["config"] = {"a": 1}
    again.config = {"a": 2}
    before = copy.deepcopy(again.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="config.a: 1 was saved"):
            again.resume(state)
    after = again.state_dict()
    assert torch.equal(after["model"]["layer.weight"], before["model"]["layer.weight"])
    assert after["optimizer"]["param_groups"] == before["optimizer"]["param_groups"]
    assert (again.model.a, again.step) == (0, 0)
