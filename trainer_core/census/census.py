"""The state of a model that no state dict has: plain attributes, other buffers, own generators.

A census notes once, when a trainer is made, what each attribute is (see
`trainer_core.census.marks`). What is unlike that at a save is state, and kept:

| key                        | value                                                        |
|----------------------------|--------------------------------------------------------------|
| `model`, `ema`             | by the module's name without wrappers, each changed attribute |
| `unkept`                   | by path, why it is not kept, in words                        |
| `remade`                   | the same of what looks as if it were made again when needed  |

Looked at are modules of the program's own classes and the program's own objects within them; of
torch's own modules numbers and text only (`dropout.p`). Nothing is looked at in between, so a
training step costs nothing.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from trainer_core.census.kept_values import Keeper, Returner, Undo, UnkeptError, is_same
from trainer_core.census.marks import ABSENT, Mark, Marker, value_of, was_nothing
from trainer_core.census.owners import Owner, attributes_of, owners_of
from trainer_core.data.generators import is_generator
from trainer_core.resuming.wording import limited, short
from trainer_core.saving.savable import CheckpointError

logger = logging.getLogger(__name__)

UNKEPT, REMADE = "unkept", "remade"
_BUFFER, _GONE = "$buffer", "$gone"


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
        return ".".join(part for part in (self.root, self.path, self.name) if part)


class Census:
    """What the attributes within `roots` are now; `section` then tells what has changed since.

    Without `generators` these are left to others. Nothing behind `but` is looked at. `caches`: see
    Keeper.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        *,
        device: torch.device | None = None,
        generators: bool = True,
        but: Iterable[Any] = (),
        caches: bool = False,
    ) -> None:
        self._roots = {name: root for name, root in roots.items() if root is not None}
        self._device = device or torch.device("cpu")
        self._generators, self._caches = generators, caches
        self._but = list(but)  # their ids are theirs only as long as they live
        marker = Marker(_covered_by(self._roots.values()), generators=generators)
        self._marks: dict[tuple[str, str], tuple[Any, dict[str, Mark]]] = {}
        for root, path, owner in self._owners():
            marks = {name: marker.mark(value) for name, value in attributes_of(owner)}
            if marks or owner.looked_at != "generators":  # no others' objects are held for nothing
                self._marks[root, path] = owner.thing, marks

    def section(
        self, *, copied: bool = False, also: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """What has changed, as a checkpoint holds it. With `copied` no tensor is shared.

        `also`: a section, of whose attributes those are kept too that have not changed.
        """
        keeper = Keeper(copied=copied, caches=self._caches)
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
            asked = _of_owner(also or {}, root, path)
            for name in dict.fromkeys([*marks, *now]):
                value, before = now.get(name, ABSENT), marks.get(name, ABSENT)
                if before.same(value) and name not in asked:
                    continue
                if self._is_of_no_account(owner, name, value, before):
                    continue
                if isinstance(value, torch.Tensor):
                    is_covered = is_covered or _covered_by(self._roots.values())
                    if is_covered(value):
                        continue
                yield Change(root, path, owner, name, value, before)

    def _is_of_no_account(self, owner: Owner, name: str, value: Any, before: Mark) -> bool:
        if value is ABSENT:
            # Looked at are only some attributes of some owners: it may be there, and another kind.
            return name in _places(owner.thing, name)
        if value is None and before is ABSENT:
            return False
        return not self._generators and is_generator(value)

    def _kept(self, change: Change, keeper: Keeper) -> Any:
        thing, name, value = change.owner.thing, change.name, change.value
        if value is ABSENT:
            return {_GONE: None}
        is_buffer = _is_buffer(thing, name)
        try:
            kept = keeper.keep(value, change.before, any_size=is_buffer)
        except UnkeptError as error:
            # A cached_property is worked out from the rest, and will be again.
            if isinstance(getattr(type(thing), name, None), functools.cached_property):
                raise UnkeptError(error.path, error.words, made_lazily=True) from None
            raise
        return {_BUFFER: kept} if is_buffer else kept

    def _owners(self) -> Iterator[tuple[str, str, Owner]]:
        but = frozenset(map(id, itertools.chain(self._but, self._roots.values())))
        for name, root in self._roots.items():
            yield from ((name, path, owner) for path, owner in owners_of(root, but).items())

    # Going back to what was kept

    def doubts(self, section: Any, *, rewinds: bool) -> list[str]:
        """What of a section cannot be had here exactly, or replaces what is here, in words."""
        if not isinstance(section, Mapping):
            return []
        words = [f"approximate: {path}: {why}" for path, why in _told(section, UNKEPT)]
        words += self._strangers(section)
        if rewinds:
            words += self._unknown_before(section)
        else:
            words += self._replaced(section)
        return list(limited("attributes", words, "more like these"))

    def _strangers(self, section: Mapping[str, Any]) -> Iterator[str]:
        known = {(root, path) for root, path, _ in self._owners()}
        for root, path in _paths(section):
            if root in self._roots and (root, path) not in known:
                yield f"{'.'.join(filter(None, (root, path)))}: has attributes saved, is not here"

    def _replaced(self, section: Mapping[str, Any]) -> Iterator[str]:
        """What the program has set since the trainer was made, and the checkpoint sets back."""
        for change in self.changes():
            saved = _saved(section, change)
            if type(saved) in (int, float, bool, str) and not is_same(saved, change.value):
                words = f"{short(saved)} was saved and counts, it is {short(change.value)} here"
                yield f"{change.words}: {words}"

    def _unknown_before(self, section: Mapping[str, Any]) -> Iterator[str]:
        unkept = {**dict(_told(section, UNKEPT)), **dict(_told(section, REMADE))}
        for change in self.changes():
            if _saved(section, change) is ABSENT and change.words not in unkept:
                try:
                    value_of(change.before)
                except LookupError:
                    if not was_nothing(change.before):
                        yield f"approximate: {change.words}: what it was then is not known any more"

    def load(self, section: Any, undo: Undo, *, rewinds: bool) -> None:
        """Sets back what was kept; `undo` takes what makes it undone.

        With `rewinds` what has changed here, and had not then, becomes again what it was at first.
        Raises CheckpointError.
        """
        if not isinstance(section, Mapping):
            raise CheckpointError("attributes: what is saved are no attributes")
        if rewinds:
            for change in list(self.changes()):
                if _saved(section, change) is ABSENT and self._could_be_kept(change):
                    self._rewind(change, undo)
        for root, path, owner in list(self._owners()):
            saved = _of_owner(section, root, path)
            for name, kept in saved.items():
                words = ".".join(filter(None, (root, path, str(name))))
                try:
                    self._set_back(owner.thing, str(name), kept, undo)
                except Exception as error:  # whatever a malformed value makes torch or numpy raise
                    raise CheckpointError(f"attributes: {words}: {error}") from error
        for path, why in _told(section, REMADE):
            logger.info("not kept, and taken to be made again when needed: %s: %s", path, why)

    def _set_back(self, thing: Any, name: str, kept: Any, undo: Undo) -> None:
        form = next(iter(kept), "") if isinstance(kept, Mapping) else ""
        is_buffer = isinstance(thing, torch.nn.Module) and form == _BUFFER
        if is_buffer and name not in thing._buffers:
            undo.append(functools.partial(_unregister, thing, name))
            thing.__dict__.pop(name, None)
            thing._buffers[name] = None
            thing._non_persistent_buffers_set.add(name)
        target = _places(thing, name) if name in _places(thing, name) else vars(thing)
        before = target.get(name, ABSENT)
        undo.append(functools.partial(_put, target, name, before))
        if form == _GONE:
            target.pop(name, None)
            return
        here = None if before is ABSENT else before
        content = kept[_BUFFER] if form == _BUFFER else kept
        value = Returner(self._device, undo).value(content, here)
        if not _belongs(value, thing, target):
            raise CheckpointError("does not fit what is here under its name")
        target[name] = value

    def _could_be_kept(self, change: Change) -> bool:
        """A handle that was opened since stays open."""
        try:
            self._kept(change, Keeper(caches=self._caches))
        except UnkeptError as error:
            return not error.made_lazily
        return True

    def _rewind(self, change: Change, undo: Undo) -> None:
        thing, name = change.owner.thing, change.name
        if change.before is ABSENT:
            self._set_back(thing, name, {_GONE: None}, undo)
            return
        try:
            kept = Keeper().keep(value_of(change.before), ABSENT)
        except (LookupError, UnkeptError):
            return
        self._set_back(thing, name, kept, undo)


def _put(target: dict[str, Any], name: str, value: Any) -> None:
    if value is ABSENT:
        target.pop(name, None)
    else:
        target[name] = value


def _unregister(module: torch.nn.Module, name: str) -> None:
    module._buffers.pop(name, None)
    module._non_persistent_buffers_set.discard(name)


def _is_buffer(thing: Any, name: str) -> bool:
    return isinstance(thing, torch.nn.Module) and name in thing._buffers


def _places(thing: Any, name: str) -> Any:
    """The dictionary of a module or an object that has this name."""
    if isinstance(thing, torch.nn.Module):
        for place in (thing._buffers, thing._parameters, thing._modules):
            if name in place:
                return place
    return vars(thing)


def _belongs(value: Any, thing: Any, target: dict[str, Any]) -> bool:
    if not isinstance(thing, torch.nn.Module) or target is vars(thing):
        return True
    if target is thing._buffers:
        return value is None or isinstance(value, torch.Tensor)
    return target is thing._parameters and isinstance(value, torch.nn.Parameter)


def _saved(section: Mapping[str, Any], change: Change) -> Any:
    return _of_owner(section, change.root, change.path).get(change.name, ABSENT)


def _of_owner(section: Mapping[str, Any], root: str, path: str) -> Mapping[str, Any]:
    owners = section.get(root)
    saved = owners.get(path) if isinstance(owners, Mapping) else None
    return saved if isinstance(saved, Mapping) else {}


def _paths(section: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for root, owners in section.items():
        if root not in (UNKEPT, REMADE) and isinstance(owners, Mapping):
            yield from ((root, str(path)) for path in owners)


def _told(section: Mapping[str, Any], part: str) -> list[tuple[str, str]]:
    told = section.get(part)
    return (
        [(str(path), str(why)) for path, why in told.items()] if isinstance(told, Mapping) else []
    )


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


def without_generators(section: Any) -> Any:
    """What `Census.section` gave, for another process than the one that drew from them."""
    if not isinstance(section, Mapping):
        return section
    return {
        key: without_generators(value)
        for key, value in section.items()
        if not (isinstance(value, Mapping) and "$generator" in value)
    }
