"""Batches without end, and the place in the data that a checkpoint keeps.

A place is the number of the pass (`epoch`), how many of its batches were used (`batch`), and what
the kind of loader needs to find it again: see `trainer_core.data.sources`. What the loader's parts
remember besides is in `attributes`: see `trainer_core.data.held_state`. Batches that workers
have read ahead don't count as used.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any

from trainer_core.data.held_state import HeldState
from trainer_core.data.sources import IteratorSource, source_of
from trainer_core.loop.batches import has_length
from trainer_core.saving.savable import CheckpointError

_ATTRIBUTES = "attributes"

logger = logging.getLogger(__name__)


class Feed:
    """The batches of `loader`, pass after pass, over several fits.

    `epoch` and `batch` say where it is: passes that are done, and batches used of the present one.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.epoch = 0
        self.batch = 0
        self._source = source_of(loader)
        self._held = HeldState(loader, self._source.kind, getattr(self._source, "watch", None))
        # What the loader's parts remembered where no pass was under way, until `start` sets it.
        self._remembered: Any = None
        self._is_left = False  # the place that waits is this process's own
        self._iterator: Iterator[Any] | None = None
        # A place that was loaded, until `start` goes there. Empty: somewhere, nobody knows where.
        self._waiting: Mapping[str, Any] | None = None

    @property
    def can_end(self) -> bool:
        """Whether the loader cannot be gone through again."""
        return self._source.once

    @property
    def is_waiting(self) -> bool:
        """Whether there is a place to go to before the next batch."""
        return self._waiting is not None

    def start(self) -> list[str]:
        """Goes to the place that was loaded, if one was. Gives what makes it uncertain, in words.

        Changes random states: whoever wants them exact restores them now. Raises CheckpointError
        where the loader refuses its place; it then begins a new pass.
        """
        state, self._waiting = self._waiting, None
        remembered, self._remembered = self._remembered, None
        if state is None:
            return [] if remembered is None else self._held.finish(remembered, replayed=False)
        if not state:
            # Making an iterator may draw random numbers (a DataLoader's does, for its workers).
            # Without a length a run that went on had its iterator already: not so at a pass's end.
            if not has_length(self.loader):
                self._begin()
            return []
        held = state.get(_ATTRIBUTES)
        if self._is_left:
            held, self._is_left = self._held.as_left(held), False
        doubts = self._held.go_back(held)
        try:
            place = self._source.resume(state, self.epoch, self.batch)
        except Exception as error:  # a loader of the user's may raise anything
            self.batch = 0
            raise CheckpointError(
                f"data: the loader could not go to its place (pass {self.epoch}, "
                f"batch {state['batch']}): {error}"
            ) from error
        self._iterator = place.iterator
        return [*doubts, *place.doubts, *self._held.finish(held)]

    def batches(self) -> Generator[Any, None, None]:
        """Batches from here on, until there are no more to come.

        Ends where the loader is an iterator that has ended, and when a new pass gives nothing.
        Raises ValueError if there is not even one.
        """
        none_yet = True
        while True:
            iterator = self._iterator if self._iterator is not None else self._begin()
            try:
                for batch in iterator:
                    self.batch += 1
                    none_yet = False
                    yield batch
            except GeneratorExit:  # the fit is over, and the pass goes on in the next one
                raise
            except BaseException:
                self._leave()  # an iterator that has failed is of no more use; its place is
                raise
            self._iterator = None
            if self.batch == 0 or self._source.once:
                break
            self.epoch, self.batch = self.epoch + 1, 0
        if none_yet:
            used_up = " (it is an iterator: it may be used up)" if self._source.once else ""
            raise ValueError(f"the dataloader gave no batch{used_up}")

    def rest(self) -> None:
        """Between two fits: lets worker processes go, and keeps the place."""
        if self._source.has_workers:
            self._leave()

    def _leave(self) -> None:
        """Lets the iterator go. The next `start` makes another and goes to the same place."""
        if self._iterator is None or self._source.once:
            return
        try:
            self._waiting = self.state_dict() if self.batch else None
            self._is_left = True
        except Exception:  # a loader of the user's that has failed may do so once more
            self._waiting = {}
            logger.exception("the loader could not say where it is; the next fit begins a pass")
        self._iterator = None

    def state_dict(self) -> dict[str, Any]:
        """The place, as plain values."""
        if self._waiting is not None:
            return dict(self._waiting)
        place = {"kind": self._source.kind, "epoch": self.epoch, "batch": self.batch}
        held = self._held.state() if self._remembered is None else self._remembered
        place |= {_ATTRIBUTES: held} if held else {}
        return place | (self._source.state(self.batch) if self._iterator is not None else {})

    def doubts(self, state: Any) -> list[str]:
        """Why a saved place cannot be found exactly, in words, where that is known beforehand."""
        if state is None:
            return ["the checkpoint does not say where in the data it was"]
        words = _problems(state)
        if words:
            return [words]
        if state["kind"] != self._source.kind:
            return [f"the place is one in a loader of another kind ({state['kind']:.40})"]
        if isinstance(self._source, IteratorSource) and state["batch"]:
            return ["the loader is an iterator, and goes on from wherever it stands"]
        return self._held.doubts(state.get(_ATTRIBUTES))

    def load_state_dict(self, state: Any) -> None:
        """Makes `start` go there. What is of no use here is a place that nobody knows."""
        self._iterator = None
        self.epoch = self.batch = 0
        self._waiting = {}
        self._remembered, self._is_left = None, False
        if state is None or _problems(state) or state["kind"] != self._source.kind:
            return
        self.epoch, self.batch = state["epoch"], state["batch"]
        self._waiting = dict(state) if state["batch"] else None
        self._remembered = None if state["batch"] else state.get(_ATTRIBUTES)

    def _begin(self) -> Iterator[Any]:
        self.batch = 0
        self._held.begin()
        self._iterator = self._source.begin(self.epoch)
        return self._iterator


def _problems(state: Any) -> str:
    if not isinstance(state, Mapping) or not isinstance(state.get("kind"), str):
        return "what is saved is no place"
    counts = [state.get(key) for key in ("epoch", "batch")]
    if not all(type(number) is int and number >= 0 for number in counts):
        return "the numbers of pass and batch are no counts"
    return ""
