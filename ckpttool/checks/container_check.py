"""What checks of a file's container have in common: they make findings of what formats noticed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckpttool.checks.base import FileCheck, FileSubject, few
from ckpttool.findings import Finding, Place, Severity
from ckpttool.formats.anomaly import Anomaly

MOST_FINDINGS = 50
"""More findings of one kind in one file are counted, not listed; bad checksums are all listed."""

CUT = ("no-end-record", "truncated")
"""What says that the end of a file is missing."""


class ContainerCheck(FileCheck):
    """A check that turns the anomalies with `codes` into findings, one each.

    `by_sibling`: what mends it is another step file, so `verify` names the newest valid one.
    """

    codes: tuple[str, ...] = ()
    by_sibling = True
    most: int | None = MOST_FINDINGS

    @classmethod
    def look(cls, subject: FileSubject) -> Iterator[Finding]:
        seen = list(subject.seen(*cls.codes))
        shown = seen if cls.most is None else seen[: cls.most]
        for anomaly in shown:
            yield cls.judge(subject, anomaly)
        if len(shown) < len(seen):
            more = len(seen) - len(shown)
            yield cls.finding(subject.place(), f"the same {more:,} times more", more=more)

    @classmethod
    def judge(cls, subject: FileSubject, anomaly: Anomaly) -> Finding:
        """The finding for one anomaly; a warning where the formats know it to do no harm."""
        words, severity = cls.words(subject, anomaly), None
        if anomaly.facts.get("harmless"):
            words += " (harmless: torch does not read it)"
            severity = min(cls.severity, Severity.WARNING, key=lambda item: item.rank)
        place = subject.place(anomaly.record)
        return cls.finding(place, words, severity=severity, **plain_facts(anomaly))

    @classmethod
    def words(cls, subject: FileSubject, anomaly: Anomaly) -> str:
        """The sentence for one anomaly."""
        return f"{anomaly.code.replace('-', ' ')}{details(anomaly.facts)}"

    @classmethod
    def went_with_the_end(
        cls, subject: FileSubject, what: str, tensors: list[str], **facts: Any
    ) -> Finding:
        """One finding for `what` was lost, all of it, when the end of a file was cut off."""
        words = f"{what} went with the end of the file"
        words += f": {few(tensors)}" if tensors else ""
        return cls.finding(Place(subject.path, tensors=tuple(tensors)), words, **facts)


def details(facts: dict[str, Any]) -> str:
    """Facts in words, to follow a sentence: `: field size, declared 5, found 3`."""
    shown = {name: value for name, value in facts.items() if name != "harmless"}
    plain = [f"{name.replace('_', ' ')} {short(value)}" for name, value in shown.items()]
    return f": {', '.join(plain)}" if plain else ""


def short(value: Any) -> str:
    """A fact's value in few words."""
    return f"{value:,}" if type(value) is int else str(value)[:120]


def plain_facts(anomaly: Anomaly) -> dict[str, Any]:
    """Facts fit for JSON, with the anomaly's code."""
    kinds = (str, int, float, bool, type(None))
    facts = {
        name: value if isinstance(value, kinds) else str(value)[:200]
        for name, value in anomaly.facts.items()
        if name not in ("place", "words", "remedy", "severity")
    }
    return {"code": anomaly.code, **facts}


def is_cut(subject: FileSubject) -> bool:
    """Whether the end of the file is missing, or was never written."""
    return any(subject.seen("zero-tail", *CUT))


def tensors_of_storage(subject: FileSubject, key: str) -> tuple[str, ...]:
    """Dotted names of the tensors that lie in the storage with this key."""
    container = subject.checkpoint.container
    return () if container is None else subject.tensors_in(container.storage_record(key))
