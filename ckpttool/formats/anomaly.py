"""Anomalies: facts about a file's bytes that differ from what its format promises.

A reader records what it sees and goes on; it never judges. `ckpttool.checks` turns anomalies into
findings, with a severity and words.
"""

from __future__ import annotations

from typing import Any


class Anomaly:
    """One deviation: a stable `code` (`"crc-mismatch"`), the `record` it is in, and its facts."""

    __slots__ = ("code", "facts", "record")

    def __init__(self, code: str, record: str | None = None, **facts: Any) -> None:
        self.code = code
        self.record = record
        self.facts = facts

    def __repr__(self) -> str:
        facts = "".join(f", {key}={value!r}" for key, value in self.facts.items())
        return f"Anomaly({self.code!r}, {self.record!r}{facts})"
