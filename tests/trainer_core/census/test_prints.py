"""What a program makes at its start is compared at a resume: made anew it is said, by its path."""

from __future__ import annotations

import array
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from tests.trainer_core.census.test_census import Model, saved, trainer, words
from trainer_core import Trainer
from trainer_core.census.owners import Owner
from trainer_core.census.prints import prints_of, unlike

SEED = "is not what the run was saved with: if it is drawn at random, seed that"


class Rows(Dataset[torch.Tensor]):
    def __init__(self, **given: Any) -> None:
        vars(self).update(given)

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(2) * index


def run(seed: int, make: Any) -> Trainer:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    return make()


def said(make: Any, tmp_path: Path, other: Any = None, steps: int = 2) -> list[str]:
    one = run(1, make)
    one.fit(steps)
    return words(run(2, other or make), saved(one, tmp_path))


def split(workers: int = 0) -> Trainer:
    train, _ = random_split(Rows(), [15, 5])
    return trainer(Model(), DataLoader(train, batch_size=5, num_workers=workers))


def test_a_split_that_is_drawn_anew_is_said(tmp_path: Path) -> None:
    assert said(split, tmp_path) == [f"dataset.indices: {SEED}"]
    one = run(1, split)
    one.fit(1)
    assert words(run(1, split), saved(one, tmp_path)) == []  # which is seeded


class Files(Rows):
    def __init__(self, folder: str, *, shuffled: bool) -> None:
        self.files = [f"{folder}/{i:04}.png" for i in range(50)]
        if shuffled:
            random.shuffle(self.files)


def test_files_in_another_order_are_said_and_in_another_folder_are_not(tmp_path: Path) -> None:
    def of(folder: str, *, shuffled: bool) -> Any:
        return lambda: trainer(Model(), DataLoader(Files(folder, shuffled=shuffled), batch_size=2))

    assert said(of("/a", shuffled=True), tmp_path) == [f"dataset.files: {SEED}"]
    assert said(of("/a", shuffled=False), tmp_path, of("/b/c", shuffled=False)) == []


def test_features_data_and_weights_of_samples(tmp_path: Path) -> None:
    def make() -> Trainer:
        rows = TensorDataset(torch.randn(20, 2))
        sampler = WeightedRandomSampler(torch.rand(20).tolist(), 20)
        model = Model(
            features=torch.randn(3, 3),
            table=np.random.rand(4),
            teacher=[nn.Linear(2, 2)],
            numbers=array.array("i", [random.randrange(99) for _ in range(9)]),
            nested={"a": [torch.randint(99, (5,))]},
        )
        loader = DataLoader(
            rows, batch_size=4, sampler=sampler, collate_fn=torch.utils.data.default_collate
        )
        loss = lambda model, batch: model(batch[0])  # noqa: E731 - made anew each time
        return trainer(model, loader, loss_fn=loss)

    paths = [line.partition(": ")[0] for line in said(make, tmp_path)]
    assert paths == [
        *("model.features", "model.table", "model.numbers", "model.nested"),
        *("model.teacher[0].weight", "model.teacher[0].bias"),
        *("dataset.tensors", "sampler.weights"),
    ]


def test_a_list_of_batches_that_is_drawn_anew(tmp_path: Path) -> None:
    def make() -> Trainer:
        return trainer(Model(), [torch.randn(1, 2) for _ in range(4)])

    assert said(make, tmp_path) == [f"loader: {SEED}"]


def test_indices_that_are_numbers_of_numpys(tmp_path: Path) -> None:
    def make() -> Trainer:
        rows = Subset(Rows(), list(np.random.permutation(20)[:12]))
        return trainer(Model(), DataLoader(rows, batch_size=5))

    assert said(make, tmp_path) == [f"dataset.indices: {SEED}"]


def test_data_that_have_grown(tmp_path: Path) -> None:
    def of(count: int) -> Any:
        rows = Rows(labels=list(range(count)))
        return lambda: trainer(Model(), DataLoader(rows, batch_size=2))

    assert said(of(20), tmp_path, of(30)) == [
        "dataset.labels: had 20 items when the run was saved, it has 30 here"
    ]


def test_no_false_alarms(tmp_path: Path) -> None:
    """Settings, places, names, what training changes, and what has changed in its last bits."""

    def of(which: int) -> Any:
        def act(model: Any) -> None:
            model.memory += 1
            model.history.append(1)

        def make() -> Trainer:
            settings = {f"option{i}": which * i for i in range(20)}
            settings["folder"] = f"/tmp/{which}"
            model = Model(
                act,
                width=which,
                ratio=random.random(),
                betas=(0.9, 0.9 + which / 100),
                settings=settings,
                folder=f"/tmp/{which}",
                memory=torch.rand(4),  # kept, since training changes it
                history=[random.random() for _ in range(20)],
                angles=torch.linspace(0, 1, 64) * (1 + which * 1e-7),
                flat=[],
            )
            vars(model)["flat"] = [one.detach() for one in model.parameters()]
            return trainer(model)

        return make

    assert said(of(1), tmp_path, of(2)) == []


def test_a_callback_that_draws_what_it_shows(tmp_path: Path) -> None:
    class Shows:
        def __init__(self) -> None:
            self.noise = torch.randn(4)

        def on_step_end(self, *arguments: Any) -> None:
            pass

    def make() -> Trainer:
        return trainer(Model(), callbacks=[Shows()])

    assert said(make, tmp_path) == [f"callbacks.Shows.noise: {SEED}"]


def test_what_is_too_big_is_sampled_and_what_is_strange_is_left_out() -> None:
    class Thing:
        def __init__(self, at: int) -> None:
            self.big = torch.zeros(20 << 20, dtype=torch.uint8)
            self.big[at] = 1
            self.long = list(range(3_000_000))
            self.words = [f"w{i % 7}" for i in range(300_000)]
            self.sparse = torch.eye(3).to_sparse()
            self.meta = torch.ones(9, device="meta")
            self.objects = np.array([Thing, None], dtype=object)
            self.deep = [[[[[[1, 2, 3]]]]]]
            self.mixed = {1, "a"}

    made = [
        prints_of([("it", Owner(Thing(at), "all"))], {}, lambda tensor: False) for at in (0, 0, 2)
    ]
    assert made[0] == made[1]
    assert made[0].keys() == {"it.big", "it.long", "it.words"}
    assert [made[0][f"it.{name}"]["count"] for name in ("big", "long", "words")] == [
        *(20 << 20, 3_000_000, 300_000)
    ]
    assert list(unlike(made[2], made[0])) == [("it.big", SEED)]


@pytest.mark.parametrize("saved", [None, 3, {"it.big": 3}, {"it.big": {}}])
def test_prints_of_another_kind_are_no_error(saved: Any) -> None:
    here = prints_of([], {"it.big": [1, 2, 3, 4, 5, 6, 7, 8, 9]}, lambda tensor: False)
    for _, why in unlike(saved, here):
        assert why.startswith("had None items")
