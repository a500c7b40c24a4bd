"""The attributes of one run, from a trainer's making to each of its checkpoints and resumes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from trainer_core.census.census import Census
from trainer_core.census.owners import Owner, owners_of
from trainer_core.census.prints import Print, prints_of, unlike
from trainer_core.census.returned_values import Undo
from trainer_core.census.sections import MADE, REMADE, paths_in
from trainer_core.resuming.wording import limited, some
from trainer_core.saving.savable import CheckpointError

KEY = "attributes"
_OF_LOADER = ("dataset", "collate_fn", "sampler", "batch_sampler")


class Attributes:
    """Those that `census` finds. `callbacks`: its roots that are callbacks.

    Callbacks are told that a fit starts, and set their own attributes then: what a checkpoint has
    of these is set back before that, and once more after it.
    """

    def __init__(self, census: Census, callbacks: Collection[str]) -> None:
        self._census = census
        self._callbacks = frozenset(callbacks)
        self._prints: dict[str, Print] | None = None
        self._again: Mapping[str, Any] = {}
        self._nothing_known = False

    def note(self, loader: Any) -> None:
        """Takes the prints of what the program has made, once: before anything has changed it."""
        if self._prints is None:
            owners = (*self._census.owners(), *_owners_of_loader(loader))
            more = {"loader": loader} if type(loader) in (list, tuple) else {}
            self._prints = prints_of(owners, more, self._census.is_covered())

    def section(self, loader: Any) -> dict[str, Any]:
        """What belongs into a checkpoint."""
        self.note(loader)
        section = self._census.section()
        return section | ({MADE: self._prints} if self._prints else {})

    def began_anew(self, section: Mapping[str, Any]) -> list[str]:
        """Once after a resume from a file that knew of no attributes: those that training changes.

        `section`: what `section` gave, or a fit has changed since.
        """
        looked_at = {key: own for key, own in section.items() if key != REMADE}
        paths = sorted(paths_in(looked_at)) if self._nothing_known else []
        if not paths:
            return []
        self._nothing_known = False
        return [f"attributes: training changes {some(paths)}, of which the file says nothing"]

    def doubts(self, state: Mapping[str, Any], loader: Any, *, rewinds: bool) -> list[str]:
        """What of a checkpoint cannot be had here exactly, in words. `rewinds`: see Census."""
        self.note(loader)
        section = state.get(KEY)
        words = self._census.doubts(section, rewinds=rewinds, later=self._callbacks)
        if isinstance(section, Mapping):
            restored = paths_in(section) | _paths_in_data(state.get("data"))
            made = unlike(section.get(MADE), self._prints or {})
            lines = (f"{path}: {why}" for path, why in made if path not in restored)
            words += limited("made by the program", lines)
        return words

    def load(self, section: Any, undo: Undo, *, rewinds: bool) -> None:
        """Sets back what was kept. Raises CheckpointError."""
        self._census.load(section, undo, rewinds=rewinds)

    def resumed(self, state: Mapping[str, Any], *, is_restored: bool) -> None:
        """Notes from what a run goes on. `is_restored`: its attributes were."""
        section = state.get(KEY)
        self._nothing_known = KEY not in state
        kept = section.items() if is_restored and isinstance(section, Mapping) else ()
        self._again = {root: own for root, own in kept if root in self._callbacks}

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Within the body callbacks are told that a fit starts."""
        with self._census.given(self._callbacks) if self._callbacks else nullcontext():
            yield

    def set_again(self) -> list[str]:
        """After that; gives what could not be set back, in words. Raises CheckpointError."""
        section, self._again = self._again, {}
        if not section:
            return []
        undo: Undo = []
        try:
            self._census.load(section, undo, rewinds=False, only=self._callbacks)
        except CheckpointError:
            for step in reversed(undo):
                step()
            raise
        return list(self._census.strangers(section))


def _owners_of_loader(loader: Any) -> Iterator[tuple[str, Owner]]:
    parts = {name: getattr(loader, name, None) for name in _OF_LOADER}
    parts["loader"] = loader
    roots = {name: part for name, part in parts.items() if part is not None}
    known = frozenset(map(id, roots.values()))
    done: set[int] = set()
    for name, root in roots.items():
        if id(root) not in done:
            done.add(id(root))
            for path, owner in owners_of(root, known).items():
                yield ".".join(filter(None, (name, path))), owner


def _paths_in_data(data: Any) -> set[str]:
    held = data.get(KEY) if isinstance(data, Mapping) else None
    sections = held.values() if isinstance(held, Mapping) else ()
    return {path for section in sections for path in paths_in(section)}
