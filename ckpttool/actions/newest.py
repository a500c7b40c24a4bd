"""The newest valid step of a directory, found from the top: nothing below it is read.

A newer step that is proven bad is passed over. One that could not be checked is not: it may be the
newest valid one, so nothing is acted on until that is known.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.checks.verify import verify
from ckpttool.errors import UnreadableError
from ckpttool.model.directory import scan
from ckpttool.model.names import POINTER_NAME
from ckpttool.model.records import read_records
from ckpttool.model.sharded_listing import holds_shards

if TYPE_CHECKING:
    from ckpttool.findings import Finding
    from ckpttool.io.durable import Progress
    from ckpttool.model.directory import CheckpointDirectory, StepFile
    from ckpttool.model.records import Precedence, Records

VALID = "valid"
NOT_AS_RECORDED = "not-as-recorded"
INCOMPLETE = "incomplete"
_FAMILIES = {"TRU": 0, "FIL": 1, "SHD": 1, "SCH": 2}
# States of verification that say nothing of the file: neither that it is good nor that it is bad.
_UNCHECKED = frozenset({"unreadable", "changing"})


class Judged(NamedTuple):
    """A step file and what verification says of it. `state` is `valid` or says why it is not.

    `unchecked` is set where the file could not be checked (not readable, a limit passed, changed
    while it was read), so that nothing is known of it. `record` says how a file that is whole
    differs from what the directory records of it.
    """

    file: StepFile
    state: str
    findings: list[Finding]
    unchecked: bool = False
    record: str | None = None

    @property
    def is_valid(self) -> bool:
        """Whether it is intact and the training checkpoint that its name promises."""
        return self.state == VALID

    def why(self) -> str:
        """Why it is not valid, in one line."""
        if self.record is not None:
            return f"not the file that was saved: {self.record}"
        return why_not_valid(self.state, self.findings)

    def as_dict(self) -> dict[str, Any]:
        """The judgement as plain data."""
        return {
            "step": self.file.step,
            "file": self.file.name,
            "state": self.state,
            "why": None if self.is_valid else self.why(),
            "could_not_check": self.unchecked,
        }


def why_not_valid(state: str, findings: list[Finding]) -> str:
    """Id and words of the error that says most of a file that is not valid.

    What is dangerous comes before what is damaged, and that before what is not as it should be.
    """
    errors = [finding for finding in findings if finding.severity.value == "error"]
    if not errors:
        return state
    worst = min(errors, key=lambda finding: _FAMILIES.get(finding.id[:3], len(_FAMILIES)))
    return f"{worst.id}: {worst.words}"


class Newest(NamedTuple):
    """The newest step file that is proven valid, or None, and the newer ones, newest first.

    `found` is the answer only where `unchecked` is empty; `sure` is it then, else None.
    """

    found: Judged | None
    passed_over: list[Judged]

    @property
    def unchecked(self) -> list[Judged]:
        """The files that could not be checked, and of which any may be the answer.

        Those are of higher steps, or come before the one found of its own step.
        """
        floor = -1 if self.found is None else self.found.file.step
        return [one for one in self.passed_over if one.unchecked and one.file.step >= floor]

    @property
    def sure(self) -> Judged | None:
        """The newest valid step file, or None where there is none, or where nobody knows."""
        return None if self.unchecked else self.found


def steps_at(path: str) -> CheckpointDirectory:
    """The directory `path`; or the one of the step `path`, as if no other step were there.

    The pointer's path stands for its whole directory. Raises UnreadableError.
    """
    is_directory = os.path.isdir(path) and not holds_shards(path)
    if is_directory or not os.path.lexists(path):
        return scan(path)
    parent, name = os.path.split(os.path.normpath(path))
    directory = scan(parent or ".")
    if name != POINTER_NAME:
        directory.steps = [file for file in directory.steps if file.name == name]
    return directory


def judge(
    file: StepFile,
    *,
    quick: bool = False,
    records: Records | None = None,
    progress: Progress | None = None,
) -> Judged:
    """Verifies one step file. Links, directories and the like are never followed or opened.

    With the `records` of its directory, a file that is not the one that was recorded is not valid:
    its state is `not-as-recorded` then. Its SHA-256 is taken only where one is recorded.
    """
    if not file.opens:
        return Judged(file, "is a link" if file.is_link else "is not a regular file", [])
    try:
        report = verify(file.path, quick=quick, progress=progress)
    except UnreadableError as error:
        return Judged(file, error.reason, [], unchecked=True)
    if not report.files:  # a directory by a step's name in which nothing lies
        return Judged(file, INCOMPLETE, [])
    state = report.files[0].state
    too_large = report.files[0].too_large
    judged = Judged(file, state, report.findings, state in _UNCHECKED)
    if records is None or not (judged.is_valid or too_large):
        return judged
    try:
        hasher = None if quick or too_large else partial(_sha256, file.recorded_path, progress)
        differs = records.contradict(file.name, report.files[0].recorded_size or 0, hasher)
    except UnreadableError as error:
        return Judged(file, error.reason, [], unchecked=True)
    return judged if differs is None else Judged(file, NOT_AS_RECORDED, [], record=differs)


def _sha256(path: str, progress: Progress | None) -> str:
    from hashlib import sha256

    from ckpttool.io.reading import FileReader

    digest, done = sha256(), 0
    with FileReader(path) as reader:
        for chunk in reader.chunks(0, reader.size):
            digest.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress(done, reader.size, os.path.basename(path))
        if reader.changed():
            raise UnreadableError(path, "changed while it was read")
    return digest.hexdigest()


def is_gone(judged: Judged) -> bool:
    """Whether it could not be checked because somebody, say the trainer, deleted it meanwhile."""
    if not judged.unchecked:
        return False
    try:
        os.lstat(judged.file.path)
    except FileNotFoundError:
        return True
    except OSError:  # who may not look does not know
        return False
    return False


def judge_step(
    directory: CheckpointDirectory, step: int, *, progress: Progress | None = None
) -> Judged | None:
    """What is meant by `step`, verified; None where nothing has its number.

    Of several names for it the first valid one counts, in the order of `records.Precedence`; one
    that could not be checked comes before all that follow it. Without a valid one, the first.
    """
    records = read_records(directory.path)
    first: Judged | None = None
    for file in directory.all_of(step):
        judged = judge(file, records=records, progress=progress)
        if judged.is_valid or judged.unchecked:
            return judged
        first = first or judged
    return first


def find_newest_valid(
    directory: CheckpointDirectory, *, quick: bool = False, progress: Progress | None = None
) -> Newest:
    """Verifies step files from the highest step down to the first valid one.

    What could not be checked on the way is in `Newest.unchecked`: ask `Newest.sure`.
    """
    passed_over: list[Judged] = []
    records = read_records(directory.path)

    def rank(file: StepFile) -> tuple[int, Precedence]:
        return file.step, records.precedence(file.name)

    for file in sorted(directory.steps, key=rank, reverse=True):
        judged = judge(file, quick=quick, records=records, progress=progress)
        if judged.is_valid:
            return Newest(judged, passed_over)
        if not is_gone(judged):
            passed_over.append(judged)
    return Newest(None, passed_over)
