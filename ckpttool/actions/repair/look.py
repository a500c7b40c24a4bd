"""What `repair` decides upon: each step file and leftover, with what verification says of it."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.actions.newest import why_not_valid
from ckpttool.checks.base import few
from ckpttool.checks.verify import verify, verify_as
from ckpttool.errors import RefusedError, UnreadableError
from ckpttool.io.processes import may_be_writing
from ckpttool.model.directory import scan
from ckpttool.model.names import (
    LOCK_NAME,
    POINTER_NAME,
    Temporary,
    parse_step_name,
)
from ckpttool.model.records import read_records
from ckpttool.model.sharded_listing import METADATA_NAME

if TYPE_CHECKING:
    from ckpttool.checks.verify import Report
    from ckpttool.findings import Finding
    from ckpttool.io.durable import Progress
    from ckpttool.model.directory import CheckpointDirectory, Other
    from ckpttool.model.records import Precedence, Records

_RECORDS = frozenset({"PTR109", "DIR110"})
_UNCHECKED = frozenset({"unreadable", "changing"})


class Entry(NamedTuple):
    """A step file, or a leftover that was to become one. `state` is that of its verdict.

    `target` is the name that it has or was to have, `precedence` what that weighs. `status` is its
    own (a link is not followed), taken before it was verified; None where it was gone already.
    `places` are the paths of those files of a sharded step, by name, that make it valid when they
    are moved into it.
    """

    path: str
    name: str
    target: str
    step: int
    state: str
    findings: list[Finding]
    status: os.stat_result | None
    precedence: Precedence
    places: dict[str, str] = {}  # noqa: RUF012 - never changed

    @property
    def is_valid(self) -> bool:
        """Whether it is intact and the training checkpoint that its name promises."""
        return self.state == "valid"

    @property
    def unchecked(self) -> bool:
        """Whether nothing is known of it, so that nothing may be done with it."""
        return self.state in _UNCHECKED or self.status is None

    @property
    def can_be_mended(self) -> bool:
        """Whether mending is worth a try: it is, or was, an archive of torch's."""
        return self.state in ("damaged", "dangerous") and not self.is_sharded

    @property
    def is_sharded(self) -> bool:
        """Whether it is a directory, which is a sharded step or was to become one."""
        return self.status is not None and stat.S_ISDIR(self.status.st_mode)

    @property
    def recorded_path(self) -> str:
        """The file whose size and SHA-256 the pointer and the manifest record of it."""
        return os.path.join(self.path, METADATA_NAME) if self.is_sharded else self.path

    def rank(self) -> tuple[int, Precedence]:
        """To sort by: of several names for one step the last one is meant."""
        return self.step, self.precedence

    def why(self) -> str:
        """Id and words of the finding that says most."""
        if self.state == "not-opened":
            link = self.status is not None and stat.S_ISLNK(self.status.st_mode)
            what = f"a link to {os.readlink(self.path)[:200]}" if link else "not a regular file"
            return f"DIR105: it is {what}"
        if self.state == "not-as-recorded":
            words = why_not_valid(self.state, [f for f in self.findings if f.id in _RECORDS])
            return f"{words}: it is not the file that was saved"
        return why_not_valid(self.state, self.findings)

    def ids(self) -> list[str]:
        """The ids of its errors, each once."""
        errors = [finding.id for finding in self.findings if finding.severity.value == "error"]
        return list(dict.fromkeys(errors))


class Leftover(NamedTuple):
    """A writer's temporary. `alive` says whether its writer may be at work: None is unknown.

    `entry` is what verification says of it where it was to become a step file.
    """

    path: str
    name: str
    temporary: Temporary
    size: int
    alive: bool | None
    status: os.stat_result | None
    entry: Entry | None


class Look(NamedTuple):
    """A directory that was looked at once: what is there, and the report of its verification."""

    directory: CheckpointDirectory
    report: Report
    files: list[Entry]
    leftovers: list[Leftover]


def look(path: str, progress: Progress | None = None) -> Look:
    """Lists and verifies the directory `path`. Raises UnreadableError where it cannot be listed."""
    directory = scan(path)
    before = {file.name: _status(file.path) for file in directory.steps}
    records = read_records(path)
    others = [other for other in directory.others if other.temporary]
    leftovers = [_leftover(other, records, progress) for other in others]
    report = verify(path, progress=progress)
    verdicts = {verdict.name: verdict for verdict in report.files}
    findings = _by_entry(path, report)
    files = []
    for file in directory.steps:
        found, verdict = findings.get(file.name, []), verdicts.get(file.name)
        state = "changing" if verdict is None else verdict.state
        if state == "not-as-recorded" and file.name == directory.pointer.file:
            found += [finding for finding in report.findings if finding.id == "PTR109"]
        weight = records.precedence(file.name)
        named = (file.path, file.name, file.name, file.step)
        places = {} if verdict is None else verdict.places
        files.append(Entry(*named, state, found, before[file.name], weight, places))
    return Look(directory, report, files, leftovers)


def still_the_same(before: Look) -> None:
    """RefusedError where step files, temporaries or the pointer are not what they were then."""
    now = scan(before.directory.path)
    expected: dict[str, os.stat_result | None] = {
        **{file.name: file.status for file in before.files},
        **{one.name: one.status for one in before.leftovers if not _is_of_lock(one)},
    }
    names = {file.name for file in now.steps}
    names |= {
        other.name
        for other in now.others
        if other.temporary is not None and other.temporary.target != LOCK_NAME
    }
    changed = sorted(names ^ expected.keys())
    here = before.directory.path
    for name, status in expected.items():
        if name not in changed and _marks(status) != _marks(_status(os.path.join(here, name))):
            changed.append(name)
    # What is written over within a folder does not show in the folder itself.
    then = {file.name: (file.size, file.mtime_ns) for file in before.directory.steps}
    inside = [file for file in now.steps if file.is_sharded and file.name not in changed]
    changed += [file.name for file in inside if then[file.name] != (file.size, file.mtime_ns)]
    if now.pointer.as_dict() != before.directory.pointer.as_dict():
        changed.append(POINTER_NAME)
    if changed:
        words = f"{few(changed)} changed since it was looked at: nothing was done, run it again"
        raise RefusedError(f"{here}: {words}")


def _is_of_lock(leftover: Leftover) -> bool:
    return leftover.temporary.target == LOCK_NAME


def _marks(status: os.stat_result | None) -> tuple[int, ...] | None:
    if status is None:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_mode


def _by_entry(path: str, report: Report) -> dict[str, list[Finding]]:
    """The findings about each entry of the directory, or something in it, by its name."""
    found: dict[str, list[Finding]] = {}
    inside = os.path.join(path, "")
    for finding in report.findings:
        if finding.place.path.startswith(inside):
            name = finding.place.path[len(inside) :].partition(os.sep)[0]
            found.setdefault(name, []).append(finding)
    return found


def _leftover(other: Other, records: Records, progress: Progress | None) -> Leftover:
    temporary = other.temporary
    assert temporary is not None
    status = _status(other.path)
    changed = 0.0 if status is None else status.st_ctime
    alive = may_be_writing(temporary.pid, changed)
    entry = None
    step = parse_step_name(temporary.target)
    if step is not None and alive is False:
        entry = _examine(other, temporary.target, step, status, records, progress)
    return Leftover(other.path, other.name, temporary, other.size, alive, status, entry)


def _examine(
    other: Other,
    target: str,
    step: int,
    status: os.stat_result | None,
    records: Records,
    progress: Progress | None,
) -> Entry:
    try:
        result = verify_as(other.path, step, progress=progress)
        state, findings = result.files[0].state, result.findings
    except UnreadableError:
        state, findings = "unreadable", []
    named = (other.path, other.name, target, step)
    return Entry(*named, state, findings, status, records.precedence(target))


def _status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None
