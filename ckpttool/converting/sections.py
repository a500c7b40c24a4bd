"""Sections: the top-level keys of a checkpoint, chosen by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckpttool.errors import CkptToolError
from ckpttool.formats.values import OrderedMap
from ckpttool.model.walk import key_text

_MOST_NAMED = 30


class SectionError(CkptToolError, ValueError):
    """A section that is not there was asked for; the message lists those that are."""


def section_names(tree: Any) -> list[str]:
    """The names of the top-level keys, as `inspect` shows them; none where there are none."""
    return [_name(key) for key in tree] if isinstance(tree, dict) else []


def choose(tree: Any, keep: Sequence[str], drop: Sequence[str]) -> tuple[Any, list[str]]:
    """The content with only the sections `keep`, or without those in `drop`; and what is left out.

    `keep` means exactly what it names: the counters go as well, unless they are named. At most one
    of the two may be given; without either the content stays as it is. Raises SectionError for
    unknown names, and for content without sections.
    """
    if not keep and not drop:
        return tree, []
    names = section_names(tree)
    wanted = {*keep, *drop}
    unknown = sorted(wanted - set(names))
    if unknown:
        raise SectionError(_unknown(unknown, names))
    out = [name for name in names if (name not in wanted if keep else name in wanted)]
    left = {key: value for key, value in tree.items() if _name(key) not in out}
    if isinstance(tree, OrderedMap):
        ordered = OrderedMap(left)
        ordered.attributes = tree.attributes
        return ordered, out
    return left, out


def section(tree: Any, name: str) -> Any:
    """The content of one section. Raises SectionError if there is none of this name."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if _name(key) == name:
                return value
    raise SectionError(_unknown([name], section_names(tree)))


def _name(key: Any) -> str:
    return key if isinstance(key, str) else key_text(key)


def _unknown(unknown: list[str], names: list[str]) -> str:
    what = f"there is no section {', '.join(map(repr, unknown))}"
    return f"{what}; {there_are(names)}" if names else f"{what}, nor any other"


def there_are(names: list[str]) -> str:
    """`there are: model, optimizer`; of a great many only the first are named."""
    more = len(names) - _MOST_NAMED
    shown = ", ".join(name[:80] for name in names[:_MOST_NAMED])
    return f"there are: {shown}" + (f" and {more:,} more" if more > 0 else "")
