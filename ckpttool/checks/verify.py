"""`verify`: every check over a directory or a file, and the newest state that can be used."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ckpttool.checks import books as book_checks
from ckpttool.checks import container as container_checks
from ckpttool.checks import directory as directory_checks
from ckpttool.checks import pointer as pointer_checks
from ckpttool.checks import schema as schema_checks
from ckpttool.checks import trust as trust_checks
from ckpttool.checks import whole_file
from ckpttool.checks.base import DirectorySubject, Examined, FileVerdict, command
from ckpttool.checks.examine import Depth, Result, examine, not_opened, size_of
from ckpttool.checks.hashing import FileHashes
from ckpttool.checks.measure import Meter, Workers
from ckpttool.checks.sharded_check import RESUME_EARLIER
from ckpttool.checks.sharded_places import FileElsewhere, Look, find_files
from ckpttool.errors import UnreadableError
from ckpttool.findings import Finding, Severity
from ckpttool.formats.limits import DEFAULT_LIMITS, ReaderLimits
from ckpttool.io.processes import process_is_alive
from ckpttool.model.books import Books, read_books
from ckpttool.model.directory import CheckpointDirectory, Other, StepFile, scan
from ckpttool.model.names import parse_step_name
from ckpttool.model.records import Records, read_records
from ckpttool.model.sharded_listing import holds_shards

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpttool.io.durable import Progress
    from ckpttool.model.schema import TrainingFacts


class Report:
    """What `verify` found.

    `findings` come worst first. `newest_valid` is the highest valid step and `newest_valid_path`
    its file, or None. `files` has a verdict for each step file, ascending (or for the one file that
    was given). `quick` says that checksums were not looked at. `facts` are those of the training
    schema, where a file or a sharded step was given.
    """

    __slots__ = ("facts", "files", "findings", "newest_valid", "newest_valid_path", "path", "quick")

    def __init__(
        self,
        path: str,
        findings: Iterable[Finding],
        files: list[FileVerdict],
        newest: FileVerdict | None,
        *,
        quick: bool,
    ) -> None:
        self.path = path
        self.findings = sorted(findings, key=_order)
        self.files = files
        self.newest_valid = None if newest is None else newest.step
        self.newest_valid_path = None if newest is None else newest.path
        self.quick = quick
        self.facts: TrainingFacts | None = None

    @property
    def worst(self) -> Severity | None:
        """The severity of the worst finding, or None where there is none."""
        return self.findings[0].severity if self.findings else None

    @property
    def could_not_check(self) -> bool:
        """Whether something could not be checked, which is never to be called good."""
        return any(finding.facts.get("could_not_check") for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data, in the shape that `verify --json` prints."""
        return {
            "path": self.path,
            "quick": self.quick,
            "newest_valid": self.newest_valid,
            "newest_valid_path": self.newest_valid_path,
            "files": [file.as_dict() for file in self.files],
            "findings": [finding.as_dict() for finding in self.findings],
            **self._coordinator(),
        }

    def _coordinator(self) -> dict[str, Any]:
        if self.facts is None or self.facts.coordinator is None:
            return {}
        copies = [list(group) for group in self.facts.copies]
        return {"coordinator": {**self.facts.coordinator.as_dict(), "copies": copies}}


def _order(finding: Finding) -> tuple[int, str, str, str]:
    place = finding.place
    return -finding.severity.rank, place.path, finding.id, place.record or place.key or ""


def verify(
    path: str | os.PathLike[str],
    *,
    quick: bool = False,
    finite: bool = False,
    jobs: int | None = None,
    limits: ReaderLimits = DEFAULT_LIMITS,
    progress: Progress | None = None,
) -> Report:
    """Run every check over a checkpoint directory, or over one file or sharded step.

    `quick` leaves out what has to read whole files (checksums, values); `finite` counts NaN and
    infinite values, too. `jobs` is the number of threads (at most four by default). `progress` is
    called as `progress(bytes_done, bytes_total, label)` from time to time, by any thread, never by
    two at once. Nothing is changed, nothing is executed. Raises UnreadableError where `path` does
    not exist or a directory cannot be listed; whatever else is wrong is a finding.
    """
    where = os.fspath(path)
    depth = Depth(quick, finite and not quick, limits)
    try:
        is_directory = stat.S_ISDIR(os.stat(where).st_mode)
    except (OSError, ValueError) as error:
        raise UnreadableError(where, getattr(error, "strerror", None) or str(error)) from error
    if is_directory and not holds_shards(where):
        return _verify_directory(scan(where), depth, jobs, progress)
    return _verify_file(where, depth, jobs, progress)


def _verify_file(path: str, depth: Depth, jobs: int | None, progress: Progress | None) -> Report:
    meter = Meter(_size(path), progress)
    step = parse_step_name(os.path.basename(os.path.normpath(path)))
    with Workers(jobs, meter) as workers:
        result = examine(path, step, depth, workers)
        if step is not None and os.path.isdir(path):
            records = read_records(os.path.dirname(os.path.normpath(path)) or os.curdir)
            result = find_files([Look(step, result)], records, depth, workers)[0]
    if result.verdict.is_valid:
        is_sharded = os.path.isdir(path)
        _name_remedy(result.findings, lambda: _mend_of_valid(path, is_sharded))
    else:
        _name_remedy(result.findings, lambda: _sibling_command(path, step))
    for finding in result.findings:
        if finding.id == FileElsewhere.id and result.verdict.places:
            finding.remedy = command("repair", os.path.dirname(os.path.normpath(path)) or os.curdir)
    newest = result.verdict if result.verdict.is_valid else None
    report = Report(path, result.findings, [result.verdict], newest, quick=depth.quick)
    report.facts = result.facts
    return report


def verify_as(
    path: str,
    step: int,
    *,
    quick: bool = False,
    limits: ReaderLimits = DEFAULT_LIMITS,
    progress: Progress | None = None,
) -> Report:
    """Verify the file, or sharded step, `path` as if its name were that of `step`.

    For a writer's temporary, and for a file that was mended and has not got its name yet.
    """
    depth = Depth(quick, limits=limits)
    with Workers(None, Meter(_size(path), progress)) as workers:
        result = examine(path, step, depth, workers)
    newest = result.verdict if result.verdict.is_valid else None
    return Report(path, result.findings, [result.verdict], newest, quick=quick)


def _size(path: str) -> int:
    try:
        return size_of(path)
    except OSError:
        return 0


def _sibling_command(path: str, step: int | None) -> str | None:
    """How to find the newest valid step beside a lone step file, if there are others at all.

    It stops at the first other one: a verb that looks at file after file asks this of each.
    """
    if step is None:
        return None
    directory, own = os.path.split(os.path.normpath(path))
    directory = directory or os.curdir
    try:
        with os.scandir(directory) as entries:
            names = (entry.name for entry in entries)
            others = any(parse_step_name(name) is not None and name != own for name in names)
    except OSError:
        others = False
    return command("latest", directory) if others else None


def _verify_directory(
    directory: CheckpointDirectory, depth: Depth, jobs: int | None, progress: Progress | None
) -> Report:
    books = read_books(directory)
    examined = _examine_steps(directory, books, depth, jobs, progress)
    whole = {other.name for other in directory.others if _looks_whole(other, depth)}
    subject = DirectorySubject(directory, examined, whole, quick=depth.quick, books=books)
    for item in examined:
        _name_remedies(subject, item)
    findings = [*_file_findings(examined), *directory_findings(subject)]
    files = [item.verdict for item in examined]
    return Report(directory.path, findings, files, subject.newest, quick=depth.quick)


def _examine_steps(
    directory: CheckpointDirectory,
    books: Books,
    depth: Depth,
    jobs: int | None,
    progress: Progress | None,
) -> list[Examined]:
    """Every step file; with its SHA-256 where something records one."""
    hashed = set() if depth.quick else _to_be_hashed(directory, books)
    sizes = [file.size + _hashed_bytes(file, hashed) for file in directory.steps if file.opens]
    examined = []
    records = Records(directory.pointer, books.manifest)
    with Workers(jobs, Meter(sum(sizes), progress)) as workers, FileHashes(workers) as hashes:
        for file in directory.steps:
            if file.name in hashed:
                hashes.start(file)
            examined.append(_examine_step(file, depth, workers))
        found = hashes.results()
        for item in examined:
            item.verdict.sha256 = found.get(item.entry.name)
            _hold_against_records(item.verdict, records, depth)
        return _with_files_found(directory, examined, records, depth, workers)


def _with_files_found(
    directory: CheckpointDirectory,
    examined: list[Examined],
    records: Records,
    depth: Depth,
    workers: Workers,
) -> list[Examined]:
    """The sharded steps that lack files which lie elsewhere, looked at again with these."""
    leftovers: dict[str, list[str]] = {}
    for other in directory.others:
        temporary = other.temporary if stat.S_ISDIR(other.mode) else None
        if temporary is not None and process_is_alive(temporary.pid) is False:
            leftovers.setdefault(temporary.target, []).append(other.path)
    sharded = [item for item in examined if item.entry.is_sharded]
    looks = [
        Look(
            item.entry.step,
            Result(item.verdict, item.findings, item.facts),
            leftovers.get(item.entry.name, ()),
        )
        for item in sharded
    ]
    for item, result in zip(sharded, find_files(looks, records, depth, workers), strict=True):
        item.findings = result.findings
    return examined


def _hashed_bytes(file: StepFile, hashed: set[str]) -> int:
    return (file.recorded_size or 0) if file.name in hashed else 0


def _hold_against_records(verdict: FileVerdict, records: Records, depth: Depth) -> None:
    """A file that is whole, but not the one that was saved, is not valid.

    Nor is one that is too large to be read, and of another size than the one that was saved.
    """
    if not verdict.is_valid and not verdict.too_large:
        return
    hasher = None if depth.quick or verdict.too_large else lambda: verdict.sha256
    if records.contradict(verdict.name, verdict.recorded_size or 0, hasher) is not None:
        verdict.state = "not-as-recorded"


def _to_be_hashed(directory: CheckpointDirectory, books: Books) -> set[str]:
    """The files of which the pointer or the manifest records a SHA-256, and no other size."""
    records = Records(directory.pointer, books.manifest)
    names = set()
    for file in directory.steps:
        known = (
            entry.size in (None, file.recorded_size) and entry.sha256 is not None
            for _, entry in records.of(file.name)
        )
        # What records nothing of a size says nothing of metadata that is no file, or not there.
        if file.opens and file.recorded_size is not None and any(known):
            names.add(file.name)
    return names


def _examine_step(file: StepFile, depth: Depth, workers: Workers) -> Examined:
    if not file.opens:
        return not_opened(file)
    result = examine(file.path, file.step, depth, workers)
    return Examined(file, *result)


def _looks_whole(other: Other, depth: Depth) -> bool:
    """Whether a writer's temporary is a valid checkpoint, as far as a quick look can tell."""
    step = parse_step_name(other.temporary.target) if other.temporary else None
    if step is None:
        return False
    with Workers(1, Meter(0, None)) as workers:
        return examine(other.path, step, depth._replace(quick=True), workers).verdict.is_valid


def _file_findings(examined: list[Examined]) -> Iterator[Finding]:
    for item in examined:
        yield from item.findings


def directory_findings(subject: DirectorySubject) -> Iterator[Finding]:
    """What is to be said of a directory as a whole, once its step files have been examined."""
    families = (
        pointer_checks.CHECKS,
        directory_checks.CHECKS,
        book_checks.CHECKS,
        schema_checks.DIRECTORY_CHECKS,
    )
    for family in families:
        for check in family:
            yield from check.look(subject)
    yield from trust_checks.WritableByOthers.look_at_directory(subject)


_BY_SIBLING = frozenset(check.id for check in container_checks.FROM_ANOMALIES if check.by_sibling)


_WRONG_STEP = "SCH102"
_LOADS_ALL_THE_SAME = "copy the step again from its source, if that is whole; it loads as it is"
_NOTHING_MENDS = "copy the step again from its source: nothing mends a sharded step"


def _name_remedies(subject: DirectorySubject, item: Examined) -> None:
    """What mends a step of a directory: `repair`, where that can leave a valid one."""
    repair, state = subject.command("repair"), item.verdict.state
    helps = subject.repair_helps or not item.entry.is_sharded
    for finding in item.findings:
        if finding.id == whole_file.LimitPassed.id and state == "unreadable":
            finding.remedy = subject.go_back(item.entry.name)
        elif finding.id == whole_file.LimitPassed.id and item.verdict.too_large:
            finding.remedy = repair if helps else _NOTHING_MENDS
        elif finding.remedy == RESUME_EARLIER and subject.newest is not None:
            finding.remedy = repair
        if item.entry.is_sharded and state == "wrong-step" and finding.id == _WRONG_STEP:
            finding.remedy = repair
        if item.verdict.places and finding.id == FileElsewhere.id:
            finding.remedy = repair
    if item.verdict.is_valid:  # `repair` leaves it as it is
        _name_remedy(item.findings, lambda: _mend_of_valid(item.entry.path, item.entry.is_sharded))
    else:
        _name_remedy(item.findings, lambda: repair if helps else _NOTHING_MENDS)


def _mend_of_valid(path: str, is_sharded: bool) -> str:
    """What mends a file that loads as it should, and has a fault beside its content."""
    return _LOADS_ALL_THE_SAME if is_sharded else f"{command('mend', path)} -o OUT"


def _name_remedy(findings: list[Finding], remedy: Callable[[], str | None]) -> None:
    for finding in findings:
        if finding.remedy is None and finding.id in _BY_SIBLING:
            finding.remedy = remedy() or "copy the file again from its source, if that is whole"
