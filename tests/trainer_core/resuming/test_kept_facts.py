"""Modes of modules, facts of the environment, names without wrappers, lengths of schedules."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from trainer_core import CheckpointError, ResumeWarning, Trainer
from trainer_core.loop.schedules import check_horizon
from trainer_core.resuming.facts import environment
from trainer_core.resuming.modes import modes_of, set_modes, strange_modes
from trainer_core.wrappers import own_state, plain_state


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5)))


def trainer(model: nn.Module | None = None, **options: Any) -> Trainer:
    model = net() if model is None else model
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(
        model,
        optimizer,
        [torch.tensor([[1.0, 2.0], [3.0, -1.0]])],
        device="cpu",
        loss_fn=lambda model, batch: model(batch).square().sum(),
        **options,
    )


# Modes


def flags(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def test_modes_are_kept_in_few_words() -> None:
    model = net()
    model[1].eval()
    modes = modes_of(model)
    assert modes == {"training": True, "others": ["1", "1.0", "1.1"]}
    other = net().eval()
    set_modes(other, modes)
    assert flags(other) == flags(model)
    assert modes_of(net().eval()) == {"training": False, "others": []}


@pytest.mark.parametrize("modes", [3, {}, {"training": 1}, {"training": True, "others": "1"}])
def test_what_are_no_modes_is_told_and_left(modes: Any) -> None:
    model = net()
    assert strange_modes(model, modes) == ["modes: what is saved are no modes of modules"]
    set_modes(model, modes)
    assert all(flags(model).values())


def test_modes_are_restored_at_once_and_again_by_the_first_fit_alone() -> None:
    first = trainer()
    first.fit(1)
    first.model[1][0].eval()  # type: ignore[index]
    state = copy.deepcopy(first.state_dict())
    again = trainer()
    again.resume(state)
    expected = {**dict.fromkeys(flags(again.model), True), "1.0": False}
    assert flags(again.model) == expected
    again.fit(2)
    assert flags(again.model) == expected
    again.fit(3)
    assert all(flags(again.model).values())


def test_a_module_that_is_gone_is_told() -> None:
    state = trainer().state_dict()
    state["modes"] = {"training": True, "others": ["1.0", "gone"]}
    with pytest.warns(ResumeWarning, match="modes: gone had another mode, and is not here"):
        trainer().resume(state)


# The environment


def test_another_environment_is_told_by_name() -> None:
    state = trainer().state_dict()
    assert state["environment"] == environment(torch.device("cpu"))
    state["environment"] |= {"torch": "2.6.0", "world_size": 3, "of a later version": 1}
    state["environment"]["deterministic"] = True
    with pytest.warns(ResumeWarning) as caught:
        trainer().resume(state)
    assert sorted(str(caught[0].message).splitlines()[1:]) == [
        "  - environment.deterministic: True was saved, it is False here",
        f"  - environment.torch: '2.6.0' was saved, it is '{torch.__version__}' here",
        "  - environment.world_size: 3 was saved, it is 1 here",
    ]


def test_the_environment_is_plain() -> None:
    kinds = {type(value) for value in environment(torch.device("cpu")).values()}
    assert kinds <= {str, int, bool}


# Wrappers


class Parallel(nn.DataParallel):
    """As on machines with several GPUs, in what counts here: names, and who is called."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class OptimizedModule(nn.Module):
    """What `torch.compile` gives, without its compiler."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner

    def forward(self, *args: Any) -> Any:
        return self._orig_mod(*args)


class Layered(nn.Module):
    """With an honest layer that is called `module`."""

    def __init__(self, inner: Any = lambda layer: layer) -> None:
        super().__init__()
        self.module = inner(nn.Linear(2, 2))
        self.last = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.module(x))
        return out


def wrapped() -> list[nn.Module]:
    return [
        Layered(),
        OptimizedModule(Layered()),
        Parallel(OptimizedModule(Layered())),
        Parallel(OptimizedModule(Layered(OptimizedModule))),
        Layered(Parallel),
    ]


NAMES = ["module.weight", "module.bias", "last.weight", "last.bias"]


@pytest.mark.parametrize("index", range(5))
def test_names_are_saved_without_wrappers(index: int) -> None:
    assert list(plain_state(wrapped()[index])) == NAMES


@pytest.mark.parametrize("source", range(5))
@pytest.mark.parametrize("target", range(5))
def test_a_model_resumes_within_other_wrappers(source: int, target: int) -> None:
    first = trainer(wrapped()[source])
    first.fit(2)
    again = trainer(wrapped()[target])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.resume(first.state_dict())
    one, other = plain_state(first.model), plain_state(again.model)
    assert all(torch.equal(one[name], other[name]) for name in NAMES)
    if source != 4:  # there nothing tells the wrapper's name from the layer's
        # A file that somebody else has written, with all the prefixes of its wrappers.
        theirs = own_state(first.model.state_dict(), again.model)
        assert list(theirs) == list(again.model.state_dict())


def test_torchs_own_compiler_is_known() -> None:
    compiled = torch.compile(Layered(), backend="eager")
    assert next(iter(compiled.state_dict())) == "_orig_mod.module.weight"
    assert list(plain_state(compiled)) == NAMES


def test_two_tensors_for_one_name_are_refused() -> None:
    saved = {"last.weight": 1, "_orig_mod.last.weight": 2}
    with pytest.raises(CheckpointError, match=r"would both become last\.weight"):
        own_state(saved, Layered())


def test_what_belongs_nowhere_keeps_its_name() -> None:
    assert own_state({"module.other": 1}, nn.Linear(1, 1)) == {"module.other": 1}


# Schedules


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)


def one_cycle(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)


def chained(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.ChainedScheduler([one_cycle(optimizer, 6)])


def last_in_sequence(optimizer: torch.optim.Optimizer) -> Any:
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    return lr_scheduler.SequentialLR(optimizer, [warm, one_cycle(optimizer, 6)], milestones=[3])


def first_in_sequence(optimizer: torch.optim.Optimizer) -> Any:
    flat = lr_scheduler.ConstantLR(optimizer)
    return lr_scheduler.SequentialLR(optimizer, [one_cycle(optimizer, 6), flat], milestones=[9])


@pytest.mark.parametrize(
    "make", [lambda o: one_cycle(o, 6), chained, last_in_sequence, first_in_sequence]
)
def test_the_end_of_a_schedule_is_where_torch_says(make: Any) -> None:
    for done in range(6):
        parts = optimizer()
        scheduler = make(parts)
        parts.step()
        for _ in range(done):
            scheduler.step()
        taken = 0
        try:
            while taken < 30:
                scheduler.step()
                taken += 1
        except ValueError:
            pass
        fresh = make(optimizer())
        fresh.optimizer.step()
        for _ in range(done):
            fresh.step()
        check_horizon(fresh, taken)
        if taken < 30:
            with pytest.raises(ValueError, match="the schedule is too short: OneCycleLR has 6"):
                check_horizon(fresh, taken + 1)


def test_too_short_a_schedule_is_refused_before_the_first_step() -> None:
    model = net()
    parts = torch.optim.SGD(model.parameters(), lr=0.1)
    one = trainer(model, optimizer=parts, scheduler=one_cycle(parts, 6))
    assert one.fit(4).steps == 4
    with pytest.raises(ValueError, match="6 steps in all, 4 of them are done, and 3 more"):
        one.fit(7)
    assert one.step == 4 and one.fit(6).steps == 6


def test_another_length_of_the_schedule_is_told() -> None:
    def made(steps: int) -> Trainer:
        model = net()
        parts = torch.optim.SGD(model.parameters(), lr=0.1)
        return trainer(model, optimizer=parts, scheduler=one_cycle(parts, steps))

    words = r"scheduler\.total_steps: 6 was saved and counts, it is 9 here"
    with pytest.warns(ResumeWarning, match=words):
        made(9).resume(made(6).state_dict())


def test_a_schedule_that_ran_ahead_of_the_steps_is_told() -> None:
    def made() -> Trainer:
        model = net()
        parts = torch.optim.SGD(model.parameters(), lr=0.1)
        return trainer(model, optimizer=parts, scheduler=lr_scheduler.StepLR(parts, 2))

    one = made()
    one.fit(2)
    one.scheduler.step()  # type: ignore[union-attr]
    with pytest.warns(ResumeWarning, match="it was moved 3 times, while 2 steps were done"):
        made().resume(one.state_dict())
