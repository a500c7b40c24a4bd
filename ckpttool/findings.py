"""Findings: what there is to say about a file or a directory, as data.

A finding is made by a check (`ckpttool.checks`), shown by `ckpttool.render`, and never raised.
"""

from __future__ import annotations

from enum import Enum
from typing import Any


class Severity(str, Enum):
    """How bad a finding is. Only `ERROR` makes `verify` exit with 1 (`WARNING` too, with
    --strict).
    """

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @property
    def rank(self) -> int:
        """0 for info, 1 for warning, 2 for error: to sort and to compare by."""
        return ("info", "warning", "error").index(self.value)


class Place:
    """Where a finding is: a path, and inside it a record and the tensors or the key it touches.

    `path` is as the user gave it or relative to the directory given; `record` is a member of the
    container (`data/7`); `tensors` are dotted tensor names; `key` is a dotted key (`rng.numpy`).
    """

    __slots__ = ("key", "path", "record", "tensors")

    def __init__(
        self,
        path: str,
        *,
        record: str | None = None,
        tensors: tuple[str, ...] = (),
        key: str | None = None,
    ) -> None:
        self.path = path
        self.record = record
        self.tensors = tensors
        self.key = key

    def as_dict(self) -> dict[str, Any]:
        """The place as plain data; parts that do not apply are left out."""
        plain: dict[str, Any] = {"path": self.path}
        if self.record is not None:
            plain["record"] = self.record
        if self.tensors:
            plain["tensors"] = list(self.tensors)
        if self.key is not None:
            plain["key"] = self.key
        return plain


class Finding:
    """One thing to say: a stable `id`, a severity, a place, words for a person, and what mends it.

    `remedy` is a command line or a sentence, or None where nothing can be done. `facts` holds what
    the words were made of (numbers, names) for programs that read the JSON.
    """

    __slots__ = ("facts", "id", "place", "remedy", "severity", "words")

    def __init__(
        self,
        id: str,
        severity: Severity,
        place: Place,
        words: str,
        remedy: str | None = None,
        facts: dict[str, Any] | None = None,
    ) -> None:
        self.id = id
        self.severity = severity
        self.place = place
        self.words = words
        self.remedy = remedy
        self.facts = facts or {}

    def as_dict(self) -> dict[str, Any]:
        """The finding as plain data, in the shape that `verify --json` prints."""
        return {
            "id": self.id,
            "severity": self.severity.value,
            "place": self.place.as_dict(),
            "words": self.words,
            "remedy": self.remedy,
            "facts": self.facts,
        }

    def __repr__(self) -> str:
        return f"Finding({self.id}, {self.severity.value}, {self.place.path!r}, {self.words!r})"
