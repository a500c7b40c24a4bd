"""The part of a checkpoint that a census fills, and what is looked up in it.

| key                        | value                                                        |
|----------------------------|--------------------------------------------------------------|
| a root (`model`, `ema`, …) | by the owner's path from it, each changed attribute          |
| `unkept`                   | by path, why it is not kept, in words                        |
| `remade`                   | the same of what looks as if it were made again when needed  |
| `made`                     | see `trainer_core.census.prints`                             |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainer_core.census.marks import ABSENT

UNKEPT, REMADE, MADE = "unkept", "remade", "made"
BUFFER, GONE = "$buffer", "$gone"
_NO_ROOTS = frozenset({UNKEPT, REMADE, MADE})


def joined(*parts: str) -> str:
    """Root, path and name as one path, for people."""
    return ".".join(part for part in parts if part)


def saved_of(section: Any, root: str, path: str) -> Mapping[str, Any]:
    """The attributes that were saved of one owner, by name."""
    owners = section.get(root) if isinstance(section, Mapping) else None
    saved = owners.get(path) if isinstance(owners, Mapping) else None
    return saved if isinstance(saved, Mapping) else {}


def saved_at(section: Any, root: str, path: str, name: str) -> Any:
    """One that was saved, else ABSENT."""
    return saved_of(section, root, path).get(name, ABSENT)


def owners_in(section: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Root and path of every owner of whom something was saved."""
    for root, owners in section.items():
        if root not in _NO_ROOTS and isinstance(owners, Mapping):
            yield from ((root, str(path)) for path in owners)


def told_in(section: Any, part: str) -> dict[str, str]:
    """What was not kept, and why: `part` is UNKEPT or REMADE."""
    told = section.get(part) if isinstance(section, Mapping) else None
    return {str(path): str(why) for path, why in told.items()} if isinstance(told, Mapping) else {}


def paths_in(section: Any) -> set[str]:
    """The path of everything that a section says something about."""
    if not isinstance(section, Mapping):
        return set()
    found = {*told_in(section, UNKEPT), *told_in(section, REMADE)}
    for root, path in owners_in(section):
        found |= {joined(root, path, str(name)) for name in saved_of(section, root, path)}
    return found


def without_generators(section: Any) -> Any:
    """What a census gave, for another process than the one that drew from them.

    Nor is it the one that made what `made` is about.
    """
    if not isinstance(section, Mapping):
        return section
    return {
        key: without_generators(value)
        for key, value in section.items()
        if key != MADE and not (isinstance(value, Mapping) and "$generator" in value)
    }
