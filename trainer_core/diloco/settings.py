"""The options of one node, frozen when its coordinator is made."""

from __future__ import annotations

import difflib
import math
import numbers
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

PARTS = frozenset({"node_id", "role", "fingerprint", "hub"})
MOST = 10**9
"""Of a count, and of seconds: what locks can wait for ends not far above."""


@dataclass(frozen=True)
class Settings:
    """What a coordinator is told to do; `of` makes one from what a caller gave.

    Raises ValueError for what is out of range, TypeError for what is of the wrong kind; both name
    the option.

    Inner loop:

    - `inner_steps`: local steps between two boundaries, at which a pseudo-gradient is sent.
    - `merge`: what becomes of local progress that was not sent when a newer global model is
      installed. "carry" puts it on top of the global model; "replace" drops it.
    - `reset_inner`: when the trainer is asked to reset the inner optimizer's state: "never" (as in
      the paper), "installed" (a global model was), or "delivered" (an upload was, or an install).
    - `final_window`: "upload" sends the steps after the last boundary when the fit stops,
      "report" only says in the log that they were not.

    Network:

    - `synchronous`: a boundary waits, at most `sync_seconds`, until its upload is delivered, a
      master's round is done, and the global model was asked for; with `await_global` also until a
      newer one is there. What is not done by then goes on like in the other mode.
    - `poll_seconds`: least time between two polls, and between two rounds of a master.
    - `start_seconds`, `stop_seconds`: the most that `start` and `stop` wait for the store.
    - `require_hub`: a store that can't be reached at the start ends the fit, instead of training
      alone until it can be.

    Outer loop (of use to a master):

    - `outer_lr`, `outer_momentum`: of Nesterov SGD; 0.7 and 0.9 are the paper's.
    - `weighting`: "equal" for each node, or by "samples".
    - `quorum`: the least number of nodes whose deltas make a round. After `quorum_seconds` a round
      is made of what there is.
    - `max_staleness`: the most outer steps between a delta's base and the newest global model.
    - `max_norm`: of one delta, over all its values. `max_norm_ratio`: the same, relative to the
      median of the round; looked at from three deltas on.
    - `keep_commits`: how many commits, with their files, stay in the store; None keeps all.
    - `lease_seconds`: how long a master must be silent until another takes its place.
    - `standby`: where another master is alive, wait for its place instead of an error.

    `accept_other`: of "node_id", "role", "fingerprint" and "hub", those that may differ between a
    checkpoint and this run.
    """

    inner_steps: int = 100
    merge: str = "carry"
    reset_inner: str = "installed"
    final_window: str = "upload"
    synchronous: bool = False
    sync_seconds: float = 60.0
    await_global: bool = False
    poll_seconds: float = 1.0
    start_seconds: float = 60.0
    stop_seconds: float = 30.0
    require_hub: bool = False
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    weighting: str = "equal"
    quorum: int = 1
    quorum_seconds: float | None = None
    max_staleness: int | None = None
    max_norm: float | None = None
    max_norm_ratio: float | None = None
    keep_commits: int | None = 3
    lease_seconds: float = 30.0
    standby: bool = False
    accept_other: frozenset[str] = frozenset()

    @classmethod
    def of(cls, given: Mapping[str, Any], beside: Collection[str] = ()) -> Settings:
        """Those given; TypeError for one that there isn't, which names the nearest there is.

        `beside`: what else the caller could have been given.
        """
        known = [*(field.name for field in fields(cls)), *beside]
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, 1)
                words = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
                raise TypeError(f"there is no option {name}: {words}")
        return cls(**given)

    def __post_init__(self) -> None:
        for field in fields(self):
            value = _of_kind(field.name, str(field.type), getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        _require(self.inner_steps >= 1, "inner_steps", "at least 1", self.inner_steps)
        _one_of("merge", self.merge, "carry", "replace")
        _one_of("reset_inner", self.reset_inner, "never", "installed", "delivered")
        _one_of("final_window", self.final_window, "upload", "report")
        _one_of("weighting", self.weighting, "equal", "samples")
        for name in ("sync_seconds", "poll_seconds", "start_seconds", "stop_seconds"):
            _require(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        _require(self.lease_seconds > 0, "lease_seconds", "above 0", self.lease_seconds)
        _require(self.outer_lr > 0, "outer_lr", "above 0", self.outer_lr)
        _require(0 <= self.outer_momentum < 1, "outer_momentum", "in [0, 1)", self.outer_momentum)
        _require(self.quorum >= 1, "quorum", "at least 1", self.quorum)
        for name, least in (("max_staleness", 0), ("keep_commits", 1)):
            value = getattr(self, name)
            _require(value is None or value >= least, name, f"None or at least {least}", value)
        for name in ("max_norm", "max_norm_ratio", "quorum_seconds"):
            value = getattr(self, name)
            _require(value is None or value > 0, name, "None or above 0", value)
        unknown = sorted(self.accept_other - PARTS)
        _require(not unknown, "accept_other", f"some of {sorted(PARTS)}", unknown)


def _of_kind(name: str, kind: str, value: Any) -> Any:
    """The value of an option, plain; `kind` is the annotation of its field."""
    kind, _, optional = kind.partition(" | ")
    if value is None and optional:
        return None
    wanted = {"int": "a whole number", "float": "a number", "bool": "True or False"}
    words = wanted.get(kind, "text" if kind == "str" else "a set of texts")
    words += " or None" if optional else ""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if kind == "int" and is_number and hasattr(value, "__index__"):
        whole = operator.index(value)
        _require(whole <= MOST, name, f"at most {MOST:,}", value)
        return whole
    if kind == "float" and is_number:
        number = float(value)
        _require(math.isfinite(number), name, "finite", value)
        _require(number <= MOST or not name.endswith("seconds"), name, f"at most {MOST:,}", value)
        return number
    if kind == "frozenset[str]" and not isinstance(value, str):
        try:
            found = frozenset(value)
        except TypeError:
            found = frozenset([None])
        if all(isinstance(one, str) for one in found):
            return found
    if kind in ("bool", "str") and type(value).__name__ == kind:
        return value
    raise TypeError(f"{name} must be {words}, not {value!r:.80}")


def _require(is_right: bool, name: str, rule: str, value: object) -> None:
    if not is_right:
        raise ValueError(f"{name} must be {rule}, not {value!r}")


def _one_of(name: str, value: str, *known: str) -> None:
    _require(value in known, name, "one of " + ", ".join(known), value)
