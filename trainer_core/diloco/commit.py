"""One entry of the commit log: what it says, its bytes, and what is checked in reading them.

An entry names the weights and the outer momentum (with size and SHA-256), the fencing number, the
deltas that were applied in their order, those that were refused, for each node the highest local
step that was dealt with, and the hash of the commit before.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trainer_core.diloco.deltas import delta_name
from trainer_core.diloco.errors import BadNameError, DiLoCoError, PassingError
from trainer_core.diloco.names import check_node_id

FOLDER = "global/commits"
TENSORS = re.compile(r"global/(model|momentum)-(\d{12})-([0-9a-f]{16})\.safetensors")
"""Names of weights and momentum: kind, outer step, and the beginning of the SHA-256."""

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


# What comes from the store is checked before anything is made of it


def document_of(raw: bytes, name: str) -> dict[str, Any]:
    """The JSON object in the file `name`. Raises HalfWrittenError and LogError."""
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        raise HalfWrittenError(f"{name} is no JSON, or not wholly written yet") from None
    if not isinstance(document, dict):
        raise LogError(f"{name} is no JSON object")
    return document


def commit_of(document: dict[str, Any], name: str) -> Commit:
    """The commit that a document is. Raises LogError."""
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
    if check_tensor_name(file.name, kind, step) != file.sha256[:16]:
        raise ValueError(f"{file.name} has another hash in its name than {file.sha256[:16]}")
    return file


def check_tensor_name(name: Any, kind: str, step: int) -> str:
    """The hash in a name, which must lie where the layout says. Raises LogError."""
    match = TENSORS.fullmatch(name) if isinstance(name, str) else None
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
