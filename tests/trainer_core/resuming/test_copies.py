"""Whatever a checkpoint can hold can be restored, and is shared with nobody."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from trainer_core import CheckpointError, CheckpointManager, Trainer
from trainer_core.resuming.copies import copied

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")


def computed() -> torch.Tensor:
    return torch.arange(4.0, requires_grad=True) * 2


MADE: dict[str, Callable[[], Any]] = {
    "computed": computed,
    "views of what was computed": lambda: list(computed().unbind()),
    "coo": lambda: torch.eye(3).to_sparse(),
    "coo that was computed": lambda: torch.eye(3, requires_grad=True).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "csc": lambda: torch.eye(3).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "conjugate": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "empty": lambda: torch.empty(0, 3),
    "parameter": lambda: nn.Parameter(torch.ones(2)),
    "all together": lambda: {
        "a": [computed(), (torch.eye(3).to_sparse_csr(), None)],
        3: {"deep": torch.eye(2).to_sparse()},
    },
}


def dense(value: Any) -> Any:
    """`value` with each tensor as nested lists of its numbers."""
    if isinstance(value, torch.Tensor):
        return value.detach().to_dense().resolve_conj().tolist()
    if isinstance(value, dict):
        return {key: dense(item) for key, item in value.items()}
    return [dense(item) for item in value] if isinstance(value, (list, tuple)) else value


class Holds:
    """A callback, a scheduler and an average, whose state is whatever it was given."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def step(self) -> None:
        pass

    def on_step_end(self, *_: Any) -> None:
        pass

    def update_parameters(self, model: Any) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def trainer(directory: Path, value: Any) -> tuple[Trainer, list[Holds]]:
    holders = [Holds(value) for _ in range(3)]
    model = nn.Linear(2, 1)
    one = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        [torch.ones(3, 2)],
        device="cpu",
        loss_fn=lambda model, batch: model(batch).square().sum(),
        checkpoint_manager=CheckpointManager(directory, every_steps=1),
        callbacks=[holders[0]],
        scheduler=holders[1],
        ema=holders[2],
    )
    return one, holders


@pytest.mark.parametrize("name", MADE)
def test_what_can_be_saved_is_restored(name: str, tmp_path: Path) -> None:
    value = MADE[name]()
    trainer(tmp_path, value)[0].fit(1)
    one, holders = trainer(tmp_path, MADE[name]())  # its own state is of that kind, too
    assert one.fit(2, resume="auto").steps == 2
    for holder in holders:
        assert dense(holder.value) == dense(value)


def test_what_was_shared_within_stays_so_and_nothing_else() -> None:
    base = computed()
    whole = torch.zeros(6)
    value = {"base": base, "again": [base], "left": whole[:4], "right": whole[2:]}
    new = copied(value)
    assert new["again"][0] is new["base"] is not base
    new["left"].fill_(1)
    assert new["right"].tolist() == [1, 1, 0, 0] and not whole.any()
    with torch.no_grad():
        new["base"].zero_()
    assert base.tolist() == [0, 2, 4, 6] and new["base"].grad_fn is None


class Point(NamedTuple):
    x: torch.Tensor
    y: int


class Stubborn:
    """A class that was registered as safe, and refuses to be copied."""

    def __init__(self) -> None:
        self.a = torch.ones(2)

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("not me")


def test_named_tuples_and_classes_that_refuse() -> None:
    point = Point(computed(), 3)
    new = copied(point)
    assert type(new) is Point and dense(new.x) == [0, 2, 4, 6] and new.x is not point.x
    with torch.serialization.safe_globals([Stubborn]):
        stubborn = Stubborn()
        (new,) = copied([stubborn])
    assert type(new) is Stubborn and dense(new.a) == [1, 1] and new.a is not stubborn.a


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Point(torch.ones(1), 1), r"callbacks\.Holds\.value: is a Point"),
        ((one for one in torch.ones(2)), r"callbacks\.Holds\.value: is a generator"),
        ({"a": torch.ones(2)}.values(), r"callbacks\.Holds\.value: is a dict_values"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_its_path(
    value: Any, words: str, tmp_path: Path
) -> None:
    one, holders = trainer(tmp_path, value)
    for holder in holders[1:]:
        holder.value = None
    with pytest.raises(CheckpointError, match=words):
        one.state_dict()
