"""The state of a run that no state dict has: plain attributes, other buffers, own generators.

A census notes once, when a trainer is made, what each attribute is (see
`trainer_core.census.marks`). What is unlike that at a save is state, and kept, in a section of the
checkpoint (see `trainer_core.census.sections`).

Looked at are modules of the program's own classes and the program's own objects within them; of
torch's own modules numbers and text only (`dropout.p`). Nothing is looked at in between, so a
training step costs nothing.
"""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from trainer_core.census.clocks import is_reading
from trainer_core.census.kept_values import Keeper, UnkeptError, is_same
from trainer_core.census.marks import ABSENT, Mark, Marker, value_of, was_nothing
from trainer_core.census.owners import STATE, Owner, attributes_of, owners_of
from trainer_core.census.places import place_of
from trainer_core.census.returned_values import Undo
from trainer_core.census.sections import (
    BUFFER,
    GONE,
    REMADE,
    UNKEPT,
    joined,
    owners_in,
    saved_at,
    saved_of,
    told_in,
    without_generators,
)
from trainer_core.census.setting_back import SettingBack
from trainer_core.data.generators import is_generator
from trainer_core.resuming.wording import limited, short
from trainer_core.saving.savable import CheckpointError

__all__ = ["REMADE", "UNKEPT", "Census", "Change", "without_generators"]

logger = logging.getLogger(__name__)


class Change(NamedTuple):
    """An attribute that is not what it was: `value` is ABSENT where it is gone."""

    root: str
    path: str
    owner: Owner
    name: str
    value: Any
    before: Mark

    @property
    def words(self) -> str:
        """Its path, for people."""
        return joined(self.root, self.path, self.name)


class Census:
    """What the attributes within `roots` are now; `section` then tells what has changed since.

    Without `generators` these are left to others. `parts`: what the run has besides, by its words
    (or weak references to it); of it, and of what is behind `but`, nothing is looked at. `covered`:
    by root, the names of its own attributes that others keep. `any_size`: roots of which tensors
    are kept whatever their size. `caches`: see Keeper.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        *,
        device: torch.device | None = None,
        generators: bool = True,
        but: Iterable[Any] = (),
        parts: Mapping[str, Any] | None = None,
        covered: Mapping[str, Collection[str]] | None = None,
        any_size: Collection[str] = (),
        caches: bool = False,
    ) -> None:
        self._roots = {name: root for name, root in roots.items() if root is not None}
        self._device = device or torch.device("cpu")
        self._generators, self._caches = generators, caches
        self._but = list(but)  # their ids are theirs only as long as they live
        self._parts = dict(parts or {})
        self._covered = {name: frozenset(names) for name, names in (covered or {}).items()}
        self._any_size = frozenset(any_size)
        marker = self._marker()
        self._marks: dict[tuple[str, str], tuple[Any, dict[str, Mark]]] = {}
        for root, path, owner in self._owners():
            marks = {name: marker.mark(value) for name, value in attributes_of(owner)}
            if marks or owner.looked_at != "generators":  # no others' objects are held for nothing
                self._marks[root, path] = owner.thing, marks
        self._first = frozenset(self._marks)

    def _marker(self) -> Marker:
        return Marker(self.is_covered(), generators=self._generators)

    @contextmanager
    def given(self, roots: Collection[str]) -> Iterator[None]:
        """What the body changes within these roots, and nobody had before, is no state.

        The program does it in each process anew.
        """
        before = {(change.root, change.path, change.name) for change in self.changes()}
        yield
        marker = self._marker()
        for root, path, owner in self._owners():
            if root not in roots:
                continue
            thing, marks = self._marks.get((root, path), (None, {}))
            if thing is not owner.thing:
                marks = {}
            now = dict(attributes_of(owner))
            for name in [*now, *(marks.keys() - now.keys())]:
                if (root, path, name) not in before:
                    marks[name] = marker.mark(now[name]) if name in now else ABSENT
            self._marks[root, path] = owner.thing, marks

    def section(
        self, *, copied: bool = False, also: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """What has changed, as a checkpoint holds it. With `copied` no tensor is shared.

        `also`: a section, of whose attributes those are kept too that have not changed.
        """
        keeper = Keeper(copied=copied, caches=self._caches, parts=self._words_of_parts)
        section: dict[str, Any] = {}
        for change in self.changes(also or {}):
            try:
                kept = self._kept(change, keeper)
            except UnkeptError as error:
                part = REMADE if error.made_lazily else UNKEPT
                section.setdefault(part, {})[change.words + error.path] = error.words
            else:
                owner = section.setdefault(change.root, {}).setdefault(change.path, {})
                owner[change.name] = kept
        return section

    def changes(self, also: Mapping[str, Any] | None = None) -> Iterator[Change]:
        """Every attribute that is not what it was, and those of the section `also`."""
        is_covered: Callable[[torch.Tensor], bool] | None = None
        for root, path, owner in self._owners():
            thing, marks = self._marks.get((root, path), (None, {}))
            if thing is not owner.thing:
                continue  # a new object, which the attribute that holds it tells of
            now = dict(attributes_of(owner))
            asked = saved_of(also, root, path)
            for name in dict.fromkeys([*marks, *now]):
                value, before = now.get(name, ABSENT), marks.get(name, ABSENT)
                if before.same(value) and name not in asked:
                    continue
                if self._is_of_no_account(owner, name, value, before):
                    continue
                if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
                    is_covered = is_covered or self.is_covered()
                    if is_covered(value):
                        continue
                yield Change(root, path, owner, name, value, before)

    def _is_of_no_account(self, owner: Owner, name: str, value: Any, before: Mark) -> bool:
        if value is ABSENT:
            # Looked at are only some attributes of some owners: it may be there, and another kind.
            return name in place_of(owner.thing, name)
        if value is None and before is ABSENT:
            return False
        return is_reading(name, value) or (not self._generators and is_generator(value))

    def _kept(self, change: Change, keeper: Keeper) -> Any:
        thing, name, value = change.owner.thing, change.name, change.value
        if value is ABSENT:
            return {GONE: None}
        if name == STATE:
            return keeper.keep_state(value)
        is_buffer = _is_buffer(thing, name)
        any_size = is_buffer or change.root in self._any_size
        try:
            more: Any = {"any_size": any_size, "holder": thing, "path": change.words}
            kept = keeper.keep(value, change.before, **more)
        except UnkeptError as error:
            # A cached_property is worked out from the rest, and will be again.
            if isinstance(getattr(type(thing), name, None), functools.cached_property):
                raise UnkeptError(error.path, error.words, made_lazily=True) from None
            raise
        return {BUFFER: kept} if is_buffer else kept

    def _owners(self) -> Iterator[tuple[str, str, Owner]]:
        others = itertools.chain(self._but, self._besides().values(), self._roots.values())
        modules = [root for root in self._roots.values() if isinstance(root, torch.nn.Module)]
        kept_elsewhere = (module for root in modules for module in root.modules())
        but = frozenset(map(id, itertools.chain(others, kept_elsewhere)))
        for name, root in self._roots.items():
            found = owners_of(root, but, self._covered.get(name, frozenset()))
            yield from ((name, path, owner) for path, owner in found.items())

    def owners(self) -> Iterator[tuple[str, Owner]]:
        """Everything whose attributes are looked at, by its words."""
        return ((joined(root, path), owner) for root, path, owner in self._owners())

    def is_covered(self) -> Callable[[torch.Tensor], bool]:
        """Says of a tensor whether it shares its memory with what a state dict has."""
        return _covered_by(self._roots.values())

    def _besides(self) -> dict[str, Any]:
        """The parts that are alive."""
        pairs = self._parts.items()
        found = {name: one() if isinstance(one, weakref.ref) else one for name, one in pairs}
        return {name: one for name, one in found.items() if one is not None}

    def parts(self) -> dict[str, Any]:
        """What the run has had from the beginning, and another process has too, by its words."""
        found = self._besides()
        for root, path, owner in self._owners():
            if (root, path) in self._first and self._marks[root, path][0] is owner.thing:
                found.setdefault(joined(root, path), owner.thing)
            if isinstance(owner.thing, torch.nn.Module) and not owner.is_hidden:
                own = owner.thing._parameters.items()
                found |= {joined(root, path, name): one for name, one in own if one is not None}
        return found

    def _words_of_parts(self) -> dict[int, str]:
        words: dict[int, str] = {}
        for name, part in self.parts().items():
            words.setdefault(id(part), name)
        return words

    # Going back to what was kept

    def doubts(self, section: Any, *, rewinds: bool, later: Collection[str] = ()) -> list[str]:
        """What of a section cannot be had here exactly, or replaces what is here, in words.

        `later`: roots of which what is not here may still come.
        """
        if not isinstance(section, Mapping):
            return []
        words = [f"approximate: {path}: {why}" for path, why in told_in(section, UNKEPT).items()]
        words += self.strangers({root: own for root, own in section.items() if root not in later})
        if rewinds:
            words += self._unknown_before(section)
        else:
            words += self._replaced(section)
        return list(limited("attributes", words, "more like these"))

    def strangers(self, section: Mapping[str, Any]) -> Iterator[str]:
        """What was saved of owners that are not here, in words."""
        known = {(root, path) for root, path, _ in self._owners()}
        for root, path in owners_in(section):
            if root != "ema" and (root, path) not in known:  # which is told of as a whole
                yield f"{joined(root, path)}: has attributes saved, is not here"

    def _replaced(self, section: Mapping[str, Any]) -> Iterator[str]:
        """What the program has set since the trainer was made, and the checkpoint sets back."""
        for change in self.changes():
            saved = saved_at(section, change.root, change.path, change.name)
            if type(saved) in (int, float, bool, str) and not is_same(saved, change.value):
                words = f"{short(saved)} was saved and counts, it is {short(change.value)} here"
                yield f"{change.words}: {words}"

    def _unknown_before(self, section: Mapping[str, Any]) -> Iterator[str]:
        unkept = {*told_in(section, UNKEPT), *told_in(section, REMADE)}
        for change in self._unsaved(section):
            if change.words not in unkept:
                try:
                    value_of(change.before)
                except LookupError:
                    if not was_nothing(change.before):
                        yield f"approximate: {change.words}: what it was then is not known any more"

    def _unsaved(self, section: Mapping[str, Any]) -> Iterator[Change]:
        """What has changed here, and had not then."""
        for change in self.changes():
            if saved_at(section, change.root, change.path, change.name) is ABSENT:
                yield change

    def load(
        self, section: Any, undo: Undo, *, rewinds: bool, only: Collection[str] | None = None
    ) -> None:
        """Sets back what was kept; `undo` takes what makes it undone. `only`: of these roots.

        With `rewinds` what has changed here, and had not then, becomes again what it was at first.
        Raises CheckpointError.
        """
        if not isinstance(section, Mapping):
            raise CheckpointError("attributes: what is saved are no attributes")
        setting = SettingBack(self._device, undo, self.parts())
        for change in list(self._unsaved(section)) if rewinds else ():
            if self._could_be_kept(change):
                setting.rewind(change.owner, change.name, change.before)
        for root, path, owner in list(self._owners()):
            if only is None or root in only:
                for name, kept in saved_of(section, root, path).items():
                    setting.set(joined(root, path, str(name)), owner, str(name), kept)
        if only is None:
            for words, why in told_in(section, REMADE).items():
                logger.info("not kept, and taken to be made again when needed: %s: %s", words, why)

    def _could_be_kept(self, change: Change) -> bool:
        """A handle that was opened since stays open."""
        try:
            self._kept(change, Keeper(caches=self._caches, parts=self._words_of_parts))
        except UnkeptError as error:
            return not error.made_lazily
        return True


def _is_buffer(thing: Any, name: str) -> bool:
    return isinstance(thing, torch.nn.Module) and name in thing._buffers


def _covered_by(roots: Iterable[Any]) -> Callable[[torch.Tensor], bool]:
    """Says of a tensor whether it is, or shares its memory with, what a state dict has."""
    modules = [root for root in roots if isinstance(root, torch.nn.Module)]
    tensors = [tensor for root in modules for tensor in _kept_elsewhere(root)]
    ids, memory = {id(tensor) for tensor in tensors}, {_memory(tensor) for tensor in tensors}
    memory -= {0}
    return lambda tensor: id(tensor) in ids or _memory(tensor) in memory


def _kept_elsewhere(root: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from root.parameters()
    for module in root.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield buffer


def _memory(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except Exception:  # subclasses, and layouts, without a storage
        return 0
