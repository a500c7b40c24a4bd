"""The commit log: what the global model is, and which deltas made it, in one file for each step.

`global/commits/<12 digits>.json` is made by an exclusive create: of two masters exactly one commits
an outer step. It names the weights and the outer momentum (with size and SHA-256), the fencing
number, the deltas that were applied in their order, those that were refused, for each node the
highest local step that was dealt with, and the hash of the commit before. So the log is the
truth; `global/step_count.json` only points at its newest entry, for readers to poll with one small
request.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import logging
import re
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trainer_core.diloco.deltas import delta_name
from trainer_core.diloco.errors import (
    BadNameError,
    DiLoCoError,
    MissingError,
    PassingError,
)
from trainer_core.diloco.names import check_node_id
from trainer_core.diloco.store import Store

logger = logging.getLogger(__name__)

POINTER = "global/step_count.json"
FOLDER = "global/commits"
_MOST_POINTER = 64 << 10
_MOST_COMMIT = 256 << 20
_COMMIT = re.compile(r"(\d{12})\.json")
_MODEL = re.compile(r"global/(model|momentum)-(\d{12})-([0-9a-f]{16})\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_REASON = 300
MOST_REFUSED = 1000


class LogError(DiLoCoError):
    """The log on the store says something that can't be, or belongs to something else."""


class HalfWrittenError(PassingError):
    """A file that is no JSON: its writer isn't done with it, or died within it.

    Only where a file system has no way to let a file appear whole under exclusion.
    """


class File(NamedTuple):
    """A file on the store that a commit names."""

    name: str
    size: int
    sha256: str


class Applied(NamedTuple):
    """A delta that went into a commit. `weight` is its node's in the average."""

    node_id: str
    local_step: int
    base_outer_step: int
    name: str
    sha256: str
    weight: float


class Refused(NamedTuple):
    """A delta that was not applied and never will be, and why."""

    node_id: str
    local_step: int
    reason: str


@dataclass(frozen=True)
class Commit:
    """One entry of the log. `momentum` is None while there is none yet.

    `applied` is in the order in which the deltas were added up; `watermarks` gives for each node
    the highest local step that was applied or refused in this commit or one before. `session` names
    the process that made it: no two masters' commits are alike, so each knows its own again.
    """

    outer_step: int
    fence: int
    master: str
    fingerprint: str
    model: File
    momentum: File | None
    applied: tuple[Applied, ...] = ()
    refused: tuple[Refused, ...] = ()
    watermarks: dict[str, int] = field(default_factory=dict)
    outer_lr: float = 0.0
    outer_momentum: float = 0.0
    previous: str | None = None
    session: str = ""

    def as_bytes(self) -> bytes:
        """The file's content; the same commit always gives the same bytes."""
        document = {"format": 1, **vars(self), "model": self.model._asdict()}
        document["momentum"] = None if self.momentum is None else self.momentum._asdict()
        document["applied"] = [one._asdict() for one in self.applied]
        document["refused"] = [one._asdict() for one in self.refused]
        return json.dumps(document, sort_keys=True, indent=1).encode()

    @property
    def sha256(self) -> str:
        """Of the file's content."""
        return hashlib.sha256(self.as_bytes()).hexdigest()


class Pointer(NamedTuple):
    """What `global/step_count.json` says."""

    outer_step: int
    model_file: str


def commit_name(outer_step: int) -> str:
    """The name of a commit on the store."""
    return f"{FOLDER}/{outer_step:012d}.json"


def tensor_name(kind: str, outer_step: int, sha256: str) -> str:
    """The name of weights ("model") or "momentum", which says what is in the file."""
    return f"global/{kind}-{outer_step:012d}-{sha256[:16]}.safetensors"


class CommitLog:
    """The log on one store. `fence` is the highest fencing number that was seen in it.

    `patience`: seconds after which half of a commit, unchanged meanwhile, is of a writer that died.
    """

    def __init__(self, store: Store, patience: float = 30.0) -> None:
        self.fence = 0
        self._store = store
        self._patience = patience
        self._half: tuple[str, bytes, float] | None = None

    def pointer(self) -> Pointer | None:
        """What readers poll; None if nothing was ever committed, or it is damaged: the commits
        themselves say it all. Raises LogError where it is another program's.
        """
        try:
            document = _document(self._store.read(POINTER, 0, _MOST_POINTER), POINTER)
        except MissingError:
            return None
        except HalfWrittenError as error:
            logger.warning("%s; the newest commit is looked for instead", error)
            return None
        step, name = document.get("outer_step"), document.get("model_file")
        if type(step) is not int or step < 0 or not isinstance(name, str):
            raise LogError(f"{POINTER} has no outer step and model file")
        if document.get("commit") != commit_name(step):
            words = f"{POINTER} names no commit: it is of another program or an older one"
            raise LogError(f"{words}. Use an empty folder for this run")
        _check_file(name, "model", step)
        return Pointer(step, name)

    def read(self, outer_step: int) -> Commit:
        """One commit. Raises MissingError, LogError, StoreError."""
        name = commit_name(outer_step)
        commit = _commit(_document(self._store.read(name, 0, _MOST_COMMIT), name), name)
        if commit.outer_step != outer_step:
            raise LogError(f"{name} is of outer step {commit.outer_step}")
        return commit

    def accepted(self, outer_step: int) -> Commit:
        """The same; also raises LogError where its fencing number is lower than one before."""
        commit = self.read(outer_step)
        if commit.fence < self.fence:
            words = f"{commit_name(outer_step)} by {commit.master} has the fencing number"
            raise LogError(f"{words} {commit.fence}, after {self.fence}: it is refused")
        self.fence = commit.fence
        return commit

    def steps(self) -> list[int]:
        """Every outer step in the listing, in order."""
        names = [_COMMIT.fullmatch(entry.name) for entry in self._store.entries(FOLDER)]
        return sorted(int(match[1]) for match in names if match)

    def latest(self) -> Commit | None:
        """The newest commit that stands, whatever pointer and listing say; None if there is none.

        A commit with a lower fencing number than the one before it doesn't stand.
        """
        pointer, steps = self.pointer(), self.steps()
        known = [*steps, *([] if pointer is None else [pointer.outer_step])]
        if not known:
            return None
        newest = max(known)
        # Neither may be the newest: the pointer moves last, and a listing may be an old one.
        while self._store.size(commit_name(newest + 1)) is not None:
            newest += 1
        try:
            return self._standing(newest)
        except HalfWrittenError:
            # Nobody has read it, so it was not committed yet.
            return self._standing(newest - 1) if newest else None

    def _standing(self, newest: int) -> Commit:
        commit = self.read(newest)
        # The one before may be cleaned away, or damaged since: whoever made this one has read it.
        with contextlib.suppress(MissingError, HalfWrittenError):
            before = self.read(newest - 1) if newest else commit
            if commit.fence < before.fence:
                logger.warning(
                    "outer step %d by %s is refused: its fencing number %d is lower than %d",
                    newest,
                    commit.master,
                    commit.fence,
                    before.fence,
                )
                return self._standing(newest - 1)
            if before is not commit and commit.previous != before.sha256:
                raise LogError(f"{commit_name(newest)} does not follow from the commit before it")
        self.fence = max(self.fence, commit.fence)
        return commit

    def append(self, commit: Commit) -> bool:
        """Commits; False if another one has this outer step. One that doesn't stand gives way."""
        name, content = commit_name(commit.outer_step), commit.as_bytes()
        if self._store.create(name, content):
            self.fence = max(self.fence, commit.fence)
            return True
        try:
            there = self.read(commit.outer_step)
        except HalfWrittenError:
            if not self._is_left(name):
                raise
            logger.warning("half of %s was left by a master that died: it gives way", name)
            self._store.remove(name)
            return self._store.create(name, content)
        if there.fence >= self.fence or commit.fence < self.fence:
            return there == commit
        logger.warning(
            "%s with the fencing number %d gives way to %d", name, there.fence, commit.fence
        )
        self._store.remove(name)
        return self._store.create(name, content)

    def _is_left(self, name: str) -> bool:
        """Whether half a file has stayed as it is for longer than any writer needs."""
        content, now = self._store.read(name, 0, _MOST_COMMIT), time.monotonic()
        if self._half is None or self._half[:2] != (name, content):
            self._half = name, content, now
        return now - self._half[2] >= self._patience

    def point_to(self, commit: Commit) -> None:
        """Moves the pointer. Its time is for people only; nothing is decided by it."""
        now = datetime.datetime.now(datetime.timezone.utc)
        document = {
            "outer_step": commit.outer_step,
            "model_file": commit.model.name,
            "updated_at": now.isoformat(timespec="seconds"),
            "commit": commit_name(commit.outer_step),
            "fence": commit.fence,
        }
        self._store.write(POINTER, json.dumps(document, indent=1).encode())

    def named(self, newest: Commit, keep: int) -> set[str]:
        """Every file that the `keep` newest commits name."""
        named: set[str] = set()
        for step in range(max(0, newest.outer_step - keep + 1), newest.outer_step + 1):
            with contextlib.suppress(MissingError):
                named |= self._files(self.read(step))
        return named

    def clean(self, newest: Commit, keep: int) -> None:
        """Removes what only older commits than the `keep` newest need, and what nobody ever named.

        Of a commit its files go first and the commit last, so that nothing is forgotten halfway.
        """
        kept_from = newest.outer_step - keep + 1
        old = [step for step in self.steps() if step < kept_from]
        named = self.named(newest, keep)
        for step in old:
            with contextlib.suppress(LogError):
                for name in self._files(self.read(step)) - named:
                    self._store.remove(name)
            self._store.remove(commit_name(step))
        self._remove_orphans(newest.outer_step, named)

    @staticmethod
    def _files(commit: Commit) -> set[str]:
        tensors = {file.name for file in (commit.model, commit.momentum) if file is not None}
        deltas = {delta_name(one.node_id, one.local_step) for one in commit.applied}
        refused = {delta_name(one.node_id, one.local_step) for one in commit.refused}
        return tensors | deltas | refused

    def _remove_orphans(self, newest: int, named: set[str]) -> None:
        """Weights that were written, but whose commit another master or a crash forestalled."""
        for entry in self._store.entries("global"):
            name = f"global/{entry.name}"
            match = _MODEL.fullmatch(name)
            if match and int(match[2]) <= newest and name not in named:
                self._store.remove(name)


# What comes from the store is checked before anything is made of it


def _document(raw: bytes, name: str) -> dict[str, Any]:
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        raise HalfWrittenError(f"{name} is no JSON, or not wholly written yet") from None
    if not isinstance(document, dict):
        raise LogError(f"{name} is no JSON object")
    return document


def _commit(document: dict[str, Any], name: str) -> Commit:
    if document.get("format") != 1:
        raise LogError(f"{name} is of the format {str(document.get('format'))[:20]}, not 1")
    try:
        step = _count(document["outer_step"])
        momentum = document["momentum"]
        return Commit(
            step,
            _count(document["fence"]),
            check_node_id(document["master"]),
            _text(document["fingerprint"]),
            _file(document["model"], "model", step),
            None if momentum is None else _file(momentum, "momentum", step),
            tuple(_applied(entry) for entry in document["applied"]),
            tuple(_refused(entry) for entry in document["refused"]),
            {check_node_id(k): _count(v) for k, v in document["watermarks"].items()},
            _factor(document["outer_lr"]),
            _factor(document["outer_momentum"]),
            document["previous"] if document["previous"] is None else _sha(document["previous"]),
            _text(document["session"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise LogError(f"{name} is no commit: {error}") from None


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 10**15:
        raise ValueError(f"{str(value)[:40]} is no count")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 64:
        raise ValueError(f"{str(value)[:40]} is no short text")
    return value


def _factor(value: Any) -> float:
    if not isinstance(value, float) or not 0 <= value < 1e18:
        raise ValueError(f"{str(value)[:40]} is no factor")
    return value


def _sha(value: Any) -> str:
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise ValueError(f"{str(value)[:80]} is no SHA-256")
    return value


def _file(value: Any, kind: str, step: int) -> File:
    file = File(str(value["name"]), _count(value["size"]), _sha(value["sha256"]))
    if _check_file(file.name, kind, step) != file.sha256[:16]:
        raise ValueError(f"{file.name} has another hash in its name than {file.sha256[:16]}")
    return file


def _check_file(name: Any, kind: str, step: int) -> str:
    """The hash in a name, which must lie where the layout says. Raises LogError."""
    match = _MODEL.fullmatch(name) if isinstance(name, str) else None
    if match is None or match[1] != kind or int(match[2]) != step:
        raise LogError(f"{str(name)[:120]!r} is no name for the {kind} of outer step {step}")
    return match[3]


def _applied(entry: Any) -> Applied:
    base = entry["base_outer_step"]
    if type(base) is not int or base < -1:
        raise ValueError(f"{str(base)[:40]} is no outer step")
    known = Applied(
        check_node_id(entry["node_id"]),
        _count(entry["local_step"]),
        base,
        str(entry["name"]),
        _sha(entry["sha256"]),
        _factor(entry["weight"]),
    )
    if known.name != delta_name(known.node_id, known.local_step):
        raise BadNameError(known.name, "is not where this delta would lie")
    return known


def _refused(entry: Any) -> Refused:
    reason = str(entry["reason"])[:_REASON]
    return Refused(check_node_id(entry["node_id"]), _count(entry["local_step"]), reason)


def shortened(refused: list[Refused]) -> tuple[Refused, ...]:
    """The newest of them, with reasons of bounded length, so that a commit stays small."""
    kept = refused[-MOST_REFUSED:]
    return tuple(one._replace(reason=one.reason[:_REASON]) for one in kept)
