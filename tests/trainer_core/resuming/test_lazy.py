"""Lazy layers have no shape before the first batch, and are resumed all the same."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainer_core import CheckpointError, ResumeWarning, Trainer

pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")


def trainer(width: int = 4, **options: Any) -> Trainer:
    torch.manual_seed(width)
    layers = [nn.LazyLinear(width), nn.LazyBatchNorm1d(), nn.Dropout(0.2), nn.LazyLinear(1)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return Trainer(
        model,
        optimizer,
        [torch.arange(6.0).reshape(3, 2), torch.ones(3, 2)],
        device="cpu",
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2),
        grad_clip=1.0,
        loss_fn=lambda model, batch: model(batch).square().mean(),
        **options,
    )


def tensors(one: Trainer) -> list[torch.Tensor]:
    return [*one.model.parameters(), *one.model.buffers()]


def test_a_lazy_model_goes_on_bit_for_bit() -> None:
    whole = trainer()
    whole.fit(6)
    first = trainer()
    first.fit(3)
    state = copy.deepcopy(first.state_dict())
    second = trainer()
    second.resume(state)
    assert not any(map(is_lazy, tensors(second)))
    second.fit(6)
    assert all(torch.equal(a, b) for a, b in zip(tensors(second), tensors(whole), strict=True))
    assert type(second.model[0]) is nn.Linear  # type: ignore[index]


def test_a_resume_that_fails_leaves_it_lazy() -> None:
    first = trainer()
    first.fit(1)
    state = copy.deepcopy(first.state_dict())
    state["optimizer"]["state"][0] = 3
    one = trainer(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResumeWarning)
        with pytest.raises(CheckpointError, match="not a mapping"):
            one.resume(state)
    # All but the counters of the batch norm, which need no shape.
    assert sum(map(is_lazy, tensors(one))) == 8
    assert one.fit(2).steps == 2
    assert one.model[0].weight.shape == (5, 2)  # type: ignore[index]


def test_before_its_first_batch_it_cannot_be_saved() -> None:
    words = r"^model\.0\.weight: has no shape yet, .*: run one batch through the model"
    with pytest.raises(CheckpointError, match=words):
        trainer().state_dict()
