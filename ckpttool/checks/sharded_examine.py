"""A sharded step, looked at once: its metadata, its shards, and what lies beside them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ckpttool.checks import container as container_checks
from ckpttool.checks import trust as trust_checks
from ckpttool.checks.base import FileSubject, FileVerdict
from ckpttool.checks.sharded import CHECKS
from ckpttool.checks.sharded_check import RESUME_EARLIER, UNPICKLES, ShardedSubject, grouped
from ckpttool.errors import UnreadableError
from ckpttool.findings import Finding, Severity
from ckpttool.formats.anomaly import Anomaly
from ckpttool.model.inert import integer, what
from ckpttool.model.schema import TrainingFacts
from ckpttool.model.sharded import TRAINER_NAME, ShardedStep, rank_of
from ckpttool.model.sharded_listing import METADATA_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckpttool.checks.examine import Depth, Result
    from ckpttool.checks.measure import Workers
    from ckpttool.checks.sharded_digests import Recorded

# Who unpickles `.metadata` does so without any allow-list, so that none is missing.
_NOT_OF_METADATA = frozenset({"TRU103", "TRU104"})
# A file of a rank or of the trainer is no step file, and is not held to be one by its name.
_NOT_OF_SIDECARS = frozenset({"SCH101", "TRU103"})
_MISSING = frozenset({"sharded-metadata-missing", "sharded-trainer-missing"})
_MISSING |= {"sharded-rank-missing", "sharded-shard-missing"}
_WRONG_FILE = "put the step's own trainer.pt in its place, or resume from another step"


class MetadataSubject(FileSubject):
    """`.metadata`: torch unpickles it with `pickle.load`, and writes no classes but its own."""

    __slots__ = ()

    @property
    def unpickled_by(self) -> str:
        """Whoever loads the step."""
        return UNPICKLES

    @property
    def all_must_be_known(self) -> bool:
        """It names torch's own classes, and plain ones."""
        return True


def examine_sharded(
    path: str,
    step: int | None,
    depth: Depth,
    workers: Workers,
    places: Mapping[str, str] | None = None,
) -> Result:
    """Looks at the directory `path`; `step` is the number in its name, None for any other name.

    With `places` it is looked at as if those files lay in it: see `ShardedStep`. Raises
    UnreadableError where the directory, or `.metadata`, cannot be read.
    """
    with ShardedStep(path, depth.limits, places) as sharded:
        return judge_sharded(sharded, step, depth, workers)


def judge_sharded(
    sharded: ShardedStep, step: int | None, depth: Depth, workers: Workers | None = None
) -> Result:
    """What an open sharded step amounts to. With a quick depth, no shard is opened."""
    from ckpttool.checks.examine import Result

    found: list[Finding | Anomaly] = [*sharded.anomalies]
    found += _metadata_findings(sharded)
    found += _trainer(sharded, step, depth, workers)
    found += sharded.rank_anomalies()
    if step is not None:  # other programs keep what they like in directories of their own
        found += _foreign(sharded)
    if workers is not None:
        records: list[Recorded] = []
        found += _ranks(sharded, step, depth, workers, records)
        if not depth.quick:
            from ckpttool.checks.sharded_items import check_items

            found += check_items(sharded, depth, workers, records)
    anomalies = [one for one in found if isinstance(one, Anomaly)]
    findings = grouped([one for one in found if isinstance(one, Finding)])
    subject = ShardedSubject(sharded.path, anomalies)
    for check in CHECKS:
        findings += check.look(subject)
    open_to_all = [name for name in sharded.listed.shards if name in sharded.listed.open_to_all]
    findings += trust_checks.WritableByOthers.look_at_step(sharded.path, open_to_all)
    _say_could_not_check(findings)
    if step is None:
        for finding in findings:
            if finding.remedy == RESUME_EARLIER:
                finding.remedy = "copy it again from its source: nothing mends it here"
    verdict = _verdict(sharded, step, anomalies, findings, depth)
    return Result(verdict, findings, sharded.trainer or TrainingFacts(None))


def _metadata_findings(sharded: ShardedStep) -> Iterator[Finding]:
    """The pickle itself: what it names, whether it can be read, whether it stayed what it was."""
    checkpoint = sharded.checkpoint
    if checkpoint is None:
        return
    mode = os.fstat(checkpoint.reader.fileno()).st_mode
    subject = MetadataSubject(checkpoint.path, checkpoint, TrainingFacts(None), None, mode)
    subject.anomalies.extend(checkpoint.anomalies)
    if checkpoint.kind not in ("dcp-metadata", "pickle"):
        code = {"empty": "empty", "zeros": "all-zero"}.get(checkpoint.kind, "other-kind")
        subject.anomalies.append(Anomaly(code, kind=checkpoint.kind, words=checkpoint.words))
    if checkpoint.reader.changed():
        subject.anomalies.append(Anomaly("changed"))
    for family in (container_checks.CHECKS, trust_checks.CHECKS):
        for check in family:
            yield from (one for one in check.look(subject) if one.id not in _NOT_OF_METADATA)


def _trainer(
    sharded: ShardedStep, step: int | None, depth: Depth, workers: Workers | None
) -> Iterator[Finding | Anomaly]:
    """`trainer.pt`: a step file whose tensors are in the shards. A lone directory needs none."""
    if problem := sharded.odd(TRAINER_NAME):
        yield Anomaly("sharded-trainer-differs", problem=problem)
        return
    if TRAINER_NAME not in sharded.listed.sizes:
        if step is not None:
            problem = f"{TRAINER_NAME} is missing: nothing says which step this is"
            yield Anomaly("sharded-trainer-missing", problem=problem)
        return
    for finding in _examine_file(sharded.file(TRAINER_NAME), step, depth, workers):
        if finding.id == "SCH102":
            finding.remedy = _WRONG_FILE
        if finding.id != "TRU103":
            yield finding
    if step is None or sharded.trainer is None:
        return
    about = sharded.trainer_tree.get("sharded") if isinstance(sharded.trainer_tree, dict) else None
    if sharded.world_size is None:
        said = "has no world size" if isinstance(about, dict) else f"is {what(about)}"
        problem = f'its "sharded" {said}, so nothing says that these shards belong to it'
        yield Anomaly("sharded-trainer-differs", problem=problem)
    elif missing := _missing(sharded):
        shown = ", ".join(name[:80] for name in missing[:3])
        problem = f"it names {len(missing):,} files that are missing: {shown}"
        yield Anomaly("sharded-trainer-differs", problem=problem)


def _missing(sharded: ShardedStep) -> list[str]:
    """The files that `trainer.pt` lists and that are not there, but for those of ranks."""
    names = (name for name in sharded.trainer_files if rank_of(name) is None)
    return [name for name in names if name not in sharded.listed.sizes]


def _foreign(sharded: ShardedStep) -> Iterator[Anomaly]:
    if names := sharded.foreign_names():
        yield Anomaly("sharded-foreign", files=names)


def _ranks(
    sharded: ShardedStep,
    step: int | None,
    depth: Depth,
    workers: Workers,
    records: list[Recorded],
) -> Iterator[Finding | Anomaly]:
    """The file of each rank: whole, and of that rank, of this run, of this step.

    What they record of the shards goes into `records`; the sizes have been compared then.
    """
    from ckpttool.checks.sharded_digests import KEY, read_records
    from ckpttool.model.checkpoint import open_checkpoint

    trees: dict[str, Any] = {}
    world = sharded.world_size
    if sharded.trainer is not None and sharded.trainer.step is not None:
        step = sharded.trainer.step  # that its name says another one is said already
    for rank, name in sorted(sharded.ranks.items()):
        if world is not None and rank >= world:
            continue  # a leftover
        path = sharded.file(name)
        if not depth.quick:
            found = _examine_file(path, None, depth, workers)
            yield from (one for one in found if one.id not in _NOT_OF_SIDECARS)
        try:
            with open_checkpoint(path, limits=depth.limits) as checkpoint:
                tree = checkpoint.tree if checkpoint.readable else None
        except UnreadableError:
            continue  # said already
        if tree is None:
            continue
        # Only this is kept: a thousand ranks have as many states of generators.
        trees[name] = {KEY: tree[KEY]} if isinstance(tree, dict) and KEY in tree else {}
        if depth.quick:
            continue
        problem = _rank_problem(tree, rank, world, step) or _save_problem(tree, sharded)
        problem = problem or _rng_problem(tree)
        if problem:
            yield Anomaly("sharded-rank-differs", name, rank=rank, problem=problem)
    yield from read_records(sharded, trees, records)


def _rank_problem(tree: Any, rank: int, world: int | None, step: int | None) -> str | None:
    if not isinstance(tree, dict):
        return f"it holds {what(tree)} where a dictionary belongs"
    for key, expected in (("rank", rank), ("world_size", world), ("step", step)):
        held = integer(tree.get(key))
        if held is None:
            return f"it has no {key.replace('_', ' ')}"
        if expected is not None and held != expected:
            return f"it is of {key.replace('_', ' ')} {held}, and should be of {expected}"
    return None


def _save_problem(tree: dict[Any, Any], sharded: ShardedStep) -> str | None:
    """Whether it is of another save than `trainer.pt`: of another run, or another try of a step."""
    trainer = sharded.trainer_tree
    if not isinstance(trainer, dict) or tree.get("save_id") == trainer.get("save_id"):
        return None
    return "it is of another save than trainer.pt"


def _rng_problem(tree: dict[Any, Any]) -> str | None:
    from ckpttool.model.rng_state import rng_problems

    for found in rng_problems(tree["rng"]) if "rng" in tree else ():
        if found.code == "schema-rng-malformed":
            return f"its {found.facts['key']} {found.facts['problem']}"
    return None


def _examine_file(
    path: str, step: int | None, depth: Depth, workers: Workers | None
) -> list[Finding]:
    from ckpttool.checks.examine import examine
    from ckpttool.checks.measure import Meter, Workers

    if workers is not None:
        return examine(path, step, depth, workers).findings
    with Workers(1, Meter(0, None)) as alone:
        return examine(path, step, depth, alone).findings


def _say_could_not_check(findings: list[Finding]) -> None:
    for finding in findings:
        if finding.id == "SHD111":
            finding.facts["could_not_check"] = True


def _verdict(
    sharded: ShardedStep,
    step: int | None,
    anomalies: list[Anomaly],
    findings: list[Finding],
    depth: Depth,
) -> FileVerdict:
    state = _state(sharded, step, anomalies, findings)
    name = os.path.basename(os.path.normpath(sharded.path))
    checksums = "skipped" if depth.quick else "checked"
    verdict = FileVerdict(step, name, sharded.path, sharded.size, state, checksums)
    verdict.recorded_name = os.path.join(name, METADATA_NAME)
    verdict.recorded_size = sharded.listed.sizes.get(METADATA_NAME)
    verdict.too_large = state == "unreadable" and any(one.id == "FIL124" for one in findings)
    return verdict


def _state(
    sharded: ShardedStep, step: int | None, anomalies: list[Anomaly], findings: list[Finding]
) -> str:
    """The worst that is to be said, in the order in which a step file is judged."""
    errors = [one for one in findings if one.severity is Severity.ERROR]
    ids = {one.id for one in errors}
    if any(id.startswith("TRU") for id in ids):
        return "dangerous"
    if "FIL125" in ids:
        return "changing"
    unchecked = [one for one in findings if one.facts.get("could_not_check")]
    bad = {one.id for one in errors if one not in unchecked and one.id[:3] in ("FIL", "SHD")}
    if not bad:
        if unchecked:
            return "unreadable"
    elif bad <= {"SHD101", "SHD103", "SHD109", "SHD110"} and _only_missing(anomalies):
        return "incomplete"
    else:
        return "damaged"
    if step is None:
        return "intact"
    if sharded.trainer is None or not sharded.trainer.is_training:
        return "not-a-checkpoint"
    return "valid" if sharded.trainer.step == step else "wrong-step"


_OTHER_CODES = frozenset({"sharded-trainer-differs", "sharded-rank-differs"})


def _only_missing(anomalies: list[Anomaly]) -> bool:
    """Whether nothing is wrong but that files are missing."""
    codes = {anomaly.code for anomaly in anomalies}
    return not codes & _OTHER_CODES and bool(codes & _MISSING)
