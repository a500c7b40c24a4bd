"""SHD: sharded steps, directories that `torch.distributed.checkpoint` wrote.

What is wrong within one archive of a shard is said as of any file (FIL, TRU); here is what is wrong
with the parts as they fit each other. Each check turns the anomalies with its codes into findings.
"""

from __future__ import annotations

import os

from ckpttool.checks.base import few, plural, quoted
from ckpttool.checks.sharded_check import MOST_NAMES, ShardedCheck, ShardedSubject
from ckpttool.findings import Finding, Place, Severity
from ckpttool.formats.anomaly import Anomaly
from ckpttool.model.sharded import TRAINER_NAME
from ckpttool.model.sharded_listing import METADATA_NAME


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
        finding.facts["names"] = list(anomaly.facts["names"])[:MOST_NAMES]
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
    codes = ("sharded-stale", "sharded-foreign")
    title = "A file that is no part of the step"
    meaning = (
        "A shard that `.metadata` does not name, or the file of a rank that the run did not have:"
        " left over from an earlier save with more processes. An info where it is anything else:"
        " notes, a folder, a writer's `.metadata.tmp`."
    )
    why = (
        "A loader that takes every shard it finds mixes two saves. Whatever else lies in a step is"
        " deleted with it, and `copy` brings along its files, not its folders."
    )
    mends = "Remove a shard, once you know that nothing needs it; move your own files elsewhere."

    @classmethod
    def judge(cls, subject: ShardedSubject, anomaly: Anomaly) -> Finding:
        """With the command that removes it, where nothing but that can be meant."""
        if anomaly.code == "sharded-foreign":
            names = [str(name) for name in anomaly.facts["files"]]
            words = f"{plural(len(names), 'name')} in it that are no part of the step: {few(names)}"
            if len(names) == 1:
                words = f"{few(names)} in it is no part of the step"
            place, severity = Place(subject.path), Severity.INFO
            return cls.finding(place, words, severity=severity, files=names[:MOST_NAMES])
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
    codes = ("sharded-transformed", "sharded-metadata-by-rank")
    title = "A shard is stored in a way that is not read here"
    meaning = (
        "Entries of a shard went through a transformation (compression, encryption), or are not"
        " archives of torch's but safetensors; or each rank wrote metadata of its own"
        " (`use_collectives=False`). Their content could not be checked."
    )
    why = "What could not be checked is not called good."
    mends = "Load it with torch to find out, or save with the default writer."
    remedy = "load it with torch to find out whether it is whole"

    @classmethod
    def words(cls, anomaly: Anomaly) -> str:
        if anomaly.code == "sharded-metadata-by-rank":
            count = plural(int(anomaly.facts["ranks"]), "rank")
            return f"{count} wrote metadata each (use_collectives=False), which is not read here"
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
