"""Averaged weights: moved at each step, kept, swapped in and out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from trainer_core import CheckpointError, ResumeWarning, Trainer


def trainer(seed: int = 0, *, ema: bool = True) -> Trainer:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    return Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        [torch.tensor([[1.0, 2.0], [3.0, -1.0]])],
        device="cpu",
        loss_fn=lambda model, batch: model(batch).square().sum(),
        ema=average if ema else None,
    )


def weight(module: Any) -> list[float]:
    return module[0].weight.flatten().tolist()


def test_it_follows_after_each_step() -> None:
    one = trainer()
    one.fit(1)  # the first update takes the weights as they are
    expected = torch.tensor(weight(one.model))
    for step in (2, 3):
        one.fit(step)
        expected = expected * 0.5 + torch.tensor(weight(one.model)) * 0.5
        assert torch.allclose(torch.tensor(weight(one.ema.module)), expected)  # type: ignore[union-attr]
    assert int(one.ema.n_averaged) == 3  # type: ignore[union-attr]


def test_it_goes_on_where_it_was() -> None:
    whole = trainer()
    whole.fit(2)
    state = copy.deepcopy(whole.state_dict())
    whole.fit(5)
    again = trainer(seed=9)
    again.resume(state)
    again.fit(5)
    assert weight(again.ema.module) == weight(whole.ema.module)  # type: ignore[union-attr]
    assert int(again.ema.n_averaged) == 5  # type: ignore[union-attr]


def test_an_average_that_does_not_fit_changes_nothing() -> None:
    state = copy.deepcopy(trainer().state_dict())
    del state["ema"]["n_averaged"]
    again = trainer(seed=9)
    before = weight(again.model), weight(again.ema.module)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="n_averaged"):
        again.resume(state)
    assert (weight(again.model), weight(again.ema.module)) == before  # type: ignore[union-attr]
    with pytest.warns(ResumeWarning, match="ema: not restored, as allowed"):
        again.resume(state, allow_partial=("ema",))
    assert weight(again.model) != before[0] and weight(again.ema.module) == before[1]  # type: ignore[union-attr]


def test_one_that_is_missing_on_either_side_is_told() -> None:
    with pytest.warns(ResumeWarning, match="ema: saved, but this run has none"):
        trainer(ema=False).resume(trainer().state_dict())
    with pytest.warns(ResumeWarning, match="ema: no state saved, so the average starts afresh"):
        trainer().resume(trainer(ema=False).state_dict())


def test_nothing_is_saved_while_the_averages_are_swapped_in() -> None:
    one = trainer()
    one.fit(3)
    own, average = weight(one.model), weight(one.ema.module)  # type: ignore[union-attr]
    assert own != average
    with one.averaged_weights():
        assert weight(one.model) == average
        with pytest.raises(CheckpointError, match="model: has the averaged weights now"):
            one.state_dict()
    assert weight(one.model) == own and weight(one.ema.module) == average  # type: ignore[union-attr]
    with pytest.raises(ZeroDivisionError), one.averaged_weights():
        raise ZeroDivisionError
    assert weight(one.model) == own and one.state_dict()["step"] == 3


def test_without_averages_there_is_nothing_to_swap() -> None:
    with pytest.raises(ValueError, match="no ema"), trainer(ema=False).averaged_weights():
        pass


def test_what_is_no_average_is_refused_at_once() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="ema: a Linear has no update_parameters"):
        Trainer(model, optimizer, [], device="cpu", ema=nn.Linear(1, 1))
