"""DIR: what a directory records about itself, against what is there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckpttool.checks.base import DirectoryCheck, DirectorySubject, command, few, plural, quoted
from ckpttool.findings import Finding, Place, Severity
from ckpttool.model.names import LOCK_NAME, MANIFEST_NAME, QUARANTINE_NAME
from ckpttool.model.operations import not_a_quarantine

if TYPE_CHECKING:
    from ckpttool.checks.base import FileVerdict
    from ckpttool.model.manifest import Entry


class ManifestDiffers(DirectoryCheck):
    """Compares the SHA-256 that `verify` has taken; a quick look compares sizes and steps alone."""

    id = "DIR110"
    title = "The manifest's record of a step differs"
    meaning = (
        "manifest.jsonl records the step, the size or the SHA-256 that a step file had when it was"
        " saved, and the file, which is whole by itself, has another. A warning where the pointer,"
        " or another line, has the SHA-256 of the file."
    )
    why = "Somebody has replaced or changed it since: it is not what training saved."
    mends = (
        "Bring back the file that was saved, from a copy whose SHA-256 is the recorded one; or"
        " `ckpttool repair` sets it aside. If it was changed on purpose, add a line to the manifest"
        " that records it as it is now."
    )

    @classmethod
    def look(cls, subject: DirectorySubject) -> Iterator[Finding]:
        for item in subject.examined:
            entry = subject.books.entry(item.entry.name)
            # Of a file that is damaged, more is said elsewhere.
            if entry is not None and item.verdict.state in ("valid", "not-as-recorded"):
                remedy = None
                if item.verdict.is_valid:
                    remedy = "nothing: another record, a newer or an older one, proves the file"
                yield from cls._compare(entry, item.verdict, remedy or subject.command("repair"))

    @classmethod
    def _compare(cls, entry: Entry, file: FileVerdict, remedy: str) -> Iterator[Finding]:
        severity = Severity.WARNING if file.is_valid and entry.step == file.step else None
        recorded: object = None
        actual: object = None
        words = ""
        if entry.step is not None and entry.step != file.step:
            recorded, actual = entry.step, file.step
            words = f"the manifest records it as step {entry.step}"
        elif entry.size is not None and entry.size != file.recorded_size:
            recorded, actual = entry.size, file.recorded_size
            it = "it" if file.recorded_name == file.name else file.recorded_name
            words = f"the manifest records {entry.size:,} bytes, {it} has {actual or 0:,}"
        elif None not in (entry.sha256, file.sha256) and entry.sha256 != file.sha256:
            recorded, actual = entry.sha256, file.sha256
            words = "the manifest records another SHA-256 than it has"
        if words:
            facts = {"recorded": recorded, "actual": actual}
            yield cls.finding(Place(file.path), words, remedy, severity=severity, **facts)


class WriterAtWork(DirectoryCheck):
    id = "DIR111"
    severity = Severity.INFO
    title = "A writer holds the lock"
    meaning = "A trainer or a verb that writes is at work here: its process lives, as far as known."
    why = "Files come and go meanwhile, and verbs that write refuse."
    mends = "Nothing, while its writer is at work."

    @classmethod
    def look(cls, subject: DirectorySubject) -> Iterator[Finding]:
        holder = subject.books.holder
        if holder is not None and holder.is_held:
            words = f"held by {holder.words()}"
            place = Place(os.path.join(subject.directory.path, LOCK_NAME))
            yield cls.finding(place, words, pid=holder.pid, host=holder.host, run_id=holder.run_id)


class LockLeftOver(DirectoryCheck):
    id = "DIR112"
    severity = Severity.WARNING
    title = "A dead writer's lock was left"
    meaning = (
        "The lock of a writer that was killed; or, on another machine, of one that has given no"
        " sign of life for five minutes."
    )
    why = "Its run did not end by itself, so its last save may be incomplete."
    mends = (
        "Nothing has to be: whoever writes here next takes it over. `ckpttool repair` clears it."
    )

    @classmethod
    def look(cls, subject: DirectorySubject) -> Iterator[Finding]:
        holder = subject.books.holder
        if holder is None or holder.is_held:
            return
        ended = "has ended" if holder.state == "dead" else "has given no sign of life for long"
        words = f"left by {holder.words()}, which {ended}"
        place = Place(os.path.join(subject.directory.path, LOCK_NAME))
        remedy = subject.command("repair")
        yield cls.finding(place, words, remedy, pid=holder.pid, host=holder.host)


class OperationHalfDone(DirectoryCheck):
    id = "DIR113"
    title = "An operation was left half-way"
    meaning = (
        "A verb that changes the directory was killed before it was through, or on its way back."
    )
    why = "Some of its files may be set aside, and the pointer may not have moved yet."
    mends = "`ckpttool repair` or the same verb finishes it; `ckpttool undo` takes it back."

    @classmethod
    def look(cls, subject: DirectorySubject) -> Iterator[Finding]:
        if subject.books.holder is not None and subject.books.holder.is_held:
            return  # it is under way
        for operation in subject.books.operations:
            if operation.is_open:
                going = "taken back" if operation.state == "taking-back" else "carried out"
                words = f"{operation.verb} {operation.id} was only partly {going}"
                remedy = command("undo", subject.directory.path, operation.id)
                yield cls.finding(Place(operation.path), words, remedy, operation=operation.id)


class ManifestUnreadable(DirectoryCheck):
    id = "DIR114"
    severity = Severity.WARNING
    title = "The manifest cannot be read"
    meaning = "manifest.jsonl, or some of its lines, cannot be read."
    why = "The steps that it recorded cannot be compared with what was saved."
    mends = "Nothing has to be done: every further save adds its own line."

    @classmethod
    def look(cls, subject: DirectorySubject) -> Iterator[Finding]:
        manifest = subject.books.manifest
        if manifest is not None and manifest.problems:
            count = plural(len(manifest.problems), "problem")
            place = Place(os.path.join(subject.directory.path, MANIFEST_NAME))
            words = f"{count} with it: {few(manifest.problems)}"
            yield cls.finding(place, words, problems=manifest.problems[:100])


class SetAsideUntold(DirectoryCheck):
    """An error, and could not be checked, where the system does not let us look."""

    id = "DIR115"
    severity = Severity.WARNING
    title = "What was set aside cannot be told"
    meaning = (
        "A folder in .quarantine has no journal that can be read, or .quarantine itself is no"
        " folder; or (then an error) it may not be looked into."
    )
    why = (
        "Nobody can tell what was done, whether it was left half-way, or take it back. Where"
        " .quarantine is no folder, nothing can be set aside, so nothing is repaired."
    )
    mends = (
        "Move the files that are needed back by hand, then delete the folder with `ckpttool purge"
        " PATH ID`. What may not be looked into: give yourself the right to. A .quarantine that is"
        " no folder: move it away."
    )

    @classmethod
    def look(cls, subject: DirectorySubject) -> Iterator[Finding]:
        home = subject.directory.path
        path = os.path.join(home, QUARANTINE_NAME)
        if subject.books.quarantine_problem is not None:
            yield cls._unchecked(path, subject.books.quarantine_problem)
        elif words := not_a_quarantine(home):
            remedy = f"mv -n -- {quoted(path)} {quoted(path + '.old')}"
            yield cls.finding(Place(path), f"{words}, so nothing can be set aside", remedy)
        for operation in subject.books.operations:
            if operation.unchecked:
                yield cls._unchecked(operation.path, operation.problem or "")
            elif operation.state == "damaged":
                words = f"cannot be taken back: {operation.problem}"
                purge = command("purge", home, operation.id)
                remedy = f"move back by hand what is needed; then: {purge}"
                yield cls.finding(Place(operation.path), words, remedy, operation=operation.id)

    @classmethod
    def _unchecked(cls, path: str, problem: str) -> Finding:
        return cls.finding(
            Place(path),
            f"could not be looked into: {problem}",
            f"chmod u+rwx -- {quoted(path)}",
            severity=Severity.ERROR,
            could_not_check=True,
        )


CHECKS: tuple[type[DirectoryCheck], ...] = (
    ManifestDiffers,
    WriterAtWork,
    LockLeftOver,
    OperationHalfDone,
    ManifestUnreadable,
    SetAsideUntold,
)
