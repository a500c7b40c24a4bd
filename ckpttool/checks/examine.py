"""One file, looked at once: opened, measured, judged."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.checks import container as container_checks
from ckpttool.checks import schema as schema_checks
from ckpttool.checks import trust as trust_checks
from ckpttool.checks import whole_file
from ckpttool.checks.base import Examined, FileSubject, FileVerdict
from ckpttool.errors import UnreadableError
from ckpttool.findings import Finding, Severity
from ckpttool.formats.anomaly import Anomaly
from ckpttool.formats.limits import DEFAULT_LIMITS, ReaderLimits

if TYPE_CHECKING:
    from ckpttool.checks.measure import Workers
    from ckpttool.model.checkpoint import Checkpoint
    from ckpttool.model.directory import StepFile
    from ckpttool.model.schema import TrainingFacts

# Containers that hold a checkpoint; every other kind is something else.
_CHECKPOINT_KINDS = frozenset(
    ("torch-zip", "torch-legacy", "torch-legacy-tar", "torchscript", "zip")
)
# Findings that say more than "damaged".
_COULD_NOT_CHECK = frozenset(("FIL101", "FIL124"))
_CHANGED = "FIL125"
_OTHER_KIND = "FIL106"
_LIMIT_PASSED = "pickle-limit"


class Depth(NamedTuple):
    """How deep to look. `quick` leaves out everything that reads the contents of records."""

    quick: bool = False
    finite: bool = False
    limits: ReaderLimits = DEFAULT_LIMITS


class Result(NamedTuple):
    """What came of one file. `facts` is None where it could not be opened."""

    verdict: FileVerdict
    findings: list[Finding]
    facts: TrainingFacts | None


def examine(path: str, step: int | None, depth: Depth, workers: Workers) -> Result:
    """Look at the file, or sharded step, `path`; `step` is the number in its name, if any."""
    workers.meter.label = os.path.basename(path)
    before = workers.meter.done
    size = 0
    try:
        size = size_of(path)
        if os.path.isdir(path):
            from ckpttool.checks.sharded_examine import examine_sharded

            return examine_sharded(path, step, depth, workers)
        return _examine_file(path, step, depth, workers)
    except UnreadableError as error:
        where = error.path if os.path.isdir(path) else path  # of a sharded step, one of its files
        finding, state = whole_file.Unreadable.at(where, error.reason), "unreadable"
        if not os.path.lexists(path):
            finding, state = whole_file.ChangedWhileRead.gone(path), "changing"
        return not_reached(path, step, size, state, [finding])
    finally:
        # Headers and padding were not counted one by one, nor what a quick look left out.
        workers.meter.add(max(0, size - (workers.meter.done - before)))


def size_of(path: str) -> int:
    """Bytes of a file, or of all files of a sharded step. Raises UnreadableError."""
    from ckpttool.model.sharded_listing import list_sharded

    try:
        return list_sharded(path).size if os.path.isdir(path) else os.stat(path).st_size
    except (OSError, ValueError) as error:
        if isinstance(error, UnreadableError):
            raise
        raise UnreadableError(path, getattr(error, "strerror", None) or str(error)) from error


def _examine_file(path: str, step: int | None, depth: Depth, workers: Workers) -> Result:
    from ckpttool.model.checkpoint import open_checkpoint

    with open_checkpoint(path, limits=depth.limits) as checkpoint:
        return judge(_measure(path, step, checkpoint, depth, workers), depth)


def _measure(
    path: str, step: int | None, checkpoint: Checkpoint, depth: Depth, workers: Workers
) -> FileSubject:
    subject = first_look(path, step, checkpoint, search=not depth.quick)
    if checkpoint.container is not None:
        subject.anomalies.extend(_measure_container(subject, checkpoint, depth, workers))
    if checkpoint.reader.changed():
        subject.anomalies.append(Anomaly("changed"))
    return subject


def first_look(
    path: str, step: int | None, checkpoint: Checkpoint, *, search: bool = False
) -> FileSubject:
    """All that opening has shown of a file. `step` is the number in its name, if it has one.

    With `search`, the file that a git-LFS pointer stands for is looked for on this machine.
    """
    from ckpttool.model.schema import training_facts

    mode = os.fstat(checkpoint.reader.fileno()).st_mode
    facts = training_facts(checkpoint.tree if checkpoint.readable else None)
    if facts.coordinator is not None:
        from ckpttool.model.coordinator_copies import copies_by_checksum

        facts.copies = copies_by_checksum(checkpoint.tree, checkpoint.container)
    subject = FileSubject(path, checkpoint, facts, step, mode)
    subject.anomalies.extend(checkpoint.anomalies)
    subject.anomalies.extend(_kind_anomalies(checkpoint, search))
    if checkpoint.readable and (step is not None or facts.follows_schema):
        subject.anomalies.extend(facts.problems)
    return subject


def not_reached(
    path: str, step: int | None, size: int, state: str, findings: list[Finding]
) -> Result:
    """The result for a file whose content was not looked at; `state` and `findings` say why."""
    verdict = FileVerdict(step, os.path.basename(path), path, size, state, "not reached")
    if os.path.isdir(path):  # whose size is nothing that anybody records
        verdict.recorded_size = None
    return Result(verdict, findings, None)


def not_opened(file: StepFile) -> Examined:
    """What is to be said of a step file that is a link, a directory or the like."""
    return Examined(file, *not_reached(file.path, file.step, 0, "not-opened", []))


def _kind_anomalies(checkpoint: Checkpoint, search: bool) -> Iterator[Anomaly]:
    """What the kind of a file alone says about it."""
    if checkpoint.kind == "empty":
        yield Anomaly("empty")
    elif checkpoint.kind == "zeros":
        yield Anomaly("all-zero")
    elif checkpoint.kind not in _CHECKPOINT_KINDS or _is_other_zip(checkpoint):
        facts = {"kind": checkpoint.kind, "words": checkpoint.words}
        if search and (found := _lfs_object(checkpoint)):
            facts["found"] = found
        yield Anomaly("other-kind", **facts)
    elif checkpoint.kind.startswith("torch-legacy"):
        yield Anomaly("no-checksums")


def _is_other_zip(checkpoint: Checkpoint) -> bool:
    """A whole zip without torch's records; a cut one may have been torch's."""
    cut = any(anomaly.code == "no-end-record" for anomaly in checkpoint.anomalies)
    return checkpoint.kind == "zip" and not cut


def _lfs_object(checkpoint: Checkpoint) -> str | None:
    oid, size = checkpoint.facts.get("oid"), checkpoint.facts.get("size")
    if checkpoint.kind != "git-lfs-pointer" or not isinstance(size, int):
        return None
    from ckpttool.checks.lfs import find_object

    return find_object(checkpoint.path, str(oid), size)


def _measure_container(
    subject: FileSubject, checkpoint: Checkpoint, depth: Depth, workers: Workers
) -> Iterator[Anomaly]:
    from ckpttool.checks.hidden_pickles import hidden_pickles
    from ckpttool.checks.measure import check_records

    container = checkpoint.container
    if container is None:
        return
    yield from container.check_structure()
    yield from hidden_pickles(checkpoint)
    storages = (container.storage_record(key) for key in checkpoint.storages)
    records = (container.records.get(name) for name in storages)
    compressed = sum(record is not None and record.method != 0 for record in records)
    if compressed:
        yield Anomaly("deflated", records=compressed)
    if depth.quick:
        return
    found = list(check_records(container, workers))
    yield from found
    if subject.facts.coordinator is not None:
        yield from _measure_coordinator(subject, checkpoint, whole=not found)
    if depth.finite:
        from ckpttool.checks.values import count_values

        yield from count_values(checkpoint, workers)


def _measure_coordinator(
    subject: FileSubject, checkpoint: Checkpoint, *, whole: bool
) -> Iterator[Anomaly]:
    """What only its values show: of damaged ones, nothing is to be said but that."""
    from ckpttool.checks.pending_delta import check_pending_delta
    from ckpttool.model.coordinator_copies import copies_by_bytes

    subject.facts.copies = copies_by_bytes(checkpoint.tree, checkpoint.container)
    if whole and subject.facts.coordinator is not None:
        yield from check_pending_delta(checkpoint, subject.facts.coordinator)


def judge(subject: FileSubject, depth: Depth) -> Result:
    """What the anomalies and facts that `subject` has gathered amount to."""
    findings = list(_look(subject))
    return Result(_verdict(subject, findings, depth), findings, subject.facts)


def _look(subject: FileSubject) -> Iterator[Finding]:
    families = (container_checks.CHECKS, schema_checks.FILE_CHECKS, trust_checks.CHECKS)
    for family in families:
        for check in family:
            yield from check.look(subject)
    if any(subject.seen("values-nan", "values-infinite")):
        from ckpttool.checks.values import CHECKS

        for value_check in CHECKS:
            yield from value_check.look(subject)


def _verdict(subject: FileSubject, findings: list[Finding], depth: Depth) -> FileVerdict:
    checkpoint = subject.checkpoint
    name = os.path.basename(subject.path)
    checksums = _checksums(subject, depth)
    state = _state(subject, findings)
    return FileVerdict(subject.step, name, subject.path, checkpoint.size, state, checksums)


def _checksums(subject: FileSubject, depth: Depth) -> str:
    container = subject.checkpoint.container
    if container is None:
        return "not reached"
    if depth.quick:
        return "skipped"
    return "checked" if container.has_checksums else "none stored"


def _state(subject: FileSubject, findings: list[Finding]) -> str:
    """The worst that is to be said; dangerous outranks damaged."""
    errors = {finding.id for finding in findings if finding.severity is Severity.ERROR}
    files = {id for id in errors if id.startswith("FIL")}
    if any(id.startswith("TRU") for id in errors):
        return "dangerous"
    if _CHANGED in files:
        return "changing"
    unusable = any(map(partial(whole_file.is_unusable, subject), subject.seen(_LIMIT_PASSED)))
    if files and files <= _COULD_NOT_CHECK and not unusable:
        return "unreadable"
    if _OTHER_KIND in files or (unusable and files <= _COULD_NOT_CHECK):
        return "not-a-checkpoint"
    if files or not subject.checkpoint.readable:
        return "damaged"
    if subject.step is None:
        return "intact"
    if not subject.facts.is_training:
        return "not-a-checkpoint"
    return "valid" if subject.facts.step == subject.step else "wrong-step"
