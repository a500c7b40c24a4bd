"""Which values of attributes a checkpoint keeps, type for type, and which it says it does not."""

from __future__ import annotations

import argparse
import array
import collections
import copy
import dataclasses
import datetime
import decimal
import enum
import fractions
import itertools
import math
import pathlib
import random
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from tests.trainer_core.census.test_census import Model, saved, trainer, words
from trainer_core import CheckpointError
from trainer_core.census.census import Census
from trainer_core.census.clocks import is_reading


class Colour(enum.Enum):
    RED = "red"
    ODD = (1, 2)


class Access(enum.IntFlag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: int
    y: float


@dataclasses.dataclass(frozen=True)
class Frozen:
    count: int = 0
    names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    count: int = 0


class Base:
    __slots__ = ("first",)


class Slots(Base):
    __slots__ = ("__hidden", "never", "second")

    def __init__(self, second: Any = 1) -> None:
        self.first, self.second, self.__hidden = 0, second, [0]

    def tick(self) -> None:
        self.first += 1
        self.__hidden.append(self.first)

    def __repr__(self) -> str:
        return f"Slots({self.first}, {self.second}, {self.__hidden})"


class Plain:
    def __init__(self) -> None:
        self.total, self.inner = 2.5, Slots()

    def __repr__(self) -> str:
        return f"Plain({self.total}, {self.inner})"


class Meter(collections.OrderedDict[str, float]):
    total = 0.0


class Window(list[float]):
    size: int


def meter() -> Meter:
    made = Meter(a=1.0, b=2.0)
    made.total = 3.0
    return made


def window() -> Window:
    made = Window([1.0, 2.0])
    made.size = 7
    return made


def with_versions() -> collections.OrderedDict[str, Any]:
    """As a module's state dict has them."""
    made: collections.OrderedDict[str, Any] = collections.OrderedDict(a=1)
    vars(made)["_metadata"] = collections.OrderedDict({"": {"version": 1}})
    return made


BERLIN = datetime.timezone(datetime.timedelta(hours=1))
DAY = datetime.datetime(2001, 2, 3, 4, 5, 6, 7, BERLIN, fold=1)
KEPT: list[Callable[[], Any]] = [
    *(lambda: Colour.RED, lambda: Colour.ODD, lambda: Access.READ | Access.WRITE),
    *(lambda: Point(1, 2.0), lambda: Frozen(3, ("a",)), lambda: FrozenSlots(4)),
    *(Plain, Slots, meter, window, with_versions),
    lambda: array.array("d", [1.5, math.inf]),
    *(lambda: array.array("b"), lambda: bytearray(b"\x00\xff"), bytearray, bytes),
    *(lambda: DAY, lambda: datetime.datetime(1, 1, 1), lambda: datetime.date(2001, 2, 3)),
    *(lambda: DAY.timetz(), lambda: datetime.timedelta(-1, 2, 3), lambda: datetime.timezone.utc),
    *(lambda: pathlib.Path("a/b"), lambda: pathlib.PurePosixPath("/c")),
    *(lambda: decimal.Decimal("1.10"), lambda: fractions.Fraction(-1, 3), lambda: uuid.UUID(int=5)),
    *(lambda: range(1, 9, 2), lambda: slice(None, 3), lambda: {1, 2}, lambda: frozenset("a")),
    *(lambda: np.float32(0.1), lambda: np.int64(2**62), lambda: np.bool_(True)),
    *(lambda: np.str_("text"), lambda: np.datetime64("2001-02-03"), lambda: np.longdouble(1) / 3),
    *(lambda: np.array(["a", "bc"]), lambda: np.array(["2001-02-03"], "M8[D]")),
    *(lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)), lambda: np.array([1], ">i4")),
    *(lambda: np.zeros((0, 2)), lambda: np.array(3.0), lambda: np.array([1j])),
    lambda: collections.defaultdict(int, a=1),
    lambda: collections.defaultdict(None, a=1),
    lambda: collections.deque([Point(1, 2.0)], maxlen=3),
    lambda: {"deep": [{"$x": Frozen()}, (Slots(2),)]},
]


@pytest.mark.parametrize("make", KEPT, ids=lambda make: repr(make())[:40])
@pytest.mark.parametrize("first", ["nothing", "the same kind"])
def test_what_a_step_sets_comes_back(tmp_path: Path, make: Any, first: str) -> None:
    """Where there was nothing, and where there was such a thing that was replaced."""
    before = None if first == "nothing" else make()
    one, again = (trainer(Model(lambda m: setattr(m, "it", make()), it=before)) for _ in range(2))
    one.model.it = None  # type: ignore[assignment]  # of torch's __setattr__
    one.fit(1)
    if first == "nothing":
        assert words(again, saved(one, tmp_path)) == []
    else:
        one.model.more = make()  # type: ignore[assignment]  # as above
        assert words(again, saved(one, tmp_path)) == []
    for name in ("it",) if first == "nothing" else ("it", "more"):
        its: Any = vars(again.model)[name]
        assert type(its) is type(make())
        assert repr(its) == repr(make())
        if isinstance(its, np.ndarray):
            assert (its.dtype, its.strides) == (make().dtype, make().strides)
        if isinstance(its, datetime.datetime):
            assert its.fold == make().fold
        if isinstance(its, collections.OrderedDict):
            assert vars(its) == vars(make())


CHANGED: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (lambda: array.array("i", [1, 2]), lambda it: it.append(3)),
    (lambda: bytearray(3), lambda it: it.extend(b"a")),
    (lambda: {1, 2}, lambda it: it.add(3)),
    (Slots, lambda it: it.tick()),
    (Plain, lambda it: it.inner.tick()),
    (meter, lambda it: it.update(c=3.0)),
    (lambda: collections.Counter("ab"), lambda it: it.update("a")),
    (lambda: [Slots()], lambda it: it[0].tick()),
]


@pytest.mark.parametrize(("make", "change"), CHANGED)
def test_what_a_step_changes_in_place_is_changed_in_place(
    tmp_path: Path, make: Any, change: Any
) -> None:
    one, again = (trainer(Model(lambda m: change(m.it), it=make())) for _ in range(2))
    mine = again.model.it
    assert one.state_dict()["attributes"].keys() <= {"made"}
    one.fit(2)
    assert words(again, saved(one, tmp_path)) == []
    assert repr(mine) == repr(one.model.it) != repr(make())
    assert again.model.it is mine or isinstance(mine, Meter)


def test_an_attribute_of_a_container_of_ones_own_is_kept(tmp_path: Path) -> None:
    def grow(model: Any) -> None:
        model.it.total += 1

    one, again = (trainer(Model(grow, it=meter())) for _ in range(2))
    one.fit(2)
    assert words(again, saved(one, tmp_path)) == []
    assert again.model.it.total == 5.0  # type: ignore[union-attr]  # the meter


def test_what_was_one_object_is_one_again_and_others_stay_apart(tmp_path: Path) -> None:
    def act(model: Any) -> None:
        model.mean = model.mean * 0.5  # no longer the one that it began as
        model.recent = [*model.recent[-1:], float(model.mean[0])]
        model.both = [[1.0], torch.zeros(1)]
        model.same, model.tensor = model.both[0], model.both[1]
        model.arrays = model.arrays + 1

    def begun() -> Any:
        start, first, numbers = torch.ones(2), [9.0], np.zeros(2)
        shared = {"start": start, "mean": start, "first": first, "recent": first}
        return trainer(Model(act, **shared, numbers=numbers, arrays=numbers))

    one, again = begun(), begun()
    one.fit(3)
    assert words(again, saved(one, tmp_path)) == []
    model = again.model
    assert model.start.tolist() == [1.0, 1.0] and model.mean.tolist() == [0.125, 0.125]
    assert model.first == [9.0] and model.recent == [0.25, 0.125]
    assert model.numbers.tolist() == [0.0, 0.0] and model.arrays.tolist() == [3.0, 3.0]
    assert model.same is model.both[0] and model.tensor is model.both[1]


def test_leaves_learn_again(tmp_path: Path) -> None:
    def act(model: Any) -> None:
        model.leaf = torch.ones(2, requires_grad=True)
        model.more["it"] = nn.Parameter(torch.ones(3))

    one, again = (trainer(Model(act, leaf=None, more={})) for _ in range(2))
    one.fit(1)
    assert words(again, saved(one, tmp_path)) == []
    model: Any = again.model
    assert model.leaf.requires_grad and type(model.leaf) is torch.Tensor
    assert isinstance(model.more["it"], nn.Parameter)


class Closes:
    def __del__(self) -> None:
        pass


class Reduces:
    def __reduce__(self) -> Any:
        return Reduces, ()


def local() -> Any:
    class Local:
        pass

    return Local()


UNKEPT = [
    (Closes, "a Closes object, which is not kept"),
    (Reduces, "a Reduces object, which is not kept"),
    (local, "a Local object, which is not kept"),
    (lambda: collections.defaultdict(lambda: 0), "is a defaultdict whose factory is not kept"),
    (lambda: np.ma.array([1, 2], mask=[0, 1]), "is a MaskedArray of numpy's, which is not kept"),
    (lambda: np.array([None]), "is an array of object, which is not kept"),
    (
        lambda: np.zeros(1, "i4,f8"),
        "is an array of [('f0', '<i4'), ('f1', '<f8')], which is not kept",
    ),
    (lambda: iter([1]), "a list_iterator object, which is not kept"),
    (lambda: (i for i in range(3)), "a generator object, which is not kept"),
]


@pytest.mark.parametrize(("make", "why"), UNKEPT)
def test_what_is_not_kept_is_said(make: Any, why: str) -> None:
    one = trainer(Model(lambda m: setattr(m, "it", make()), it=None))
    one.fit(1)
    assert words(trainer(Model(it=None)), one.state_dict()) == [f"approximate: model.it: {why}"]


HOSTILE = [
    {"$object": ["subprocess", "Popen"], "attributes": {"args": "true"}},
    {"$object": ["builtins", "object"], "attributes": {}},
    {"$object": [__name__, "Closes"], "attributes": {}},
    {"$object": [__name__, "Reduces"], "attributes": {}},
    {"$object": [__name__, "gone.further"], "attributes": {}},
    {"$object": [3, None], "attributes": {}},
    {"$object": 3},
    {"$enum": 3, "class": "Popen", "module": "subprocess"},
    {"$enum": "blue", "class": "Colour", "module": __name__},
    {"$member": "BLUE", "class": "Colour", "module": __name__},
    {"$part": "trainer.optimizer"},
    {"$part": []},
    {"$raw": torch.zeros(8, dtype=torch.uint8), "dtype": "O", "shape": [1]},
    {"$raw": torch.zeros(3, dtype=torch.uint8), "dtype": "f8", "shape": [1]},
    {"$bytes": torch.zeros(3, dtype=torch.uint8), "of": "d"},
    {"$bytes": b"123"},
    {"$datetime": ["never", 0, []]},
    {"$state": {}},
    {"$new": {"$new": {"$odd": 1}}},
    {"$defaultdict": [["a"], [1]], "factory": "eval"},
]


@pytest.mark.parametrize("kept", HOSTILE)
def test_a_file_makes_nothing_but_what_the_program_has(kept: Any) -> None:
    one = trainer(Model(it=None))
    state = copy.deepcopy(one.state_dict())
    state["attributes"] = {"model": {"": {"it": kept}}}
    with pytest.raises(CheckpointError, match=r"^attributes: model\.it: "):
        trainer(Model(it=None)).resume(state)


def test_where_an_iterator_is_cannot_be_kept_and_that_is_said(tmp_path: Path) -> None:
    def begun() -> Any:
        def act(model: Any) -> None:
            model.number = next(model.counter) + next(model.halves)
            next(model.cycle)
            next(model.drawn)

        given = {
            "counter": itertools.count(5),
            "halves": itertools.count(0.5, 0.25),
            "cycle": itertools.cycle([1, 2]),
            "drawn": (i for i in range(9)),
        }
        return trainer(Model(act, **given))

    one, again = begun(), begun()
    one.fit(2)
    assert words(again, saved(one, tmp_path)) == [
        "approximate: model.cycle: a cycle object, which is not kept",
        "approximate: model.drawn: a generator object, which is not kept",
    ]
    again.fit(3)
    assert again.model.number == 7 + 1.0


# Clocks


def test_readings_of_clocks_are_no_state() -> None:
    class Times:
        def __init__(self) -> None:
            self.started: Any = None
            self.last = self.nanoseconds = self.when = self.seconds = self.loss = None

    thing = Times()
    census = Census({"it": thing})
    thing.started, thing.last = time.perf_counter(), time.time()
    thing.nanoseconds, thing.when = time.time_ns(), datetime.datetime.now()
    thing.seconds, thing.loss = 12.5, time.perf_counter()  # type: ignore[assignment]  # int before
    assert census.section()["it"][""].keys() == {"seconds", "loss"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("start", 3), ("start", True), ("start", "now"), ("start", None), ("time", math.inf)),
        *(("tokens", 10**15), ("time", math.nan), ("when", datetime.datetime(1, 1, 1))),
        *(("last_loss", 2.5), ("when", datetime.datetime.max)),
    ],
)
def test_what_is_no_reading_of_a_clock(name: str, value: Any) -> None:
    assert not is_reading(name, value)


def test_what_a_program_puts_on_objects_of_torch(tmp_path: Path) -> None:
    """Lists and the like, and generators; of a callback's Namespace all."""

    class Counts:
        def __init__(self) -> None:
            self.seen = argparse.Namespace(steps=0)

        def on_step_end(self, one: Any, step: int, metrics: Any) -> None:
            self.seen.steps += 1
            one.model.history.append(step)
            one.model.last.append(step)
            one.model.draws.random()
            one.optimizer.rates = {"all": [step]}

    def begun() -> Any:
        model: Any = nn.Sequential(Model())
        model.history, model.last = [], collections.deque(maxlen=2)
        model.draws = random.Random(5)
        return trainer(model, callbacks=[Counts()])

    one, again = begun(), begun()
    one.fit(3)
    assert words(again, saved(one, tmp_path)) == []
    again.fit(3)
    assert again.model.history == [1, 2, 3]
    assert list(again.model.last) == [2, 3] and again.model.last.maxlen == 2
    expected = random.Random(5)
    drawn = [expected.random() for _ in range(4)]
    assert again.model.draws.random() == drawn[3]
    assert again.optimizer.rates == {"all": [3]}
    assert next(iter(again._callbacks.others.values())).seen.steps == 3
