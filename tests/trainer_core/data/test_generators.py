"""Generators that objects hold: found, kept, set back and seeded."""

from __future__ import annotations

import functools
import io
import random
from typing import Any

import numpy as np
import pytest
import torch

from trainer_core.data.generators import (
    Moment,
    held_generators,
    reseed,
    return_to,
    set_states,
    state_of,
    states_of,
)
from trainer_core.rng import capture_rng_state, restore_rng_state


class Holder:
    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)

    def method(self) -> None:
        """Bound to what holds it."""


def kinds() -> list[Any]:
    bits = (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64)
    return [
        torch.Generator().manual_seed(1),
        random.Random(1),
        np.random.RandomState(1),
        *(np.random.Generator(kind(1)) for kind in bits),
    ]


def draw(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return torch.rand(3, generator=generator).tolist()
    if isinstance(generator, random.Random):
        return [generator.gauss(0, 1) for _ in range(3)]
    if isinstance(generator, np.random.RandomState):
        return generator.normal(size=3).tolist()
    return [*generator.normal(size=3).tolist(), int(generator.integers(9, dtype="uint32"))]


def test_found_by_path() -> None:
    one, two, three, four, five = kinds()[:5]
    dataset = Holder(
        transform=Holder(rng=one, steps=[Holder(), Holder(rng=two)]),
        options={"noise": three},
        call=functools.partial(print, four, end=five),
        again=two,
    )
    assert held_generators({"dataset": dataset}) == {
        "dataset.transform.rng": one,
        "dataset.again": two,
        "dataset.options['noise']": three,
        "dataset.call.args[0]": four,
        "dataset.call.end": five,
    }
    assert held_generators({"collate": dataset.transform.steps[1].method}) == {"collate.rng": two}
    assert held_generators({"dataset": dataset}, but=[dataset]) == {}
    assert held_generators({"generator": one, "none": None}) == {"generator": one}


def test_data_are_not_searched() -> None:
    deep = Holder(samples=[random.Random(0)] * 100, table={i: random.Random(i) for i in range(100)})
    assert held_generators({"dataset": deep}) == {}


def test_cycles_and_endless_objects_end() -> None:
    class Endless:
        def __init__(self) -> None:
            self.holder = Holder(back=self, rng=random.Random(3))

    assert len(held_generators({"it": Endless()})) == 1
    chain = Holder()
    for _ in range(20_000):
        chain = Holder(next=chain)
    assert held_generators({"it": chain}) == {}


@pytest.mark.parametrize("index", range(7))
def test_a_state_is_kept_under_safe_loading_and_set_back(index: int) -> None:
    generator = kinds()[index]
    draw(generator)  # an odd number of normal deviates: one is left over inside
    buffer = io.BytesIO()
    torch.save(state_of(generator), buffer)
    expected = draw(generator)
    state = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    other = kinds()[index]
    assert set_states({"it": other}, {"it": state}) == []
    assert draw(other) == expected


@pytest.mark.parametrize("index", range(7))
def test_a_seed_decides_all(index: int) -> None:
    one, other = kinds()[index], kinds()[index]
    draw(one)
    reseed(one, bytes(range(16)))
    reseed(other, bytes(range(16)))
    first = draw(one)
    assert first == draw(other)
    reseed(other, bytes(range(1, 17)))
    assert draw(other) != first


def test_what_does_not_fit_is_told() -> None:
    held = {"a": random.Random(0), "b": torch.Generator()}
    words = set_states(held, {"b": torch.zeros(3, dtype=torch.uint8), "c": 1})
    assert words[0] == "c: there is no generator here, while one was saved"
    assert words[1] == "a: no state of this generator was saved"
    assert words[2].startswith("b: ")
    assert set_states(held, 3) == ["the states of generators are no mapping"]


def test_a_moment_is_returned_to() -> None:
    before = capture_rng_state()
    try:
        held = {"it": random.Random(2)}
        moment = Moment(held)

        def drawn() -> list[float]:
            return [random.random(), np.random.random(), float(torch.rand(())), held["it"].random()]

        expected = drawn()
        assert Moment(held) != moment
        assert return_to(moment.plain(), held) == []
        assert Moment(held) == moment
        assert drawn() == expected
        assert return_to(None, held) == ["the random state at the beginning of the pass is missing"]
        (words,) = return_to({**moment.plain(), "held": {}}, held)
        assert words == "it: no state of this generator was saved"
    finally:
        restore_rng_state(before)


def test_states_by_path() -> None:
    one = random.Random(2)
    assert states_of({"a.b": one}) == {"a.b": one.getstate()}
