"""The indices that a DataLoader asks for: numbered, seeded, and begun in the midst of a pass.

`Indices` stands in for a loader's index sampler, in every run. It notes the random state in which
a pass begins; with that, a resumed run lets the sampler draw the same indices again and passes over
those that were used, without reading any data.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.utils.data

from trainer_core.callbacks import has_state
from trainer_core.data.generators import (
    Moment,
    held_generators,
    return_to,
    set_states,
    states_of,
)
from trainer_core.data.seeding import Seeded, batch_seed, new_seed
from trainer_core.loop.batches import has_length
from trainer_core.rng import host_rng_state, is_same_state

_MOST_COMPARED = 16
_NOTHING = object()


class Indices(torch.utils.data.Sampler[Any]):
    """What `sampler` gives, in its order. `epoch`: the number of the pass that begins next.

    `seeded`: each index goes to a worker process and takes a seed there. `generator`: the loader's
    own, or None. `ahead`: how many indices may be asked for before the first of them is used.
    """

    def __init__(
        self, sampler: Iterable[Any], *, seeded: bool, generator: Any, ahead: int, dataset: Any
    ) -> None:
        self.epoch = 0
        self.seed = ""
        self._sampler, self._seeded, self._generator = sampler, seeded, generator
        self._dataset = dataset
        # When the pass was asked for, when its sampler began, and when the first index was taken.
        self._asked: Moment | None = None
        self._begins: Moment | None = None
        self._begun: Moment | None = None
        self._recent: collections.deque[tuple[int, Any, Any]] = collections.deque(maxlen=ahead + 2)
        self._prepared: Iterator[Any] | None = None
        self._stateful = _stateful_part(sampler)

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        # A loader with workers asks twice, and draws its workers' base seed in between.
        if self._prepared is not None:
            return self._prepared
        held = self._held()
        self._begins = Moment(held)
        inner = iter(self._sampler)
        if self._asked is None or self._begun is not None:
            self._asked = Moment(held)
            self.seed = self._new_seed(self._asked)
        self._begun = None
        return self._numbered(inner, 0, held, None)

    def state(self, batch: int) -> dict[str, Any]:
        """What `go_to` needs to get here again: `batch` of this pass's batches were used."""
        if self._asked is None or self._begins is None or self._begun is None:
            return {}
        state: dict[str, Any] = {"seed": self.seed, "begins": self._begins.plain()}
        if self._begun != self._begins:
            state["begun"] = self._begun.plain()
        if self._seeded:
            state["asked"] = self._asked.plain()
        for number, index, sampler in self._recent:
            if number == batch - 1:
                state["last"] = _comparable(index)
                if sampler is not None:
                    state["sampler"] = sampler
        return state

    def go_to(self, state: Mapping[str, Any], batch: int) -> list[str]:
        """Makes the next pass begin after `batch` batches of the one that `state` is from.

        Changes random states. Gives, in words, what makes the result uncertain.
        """
        held = self._held()
        words = return_to(state.get("begins"), held)
        self._begins = self._begun = Moment(held)
        if self._stateful is not None and "sampler" in state:
            inner = self._from_state(state["sampler"], batch)
        else:
            inner = iter(self._sampler)
            if "begun" in state:
                words += return_to(state["begun"], held)
                self._begun = Moment(held)
            words += _pass_over(inner, batch, state.get("last"))
        self._prepare(inner, batch, state, states_of(held))
        return words + self._ask_again(state, held)

    def replay(self, state: Mapping[str, Any]) -> list[str]:
        """Makes the next pass begin as the one did that `state` is from, seeds and all."""
        held = self._held()
        words = return_to(state.get("begins"), held)
        self._begins = self._begun = Moment(held)
        self._prepare(iter(self._sampler), 0, state, states_of(held))
        return words + self._ask_again(state, held)

    def _prepare(
        self, inner: Iterator[Any], batch: int, state: Mapping[str, Any], states: dict[str, Any]
    ) -> None:
        self.seed = str(state.get("seed", ""))
        self._prepared = self._numbered(inner, batch, self._held(), states)

    def _ask_again(self, state: Mapping[str, Any], held: Mapping[str, Any]) -> list[str]:
        """A loader with workers draws their base seed next: the one that it drew then."""
        words = return_to(state["asked"], held) if "asked" in state else []
        self._asked = Moment(held)
        return words

    def _from_state(self, state: Any, batch: int) -> Iterator[Any]:
        """From where the sampler itself says that it is."""
        sampler: Any = self._stateful
        sampler.load_state_dict(copy.deepcopy(state))
        inner = iter(self._sampler)
        if not has_length(self._sampler) or batch < len(self):
            return inner
        # At the end of a pass some begin the next one at once, when they are only asked.
        if next(inner, _NOTHING) is not _NOTHING:
            sampler.load_state_dict(copy.deepcopy(state))
        return iter(())

    def _numbered(
        self,
        indices: Iterator[Any],
        number: int,
        held: Mapping[str, Any],
        states: Mapping[str, Any] | None,
    ) -> Iterator[Any]:
        # Only now, with the first index, does a sampler draw that is a generator function.
        self._prepared = None
        if states is None:
            self._begun = Moment(held)
        else:
            set_states(held, states)
        seed = self.seed
        for index in indices:
            stateful = self._stateful
            kept = None if stateful is None else copy.deepcopy(stateful.state_dict())
            self._recent.append((number, index, kept))
            yield Seeded(index, batch_seed(seed, number)) if self._seeded else index
            number += 1

    def _held(self) -> dict[str, Any]:
        roots = {"generator": self._generator, "sampler": self._sampler}
        return held_generators(roots, but=[self._dataset])

    def _new_seed(self, moment: Moment) -> str:
        own = self._generator
        state = own.get_state().cpu() if own is not None else moment.torch_state()
        # Where nothing was drawn since the last pass, the number alone makes another seed.
        return new_seed(state, self.epoch)


def _pass_over(indices: Iterator[Any], batches: int, last: Any) -> list[str]:
    index, after_first = None, None
    for _ in range(batches):
        index = next(indices, _NOTHING)
        if index is _NOTHING:
            return ["the pass is shorter here than the place in it that was saved"]
        if after_first is None:
            after_first = host_rng_state()
    if last is not None and _comparable(index) != last:
        return ["the sampler gives other indices here, or batches of another size"]
    if after_first is not None and not is_same_state(after_first, host_rng_state()):
        return ["the sampler draws random numbers of this process between two batches"]
    return []


def _stateful_part(sampler: Any) -> Any:
    """The batch sampler, or the sampler in it, that can say where it is; None if neither can."""
    for part in (sampler, getattr(sampler, "sampler", None)):
        if has_state(part):
            return part
    return None


def _comparable(index: Any) -> list[Any] | None:
    """The size of a batch and its first indices, where they are plain numbers or strings."""
    items = list(index) if isinstance(index, (list, tuple)) else [index]
    few = items[:_MOST_COMPARED]
    if not all(type(item) in (int, str) for item in few):
        return None
    return [len(items), *few]
