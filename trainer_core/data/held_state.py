"""What dataset, collate function, sampler or loader remember of the run, beside their generators.

Where a pass is gone through again to find the place in it (by a loader of one's own, a stream, a
sampler), its objects first get back what they had when the pass began, and come to the rest by
themselves; where nothing is read again (a dataset with indices), what they had at the save is set.
So a loader that counts its passes in `__iter__`, and shuffles by that, does it as it did then.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from trainer_core.callbacks import has_state
from trainer_core.census.census import REMADE, UNKEPT, Census
from trainer_core.census.kept_values import is_same
from trainer_core.data.watching import WorkerWatch

_BEGINS, _NOW, _HERE = "begins", "now", "here"
_DOUBT = "approximate: "
_IN_WORKERS = "changes within worker processes, where it cannot be kept"


class _Roots(NamedTuple):
    """Objects by name. `replayed`: those that come to where they were by themselves.

    `at_begin`: those that have to be what they were before the pass begins. `generators`: whether
    nobody else keeps these.
    """

    objects: Mapping[str, Any]
    replayed: frozenset[str]
    at_begin: frozenset[str]
    generators: bool = False
    but: tuple[Any, ...] = ()


class HeldState:
    """The attributes of one loader's parts, from its first pass on. `kind`: of its source."""

    def __init__(self, loader: Any, kind: str, watch: WorkerWatch | None = None) -> None:
        self._roots = _roots_of(loader, kind)
        self._watch = watch
        roots = self._roots
        self._census = Census(
            roots.objects, generators=roots.generators, but=roots.but, caches=True
        )
        self._begins: dict[str, Any] = {}
        self._has_begun = False

    def begin(self) -> None:
        """A pass is about to begin."""
        self._has_begun = True
        self._begins = {}
        if self._roots.at_begin:
            section = self._census.section(copied=True)
            self._begins = _only(section, self._roots.at_begin)

    def state(self) -> dict[str, Any]:
        """What `go_back` and `finish` need, as plain values; empty where nothing has changed."""
        now = self._census.section(copied=True, also=self._begins)
        found = self._watch.found() if self._watch is not None else ""
        if found:
            now.setdefault(UNKEPT, {})[found] = _IN_WORKERS
        state = {_BEGINS: self._begins, _NOW: now}
        return {key: section for key, section in state.items() if section}

    def doubts(self, state: Any) -> list[str]:
        """What of a state cannot be had here, in words."""
        words: list[str] = []
        for part in (_BEGINS, _NOW):
            words += self._census.doubts(_section(state, part), rewinds=self._has_begun)
        return [line.removeprefix(_DOUBT) for line in dict.fromkeys(words)]

    def as_left(self, state: Any) -> dict[str, Any]:
        """A state from this very process, for which what is set here since then counts."""
        held = dict(state) if isinstance(state, Mapping) else {}
        return {**held, _HERE: self._census.section(copied=True, also=_section(held, _NOW))}

    def go_back(self, state: Any) -> list[str]:
        """Before the pass is begun that `state` is from; gives, in words, what could not be."""
        rewinds, self._has_begun = self._has_begun, True
        begins = _only(_section(state, _BEGINS), self._roots.at_begin)
        words = self._load(begins, rewinds=rewinds)
        self._begins = begins
        return words

    def finish(self, state: Any, *, replayed: bool = True) -> list[str]:
        """When the place in the pass is reached; gives, in words, what makes it uncertain."""
        now = _section(state, _NOW)
        # Of files that know nothing of all this no more is said than there ever was.
        replayed = replayed and isinstance(state, Mapping) and bool(self._roots.replayed)
        words = list(self._unlike(now)) if replayed else []
        return words + self._load(_section(state, _HERE) or now, rewinds=False)

    def _load(self, section: Mapping[str, Any], *, rewinds: bool) -> list[str]:
        undo: list[Any] = []
        try:
            self._census.load(section, undo, rewinds=rewinds)
        except Exception as error:  # the place in the data is found as well as can be
            for step in reversed(undo):
                step()
            return [str(error)]
        return []

    def _unlike(self, now: Mapping[str, Any]) -> Iterable[str]:
        here = self._census.section(also=now)
        for name in sorted(self._roots.replayed):
            then, found = _flat(now, name), _flat(here, name)
            for path in dict.fromkeys([*then, *found]):
                if not is_same(then.get(path), found.get(path)):
                    yield f"{path}: is not what it was when the pass is gone through again"


def _flat(section: Mapping[str, Any], root: str) -> dict[str, Any]:
    owners = section.get(root)
    return {
        ".".join(filter(None, (root, path, name))): kept
        for path, attributes in (owners.items() if isinstance(owners, Mapping) else ())
        for name, kept in (attributes.items() if isinstance(attributes, Mapping) else ())
    }


def _section(state: Any, part: str) -> Mapping[str, Any]:
    section = state.get(part) if isinstance(state, Mapping) else None
    return section if isinstance(section, Mapping) else {}


def _only(section: Mapping[str, Any], roots: frozenset[str]) -> dict[str, Any]:
    """The part of a section that is about these roots, with what was not kept of them."""
    some = {key: value for key, value in section.items() if key in roots}
    for part in (UNKEPT, REMADE):
        told = section.get(part)
        if isinstance(told, Mapping):
            own = {path: why for path, why in told.items() if _root_of(path) in roots}
            some |= {part: own} if own else {}
    return some


def _root_of(path: Any) -> str:
    return str(path).partition(".")[0].partition("[")[0]


def _roots_of(loader: Any, kind: str) -> _Roots:
    if kind in ("stateful", "DataLoader"):
        return _parts_of(loader, speaks=kind == "stateful")
    if kind == "iterable":
        objects = {"loader": loader, "dataset": getattr(loader, "dataset", None)}
        return _only_objects(objects, replayed=frozenset(objects))
    return _only_objects({})


def _parts_of(loader: Any, *, speaks: bool) -> _Roots:
    """Of a DataLoader, or what looks like one. `speaks`: it says itself where its sampler is."""
    dataset = getattr(loader, "dataset", None)
    collate = getattr(loader, "collate_fn", None)
    samplers = {name: getattr(loader, name, None) for name in ("sampler", "batch_sampler")}
    inner = getattr(samplers["batch_sampler"], "sampler", None)
    # What has a state_dict is asked by those that know of it.
    but = tuple(part for part in (*samplers.values(), inner) if has_state(part))
    stream = isinstance(dataset, IterableDataset)
    if speaks:
        is_asked = stream or has_state(dataset) or getattr(loader, "num_workers", 0) > 0
        objects = {} if is_asked else {"dataset": dataset, "collate_fn": _holder(collate)}
        return _only_objects(objects, but=but, generators=True)
    objects = {"dataset": dataset, "collate_fn": _holder(collate), **samplers}
    replayed = frozenset(samplers)
    if stream and has_state(dataset):
        objects.pop("dataset")
    elif stream and not loader.num_workers:
        replayed |= {"dataset"}
    at_begin = frozenset(objects) if loader.num_workers else replayed
    return _only_objects(objects, replayed=replayed, at_begin=at_begin, but=but)


def _only_objects(
    objects: Mapping[str, Any],
    *,
    replayed: frozenset[str] = frozenset(),
    at_begin: frozenset[str] | None = None,
    but: tuple[Any, ...] = (),
    generators: bool = False,
) -> _Roots:
    """Without what is not there, is there twice, or is kept by others."""
    found: dict[str, Any] = {}
    known = {id(part) for part in but}
    for name, part in objects.items():
        if part is not None and id(part) not in known:
            known.add(id(part))
            found[name] = part
    at_begin = replayed if at_begin is None else at_begin
    names = frozenset(found)
    return _Roots(found, replayed & names, at_begin & names, generators, but)


def _holder(function: Any) -> Any:
    """Of a method the object that it belongs to."""
    return function.__self__ if isinstance(function, types.MethodType) else function
