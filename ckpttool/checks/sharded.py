"""SHD: sharded steps, directories that `torch.distributed.checkpoint` wrote.

What is wrong within one archive of a shard is said as of any file (FIL, TRU); here is what is wrong
with the parts as they fit each other. Each check turns the anomalies with its codes into findings.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from ckpttool.checks.base import Check, few, plural, quoted
from ckpttool.findings import Finding, Place, Severity
from ckpttool.formats.anomaly import Anomaly
from ckpttool.model.sharded import TRAINER_NAME
from ckpttool.model.sharded_listing import METADATA_NAME

RESUME_EARLIER = "resume from another step, or copy this one again from its source"
_MOST_FINDINGS = 50
_MOST_NAMES = 1000
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
        names = tuple(anomaly.facts.get("names", ()))[:_MOST_NAMES]
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
    first.place.tensors = names[:_MOST_NAMES]
    first.place.record = None
    first.words += f"; {len(names):,} entries in all: {few(names)}"
    first.facts = {**first.facts, "count": len(names)}
    return first


def _plain(value: Any) -> Any:
    return list(value)[:_MOST_NAMES] if isinstance(value, (list, tuple)) else value


class MetadataMissing(ShardedCheck):
    id = "SHD101"
    codes = ("sharded-metadata-missing",)
    title = "A sharded step has no metadata"
    meaning = (
        "A directory of shards lacks `.metadata`, written after them: its writer was killed, or"
        " the copy did not bring it along. The step is incomplete."
    )
    why = "Nothing says which tensors there are and where; a run must not resume from it."
    mends = "Nothing, without that file; `ckpttool repair` sets the step aside."

    @classmethod
    def words(cls, anomaly: Anomaly) -> str:
        count = plural(int(anomaly.facts["shards"]), "shard")
        return f"{METADATA_NAME} is missing beside {count}: the step is incomplete"


class MetadataMalformed(ShardedCheck):
    id = "SHD102"
    codes = ("sharded-metadata-malformed",)
    by_problem = True
    names_many = True
    title = "The metadata of a sharded step makes no sense"
    meaning = (
        "`.metadata` is a link or no file at all, is not the pickle of torch's `Metadata`, has"
        " something else in a field than torch writes there, or contradicts itself: a piece without"
        " a place, a place without a piece, two entries for the same bytes."
    )
    why = "torch refuses it, or loads bytes into the wrong tensors."
    mends = "Resume from another step."

    @classmethod
    def default_file(cls) -> str:
        return METADATA_NAME


class ShardMissing(ShardedCheck):
    id = "SHD103"
    codes = ("sharded-shard-missing",)
    title = "A shard is missing"
    meaning = "`.metadata` names a file that is not there."
    why = "Loading fails, or goes on with weights that nobody has set."
    mends = "Bring the file back from where the step was copied from, or resume from another step."

    @classmethod
    def words(cls, anomaly: Anomaly) -> str:
        count = plural(len(anomaly.facts["names"]), "tensor or object", "tensors and objects")
        return f"the shard is missing; {count} lie in it"

    @classmethod
    def judge(cls, subject: ShardedSubject, anomaly: Anomaly) -> Finding:
        """Counted rather than listed: a shard holds a part of nearly everything."""
        finding = super().judge(subject, anomaly)
        finding.facts["names"] = list(anomaly.facts["names"])[:_MOST_NAMES]
        finding.place.tensors = ()
        return finding


class ShardShort(ShardedCheck):
    id = "SHD104"
    codes = ("sharded-shard-short",)
    title = "A shard is cut"
    meaning = "A shard ends before the last of what `.metadata` says lies in it."
    why = "The process died, the disk was full, or the copy did not finish."
    mends = "Copy the shard again from its source, or resume from another step."

    @classmethod
    def words(cls, anomaly: Anomaly) -> str:
        facts = anomaly.facts
        return f"the shard has {facts['size']:,} bytes, and {facts['needed']:,} are needed"


class UnsafePath(ShardedCheck):
    id = "SHD105"
    codes = ("sharded-unsafe-path",)
    title = "The metadata names a file elsewhere"
    meaning = (
        "A `relative_path` in `.metadata` is absolute, has separators or `..`, or names a link or a"
        " directory. It is not followed."
    )
    why = "Following it would load a file that somebody placed elsewhere."
    mends = "Do not load it. Find out who wrote it; resume from another step."
    remedy = "do not load it; find out who wrote it"

    @classmethod
    def default_file(cls) -> str:
        return METADATA_NAME

    @classmethod
    def words(cls, anomaly: Anomaly) -> str:
        file = str(anomaly.facts["file"])[:120]
        if anomaly.facts.get("odd"):
            return f"{file} is not a regular file, and is not followed"
        return f'it names "{file}", which is no plain name of a file beside it: not followed'


class ItemDiffers(ShardedCheck):
    id = "SHD106"
    codes = ("sharded-item-differs",)
    names_many = True
    title = "A shard does not hold what the metadata says"
    meaning = (
        "An archive in a shard holds no tensor, or one of another dtype or shape than `.metadata`"
        " says, or has fewer bytes than its values take."
    )
    why = "The shard and the metadata are of two different saves, or one of them is damaged."
    mends = "Bring back the files of one save, or resume from another step."


class CoverageWrong(ShardedCheck):
    id = "SHD107"
    codes = ("sharded-coverage",)
    names_many = True
    title = "The pieces of a tensor do not cover it"
    meaning = "The pieces leave out elements of a tensor, overlap, or lie outside of its shape."
    why = "Elements that no piece covers keep whatever was in memory before."
    mends = "Resume from another step."

    @classmethod
    def default_file(cls) -> str:
        return METADATA_NAME


class StaleFile(ShardedCheck):
    id = "SHD108"
    severity = Severity.WARNING
    codes = ("sharded-stale",)
    title = "A file that is no part of the step"
    meaning = (
        "A shard that `.metadata` does not name, or the file of a rank that the run did not have:"
        " left over from an earlier save with more processes."
    )
    why = "A loader that takes every shard it finds mixes two saves."
    mends = "Remove it, once you know that nothing needs it."

    @classmethod
    def judge(cls, subject: ShardedSubject, anomaly: Anomaly) -> Finding:
        """With the command that removes it."""
        finding = super().judge(subject, anomaly)
        finding.remedy = f"once nothing needs it: rm -- {quoted(finding.place.path)}"
        return finding

    @classmethod
    def words(cls, anomaly: Anomaly) -> str:
        if "world_size" in anomaly.facts:
            return f"is of a rank beyond the {anomaly.facts['world_size']:,} of the run"
        return "the metadata does not name this shard: it is a leftover"


class TrainingStateWrong(ShardedCheck):
    id = "SHD109"
    codes = ("sharded-trainer-missing", "sharded-trainer-differs")
    title = "The training state beside the shards is missing or differs"
    meaning = (
        "`trainer.pt` is not there, or does not say that its tensors are in the shards, or names"
        " files that are missing."
    )
    why = "Without it nobody knows the step, the counters, the schedule or the random numbers."
    mends = "Copy it again from its source, or resume from another step."

    @classmethod
    def default_file(cls) -> str:
        return TRAINER_NAME


class RankFileWrong(ShardedCheck):
    id = "SHD110"
    codes = ("sharded-rank-missing", "sharded-rank-differs")
    title = "The files of the ranks are not as they should be"
    meaning = (
        "`rank_<5 digits>.pt` is missing for a rank of the run, or holds another rank, world size"
        " or step than it should."
    )
    why = "That rank draws other random numbers, and goes on elsewhere in the data."
    mends = "Copy them again from their source, or resume from another step."

    @classmethod
    def words(cls, anomaly: Anomaly) -> str:
        if anomaly.code == "sharded-rank-missing":
            ranks = [str(rank) for rank in anomaly.facts["ranks"]]
            of = anomaly.facts["world_size"]
            return f"of {of:,} ranks, {len(ranks):,} have no file: {few(ranks)}"
        return super().words(anomaly)


class Transformed(ShardedCheck):
    id = "SHD111"
    severity = Severity.WARNING
    codes = ("sharded-transformed",)
    title = "A shard is stored in a way that is not read here"
    meaning = (
        "Entries of a shard went through a transformation (compression, encryption), or are not"
        " archives of torch's but safetensors. Their content could not be checked."
    )
    why = "What could not be checked is not called good."
    mends = "Load it with torch to find out, or save with the default writer."
    remedy = "load it with torch to find out whether it is whole"

    @classmethod
    def words(cls, anomaly: Anomaly) -> str:
        count = plural(int(anomaly.facts["count"]), "entry", "entries")
        return f"{count} could not be checked: stored as {anomaly.facts['stored_as']}"


class Unclaimed(ShardedCheck):
    id = "SHD112"
    severity = Severity.WARNING
    codes = ("sharded-unclaimed",)
    title = "A shard has bytes that the metadata does not name"
    meaning = "There are bytes between or behind the entries of a shard."
    why = "The shard was written over by another save, or something was appended to it."
    mends = "Nothing has to be done if every entry is intact: nobody reads these bytes."
    remedy = "nothing has to be done, where every entry is intact"

    @classmethod
    def words(cls, anomaly: Anomaly) -> str:
        return f"{anomaly.facts['length']:,} bytes of it belong to nothing that the metadata names"


class ShardOfAnotherSave(ShardedCheck):
    id = "SHD113"
    codes = ("sharded-shard-differs",)
    title = "A shard is not the one that the step was saved with"
    meaning = (
        "The size or SHA-256 of a shard is not what the file of the rank that wrote it records"
        " under `shards`, or no rank records it while all record theirs. Steps saved without this"
        " key are not held against it. `--quick` compares sizes only."
    )
    why = (
        "Shards of two steps look alike to `.metadata`: mixed together, they load in silence, and a"
        " run goes on from weights that never belonged together."
    )
    mends = "Copy the step's own shards again from their source, or resume from another step."


def missing_files(finding: Finding) -> list[str]:
    """The names of the files whose absence a finding states."""
    if finding.id == ShardMissing.id:
        return [os.path.basename(finding.place.path)]
    if finding.id == MetadataMissing.id:
        return [METADATA_NAME]
    if finding.id == TrainingStateWrong.id:
        return [TRAINER_NAME]
    if finding.id == RankFileWrong.id:
        return [f"rank_{rank:05d}.pt" for rank in finding.facts.get("ranks", ())]
    return []


CHECKS: tuple[type[ShardedCheck], ...] = (
    MetadataMissing,
    MetadataMalformed,
    ShardMissing,
    ShardShort,
    UnsafePath,
    ItemDiffers,
    CoverageWrong,
    StaleFile,
    TrainingStateWrong,
    RankFileWrong,
    Transformed,
    Unclaimed,
    ShardOfAnotherSave,
)
