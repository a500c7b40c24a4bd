"""Random generators: those of this process at one moment, and those that objects hold.

A dataset, a sampler or a transform may draw from a generator of its own (`torch.Generator`,
`random.Random`, numpy's `Generator` or `RandomState`). Such are found by walking attributes, and
known by their path (`sampler.generator`, `dataset.transform.rng`).
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from trainer_core.rng import host_rng_state, is_same_state, plain_host_state, restore_rng_state

_MOST_OBJECTS = 10_000
_MOST_ITEMS = 64  # of one list or dict: a longer one is data
_CLOSED = (
    *(torch.Tensor, torch.nn.Parameter, torch.storage.UntypedStorage, types.ModuleType, type),
    *(types.FunctionType, types.BuiltinFunctionType, str, bytes, bytearray, int, float, complex),
)


def held_generators(roots: Mapping[str, Any], *, but: Iterable[Any] = ()) -> dict[str, Any]:
    """The generators that these objects are or hold, by path; nothing behind `but` is looked at.

    Follows attributes, short lists and dictionaries, bound methods and partial functions; not
    properties, closures, modules and classes. Stops after 10,000 objects.
    """
    found: dict[str, Any] = {}
    seen = {id(item) for item in but}
    waiting = [(name, root) for name, root in roots.items() if root is not None]
    for _ in range(_MOST_OBJECTS):
        if not waiting:
            break
        path, item = waiting.pop(0)
        if id(item) in seen:
            continue
        seen.add(id(item))
        if is_generator(item):
            found[path] = item
        else:
            waiting.extend(_inside(path, item))
    return found


def _inside(path: str, item: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(item, _CLOSED):
        return
    if isinstance(item, types.MethodType):
        yield path, item.__self__
    elif isinstance(item, functools.partial):
        yield path, item.func
        yield from ((f"{path}.args[{i}]", value) for i, value in enumerate(item.args))
        yield from ((f"{path}.{key}", value) for key, value in item.keywords.items())
    elif isinstance(item, dict) and len(item) <= _MOST_ITEMS:
        yield from ((f"{path}[{key!r}]", value) for key, value in item.items())
    elif isinstance(item, (list, tuple)) and len(item) <= _MOST_ITEMS:
        yield from ((f"{path}[{i}]", value) for i, value in enumerate(item))
    attributes = getattr(item, "__dict__", None)
    if type(attributes) is dict:
        yield from ((f"{path}.{key}", value) for key, value in attributes.items())


def is_generator(item: Any) -> bool:
    """Whether this is a generator whose state can be kept."""
    return isinstance(item, (torch.Generator, random.Random, *_numpys()))


def _numpys() -> tuple[type, ...]:
    # Where nobody has imported numpy, nobody holds one of its generators.
    numpy = sys.modules.get("numpy")
    if numpy is None or not hasattr(numpy, "random"):
        return ()
    return numpy.random.Generator, numpy.random.RandomState


def kind_of(generator: Any) -> str:
    """Whose generator it is."""
    if isinstance(generator, torch.Generator):
        return "torch"
    if isinstance(generator, random.Random):
        return "python"
    return "numpy" if hasattr(generator, "bit_generator") else "numpy-legacy"


def state_of(generator: Any) -> Any:
    """The state of one generator, as plain values and CPU tensors."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().cpu()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return _plain(generator.bit_generator.state)
    return _plain(generator.get_state(legacy=False))


def set_state(generator: Any, state: Any) -> None:
    """Makes one generator go on from what `state_of` gave. Raises what it raises for another's."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        version, words, gauss = state
        generator.setstate((version, tuple(words), gauss))
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = _with_arrays(state)
    else:
        generator.set_state(_with_arrays(state))


def reseed(generator: Any, seed: bytes) -> None:
    """Makes one generator go on from a state that depends on nothing but `seed`, 16 bytes."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(int.from_bytes(seed[:8], "little") >> 1)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif hasattr(generator, "bit_generator"):
        fresh = type(generator.bit_generator)(int.from_bytes(seed, "little"))
        generator.bit_generator.state = fresh.state
    else:
        generator.seed(words_of(seed))


def words_of(seed: bytes) -> list[int]:
    """A seed as words of 32 bits."""
    return [int.from_bytes(seed[i : i + 4], "little") for i in range(0, len(seed), 4)]


def states_of(generators: Mapping[str, Any]) -> dict[str, Any]:
    """The state of each, by path."""
    return {path: state_of(generator) for path, generator in generators.items()}


def set_states(generators: Mapping[str, Any], states: Any) -> list[str]:
    """Restores those that both sides have; gives, in words, what could not be."""
    if not isinstance(states, Mapping):
        return ["the states of generators are no mapping"]
    gone = [path for path in states if path not in generators]
    problems = [f"{path}: there is no generator here, while one was saved" for path in gone]
    for path, generator in generators.items():
        if path not in states:
            problems.append(f"{path}: no state of this generator was saved")
            continue
        try:
            set_state(generator, states[path])
        except Exception as error:  # each kind raises its own
            problems.append(f"{path}: {error}")
    return problems


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def _with_arrays(state: Mapping[str, Any]) -> dict[str, Any]:
    import numpy

    words = "uint32" if state["bit_generator"] == "MT19937" else "uint64"

    def convert(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: convert(item) for key, item in value.items()}
        return numpy.array(value, dtype=words) if isinstance(value, list) else value

    return {key: convert(value) for key, value in state.items()}


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    return bool(one == other)


class Moment:
    """The generators of this process (but not of its devices), and some others, at one moment."""

    __slots__ = ("_held", "_host")

    def __init__(self, held: Mapping[str, Any]) -> None:
        self._host = host_rng_state()
        self._held = states_of(held)

    def plain(self) -> dict[str, Any]:
        """As a checkpoint keeps it; `return_to` takes it back."""
        return {"rng": plain_host_state(self._host), "held": self._held}

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Moment)
            and is_same_state(self._host, other._host)
            and self._held.keys() == other._held.keys()
            and all(_is_equal(state, other._held[path]) for path, state in self._held.items())
        )

    __hash__ = None  # type: ignore[assignment]

    def torch_state(self) -> torch.Tensor:
        """The state of torch's generator on the CPU."""
        state: torch.Tensor = self._host["torch"]
        return state


def return_to(moment: Any, held: Mapping[str, Any]) -> list[str]:
    """Goes back to a moment (as `Moment.plain` gave it); gives, in words, what could not."""
    if not isinstance(moment, Mapping):
        return ["the random state at the beginning of the pass is missing"]
    failed = restore_rng_state(moment.get("rng"))
    words = [f"{part}, at the beginning of the pass: {why}" for part, why in failed.items()]
    return words + set_states(held, moment.get("held"))
