"""What the checks of sharded steps share: each turns the anomalies with its codes into findings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from ckpttool.checks.base import Check, few
from ckpttool.findings import Finding, Place
from ckpttool.formats.anomaly import Anomaly

UNPICKLES = "torch.distributed.checkpoint"
RESUME_EARLIER = "resume from another step, or copy this one again from its source"
_MOST_FINDINGS = 50
MOST_NAMES = 1000
_MOST_PROBLEMS = 20


class ShardedSubject:
    """A sharded step that has been looked at: its path, and all that was noticed.

    `codes` are those of the anomalies that became errors.
    """

    __slots__ = ("anomalies", "path")

    def __init__(self, path: str, anomalies: list[Anomaly]) -> None:
        self.path = path
        self.anomalies = anomalies

    def seen(self, *codes: str) -> Iterator[Anomaly]:
        """The anomalies with these codes."""
        return (anomaly for anomaly in self.anomalies if anomaly.code in codes)


class ShardedCheck(Check):
    """A check that turns the anomalies with `codes` into findings, one for each file.

    With `by_problem`, one for each file and problem.
    """

    codes: tuple[str, ...] = ()
    remedy: str | None = RESUME_EARLIER
    by_problem = False
    names_many = False

    @classmethod
    def look(cls, subject: ShardedSubject) -> Iterator[Finding]:
        """The findings of this kind in a sharded step."""
        groups: dict[tuple[Any, ...], list[Anomaly]] = {}
        for anomaly in subject.seen(*cls.codes):
            problem = anomaly.facts.get("problem") if cls.by_problem else None
            groups.setdefault((anomaly.code, anomaly.record, problem), []).append(anomaly)
        seen = list(groups.values())
        for group in seen[:_MOST_FINDINGS]:
            yield cls.judge(subject, _together(group))
        if len(seen) > _MOST_FINDINGS:
            more = len(seen) - _MOST_FINDINGS
            words = f"the same {more:,} times more"
            yield cls.finding(Place(subject.path), words, cls.remedy, more=more)

    @classmethod
    def judge(cls, subject: ShardedSubject, anomaly: Anomaly) -> Finding:
        """The finding for one anomaly, at the file that is concerned."""
        facts = {key: _plain(value) for key, value in anomaly.facts.items() if key != "names"}
        place = cls.place(subject, anomaly)
        words, names = cls.words(anomaly), list(dict.fromkeys(anomaly.facts.get("names", ())))
        if len(names) > 1 and cls.names_many:
            words += f"; {len(names):,} in all: {few(names)}"
        return cls.finding(place, words, cls.remedy, **facts)

    @classmethod
    def place(cls, subject: ShardedSubject, anomaly: Anomaly) -> Place:
        """The file, and the tensors that are touched."""
        names = tuple(anomaly.facts.get("names", ()))[:MOST_NAMES]
        name = anomaly.record or cls.default_file()
        return Place(os.path.join(subject.path, name) if name else subject.path, tensors=names)

    @classmethod
    def default_file(cls) -> str:
        """The file that is meant where the anomaly names none; empty for the directory."""
        return ""

    @classmethod
    def words(cls, anomaly: Anomaly) -> str:
        """The sentence for one anomaly."""
        return str(anomaly.facts["problem"])


def _together(group: list[Anomaly]) -> Anomaly:
    """Several anomalies of one file as one: the first, with the names and the problems of all."""
    first = group[0]
    if len(group) == 1:
        return first
    names = [name for anomaly in group for name in anomaly.facts.get("names", ())]
    problems = list(dict.fromkeys(anomaly.facts.get("problem") for anomaly in group))
    facts = {**first.facts, "names": list(dict.fromkeys(names)), "count": len(group)}
    if len(problems) > 1:
        facts["problems"] = problems[:_MOST_PROBLEMS]
    return Anomaly(first.code, first.record, **facts)


def grouped(findings: list[Finding]) -> list[Finding]:
    """Findings of one kind about many entries of one shard as one: the first one's, for all.

    What it says of trust stays apart where the words differ: each is another danger.
    """
    groups: dict[tuple[Any, ...], list[Finding]] = {}
    for one in findings:
        apart = one.words if one.id.startswith("TRU") else None
        key = one.id, one.severity, one.place.path, one.remedy, apart, _could_not(one)
        groups.setdefault(key, []).append(one)
    return [_one_finding(group) for group in groups.values()]


def _could_not(finding: Finding) -> bool:
    return bool(finding.facts.get("could_not_check"))


def _one_finding(group: list[Finding]) -> Finding:
    first = group[0]
    names = tuple(dict.fromkeys(name for one in group for name in one.place.tensors))
    if len(group) == 1 or len(names) < 2:
        return first
    first.place.tensors = names[:MOST_NAMES]
    first.place.record = None
    first.words += f"; {len(names):,} entries in all: {few(names)}"
    first.facts = {**first.facts, "count": len(names)}
    return first


def _plain(value: Any) -> Any:
    return list(value)[:MOST_NAMES] if isinstance(value, (list, tuple)) else value
