"""Settings that a program has changed: told at resume, with which of the two counts."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from trainer_core import Callback, ResumeWarning, Trainer

DATA = TensorDataset(torch.arange(24.0).reshape(12, 2))
Scheduled = Callable[[torch.optim.Optimizer], Any]


def trainer(
    kind: Any = torch.optim.SGD,
    scheduled: Scheduled | None = None,
    *,
    groups: int = 1,
    batch_size: int = 2,
    given: dict[str, Any] | None = None,
    **options: Any,
) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    parameters: Any = list(model.parameters())
    if groups == 2:
        parameters = [{"params": [one]} for one in parameters]
    optimizer = kind(parameters, **options)
    return Trainer(
        model,
        optimizer,
        DataLoader(DATA, batch_size=batch_size),
        device="cpu",
        scheduler=None if scheduled is None else scheduled(optimizer),
        loss_fn=lambda model, batch: model(batch[0] / 24).square().mean(),
        **(given or {}),
    )


def saved(one: Trainer, steps: int = 3) -> dict[str, Any]:
    one.fit(one.step + steps)
    return copy.deepcopy(one.state_dict())


def lines(one: Trainer, state: dict[str, Any]) -> list[str]:
    """What a resume warns of, without its title."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        one.resume(state)
    assert len(caught) <= 1 and all(each.category is ResumeWarning for each in caught)
    return [line[4:] for each in caught for line in str(each.message).splitlines()[1:]]


def test_options_that_the_checkpoint_overrules_are_told() -> None:
    state = saved(trainer(lr=0.1, momentum=0.9, weight_decay=0.0))
    one = trainer(lr=0.01, momentum=0.8, weight_decay=0.0)
    found = lines(one, state)
    assert found[:2] == [
        "optimizer, parameter group 0: lr: 0.1 was saved and counts, it is 0.01 here",
        "optimizer, parameter group 0: momentum: 0.9 was saved and counts, it is 0.8 here",
    ]
    assert len(found) == 3 and found[2].startswith("settings: to have this run's own, set them aft")
    assert one.optimizer.param_groups[0]["lr"] == 0.1  # it is so


def test_one_line_for_what_all_groups_have() -> None:
    words = lines(trainer(lr=0.01, groups=2), saved(trainer(lr=0.1, groups=2)))[0]
    assert words == (
        "optimizer, parameter groups, all 2: lr: 0.1 was saved and counts, it is 0.01 here"
    )


class Own(torch.optim.Adam):
    """Another class, that torch's may take for its own."""


def test_tuples_and_another_class() -> None:
    state = saved(trainer(Own, lr=0.1, betas=(0.9, 0.99)))
    found = lines(trainer(torch.optim.Adam, lr=0.1, betas=(0.8, 0.99)), state)
    assert (
        found[0]
        == "optimizer: Own was saved, it is Adam here, which goes on with the saved numbers"
    )
    assert any("betas: [0.9, 0.99] was saved and counts, it is [0.8, 0.99]" in one for one in found)


def test_the_numbers_of_a_schedule_and_its_first_lr() -> None:
    state = saved(trainer(scheduled=lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5), lr=0.1))
    found = lines(trainer(scheduled=lambda o: lr_scheduler.StepLR(o, 1, gamma=0.9), lr=0.2), state)
    assert found[:3] == [
        "optimizer, parameter group 0: lr: 0.1 was saved and counts, it is 0.2 here",
        "scheduler.gamma: 0.5 was saved and counts, it is 0.9 here",
        "scheduler.base_lrs: [0.1] was saved and counts, it is [0.2] here",
    ]
    other = trainer(scheduled=lambda o: lr_scheduler.ExponentialLR(o, 0.9), lr=0.1)
    assert (
        "scheduler: StepLR was saved, it is ExponentialLR here, which goes on with the saved numbers"
        in lines(other, state)
    )


def test_what_this_run_itself_was_given_counts() -> None:
    state = saved(trainer(lr=0.1, given={"grad_clip": 1.0}))
    given = {"grad_clip": 0.5, "accumulation_steps": 2}
    one = trainer(lr=0.1, batch_size=3, given=given)
    assert lines(one, state) == [
        "grad_clip: 1.0 was saved, it is 0.5 here, which counts",
        "accumulation_steps: 1 was saved, it is 2 here, which counts",
        (
            "batch_size: 2 was saved, it is 3 here, which counts; "
            "the place in the data is counted in batches"
        ),
    ]
    assert one.state_dict()["settings"]["grad_clip"] == 0.5


class Warms(Callback):
    """Moves the learning rate by itself, from the first step on."""

    def on_fit_start(self, trainer: Trainer) -> None:
        trainer.optimizer.param_groups[0]["lr"] = 0.001

    def on_step_end(self, trainer: Trainer, step: int, metrics: dict[str, Any]) -> None:
        trainer.optimizer.param_groups[0]["lr"] *= 1.5


def sequence(optimizer: torch.optim.Optimizer) -> Any:
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3)
    return lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[2])


PROGRAMS: list[Callable[[], Trainer]] = [
    lambda: trainer(lr=0.1, given={"callbacks": [Warms()]}),
    lambda: trainer(torch.optim.AdamW, sequence, lr=0.1, groups=2),
    lambda: trainer(
        torch.optim.Adam, lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=30), lr=0.1
    ),
    lambda: trainer(
        torch.optim.SGD, lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2), lr=0.1, momentum=0.9
    ),
    lambda: trainer(
        torch.optim.Adam, lambda o: lr_scheduler.LambdaLR(o, lambda s: 0.9**s), lr=torch.tensor(0.1)
    ),
    lambda: trainer(lr=0.1, momentum=0.9, nesterov=True, maximize=True),
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_same_program_is_told_nothing(program: Callable[[], Trainer]) -> None:
    state = saved(program())
    for _ in range(2):  # after a resume, too
        one = program()
        assert lines(one, state) == []
        state = saved(one, 4)


def test_what_was_set_after_the_resume_counts_and_is_told_no_more() -> None:
    state = saved(trainer(lr=0.1))
    one = trainer(lr=0.01)
    assert lines(one, state)
    untouched = saved(one)
    found = lines(trainer(lr=0.01), untouched)
    assert "lr: 0.1 was saved and counts, it is 0.01 here" in found[0]  # as long as it is so

    class Sets(Callback):
        def on_fit_start(self, trainer: Trainer) -> None:
            trainer.optimizer.param_groups[0]["lr"] = 0.01

    one = trainer(lr=0.01, given={"callbacks": [Sets()]})
    assert lines(one, state)
    again = saved(one)
    assert again["optimizer"]["param_groups"][0]["lr"] == 0.01
    assert lines(trainer(lr=0.01, given={"callbacks": [Sets()]}), again) == []


def test_a_schedule_that_was_set_after_the_resume() -> None:
    def program(lr: float) -> Trainer:
        return trainer(scheduled=lambda o: lr_scheduler.LambdaLR(o, lambda s: 1.0), lr=lr)

    state = saved(program(0.1))
    one = program(0.02)
    assert len(lines(one, state)) == 3
    one.optimizer.param_groups[0]["initial_lr"] = 0.02
    one.scheduler.base_lrs = [0.02]  # type: ignore[union-attr]
    again = saved(one)
    assert again["optimizer"]["param_groups"][0]["lr"] == 0.02
    assert lines(program(0.02), again) == []


def test_a_part_that_was_left_out_has_this_runs_own() -> None:
    state = saved(trainer(torch.optim.Adam, lr=0.1))
    one = trainer(torch.optim.SGD, lr=0.3)
    with pytest.warns(ResumeWarning) as caught:
        one.resume(state, allow_partial=("optimizer",))
    first, second = (str(each.message).splitlines()[1:] for each in caught)
    # Nothing that would be so if it had been restored.
    words = "optimizer, parameter group 0: options that only the saved one has: amsgrad, betas, eps"
    assert first == [f"  - {words}"]
    assert second[0].startswith("  - optimizer: not restored, as allowed")
    assert one.state_dict()["settings"]["groups"][0]["lr"] == 0.3


@pytest.mark.parametrize("settings", [None, 3, {}, {"groups": 3}, {"groups": [3], "schedule": []}])
def test_files_without_settings_or_with_strange_ones_are_as_before(settings: Any) -> None:
    state = saved(trainer(lr=0.1))
    if settings is None:
        del state["settings"]
    else:
        state["settings"] = settings
    assert lines(trainer(lr=0.01), state) == []
