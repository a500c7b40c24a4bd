"""What no state dict has: kept where it can be, said where it cannot, and never a false alarm.

That it goes on bit for bit is in the table of `benchmarks.resume_features`.
"""

from __future__ import annotations

import collections
import copy
import enum
import functools
import random
import threading
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset

from tests.torch_process import TorchProcesses
from trainer_core import CheckpointError, CheckpointManager, ResumeWarning, Trainer
from trainer_core.census.census import Census, without_generators
from trainer_core.census.kept_values import MOST_BYTES, MOST_GRAPH_BYTES, MOST_TOTAL_BYTES
from trainer_core.site.per_rank import own_section, take_own


class Model(nn.Module):
    """`act` is called in each forward, and may change what it likes."""

    def __init__(self, act: Any = lambda model: None, **given: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.drop = nn.Dropout(0.5)
        self.act = act
        vars(self).update(given)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.act(self)
        self.x = self.layer(x).square().mean()
        return self.x


BATCHES = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0]])]


def trainer(model: nn.Module, loader: Any = BATCHES, **options: Any) -> Trainer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Trainer(model, optimizer, loader, device="cpu", **options)


def saved(one: Trainer, tmp_path: Path) -> Any:
    """As a file brings it back."""
    path = tmp_path / "state.pt"
    torch.save(one.state_dict(), path)
    return torch.load(path, weights_only=True)


def words(one: Trainer, state: Any, **options: Any) -> list[str]:
    """The lines of a resume's one warning; none where it says nothing."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        one.resume(state, **options)
    assert len(caught) <= 1 and all(w.category is ResumeWarning for w in caught)
    return str(caught[0].message).split("\n  - ")[1:] if caught else []


# What is kept


class Phase(enum.Enum):
    WARM = "warm"
    MAIN = "main"


class Plan:
    """An object of the program's own."""

    def __init__(self) -> None:
        self.level, self.inner = 0, types.SimpleNamespace(depth=1)


def changed(model: Any) -> None:
    model.number, model.text, model.nothing = float("nan"), "b", None
    model.phase, model.single = Phase.MAIN, np.float32(0.1)
    model.items.append(("c", {"d": {2, 3}}))
    model.recent.append(9)
    model.counts["x"] += 2
    model.groups["y"].append(1)
    model.ordered.move_to_end("a")
    model.array[1] = 5
    model.plan.level, model.plan.inner.depth = 3, 4
    model.sizes = torch.Size([2, 3]), frozenset({1}), b"\x00", 1j
    model.generator.manual_seed(77)
    model.drawn["python"].random()
    model.drop.p = 0.25
    model.wide = torch.zeros(3).expand(2, 3)
    model.teacher[0].weight.data.fill_(2)
    with torch.no_grad():
        model.teacher[0].weight.add_(1)
    del model.gone


def given() -> dict[str, Any]:
    torch.manual_seed(5)
    return {
        "number": 1.0,
        "text": "a",
        "nothing": 1,
        "gone": 1,
        "phase": Phase.WARM,
        "single": np.float32(0),
        "items": [1],
        "recent": collections.deque([1], maxlen=2),
        "counts": collections.Counter("x"),
        "groups": collections.defaultdict(list),
        "ordered": collections.OrderedDict(a=1, b=2),
        "array": np.zeros(3),
        "plan": Plan(),
        "sizes": None,
        "wide": None,
        "generator": torch.Generator().manual_seed(1),
        "drawn": {"python": random.Random(2)},
        "teacher": [nn.Linear(2, 2)],
    }


def test_each_kind_of_value_comes_back_as_it_was(tmp_path: Path) -> None:
    one = trainer(Model(changed, **given()))
    one.fit(1)
    again = trainer(Model(**given()))
    held = {name: getattr(again.model, name) for name in ("items", "recent", "groups", "array")}
    assert words(again, saved(one, tmp_path)) == []
    mine, other = vars(again.model), vars(one.model)
    for name in given().keys() - {"number", "array", "plan", "generator", "drawn", "teacher"}:
        assert name == "gone" or repr(mine.get(name)) == repr(other.get(name)), name
        assert type(mine.get(name)) is type(other.get(name)), name
    assert mine["number"] != mine["number"] and "gone" not in mine
    assert (mine["plan"].level, mine["plan"].inner.depth) == (3, 4)
    assert again.model.get_submodule("drop").p == 0.25
    assert mine["array"].tolist() == [0, 5, 0]
    assert torch.equal(mine["teacher"][0].weight, torch.full((2, 2), 3.0))
    assert isinstance(mine["teacher"][0].weight, nn.Parameter)
    assert torch.rand(1, generator=mine["generator"]) == torch.rand(1, generator=other["generator"])
    assert mine["drawn"]["python"].random() == other["drawn"]["python"].random()
    assert all(mine[name] is thing for name, thing in held.items())  # in place


def test_what_a_program_has_not_made_yet_is_made(tmp_path: Path) -> None:
    def lazily(model: Any) -> None:
        if not hasattr(model, "rng"):
            model.rng, model.torchs = np.random.default_rng(5), torch.Generator().manual_seed(6)
            model.old, model.py = np.random.RandomState(7), random.Random(8)
            model.register_buffer("mask", torch.arange(3.0), persistent=False)
        model.rng.random()

    one, again = trainer(Model(lazily)), trainer(Model(lazily))
    one.fit(2)
    assert words(again, saved(one, tmp_path)) == []
    mine, other = again.model, one.model
    assert mine.rng.random() == other.rng.random()  # type: ignore[operator, union-attr]  # a Linear
    assert mine.old.rand() == other.old.rand() and mine.py.random() == other.py.random()  # type: ignore[operator, union-attr]  # a Linear
    assert torch.equal(mine.torchs.get_state(), other.torchs.get_state())  # type: ignore[operator, union-attr]  # a Linear
    assert "mask" in mine._buffers and "mask" not in mine.state_dict()
    assert torch.equal(mine.mask, torch.arange(3.0))  # type: ignore[arg-type]


def count(model: Any) -> None:
    model.calls += 1


class Compiled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self._orig_mod(x)


Compiled.__name__ = "OptimizedModule"


def test_names_are_those_without_wrappers() -> None:
    plain, wrapped = trainer(Model(count, calls=0)), trainer(Compiled(Model(count, calls=0)))
    wrapped.fit(3)
    section = wrapped.state_dict()["attributes"]
    assert section["model"][""]["calls"] == 3
    assert words(plain, wrapped.state_dict()) == []
    assert plain.model.calls == 3


def test_the_averaged_models_other_buffers_are_kept(tmp_path: Path) -> None:
    def make() -> Trainer:
        model = Model()
        model.register_buffer("mean", torch.zeros(1), persistent=False)
        ema = AveragedModel(model, avg_fn=lambda old, new, n: old + 1, use_buffers=True)
        return trainer(model, ema=ema)

    one, again = make(), make()
    one.fit(3)
    assert float(one.ema.module.mean) == 2.0  # type: ignore[union-attr]
    assert words(again, saved(one, tmp_path)) == []
    assert float(again.ema.module.mean) == 2.0  # type: ignore[union-attr]


class Centred(nn.Module):
    """A loss that remembers: a buffer, a count, and what it gave last."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(()))
        self.calls = 0

    def forward(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        out = model(batch)
        self.calls += 1
        self.centre = self.centre * 0.9 + 0.1 * out.detach() / self.calls
        loss: torch.Tensor = (out - self.centre).square()
        return loss

    def method(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self(model, batch)
        return loss


class Unfreezing:
    """The layer learns from step 2 on."""

    def on_step_end(self, one: Trainer, step: int, metrics: Any) -> None:
        one.model.layer.weight.requires_grad_(step >= 2)


@pytest.mark.parametrize("of", [lambda loss: loss, lambda loss: loss.method])
def test_a_loss_that_remembers_and_a_layer_that_learns_later(tmp_path: Path, of: Any) -> None:
    def begun() -> Trainer:
        torch.manual_seed(3)
        model = Model()
        model.layer.weight.requires_grad_(False)
        return trainer(model, loss_fn=of(Centred()), callbacks=[Unfreezing()])

    whole = begun()
    losses = [whole.fit(step).final_loss for step in range(1, 7)]
    for at in range(1, 6):
        first, second = begun(), begun()
        first.fit(at)
        assert words(second, saved(first, tmp_path)) == []
        assert second.model.layer.weight.requires_grad is (at >= 2)
        assert [second.fit(step).final_loss for step in range(at + 1, 7)] == losses[at:]


def test_outputs_that_are_stored_to_look_at_are_neither_told_nor_without_bounds() -> None:
    Output = collections.namedtuple("Output", "loss more")

    def store(model: Any) -> None:
        model.output = Output(model.layer.weight.sum(), [1])
        for number in range(20):  # 4 MiB each
            setattr(model, f"seen{number}", torch.ones(1 << 20))

    model = Model(store)
    one = trainer(model)
    one.fit(2)
    state = one.state_dict()
    kept = state["attributes"]["model"][""]
    assert sum(name.startswith("seen") for name in kept) == MOST_TOTAL_BYTES // (4 << 20)
    assert "output" not in kept
    assert words(trainer(Model(store)), state) == []


def test_a_checkpoint_taken_back_to_in_one_process_sets_all_as_it_was() -> None:
    def act(model: Any) -> None:
        model.calls += 1
        model.flag = not model.flag
        model.names.append(model.calls)
        model.made = model.calls if model.calls > 1 else None

    one = trainer(Model(act, calls=0, flag=False, names=["a"], made=None))
    one.fit(2)
    state = copy.deepcopy(one.state_dict())
    first = copy.deepcopy(trainer(Model(act, calls=0, flag=False, names=["a"], made=None)))
    start = first.state_dict()
    one.fit(3)
    assert words(one, state) == []
    own = vars(one.model)
    assert (own["calls"], own["flag"], own["names"], own["made"]) == (2, False, ["a", 1, 2], 2)
    assert words(one, start) == []
    assert (own["calls"], own["flag"], own["names"], own["made"]) == (0, False, ["a"], None)


def test_nothing_is_kept_that_the_program_gives(tmp_path: Path) -> None:
    one = trainer(Model(count, calls=0, limit=5))
    one.fit(1)
    again = trainer(Model(count, calls=0, limit=6))
    assert words(again, saved(one, tmp_path)) == []
    assert (again.model.calls, again.model.limit) == (1, 6)


def test_what_is_set_after_the_trainer_was_made_and_replaced_is_told() -> None:
    one, again = (trainer(Model(count, calls=0)) for _ in range(2))
    one.fit(2)
    again.model.calls = 7  # type: ignore[assignment]
    assert words(again, one.state_dict()) == ["model.calls: 2 was saved and counts, it is 7 here"]
    assert again.model.calls == 2


# What cannot be kept


class Strange:
    """Says itself how it is copied."""

    __slots__ = ("value",)

    def __getstate__(self) -> int:
        return 1


def test_what_cannot_be_kept_is_said_by_its_path(tmp_path: Path) -> None:
    def act(model: Any) -> None:
        model.thing = Strange()
        model.function = len
        model.memory = torch.ones(MOST_BYTES // 4 + 1)
        model.deep["a"][0] = Strange()
        model.keys[(1, 2)] = 3

    start = {"thing": 1, "function": max, "memory": None, "deep": {"a": [1]}, "keys": {}}
    one = trainer(Model(act, **copy.deepcopy(start)))
    one.fit(1)
    lines = words(trainer(Model(act, **copy.deepcopy(start))), saved(one, tmp_path))
    memory = "is a tensor of 16.0 MiB, and not kept: as a buffer (persistent=False) it is"
    assert sorted(lines) == [
        "approximate: model.deep['a'][0]: a Strange object, which is not kept",
        "approximate: model.function: a builtin_function_or_method, which is not kept",
        "approximate: model.keys: is a dictionary with keys that are not plain",
        f"approximate: model.memory: {memory}",
        "approximate: model.thing: a Strange object, which is not kept",
    ]


def test_too_many_lines_are_cut() -> None:
    def act(model: Any) -> None:
        vars(model).update({f"thing{i}": Strange() for i in range(20)})

    one = trainer(Model(act, **{f"thing{i}": 1 for i in range(20)}))
    one.fit(1)
    lines = words(trainer(Model()), one.state_dict())
    assert len(lines) == 9 and lines[-1] == "attributes: 12 more like these"


def test_a_module_that_is_not_here_is_told() -> None:
    one = trainer(Model(count, calls=0))
    one.fit(1)
    state = one.state_dict()
    state["attributes"]["model"]["gone.layer"] = {"calls": 1}
    assert words(trainer(Model(count, calls=0)), state) == [
        "model.gone.layer: has attributes saved, is not here"
    ]


MALFORMED = [
    (3, "attributes: what is saved are no attributes"),
    ({"model": {"": {"calls": {"$odd": 1}}}}, "is kept as '\\$odd', which is not known here"),
    ({"model": {"": {"rng": {"$generator": "torch", "state": 3}}}}, "attributes: model.rng: "),
    (
        {"model": {"": {"calls": {"$generator": "numpy", "state": {}}}}},
        "model.calls: is int here, while a generator was saved",
    ),
    ({"model": {"": {"layer": 3}}}, "model.layer: does not fit what is here under its name"),
]


@pytest.mark.parametrize(("section", "error"), MALFORMED)
def test_what_does_not_fit_is_refused_and_nothing_is_changed(section: Any, error: str) -> None:
    def make() -> Trainer:
        rng = torch.Generator().manual_seed(5)
        return trainer(Model(count, calls=0, rng=rng, history=[1], before=torch.ones(2)))

    again, before = make(), make()
    state = trainer(Model()).state_dict()
    state["attributes"] = section
    if isinstance(section, dict):  # these come before what is refused, and are taken back
        own = {"history": [1, 2], "before": torch.zeros(2), "new": 1}
        section = {"model": {"": {**own, **section["model"][""]}}}
        state["attributes"] = section
    history = again.model.history
    with pytest.raises(CheckpointError, match=error):
        again.resume(state)
    assert history == [1] and again.model.before.tolist() == [1, 1]  # type: ignore[union-attr, operator]
    assert not hasattr(again.model, "new") and again.step == 0
    assert torch.equal(again.model.rng.get_state(), before.model.rng.get_state())  # type: ignore[union-attr, operator]
    lines = words(again, state, allow_partial=("attributes",))
    assert len(lines) == 1 and lines[0].startswith("attributes: not restored, as allowed: ")
    assert history == [1]


def test_a_file_of_an_older_version_resumes_as_it_did() -> None:
    one, again = (trainer(Model(count, calls=0)) for _ in range(2))
    one.fit(2)
    state = one.state_dict()
    del state["attributes"]
    assert words(again, state) == [] and again.model.calls == 0


# No false alarms


class Ordinary(nn.Module):
    """What models do that remember nothing."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.layers = list(self.encoder.layers)  # the same again, in a list of their own
        self.flat = [p.detach() for p in self.parameters()]
        self.mask: torch.Tensor | None = None
        self.caches: dict[str, Any] = {}
        self.lock = threading.Lock()
        self.file: Any = None
        self.owner = [self]
        self.register_buffer("angles", torch.ones(4), persistent=False)

    @functools.cached_property
    def scale(self) -> Any:
        return Strange()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.ones(2048, 2048).triu(1).bool()  # 4 MiB
            self.file, self.helper = open(__file__), threading.Lock()  # noqa: SIM115 - stays open
            self.caches["activate"] = lambda x: x.relu()
        self.scale  # noqa: B018 - worked out once
        x = self.encoder(x, mask=self.mask[:3, :3])
        self.activations = x.new_ones(MOST_GRAPH_BYTES // 4, 2) * x.mean()
        x = self.caches["activate"](self.norm(self.lstm(x)[0])) * self.angles
        self.last_loss = x.square().mean()
        return self.last_loss


def test_an_ordinary_model_is_not_talked_about(tmp_path: Path) -> None:
    batches = [torch.ones(2, 3, 4)]
    one, again = trainer(Ordinary(), batches), trainer(Ordinary(), batches)
    assert one.state_dict()["attributes"].keys() == {"made"}
    one.fit(2)
    state = saved(one, tmp_path)
    section = state["attributes"]
    assert section.keys() == {"model", "remade", "made"}
    assert {path: list(owner) for path, owner in section["model"].items()} == {
        "": ["mask", "last_loss"]
    }
    names = ["file", "helper", "caches['activate']", "scale", "activations"]
    assert sorted(section["remade"]) == sorted(f"model.{name}" for name in names)
    assert words(again, state) == []
    assert torch.equal(again.model.mask, one.model.mask)  # type: ignore[arg-type]
    for trained in (one, again):
        if trained.model.file:
            trained.model.file.close()  # type: ignore[operator, union-attr]  # a Linear


def test_a_model_that_remembers_nothing_costs_no_bytes() -> None:
    one = trainer(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), [torch.ones(3, 2)] * 2)
    one.loss_fn = lambda model, batch: model(batch).square().mean()
    one.fit(2)
    assert one.state_dict()["attributes"].keys() == {"made"}  # of the batches, a list


def test_long_containers_are_noticed_without_a_look_at_each_item() -> None:
    class Long:
        def __init__(self) -> None:
            self.files = [f"{i}.jpg" for i in range(200_000)]
            self.tokens = np.zeros(3_000_000)
            self.order = list(range(50_000))

    thing = Long()
    census = Census({"it": thing})
    assert census.section() == {}
    random.Random(1).shuffle(thing.files)
    random.Random(1).shuffle(thing.order)
    thing.tokens += 1
    assert census.section()["it"] == {"": {"order": thing.order}}
    assert census.section()["unkept"] == {
        "it.files": "is too big to be kept",
        "it.tokens": "is too big to be kept",
    }


# Data


class Rows(Dataset[torch.Tensor]):
    """`act` is called at each reading."""

    def __init__(self, act: Any = lambda rows: None, **given: Any) -> None:
        self.act = act
        vars(self).update(given)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        self.act(self)
        return torch.ones(2) * index


class Remembers:
    """A collate function with a state."""

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, rows: list[torch.Tensor]) -> torch.Tensor:
        self.batches += 1
        return torch.stack(rows) * self.batches


def fill(rows: Any) -> None:
    rows.read += 1
    rows.file = rows.file or threading.Lock()
    rows.cache[rows.read] = torch.ones(MOST_BYTES // 8)  # decoded samples, say: no state


def test_dataset_and_collate_function_remember_before_fit_and_in_it(tmp_path: Path) -> None:
    def make() -> Trainer:
        rows = Rows(fill, read=0, file=None, cache={})
        return trainer(Model(), DataLoader(rows, batch_size=2, collate_fn=Remembers()))

    one, again = make(), make()
    one.dataloader.dataset.read = 10  # type: ignore[attr-defined]
    assert words(again, saved(one, tmp_path)) == []  # no pass is under way
    again.fit(2)
    one.fit(2)
    for done in (one, again):
        assert (done.dataloader.dataset.read, done.dataloader.collate_fn.batches) == (14, 2)  # type: ignore[attr-defined]
    third = make()
    assert words(third, saved(one, tmp_path)) == []
    third.fit(3)
    assert (third.dataloader.dataset.read, third.dataloader.collate_fn.batches) == (16, 3)  # type: ignore[attr-defined]
    assert list(third.dataloader.dataset.cache) == [15, 16]  # type: ignore[attr-defined]


def test_what_is_set_between_two_fits_counts() -> None:
    rows = Rows(level=1)
    one = trainer(Model(), DataLoader(rows, batch_size=2, num_workers=1))
    one.fit(1)
    rows.level = 2
    one.fit(2)
    assert rows.level == 2


class Levels:
    """A loader of one's own; a callback changes its level."""

    def __init__(self) -> None:
        self.level, self.strange = 1, None

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(4):
            yield torch.ones(1, 2) * self.level

    def on_step_end(self, trainer: Trainer, step: int, metrics: dict[str, Any]) -> None:
        if step == 2:
            self.level = 5


def test_what_is_changed_in_the_midst_of_a_pass_is_set_back_and_said() -> None:
    def make() -> Trainer:
        loader = Levels()
        return trainer(Model(), loader, callbacks=[loader])

    one, again = make(), make()
    one.fit(3)
    assert words(again, one.state_dict()) == []
    with pytest.warns(ResumeWarning, match=r"loader\.level: is not what it was when the pass"):
        again.fit(4)
    one.fit(4)
    assert again.dataloader.level == 5  # type: ignore[attr-defined]
    assert torch.equal(again.model.layer.weight, one.model.layer.weight)  # type: ignore[arg-type, union-attr]


def test_a_loader_that_holds_what_cannot_be_kept_is_approximate() -> None:
    class Odd(Levels):
        def __iter__(self) -> Iterator[torch.Tensor]:
            self.level = Strange()  # type: ignore[assignment]
            return iter(BATCHES)

    one = trainer(Model(), Odd())
    one.fit(3)
    assert words(trainer(Model(), Odd()), one.state_dict()) == [
        "data: approximate: loader.level: a Strange object, which is not kept"
    ]


def read(rows: Any) -> None:
    rows.read += 1


def cached(rows: Any) -> None:
    rows.cache[len(rows.cache)] = torch.ones(2)
    rows.file = rows.file or threading.Lock()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_what_changes_within_workers_is_said_and_caches_are_not() -> None:
    def lines(act: Any, **given: Any) -> list[str]:
        one, again = (
            trainer(Model(), DataLoader(Rows(act, **given), batch_size=1, num_workers=1))
            for _ in range(2)
        )
        one.fit(6)  # the worker has told by the time of its last batch
        return words(again, one.state_dict())

    what = "dataset.read: changes within worker processes, where it cannot be kept"
    assert lines(read, read=0) == [f"data: approximate: {what}"]
    assert lines(cached, cache={}, file=None) == []


# Ranks


def test_a_rank_gets_its_own_and_a_new_one_no_generators() -> None:
    def state(calls: int) -> dict[str, Any]:
        one = trainer(Model(count, calls=calls, rng=torch.Generator().manual_seed(calls)))
        one.fit(1)
        one.model.rng.manual_seed(calls + 1)  # type: ignore[operator, union-attr]  # a Linear
        return one.state_dict()

    states = [state(0), state(5)]
    whole = {**states[0], "ranks": {str(i): own_section(one) for i, one in enumerate(states)}}
    own = take_own(whole, 1, 2, None).state["attributes"]["model"][""]
    assert own["calls"] == 6 and own["rng"]["$generator"] == "torch"
    new = take_own(whole, 3, 4, None).state["attributes"]["model"][""]
    assert new["calls"] == 6 and "rng" not in new
    assert without_generators(3) == 3


def test_saved_beside_training_it_is_that_of_its_step(tmp_path: Path) -> None:
    def act(model: Any) -> None:
        model.calls += 1
        model.sums += 1

    manager = CheckpointManager(tmp_path, every_steps=1, keep_last=None, async_save=True)
    one = trainer(Model(act, calls=0, sums=torch.zeros(2)), checkpoint_manager=manager)
    one.fit(4)
    for step in range(1, 5):
        own = torch.load(manager.path_for(step), weights_only=True)["attributes"]["model"][""]
        assert own["calls"] == step and own["sums"].tolist() == [step, step]


# Whose attributes


def test_a_package_without_an_init_file_is_of_the_program(
    torch_processes: TorchProcesses, tmp_path: Path
) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "nets.py").write_text(
        "class Count:\n    def __init__(self):\n        self.calls = 0\n"
    )
    program = (
        "import sys; sys.path.insert(0, '.')\n"
        "import types\n"
        "from parts.nets import Count\n"
        "from trainer_core.census.census import Census\n"
        "holder = types.SimpleNamespace(count=Count())\n"
        "census = Census({'it': holder})\n"
        "holder.count.calls = 3\n"
        "print(census.section())\n"
    )
    done = torch_processes.run("-c", program, cwd=tmp_path)
    assert done.stdout.strip() == "{'it': {'count': {'calls': 3}}}", done.stderr


def test_a_layer_of_the_model_that_a_loss_holds_is_kept_once(tmp_path: Path) -> None:
    class Loss:
        def __init__(self, layer: nn.Module) -> None:
            self.layer, self.calls = layer, 0

        def __call__(self, model: Any, batch: Any) -> Any:
            self.calls += 1
            return model(batch) + self.layer.weight.square().sum()  # type: ignore[operator, union-attr]  # a Linear

    def begun() -> Trainer:
        model = Model()
        return trainer(model, loss_fn=Loss(model.layer))

    one, again = begun(), begun()
    one.fit(2)
    state = saved(one, tmp_path)
    assert state["attributes"]["loss_fn"] == {"fn": {"calls": 2}}
    assert words(again, state) == []


def test_a_state_that_is_kept_for_others_is_not_kept_again() -> None:
    """What a data loader within a callback changes, and the run's own parts that it holds."""

    class Evaluates:
        def __init__(self) -> None:
            self.loader = DataLoader(Rows(read, read=0), batch_size=2)
            self.parts: Any = None

        def on_step_end(self, one: Trainer, step: int, metrics: Any) -> None:
            self.parts = [one, one.model, one.optimizer, one.dataloader, one.model.layer]
            for _ in self.loader:
                pass

    one, again = (trainer(Model(), callbacks=[Evaluates()]) for _ in range(2))
    one.fit(2)
    state = one.state_dict()
    parts = ["trainer", "model", "optimizer", "loader", "model.layer"]
    assert state["attributes"]["callbacks.Evaluates"] == {
        "": {"parts": [{"$part": part} for part in parts]},
        "loader.dataset": {"read": 12},
    }
    assert words(again, state) == []
    mine = next(iter(again._callbacks.others.values()))
    assert mine.parts[0] is again and mine.parts[4] is again.model.layer
    assert mine.loader.dataset.read == 12


def test_a_shared_layer_of_an_optimizer_of_a_callback_that_is_fused_is_seen() -> None:
    """torch's fused optimizers change no version of what they step."""

    class Trains:
        def __init__(self) -> None:
            self.net = nn.Linear(2, 1)
            self.optimizer = torch.optim.AdamW(self.net.parameters(), fused=True)

    thing = Trains()
    census = Census({"it": thing})
    thing.net(torch.ones(2)).backward()
    version = thing.net.weight._version
    thing.optimizer.step()
    assert thing.net.weight._version == version  # so that it would not be seen by that
    section = census.section()["it"]
    assert section["net"].keys() == {"weight", "bias"}
    assert section["optimizer"].keys() == {"state_dict()"}


def test_handles_within_an_object_of_another_package_make_it_one() -> None:
    import logging
    import queue

    class Thing:
        def __init__(self) -> None:
            self.handler: Any = None
            self.queue: Any = None
            self.own: Any = None

    class Own:
        def __init__(self) -> None:
            self.lock, self.count = threading.Lock(), 3

    thing = Thing()
    census = Census({"it": thing})
    thing.handler, thing.queue, thing.own = logging.StreamHandler(), queue.Queue(), Own()
    assert census.section() == {
        "remade": {
            "it.handler": "a StreamHandler object, which is not kept",
            "it.queue": "a Queue object, which is not kept",
        },
        "unkept": {"it.own": "an Own object, which is not kept"},  # it counts, too
    }
