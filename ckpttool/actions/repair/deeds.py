"""The words in which a repair is planned: kinds of deeds, single deeds, and what is left alone."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.model.sharded_listing import METADATA_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckpttool.actions.repair.look import Entry
    from ckpttool.mending.plan import Mending

SHARDS = "shards"
TEMPORARIES = "temporaries"
MEND = "mend"
SET_ASIDE = "set-aside"
RENAME = "rename"
MODES = "modes"
POINTER = "pointer"
KINDS = (SHARDS, TEMPORARIES, MEND, SET_ASIDE, RENAME, MODES, POINTER)
"""What a repair can do, in the order in which it does it; see `in_order`."""


class Options(NamedTuple):
    """What a repair may do.

    `only` are the kinds that it may do. `missing` says what becomes of what is lost where
    `allow_loss` permits a loss: `drop`, `zeros`, or `from`, the step file of `source_step`.
    `bit_odds` bounds the odds at which one flipped bit is taken for what happened.
    """

    only: frozenset[str] = frozenset(KINDS)
    allow_loss: bool = False
    missing: str = "drop"
    source_step: int | None = None
    bit_odds: float = 0.01


class Deed:
    """One thing that a repair will do. `kind` is one of KINDS, `verb` says what is done.

    `set-aside` moves `path` into quarantine; `publish` gives the temporary `path` the name
    `target`, `rename` the step file `path`; `mend` puts a mended copy of `path` in the place of
    `target`; `arrange` moves the files of the sharded step `path` that lie at `places` to their
    names in it; `chmod` gives it `mode`; `point` writes the pointer. `status` is what `path` was
    when it was verified. `why` are findings in words, `loses` what is given up by it, `notes`
    proofs and advice. `mending` is what `mend` carries out, and what could be got back of a file
    that is set aside.
    """

    __slots__ = (
        "kind",
        "loses",
        "mending",
        "mode",
        "notes",
        "path",
        "places",
        "status",
        "step",
        "target",
        "verb",
        "why",
        "words",
    )

    def __init__(
        self,
        kind: str,
        verb: str,
        path: str,
        words: str,
        *,
        why: tuple[str, ...] = (),
        loses: tuple[str, ...] = (),
        notes: tuple[str, ...] = (),
        status: os.stat_result | None = None,
        target: str | None = None,
        step: int | None = None,
        mending: Mending | None = None,
        mode: int | None = None,
        places: dict[str, str] | None = None,
    ) -> None:
        self.kind = kind
        self.verb = verb
        self.path = path
        self.words = words
        self.why = why
        self.loses = loses
        self.notes = notes
        self.status = status
        self.target = target
        self.step = step
        self.mending = mending
        self.mode = mode
        self.places = places or {}

    def as_dict(self) -> dict[str, Any]:
        """The deed as plain data."""
        plain: dict[str, Any] = {"kind": self.kind, "action": self.verb, "path": self.path}
        plain |= {"words": self.words, "why": self.why, "loses": self.loses, "notes": self.notes}
        if self.target is not None:
            plain["target"] = self.target
        if self.step is not None:
            plain["step"] = self.step
        if self.mode is not None:
            plain["mode"] = f"{self.mode:04o}"
        if self.places:
            plain["places"] = self.places
        if self.mending is not None:
            plain["mending"] = self.mending.as_dict()
        return plain


class Left(NamedTuple):
    """Something that is wrong and stays as it is, and why."""

    path: str
    words: str
    unchecked: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return {"path": self.path, "words": self.words, "could_not_check": self.unchecked}


class Kept(NamedTuple):
    """The valid file that a step will have after the repair, under the name `name`.

    `entry` is where its content comes from; `deed` mends, publishes or renames it, None where it
    stays.
    """

    step: int
    name: str
    entry: Entry
    deed: Deed | None = None

    @property
    def recorded_path(self) -> str:
        """Where the file lies now of which the pointer and the manifest record a SHA-256."""
        places = {} if self.deed is None else self.deed.places
        return places.get(METADATA_NAME) or self.entry.recorded_path


def set_aside(kind: str, entry: Entry, why: str) -> Deed:
    """The deed that moves a step file, or what was to become one, into quarantine."""
    return Deed(
        *(kind, "set-aside", entry.path, f"set {entry.name} aside"),
        why=(why,),
        status=entry.status,
        step=entry.step,
    )


def frees_names(deeds: Iterable[Deed]) -> dict[str, Deed]:
    """The deeds after which nothing has the name any more that their file had, by that name."""
    return {os.path.basename(one.path): one for one in deeds if one.verb in ("set-aside", "rename")}


def in_order(deeds: Iterable[Deed]) -> list[Deed]:
    """By kind, in the order of KINDS; but what frees a name comes before what takes it."""
    by_kind = sorted(deeds, key=lambda deed: KINDS.index(deed.kind))
    freeing = frees_names(by_kind)
    ordered: dict[int, Deed] = {}
    for deed in by_kind:
        chain: dict[int, Deed] = {}
        one: Deed | None = deed
        while one is not None and id(one) not in chain and id(one) not in ordered:
            chain[id(one)] = one
            one = None if one.target is None else freeing.get(one.target)
        for key in reversed(chain):
            ordered[key] = chain[key]
    return list(ordered.values())
