"""Callbacks that keep something: under which name, all or nothing, and what cannot be kept."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trainer_core import Callback, CheckpointError, CheckpointManager, ResumeWarning, Trainer
from trainer_core.callbacks import Callbacks


class Keeper:
    def __init__(self, kept: Any = None, name: Any = None, fails: bool = False) -> None:
        self.kept, self.fails = kept, fails
        if name is not None:
            self.name = name

    def on_fit_end(self, trainer: Trainer, result: Any) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.fails and state["kept"] == "b":
            self.kept = "half"
            raise KeyError("gone")
        self.kept = state["kept"]


def trainer(*callbacks: Any, **options: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(
        model,
        optimizer,
        [torch.ones(3, 2)],
        device="cpu",
        loss_fn=lambda model, batch: model(batch).sum(),
        callbacks=callbacks,
        **options,
    )


def test_names() -> None:
    class Silent(Callback):
        pass

    keepers = [
        Keeper(),
        Keeper(name="lr_finder"),
        Keeper(),
        Keeper(name=""),
        Silent(),
        Keeper(name=3),
    ]
    named = Callbacks([*keepers, print]).stateful
    assert list(named) == ["Keeper", "lr_finder", "Keeper#2", "Keeper#3", "Keeper#4"]
    assert [keepers.index(callback) for callback in named.values()] == [0, 1, 2, 3, 5]


def test_a_state_is_kept_and_restored_at_once(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, every_steps=2)
    kept = {"best": 0.5, "at": (1, 2), "tensor": torch.arange(3)}
    trainer(Keeper(kept), Keeper(1), checkpoint_manager=manager).fit(2)
    state = manager.load_latest()
    assert state is not None
    one, other = Keeper(), Keeper()
    again = trainer(one, other)
    again.resume(state)
    assert one.kept["at"] == (1, 2) and torch.equal(one.kept["tensor"], torch.arange(3))
    assert other.kept == 1
    one.kept["tensor"] += 1  # its own copy
    assert state["callbacks"]["Keeper"]["kept"]["tensor"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("value", [lambda: 1, {"fn": print}, deque([1]), np.array(["a"])])
def test_what_cannot_be_kept_fails_when_it_is_saved(value: Any, tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, every_steps=2)
    one = trainer(Keeper(value, "lr_finder"), checkpoint_manager=manager)
    with pytest.raises(CheckpointError, match=r"^callbacks\.lr_finder\.kept(\.fn)?: is "):
        one.fit(4)
    assert one.step == 2
    assert not list(tmp_path.glob("*.pt")) and not list(tmp_path.glob("latest*"))


def test_arrays_come_back_as_tensors_bit_for_bit(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, every_steps=1)
    arrays = {
        "double": np.linspace(0, 1, 5),
        "bits": np.array([True, False]),
        "words": np.array([2**63 + 1], dtype="uint64"),
        "columns": np.asfortranarray(np.arange(6, dtype="int16").reshape(2, 3)),
        "backwards": np.arange(3)[::-1],
        "fixed": np.arange(2).astype("float16"),
    }
    arrays["fixed"].flags.writeable = False
    scalars = {"lr": np.float32(0.1), "flag": np.bool_(True), "count": np.int64(3)}
    trainer(Keeper({**arrays, **scalars}), checkpoint_manager=manager).fit(1)
    state = manager.load_latest()
    assert state is not None
    kept = state["callbacks"]["Keeper"]["kept"]
    for name, array in arrays.items():
        assert kept[name].numpy().dtype == array.dtype and (kept[name].numpy() == array).all()
    assert (kept["lr"], kept["flag"], kept["count"]) == (float(np.float32(0.1)), True, 3)
    assert [type(kept[name]) for name in scalars] == [float, bool, int]


def test_one_that_refuses_changes_nothing() -> None:
    state = copy.deepcopy(trainer(Keeper("a"), Keeper("b", "other")).state_dict())
    state["model"]["weight"] += 1
    first, failing = Keeper("x"), Keeper("y", "other", fails=True)
    again = trainer(first, failing)
    before = copy.deepcopy(again.state_dict())
    with pytest.raises(CheckpointError, match=r"callbacks\.other: could not be restored: 'gone'"):
        again.resume(state)
    assert (first.kept, failing.kept) == ("x", "y")
    assert torch.equal(again.state_dict()["model"]["weight"], before["model"]["weight"])


def test_it_may_stay_as_it_is_where_that_is_allowed() -> None:
    state = copy.deepcopy(trainer(Keeper("a"), Keeper("b", "other")).state_dict())
    first, failing = Keeper("x"), Keeper("y", "other", fails=True)
    with pytest.warns(ResumeWarning, match=r"callbacks\.other: not restored, as allowed: .*'gone'"):
        trainer(first, failing).resume(state, allow_partial=("callbacks",))
    assert (first.kept, failing.kept) == ("a", "y")


def test_one_that_is_missing_on_either_side_is_told() -> None:
    state = copy.deepcopy(trainer(Keeper("a"), Keeper("b", "old")).state_dict())
    with pytest.warns(ResumeWarning) as caught:
        trainer(Keeper(), Keeper(name="new")).resume(state)
    assert str(caught[0].message).splitlines()[1:] == [
        "  - callbacks.old: saved, but this run has none of that name with a state",
        "  - callbacks.new: no state saved, so it starts afresh",
    ]
