"""Runs that did not go on as they were: problems that people reported, one test each.

Kind F: resume is not identical. Beside it C13 and C14 (which state, and whether there is one), G09,
K11 and K12. That not one bit differs, at any step, is shown in trainer_core/test_exact_resume.py.
"""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import ckpttool
from ckpttool.cli.main import main
from trainer_core import (
    CheckpointError,
    CheckpointManager,
    PrecisionPlan,
    ResumeWarning,
    Trainer,
    atomic_torch_save,
    capture_rng_state,
    restore_rng_state,
)

SCALED = PrecisionPlan("fp16", autocast_enabled=False, use_scaler=True)


@pytest.fixture(autouse=True)
def own_random_numbers() -> Iterator[None]:
    before = capture_rng_state()
    yield
    restore_rng_state(before)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.dropout(torch.tanh(self.body(x)))).square().mean()
        return loss


class Augmented(Dataset[torch.Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(index)) + torch.randn(3) * 1e-3


def trainer(seed: int = 0, **options: Any) -> Trainer:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model = options.pop("model", None)
    model = Net() if model is None else model
    make = options.pop("optimizer", lambda model: torch.optim.AdamW(model.parameters(), lr=0.01))
    optimizer = make(model)
    scheduler = options.pop("scheduler", lambda optimizer: None)(optimizer)
    loader = options.pop("loader", [torch.ones(2, 3) * i for i in range(4)])
    with_ema = options.pop("with_ema", False)
    if with_ema:
        options["ema"] = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    return Trainer(model, optimizer, loader, device="cpu", scheduler=scheduler, **options)


def saved(one: Trainer, tmp_path: Path) -> dict[str, Any]:
    """What a checkpoint of this moment gives back: from disk, under weights_only."""
    path = tmp_path / "saved.pt"
    atomic_torch_save(one.state_dict(), path)
    state: dict[str, Any] = torch.load(path, weights_only=True)
    return state


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def unchanged_by(
    one: Trainer, state: Any, words: str, error: type[Exception] = CheckpointError
) -> None:
    before = copy.deepcopy(one.state_dict())
    with warnings.catch_warnings(), pytest.raises(error, match=words):
        warnings.simplefilter("ignore", ResumeWarning)
        one.resume(state)
    assert same(one.state_dict(), before)


def values_found(directory: Path) -> list[str]:
    findings = ckpttool.verify(directory, finite=True).findings
    return [finding.id for finding in findings if finding.id.startswith("VAL")]


def goes_on(tmp_path: Path, steps: int = 6, **options: Any) -> None:
    """Resumed after each step, it ends as if it had never been interrupted."""
    manager = CheckpointManager(tmp_path, every_steps=1, keep_last=None)
    whole = trainer(checkpoint_manager=manager, **options)
    losses = [record["loss"] for record in whole.fit(steps).metrics]
    for step in range(1, steps):
        again = trainer(9, **options)
        again.resume(torch.load(manager.path_for(step), weights_only=True))
        assert [record["loss"] for record in again.fit(steps).metrics] == losses[step:]
        assert same(again.state_dict(), whole.state_dict())


@pytest.mark.parametrize("damage", ["float", "half", "meta"])
def test_f01_a_random_state_that_a_loader_has_moved_or_cast(damage: str, tmp_path: Path) -> None:
    one = trainer()
    state = saved(one, tmp_path)
    rng = state["rng"]["torch"]
    moved = {"float": rng.float, "half": rng.half, "meta": lambda: rng.to("meta")}[damage]()
    again = trainer(9)
    if damage == "meta":
        return unchanged_by(again, {**state, "rng": {**state["rng"], "torch": moved}}, "rng.torch")
    again.resume({**state, "rng": {**state["rng"], "torch": moved}})
    assert torch.equal(torch.get_rng_state(), rng)
    return None


class WithOddState(torch.optim.SGD):
    """Keeps bytes and whole numbers, which torch's loading casts to the parameter's dtype."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("rng", torch.arange(200, dtype=torch.uint8))
            state["count"] = state.get("count", torch.tensor(2**53)) + 1
            state.setdefault("master", parameter.detach().double() + 1e-12)


def test_f02_f18_f19_optimizer_state_of_any_dtype_stays_as_it_is(tmp_path: Path) -> None:
    def made(seed: int) -> Trainer:
        return trainer(seed, optimizer=lambda model: WithOddState(model.parameters(), lr=0.1))

    one = made(0)
    one.fit(3)
    again = made(9)
    again.resume(saved(one, tmp_path))
    assert same(again.optimizer.state_dict(), one.optimizer.state_dict())


def test_f18_float32_moments_of_bfloat16_parameters(tmp_path: Path) -> None:
    def made(seed: int) -> Trainer:
        model = Net().to(torch.bfloat16)
        return trainer(seed, model=model, loader=[torch.ones(2, 3, dtype=torch.bfloat16)])

    one = made(0)
    one.fit(2)
    for entry in one.optimizer.state.values():
        entry["exp_avg"] = entry["exp_avg"].float() + 1e-6
    again = made(9)
    again.resume(saved(one, tmp_path))
    assert same(again.optimizer.state_dict(), one.optimizer.state_dict())


def test_f03_numpys_random_state_loads_safely_and_is_restored(tmp_path: Path) -> None:
    state = saved(trainer(), tmp_path)  # under weights_only=True
    expected = np.random.random()
    trainer(9).resume(state)
    assert np.random.random() == expected
    # As another program may have kept it: also a form that is restored.
    np.random.seed(5)
    trainer(9).resume({**state, "rng": {**state["rng"], "numpy": np.random.get_state()}})


def test_f05_f06_another_number_of_processes_or_devices_is_told(tmp_path: Path) -> None:
    state = saved(trainer(), tmp_path)
    state["environment"]["world_size"] = 2
    # Two devices more than there are here: none of them is this run's own.
    state["rng"]["cuda"] = [state["rng"]["torch"]] * (torch.cuda.device_count() + 2)
    with pytest.warns(ResumeWarning) as caught:
        trainer(9).resume(state)
    words = str(caught[0].message)
    assert "environment.world_size: 2 was saved, it is 1 here" in words
    assert "rng.cuda" in words


def test_f07_reading_up_to_the_place_draws_nothing(tmp_path: Path) -> None:
    goes_on(tmp_path, loader=DataLoader(Augmented(9), batch_size=2, shuffle=True))


def warm_up_and_cosine(optimizer: torch.optim.Optimizer) -> Any:
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, 7)
    return lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[3])


def test_f08_learning_rates_go_on_as_they_were(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, every_steps=1, keep_last=None)
    whole = trainer(checkpoint_manager=manager, scheduler=warm_up_and_cosine)
    rates = [record["lr"] for record in whole.fit(10).metrics]
    for step in range(1, 10):
        again = trainer(9, scheduler=warm_up_and_cosine)
        again.resume(torch.load(manager.path_for(step), weights_only=True))
        assert [record["lr"] for record in again.fit(10).metrics] == rates[step:]


def test_f09_what_is_there_is_shown_and_what_is_missing_is_told(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    path = manager.save(0, trainer().state_dict())
    shown = CliRunner().invoke(main, ["inspect", str(path)], catch_exceptions=False).output
    assert "scheduler    none" in shown and "other keys   data, modes, environment" in shown
    with pytest.warns(ResumeWarning, match="scheduler: no state saved"):
        trainer(scheduler=warm_up_and_cosine).resume(torch.load(path, weights_only=True))


def test_f10_a_schedule_that_is_too_short_is_refused_at_once(tmp_path: Path) -> None:
    def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
        return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)

    one = trainer(scheduler=one_cycle)
    one.fit(4)
    again = trainer(9, scheduler=one_cycle)
    again.resume(saved(one, tmp_path))
    with pytest.raises(
        ValueError, match="OneCycleLR has 6 steps in all, 4 of them are done, and 4"
    ):
        again.fit(8)
    assert again.step == 4


def test_f11_a_schedulers_function_is_named_when_it_is_saved(tmp_path: Path) -> None:
    class Scheduler(lr_scheduler.StepLR):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "scale_fn": lambda step: step}

    manager = CheckpointManager(tmp_path, every_steps=1)
    one = trainer(checkpoint_manager=manager, scheduler=lambda optimizer: Scheduler(optimizer, 2))
    with pytest.raises(CheckpointError, match=r"scheduler\.scale_fn: is a function"):
        one.fit(1)
    assert not list(tmp_path.glob("step_*")) and not list(tmp_path.glob(".step_*"))


def test_f12_a_scaler_without_its_state_is_told_and_with_it_goes_on(tmp_path: Path) -> None:
    one = trainer(precision=SCALED)
    one.fit(2)
    state = saved(one, tmp_path)
    again = trainer(9, precision=SCALED)
    again.resume(state)
    again.fit(3)
    assert again.state_dict()["scaler"]["_growth_tracker"] == 3
    with pytest.warns(ResumeWarning, match="scaler: no state saved, so loss scaling starts afresh"):
        trainer(9, precision=SCALED).resume({**state, "scaler": None})


def test_f14_a_fresh_optimizer_gets_all_its_moments(tmp_path: Path) -> None:
    class InPlace(torch.optim.AdamW):
        """Fills only what is already there: nothing, in a new optimizer."""

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict({**state_dict, "state": dict(self.state)})

    one = trainer()
    one.fit(2)
    state = saved(one, tmp_path)
    again = trainer(9)
    again.resume(state)
    moments = again.optimizer.state_dict()["state"]
    assert all(
        same(moments[key]["exp_avg"], state["optimizer"]["state"][key]["exp_avg"])
        for key in moments
    )
    assert len(moments) == 4
    lazy = trainer(9, optimizer=lambda model: InPlace(model.parameters(), lr=0.01))
    unchanged_by(lazy, state, r"optimizer\.state\.0\.step: was saved, and is gone after loading")


def test_f15_the_place_is_right_the_second_time_as_well(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[Trainer, list[float]]:
        seen: list[float] = []

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            seen.append(float(batch[0][0, 0]))
            out: torch.Tensor = model(batch[0])
            return out

        data = TensorDataset(torch.arange(100.0).repeat(3, 1).T)
        return trainer(seed, loader=DataLoader(data, batch_size=2), loss_fn=loss), seen

    one, _ = made(0)
    one.fit(30)
    second, _ = made(1)
    second.resume(saved(one, tmp_path))
    second.fit(40)
    third, seen = made(2)
    third.resume(saved(second, tmp_path))
    third.fit(41)
    assert seen == [80.0]  # the 41st batch of two


@pytest.mark.parametrize("drop_last", [False, True])
def test_f16_at_the_end_of_a_pass(drop_last: bool, tmp_path: Path) -> None:
    # Five or four batches a pass: steps 4 and 5 are last batches, 8 and 10 in the second pass.
    data = Augmented(9)
    goes_on(tmp_path, 11, loader=DataLoader(data, batch_size=2, shuffle=True, drop_last=drop_last))


def test_f17_accumulated_micro_batches_count(tmp_path: Path) -> None:
    loader = DataLoader(Augmented(9), batch_size=1, shuffle=True)
    goes_on(tmp_path, loader=loader, accumulation_steps=4)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"capturable": False}])
def test_f20_step_counts_where_the_optimizer_wants_them(options: Any, tmp_path: Path) -> None:
    make = lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, **options)  # noqa: E731
    goes_on(tmp_path, optimizer=make)
    plain = trainer(9)
    state = saved(trainer(optimizer=make), tmp_path)
    if any(options.values()):
        with pytest.warns(ResumeWarning, match=": True was saved and counts, it is None here"):
            plain.resume(state)
    else:
        plain.resume(state)
    assert plain.fit(2).steps == 2  # saved by one kind, gone on with by another


def test_f21_groups_that_do_not_fit_are_told_by_name(tmp_path: Path) -> None:
    def only(*names: str) -> Any:
        def make(model: nn.Module) -> torch.optim.Optimizer:
            parameters = dict(model.named_parameters())
            return torch.optim.SGD([(name, parameters[name]) for name in names], lr=0.1)

        return make

    state = saved(trainer(optimizer=only("body.weight", "head.weight")), tmp_path)
    one = trainer(9, optimizer=only("body.weight", "body.bias", "head.bias"))
    with pytest.raises(ValueError, match="doesn't match") as caught:
        one.resume(state)
    words = str(caught.value)
    assert "parameter group 0: only saved: head.weight" in words
    assert "parameter group 0: only here: body.bias, head.bias" in words


def test_f23_prefixes_of_wrappers_are_not_saved(tmp_path: Path) -> None:
    compiled = torch.compile(Net(), backend="eager")
    state = saved(trainer(model=compiled), tmp_path)
    assert list(state["model"]) == list(Net().state_dict())
    plain = trainer(9)
    plain.resume(state)
    assert same(dict(plain.model.state_dict()), dict(state["model"]))
    # And a file that holds them, at two depths, from before or from another program.
    old = {f"module._orig_mod.{name}": value for name, value in state["model"].items()}
    plain = trainer(9)
    plain.resume({**state, "model": old})
    assert same(dict(plain.model.state_dict()), dict(state["model"]))


def test_f24_a_model_that_matches_in_part_is_refused(tmp_path: Path) -> None:
    state = saved(trainer(), tmp_path)
    state["model"] = {f"other.{name}": value for name, value in state["model"].items()}
    unchanged_by(trainer(9), state, "Missing key", RuntimeError)
    with pytest.warns(ResumeWarning) as caught:
        trainer(9).resume(state, allow_partial=("model",))
    assert "model: 4 of 4 tensors not restored, as allowed" in str(caught[-1].message)


def test_f25_averaged_weights_and_their_count_go_on(tmp_path: Path) -> None:
    goes_on(tmp_path, with_ema=True)


def test_f26_nothing_is_saved_while_averaged_weights_are_in_the_model(tmp_path: Path) -> None:
    one = trainer(with_ema=True, checkpoint_manager=CheckpointManager(tmp_path))
    one.fit(2)
    with one.averaged_weights(), pytest.raises(CheckpointError, match="averaged weights"):
        one.state_dict()


def test_f27_everything_is_loaded_to_the_cpu(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, every_steps=1)
    trainer(checkpoint_manager=manager).fit(1)
    state = manager.load_latest()
    assert state is not None
    tensors = [*state["model"].values(), state["rng"]["torch"]]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}


def test_f28_numbers_of_a_group_are_restored_and_checked(tmp_path: Path) -> None:
    class OnlyTensors(torch.optim.AdamW):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            mine = [{**group} for group in self.param_groups]
            super().load_state_dict(state_dict)
            for group, old in zip(self.param_groups, mine, strict=True):
                group["lr"] = old["lr"]

    one = trainer()
    one.optimizer.param_groups[0].update(lr=0.5, weight_decay=0.25, passes=3)
    state = saved(one, tmp_path)
    again = trainer(9)
    with pytest.warns(ResumeWarning, match="options that only the saved one has: passes"):
        again.resume(state)
    group = again.optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["passes"]) == (0.5, 0.25, 3)
    losing = trainer(9, optimizer=lambda model: OnlyTensors(model.parameters(), lr=0.01))
    unchanged_by(losing, state, r"param_groups\[0\]\.lr: 0\.5 was saved, and after loading it is")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_f29_weights_that_are_not_finite_are_judged_in_their_own_dtype(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    manager = CheckpointManager(tmp_path)
    state = trainer(loader=[]).state_dict()
    large = torch.full((4,), 448.0 if dtype == torch.float8_e4m3fn else 1e30).to(dtype)
    state["model"]["extra"] = large  # finite, though float16 could not hold it
    manager.save(0, state)
    assert values_found(tmp_path) == []
    state["model"]["extra"] = torch.tensor([1.0, math.nan]).to(dtype)
    manager.save(0, state)
    assert values_found(tmp_path) == ["VAL101"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(9).resume(state, allow_partial=("model",))  # has no such weight
    assert "model.extra: holds numbers that are not finite" in str(caught[0].message)


def test_c13_a_checkpoint_is_of_one_moment(tmp_path: Path) -> None:
    class Best:
        """Changes what it keeps at each step; the checkpoint of that step has the new value."""

        steps = 0

        def on_step_end(self, one: Trainer, step: int, metrics: Any) -> None:
            self.steps += 1

        def state_dict(self) -> dict[str, int]:
            return {"steps": self.steps}

        def load_state_dict(self, state: Mapping[str, int]) -> None:
            self.steps = state["steps"]

    manager = CheckpointManager(tmp_path, every_steps=3)
    trainer(checkpoint_manager=manager, callbacks=[Best()], scheduler=warm_up_and_cosine).fit(3)
    state = manager.load_latest()
    assert state is not None
    counts = state["step"], state["scheduler"]["last_epoch"], state["callbacks"]["Best"]["steps"]
    assert counts == (3, 3, 3) and state["data"]["batch"] == 3


def test_c14_resuming_never_begins_anew_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path, every_steps=1)
    with pytest.raises(CheckpointError, match="there is no checkpoint to resume from"):
        trainer(checkpoint_manager=manager).fit(1, resume="must")
    with caplog.at_level("INFO"):
        trainer(checkpoint_manager=manager).fit(1, resume="auto")
        trainer(checkpoint_manager=manager).fit(2, resume="auto")
    assert "fresh start" in caplog.text and "resuming from" in caplog.text


def test_g09_numbers_of_numpys_hidden_in_a_state(tmp_path: Path) -> None:
    one = trainer()
    one.optimizer.param_groups[0]["lr"] = np.float64(0.1)
    state = saved(one, tmp_path)
    assert type(state["optimizer"]["param_groups"][0]["lr"]) is float
    one.optimizer.param_groups[0]["lr"] = np.array([0.1], dtype=object)
    with pytest.raises(
        CheckpointError, match=r"optimizer\.param_groups\[0\]\.lr: is an array of o"
    ):
        one.state_dict()


def test_k11_a_part_that_does_not_fit_changes_no_other(tmp_path: Path) -> None:
    one = trainer()
    one.fit(2)
    state = saved(one, tmp_path)
    state["optimizer"]["param_groups"][0]["params"].append(4)
    unchanged_by(trainer(9), state, "doesn't match the size of optimizer's group", ValueError)


def test_k12_garbage_for_random_numbers_is_an_error(tmp_path: Path) -> None:
    state = saved(trainer(), tmp_path)
    state["rng"]["python"] = (3, (1, 2), None)
    unchanged_by(trainer(9), state, "random numbers could not go on where they were: rng.python: ")
    with pytest.warns(ResumeWarning, match=r"rng\.python: "):
        trainer(9).resume(state, allow_partial=("rng",))
