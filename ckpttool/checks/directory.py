"""DIR: what lies in a checkpoint directory besides good step files and a pointer."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator

from ckpttool.checks.base import DirectoryCheck, DirectorySubject, few, plural, quoted
from ckpttool.checks.sharded import missing_files
from ckpttool.errors import UnreadableError
from ckpttool.findings import Finding, Place, Severity
from ckpttool.io.processes import process_is_alive
from ckpttool.model.directory import Other, StepFile
from ckpttool.model.names import (
    STEP_DIGITS,
    Temporary,
    has_full_width,
    parse_step_name,
    step_directory_name,
    step_file_name,
)
from ckpttool.model.sharded_listing import holds_shards, list_sharded


class LeftoverTemporary(DirectoryCheck):
    id = "DIR101"
    severity = Severity.WARNING
    title = "A writer's temporary was left over"
    meaning = (
        "A file with the name that a writer uses until it is done (`.<name>.tmp-<pid>`). Its writer"
        " was killed, or is still at work: then this is an info."
    )
    why = "It takes space for ever, and may hold the only good copy of its step."
    mends = (
        "`ckpttool repair` looks inside: it publishes one that is whole where its step is lost, and"
        " sets others aside."
    )

    @classmethod
    def look(cls, subject: DirectorySubject) -> Iterator[Finding]:
        for other in subject.directory.others:
            if other.kind == "temporary" and other.temporary is not None:
                yield cls._judge(subject, other, other.temporary)

    @classmethod
    def _judge(cls, subject: DirectorySubject, other: Other, name: Temporary) -> Finding:
        alive = process_is_alive(name.pid)
        whole = other.name in subject.whole_temporaries
        only_copy = whole and not _step_is_valid(subject, name.target)
        words = [f"left by process {name.pid}, which {_ALIVE[alive]}"]
        if parse_step_name(name.target) is not None:
            words.append("looks whole" if whole else "is no whole checkpoint")
        if only_copy:
            words.append(f"and may be the only good copy of {name.target}")
        return cls.finding(
            Place(other.path),
            "; ".join(words),
            _temporary_remedy(subject, other, alive),
            severity=Severity.INFO if alive else None,
            pid=name.pid,
            process_alive=alive,
            looks_whole=whole,
            only_copy=only_copy,
            size=other.size,
        )


_ALIVE = {True: "is alive on this host", False: "is not alive on this host", None: "is not known"}


def _temporary_remedy(subject: DirectorySubject, other: Other, alive: bool | None) -> str:
    if alive:
        return "nothing, while its writer is at work"
    if alive is None:  # whom repair does not call dead either
        return f"once no process writes it: rm -- {quoted(other.path)}"
    return subject.command("repair")


def _step_is_valid(subject: DirectorySubject, target: str) -> bool:
    step = parse_step_name(target)
    return any(it.verdict.is_valid and it.verdict.step == step for it in subject.examined)


class ForeignNames(DirectoryCheck):
    id = "DIR102"
    severity = Severity.INFO
    title = "There are other names here"
    meaning = "Names that are neither step files nor the pointer; the tool leaves them alone."
    why = "Good to know before a directory is copied or pruned: no verb counts or touches them."
    mends = "Nothing has to be done."

    @classmethod
    def look(cls, subject: DirectorySubject) -> Iterator[Finding]:
        kinds = ("foreign", "directory", "special")
        others = [other for other in subject.directory.others if other.kind in kinds]
        names = [other.name for other in others if step_name_meant(other) is None]
        if names:
            words = f"{plural(len(names), 'other name')} here, left alone: {few(names)}"
            yield cls.finding(Place(subject.directory.path), words, names=names[:1000])


class OddStepNames(DirectoryCheck):
    id = "DIR103"
    severity = Severity.WARNING
    title = "Step numbers are not twelve digits wide"
    meaning = (
        "The number of a step file, or of a directory that torch.distributed.checkpoint wrote, has"
        " another width than the twelve digits of this layout. Such a directory, and what differs"
        " from a step's name in upper and lower case, is not counted as a step."
    )
    why = "Programs that sort names as text then take an older step for the newest one."
    mends = "Rename it to the twelve-digit name of its step."

    @classmethod
    def look(cls, subject: DirectorySubject) -> Iterator[Finding]:
        for file in subject.directory.steps:
            if not has_full_width(file.name):
                yield cls._judge(subject, file.name, step_file_name(file.step), counted=True)
        for other in subject.directory.others:
            if (right := step_name_meant(other)) is not None:
                yield cls._judge(subject, other.name, right, counted=False)

    @classmethod
    def _judge(cls, subject: DirectorySubject, name: str, right: str, *, counted: bool) -> Finding:
        here = subject.directory.path
        digits = sum(char.isdigit() for char in name)
        words = f"the number in its name has {plural(digits, 'digit')}, not {STEP_DIGITS}"
        if digits == STEP_DIGITS:
            words = "its name differs from a step's in upper and lower case"
        words += "" if counted else ": it is not counted as a step"
        old, new = os.path.join(here, name), os.path.join(here, right)
        remedy = None if os.path.lexists(new) else f"mv -n -- {quoted(old)} {quoted(new)}"
        return cls.finding(Place(old), words, remedy, digits=digits)


_MEANT = re.compile(r"step_([0-9]{1,12})(\.pt)?\Z", re.IGNORECASE)


def step_name_meant(other: Other) -> str | None:
    """The right name of what is named nearly like a step: a file, or a directory with shards."""
    match = _MEANT.match(other.name)
    if match is None or other.kind not in ("foreign", "directory"):
        return None
    if other.kind == "foreign":
        return step_file_name(int(match[1])) if match[2] else None
    if match[2] or not holds_shards(other.path):
        return None
    return step_directory_name(int(match[1]))


class ModesDiffer(DirectoryCheck):
    id = "DIR104"
    severity = Severity.WARNING
    title = "Step files differ in who may read them"
    meaning = "The permissions of the step files here are not all the same."
    why = "A colleague, or a job under another account, can read some steps and not the others."
    mends = "Give all the same mode with `chmod`."

    @classmethod
    def look(cls, subject: DirectorySubject) -> Iterator[Finding]:
        modes: dict[int, list[StepFile]] = {}
        for file in subject.directory.steps:
            if file.is_regular:
                modes.setdefault(stat.S_IMODE(file.mode), []).append(file)
        if len(modes) < 2:
            return
        usual = max(modes, key=lambda mode: len(modes[mode]))
        odd = [file.path for mode, files in modes.items() if mode != usual for file in files]
        shown = ", ".join(f"{mode:04o} ({len(files)})" for mode, files in sorted(modes.items()))
        paths = " ".join(quoted(path) for path in odd) if len(odd) <= 5 else None
        yield cls.finding(
            Place(subject.directory.path),
            f"the step files have {len(modes)} different modes: {shown}",
            f"chmod {usual:o} -- {paths}" if paths else "give all the same mode with chmod",
            modes={f"{mode:04o}": len(files) for mode, files in sorted(modes.items())},
        )


class StepIsNoFile(DirectoryCheck):
    id = "DIR105"
    severity = Severity.WARNING
    title = "A step file is a link or a directory"
    meaning = (
        "An entry with a step's name is not a regular file, nor a directory of shards. It is not"
        " followed and never valid. It is an error where the pointer names it or it has the"
        " highest step."
    )
    why = "A link can lead to a file of another run, or to one that somebody else controls."
    mends = "`ckpttool repair` sets the entry aside; or put the file itself in its place."

    @classmethod
    def look(cls, subject: DirectorySubject) -> Iterator[Finding]:
        steps = subject.directory.steps
        for file in steps:
            if file.opens:
                continue
            what = "link" if file.is_link else "directory" if stat.S_ISDIR(file.mode) else "device"
            named = subject.directory.pointer.file == file.name
            bad = named or file.step == steps[-1].step
            words = f"is a {what}, not a regular file, and is not followed"
            severity = Severity.ERROR if bad else None
            remedy = subject.command("repair")
            yield cls.finding(Place(file.path), words, remedy, severity=severity, what=what)


class TwoFilesForAStep(DirectoryCheck):
    id = "DIR106"
    title = "Two files claim the same step"
    meaning = (
        "Several names here stand for one step number: step_4.pt and step_0004.pt, or a file and"
        " the directory of a sharded step."
    )
    why = "Which one is loaded depends on the program that looks."
    mends = (
        "`ckpttool repair` keeps the valid one. Of several valid ones it keeps, as every verb here"
        " takes, the one that the pointer names, else the one that the manifest recorded last, else"
        " one with twelve digits, else the directory."
    )

    @classmethod
    def look(cls, subject: DirectorySubject) -> Iterator[Finding]:
        by_step: dict[int, list[StepFile]] = {}
        for file in subject.directory.steps:
            by_step.setdefault(file.step, []).append(file)
        for step, files in by_step.items():
            if len(files) > 1:
                yield cls._judge(subject, step, files)

    @classmethod
    def _judge(cls, subject: DirectorySubject, step: int, files: list[StepFile]) -> Finding:
        names = [file.name for file in files]
        kinds = "files and directories" if any(file.is_sharded for file in files) else "files"
        words = f"step {step} has {len(names)} {kinds}: {few(names)}"
        verdicts = [it for name in names if (it := subject.verdict(name)) is not None]
        valid = [subject.records.precedence(it.name) for it in verdicts if it.is_valid]
        meant = max(valid, default=None)
        if meant is not None:
            why = meant.why() if len(valid) > 1 else "the only valid one"
            words += f"; {meant.name} is taken, {why}"
        place, remedy = Place(subject.directory.path), subject.command("repair")
        taken = None if meant is None else meant.name
        return cls.finding(place, words, remedy, step=step, names=names, taken=taken)


class NoStepFiles(DirectoryCheck):
    id = "DIR107"
    title = "There are no step files"
    meaning = "The directory holds no file named step_<number>.pt."
    why = "There is nothing to resume from; perhaps this is not the directory that was meant."
    mends = "Check the path."

    @classmethod
    def look(cls, subject: DirectorySubject) -> Iterator[Finding]:
        if not subject.directory.steps:
            words = "there are no step files here"
            yield cls.finding(Place(subject.directory.path), words, "check the path")


class BadLink(DirectoryCheck):
    id = "DIR108"
    severity = Severity.WARNING
    title = "A link here leads out, is absolute, or leads nowhere"
    meaning = "A symbolic link in the directory is absolute, dangles, or points outside of it."
    why = "It breaks when the directory is moved or mounted elsewhere. No verb follows it."
    mends = "Make it relative to the directory, or remove it."

    @classmethod
    def look(cls, subject: DirectorySubject) -> Iterator[Finding]:
        for other in subject.directory.others:
            if other.kind == "link" and (problem := _link_problem(other)):
                remedy = _link_remedy(subject, other)
                place = Place(other.path)
                yield cls.finding(place, problem, remedy, target=other.link)


def _link_problem(link: Other) -> str | None:
    target = link.link or ""
    shown = f"the link points to {target[:120]}"
    if os.path.isabs(target):
        return f"{shown}, an absolute path"
    if os.path.normpath(target).split(os.sep)[0] == os.pardir:
        return f"{shown}, outside of this directory"
    if not os.path.exists(link.path):
        return f"{shown}, which leads nowhere"
    return None


def _link_remedy(subject: DirectorySubject, link: Other) -> str:
    name = os.path.basename(link.link or "")
    if name != link.name and os.path.lexists(os.path.join(subject.directory.path, name)):
        return f"ln -sfn -- {quoted(name)} {quoted(link.path)}"
    return f"rm -- {quoted(link.path)}"


class NoValidStep(DirectoryCheck):
    id = "DIR109"
    title = "No step is valid"
    meaning = "There are step files, but none of them is an intact training checkpoint."
    why = "There is nothing here that training could resume from."
    mends = "`ckpttool repair` says what can be got back; else bring back a copy of a step file."

    @classmethod
    def look(cls, subject: DirectorySubject) -> Iterator[Finding]:
        if subject.directory.steps and subject.newest is None:
            count = plural(len(subject.directory.steps), "step file")
            words = f"none of the {count} here is valid"
            none = "bring back a copy of a step: nothing here can be mended"
            remedy = subject.command("repair") if subject.repair_helps else none
            yield cls.finding(Place(subject.directory.path), words, remedy)


class LeftoverHasShards(DirectoryCheck):
    """Lists the leftover's directory; nothing in it is opened."""

    id = "DIR116"
    severity = Severity.WARNING
    title = "A leftover holds what a step lacks"
    meaning = (
        "The temporary directory of a writer holds files that the sharded step of the same number"
        " lacks: it was published before every rank had written into it, or on another node."
    )
    why = "They may be all that is missing of the step. Whoever cleans up deletes them."
    mends = "Move them into the step and verify it again; `ckpttool repair` deletes nothing."

    @classmethod
    def look(cls, subject: DirectorySubject) -> Iterator[Finding]:
        for other in subject.directory.others:
            if other.temporary is None or not stat.S_ISDIR(other.mode):
                continue
            name = other.temporary.target
            step = next((it for it in subject.examined if it.entry.name == name), None)
            if step is None or step.verdict.is_valid:
                continue
            if files := lacking(step.findings, other.path):
                paths = " ".join(quoted(os.path.join(other.path, file)) for file in files)
                words = f"it holds {few(files)}, which {name} lacks"
                remedy = f"mv -n -- {paths} {quoted(step.entry.path)}"
                yield cls.finding(Place(other.path), words, remedy, files=files, step=name)


def lacking(findings: list[Finding], leftover: str) -> list[str]:
    """Names of files that a step lacks, as its findings say, and that lie in a leftover."""
    try:
        there = list_sharded(leftover).sizes
    except UnreadableError:
        return []
    names = {name for finding in findings for name in missing_files(finding)}
    return sorted(names & there.keys())


CHECKS: tuple[type[DirectoryCheck], ...] = (
    LeftoverTemporary,
    LeftoverHasShards,
    ForeignNames,
    OddStepNames,
    ModesDiffer,
    StepIsNoFile,
    TwoFilesForAStep,
    NoStepFiles,
    BadLink,
    NoValidStep,
)
