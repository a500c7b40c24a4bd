"""Prefixes that wrappers put before the names of a state dict, and taking them off.

`DataParallel` and `DistributedDataParallel` put `module.` before every name, `torch.compile` puts
`_orig_mod.` before the names of whatever has been compiled, a whole model or a part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

WRAPPERS = ("module.", "_orig_mod.")
# No layer is called like this by a person, so it is taken off at any level.
_AT_ANY_LEVEL = "_orig_mod."


def seen(names: Iterable[str]) -> list[str]:
    """The wrappers' prefixes that stand in `names`: `module.` only where all of them have it.

    A layer that a person called `module` has neighbours; a wrapper has none.
    """
    bare = list(names)
    anywhere = any(f".{_AT_ANY_LEVEL}" in f".{name}" for name in bare)
    found = []
    while (prefix := _of_all(bare, WRAPPERS)) is not None:
        found.append(prefix)
        bare = [name[len(prefix) :] for name in bare]
    if anywhere:
        found.append(_AT_ANY_LEVEL)
    return list(dict.fromkeys(found))


def strip(names: Iterable[str], prefixes: Sequence[str]) -> list[str]:
    """The names without the prefixes, in the same order.

    One that all names have is taken off all of them, as often as all have it, in whatever order the
    prefixes stand: so a layer that is called `module` keeps its name under a wrapper. One that only
    some names have is taken off those once. `_orig_mod.` is taken off at every level. No name
    becomes empty.
    """
    return _strip(names, prefixes)[0]


def counts(names: Iterable[str], prefixes: Sequence[str]) -> dict[str, int]:
    """How many names `strip` takes each prefix off."""
    return _strip(names, prefixes)[1]


def _strip(names: Iterable[str], prefixes: Sequence[str]) -> tuple[list[str], dict[str, int]]:
    bare = list(names)
    taken = dict.fromkeys(prefixes, 0)
    if _AT_ANY_LEVEL in prefixes:
        without = [_without_part(name, _AT_ANY_LEVEL[:-1]) for name in bare]
        taken[_AT_ANY_LEVEL] = sum(old != new for old, new in zip(bare, without, strict=True))
        bare = without
    used = set()
    while (prefix := _of_all(bare, prefixes)) is not None:
        used.add(prefix)
        taken[prefix] = len(bare)
        bare = [name[len(prefix) :] for name in bare]
    for prefix in taken:
        if prefix not in used:
            taken[prefix] += sum(_has(name, prefix) for name in bare)
            bare = [name[len(prefix) :] if _has(name, prefix) else name for name in bare]
    return bare, taken


def strip_all(
    names: Iterable[str], prefixes: Sequence[str]
) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Old names to new ones, and pairs of old names that would get the same one."""
    old = list(names)
    renamed: dict[str, str] = {}
    taken: dict[str, str] = {}
    collisions = []
    for name, new in zip(old, strip(old, prefixes), strict=True):
        if new in taken:
            collisions.append((taken[new], name))
        else:
            taken[new] = name
            renamed[name] = new
    return renamed, collisions


def _of_all(names: list[str], prefixes: Iterable[str]) -> str | None:
    """The first of the prefixes that every name begins with, and is longer than."""
    for prefix in prefixes:
        if names and all(_has(name, prefix) for name in names):
            return prefix
    return None


def _has(name: str, prefix: str) -> bool:
    return bool(prefix) and name.startswith(prefix) and name != prefix


def _without_part(name: str, part: str) -> str:
    *head, last = name.split(".")
    return ".".join([*(step for step in head if step != part), last])
