"""PTR: the pointer against what it should be, and against the highest valid step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckpttool.checks import whole_file
from ckpttool.checks.base import DirectoryCheck, DirectorySubject, Examined, quoted
from ckpttool.findings import Finding, Place, Severity
from ckpttool.model.names import POINTER_NAME

_NO_VALID = "no step here is valid, so there is nothing to point at"


class PointerCheck(DirectoryCheck):
    """A check of `latest.json`; most are mended by writing it anew."""

    @classmethod
    def say(cls, subject: DirectorySubject, words: str, **facts: Any) -> Finding:
        """A finding about the pointer, with the command that rewrites it where that is possible."""
        if (unknown := _unknown_above(subject)) is not None:
            remedy = subject.go_back(unknown)
        elif subject.newest is not None:
            remedy = subject.command(_verb(subject))
        else:
            back = subject.comes_back or any(map(_may_be_mended, subject.examined))
            remedy = subject.command("repair") if back else _NO_VALID
        return cls.finding(Place(subject.directory.pointer.path), words, remedy, **facts)


def _may_be_mended(item: Examined) -> bool:
    """Whether a damaged file has anything in it that could come back."""
    nothing = any(finding.id in _NOTHING_LEFT for finding in item.findings)
    return item.entry.is_regular and item.verdict.state == "damaged" and not nothing


_NOTHING_LEFT = frozenset({whole_file.Empty.id, whole_file.AllZero.id})


def _unknown_above(subject: DirectorySubject) -> str | None:
    """The name of a step that nobody can check and that may be the newest: none moves past it."""
    floor = -1 if subject.newest is None else subject.newest.step or 0
    unknown = (item.verdict for item in subject.examined if item.verdict.state == "unreadable")
    return next((verdict.name for verdict in unknown if (verdict.step or 0) > floor), None)


def _verb(subject: DirectorySubject) -> str:
    """What moves the pointer: `repair`, where more than the pointer is wrong, or more comes back.

    A step that is not valid would still be there after `fix-pointer`, and so would what a writer
    left, which may be the newest step: a quick look does not tell.
    """
    invalid = any(not item.verdict.is_valid for item in subject.examined)
    left = any(other.temporary is not None for other in subject.directory.others)
    return "repair" if invalid or left else "fix-pointer"


class PointerMissing(PointerCheck):
    id = "PTR101"
    severity = Severity.WARNING
    title = "The pointer is missing"
    meaning = "The directory holds step files but no latest.json."
    why = (
        "A loader has to guess which file is newest, and takes the highest number whether or not"
        " that file is good."
    )
    mends = "`ckpttool fix-pointer` writes one that names the highest valid step."

    @classmethod
    def look(cls, subject: DirectorySubject) -> Iterator[Finding]:
        if subject.directory.pointer.state == "missing" and subject.directory.steps:
            yield cls.say(subject, f"there is no {POINTER_NAME}")


class PointerMalformed(PointerCheck):
    id = "PTR102"
    title = "The pointer is malformed"
    meaning = (
        "latest.json is empty, cut short, not UTF-8, not JSON, too large, or not an object with a"
        ' text under "file".'
    )
    why = "A writer died while it wrote it. Loaders that ignore it fall back in silence."
    mends = "`ckpttool fix-pointer` writes it anew."

    @classmethod
    def look(cls, subject: DirectorySubject) -> Iterator[Finding]:
        pointer = subject.directory.pointer
        if pointer.state == "malformed":
            yield cls.say(subject, f"the pointer cannot be used: {pointer.problem}")


class PointerUnsafe(PointerCheck):
    id = "PTR103"
    title = "The pointer leads somewhere else"
    meaning = (
        "latest.json names something that is not a plain step file in its own directory: an"
        " absolute path, a path with separators or `..`, an empty name, a link, a directory. It is"
        " not followed."
    )
    why = "Following it would load, and run, a file that somebody placed elsewhere."
    mends = "`ckpttool fix-pointer` writes it anew. Find out who wrote the old one."

    @classmethod
    def look(cls, subject: DirectorySubject) -> Iterator[Finding]:
        pointer = subject.directory.pointer
        if pointer.state == "unsafe-target":
            yield cls.say(subject, f"the pointer is not followed: {pointer.problem}")


class PointerBehind(PointerCheck):
    id = "PTR104"
    title = "The pointer is behind"
    meaning = "latest.json names a good step file, but a higher step is there and valid."
    why = (
        "The process died between writing the step file and moving the pointer. Resuming now would"
        " repeat work that is already saved."
    )
    mends = "`ckpttool fix-pointer` moves it to the highest valid step."

    @classmethod
    def look(cls, subject: DirectorySubject) -> Iterator[Finding]:
        pointed, newest = subject.directory.pointer.file_step, subject.newest
        if subject.directory.pointer.state != "ok" or pointed is None or newest is None:
            return
        if newest.step is not None and pointed < newest.step:
            words = f"the pointer names step {pointed}, while step {newest.step} is there and valid"
            yield cls.say(subject, words, pointer_step=pointed, newest_valid=newest.step)


class PointerDangling(PointerCheck):
    id = "PTR105"
    title = "The pointer's target is missing"
    meaning = "latest.json names a step file that does not exist."
    why = "The file was pruned, moved or never arrived, or the pointer was copied without it."
    mends = (
        "`ckpttool fix-pointer` moves it to the highest valid step, `ckpttool repair` where a step"
        " is not valid or a writer left something, which may be what is missing."
    )

    @classmethod
    def look(cls, subject: DirectorySubject) -> Iterator[Finding]:
        pointer = subject.directory.pointer
        if pointer.state == "dangling":
            yield cls.say(subject, f"the pointer dangles: {pointer.problem}", file=pointer.file)


class PointerStepDiffers(PointerCheck):
    id = "PTR106"
    title = "The pointer contradicts itself"
    meaning = 'The "step" in latest.json is missing, or is not the step in the file name beside it.'
    why = "Programs that read one of the two disagree with those that read the other."
    mends = "`ckpttool fix-pointer` writes both from the highest valid step."

    @classmethod
    def look(cls, subject: DirectorySubject) -> Iterator[Finding]:
        pointer = subject.directory.pointer
        if pointer.file_step is None or pointer.step == pointer.file_step:
            return
        says = "no step" if pointer.step is None else f"step {pointer.step}"
        words = f"the pointer says {says} but names the file of step {pointer.file_step}"
        yield cls.say(subject, words, step=pointer.step, file_step=pointer.file_step)


class PointerTargetInvalid(PointerCheck):
    id = "PTR107"
    title = "The pointer's target is not valid"
    meaning = "The file that latest.json names is there, but damaged, dangerous or no checkpoint."
    why = "The next resume fails, or starts from bad data."
    mends = (
        "`ckpttool repair` mends the file if that can be done without loss; else it, or"
        " `ckpttool fix-pointer`, moves the pointer to the highest valid step."
    )

    @classmethod
    def look(cls, subject: DirectorySubject) -> Iterator[Finding]:
        pointer = subject.directory.pointer
        target = subject.verdict(pointer.file or "")
        if pointer.state == "ok" and target is not None and not target.is_valid:
            if target.state == "not-as-recorded" and any(PointerRecordDiffers.look(subject)):
                return  # which says the same
            words = f"the pointer names {target.name}, which is {_STATES[target.state]}"
            finding = cls.say(subject, words, file=target.name, state=target.state)
            if target.state == "unreadable":
                finding.remedy = subject.go_back(target.name)
            elif subject.newest is not None:
                # It may come back whole: then the pointer is right where it is.
                finding.remedy = subject.command("repair")
            yield finding


_STATES = {
    "damaged": "damaged",
    "not-as-recorded": "not the file that was saved",
    "dangerous": "dangerous to load",
    "unreadable": "not readable",
    "not-a-checkpoint": "not a training checkpoint",
    "wrong-step": "of another step",
    "changing": "being changed",
    "incomplete": "incomplete",
    "intact": "no step",
    "not-opened": "not a regular file",
}


class PointerNotAFile(PointerCheck):
    id = "PTR108"
    title = "The pointer is not a regular file"
    meaning = "latest.json is a directory, a link, a pipe or a device. It is not followed or read."
    why = "A loader fails on it, or follows it to a file that this directory does not control."
    mends = "`ckpttool repair` sets it aside and writes a pointer."

    @classmethod
    def look(cls, subject: DirectorySubject) -> Iterator[Finding]:
        pointer = subject.directory.pointer
        if pointer.state != "not-a-file":
            return
        finding = cls.say(subject, f"the pointer cannot be used: {pointer.problem}")
        if subject.newest is not None:
            finding.remedy = subject.command("repair")
        yield finding


class PointerRecordDiffers(PointerCheck):
    """A quick look takes no SHA-256, so it compares the size alone."""

    id = "PTR109"
    title = "The pointer's record of its target differs"
    meaning = (
        "latest.json records the size or the SHA-256 of the file that it names, and the file has"
        " another."
    )
    why = (
        "The pointer arrived before the file did, or the file was changed or replaced since. Unless"
        " the manifest proves the file, it is not valid, however whole it is."
    )
    mends = (
        "Wait for the copy to finish, or bring back the file that was saved. `ckpttool repair` sets"
        " aside a file that is not the recorded one, or writes the record anew where the manifest"
        " proves the file."
    )

    @classmethod
    def look(cls, subject: DirectorySubject) -> Iterator[Finding]:
        pointer = subject.directory.pointer
        target = subject.verdict(pointer.file or "")
        if pointer.target is None or target is None:
            return
        actual = target.recorded_size
        if actual is None:
            return  # there is nothing to compare: that it is missing is said of the step
        size = pointer.extra.get("size")
        if size is not None and size != actual:
            recorded = size if isinstance(size, int) else None
            words = f"the pointer records {_recorded(size)} bytes, {target.recorded_name} has"
            words += f" {actual:,}"
            yield cls.differ(subject, words, recorded=recorded, size=actual)
            return
        sha256 = pointer.extra.get("sha256")
        if None not in (sha256, target.sha256) and str(sha256).lower() != target.sha256:
            words = "the pointer records another SHA-256 than its target has"
            yield cls.differ(subject, words, recorded=str(sha256)[:80], sha256=target.sha256)

    @classmethod
    def differ(cls, subject: DirectorySubject, words: str, **facts: Any) -> Finding:
        """The finding; `fix-pointer` writes no record, so it does not mend this."""
        target = subject.verdict(subject.directory.pointer.file or "")
        if target is not None and target.state == "unreadable":
            remedy = subject.go_back(target.name)
        else:
            remedy = subject.command("repair") if subject.repair_helps else _NO_VALID
        return cls.finding(Place(subject.directory.pointer.path), words, remedy, **facts)


def _recorded(size: object) -> str:
    return f"{size:,}" if isinstance(size, int) else f'"{str(size)[:40]}"'


class PointerUnreadable(PointerCheck):
    id = "PTR110"
    title = "The pointer could not be read"
    meaning = (
        "latest.json is there, but the system does not let us read it (or its target's entry)."
    )
    why = "What could not be checked is not called good."
    mends = "Give the reading user permission; see the system's own reason in the finding."

    @classmethod
    def look(cls, subject: DirectorySubject) -> Iterator[Finding]:
        pointer = subject.directory.pointer
        if pointer.state == "unreadable":
            words = f"the pointer could not be read: {pointer.problem}"
            remedy = f"chmod u+r -- {quoted(pointer.path)}"
            yield cls.finding(Place(pointer.path), words, remedy, could_not_check=True)


class SeveralPointers(PointerCheck):
    """Reads the other pointers, each a few bytes."""

    id = "PTR111"
    severity = Severity.WARNING
    title = "Several pointers lie side by side"
    meaning = (
        "Beside latest.json lies a pointer of another program (`latest`,"
        " `latest_checkpointed_iteration.txt`, `last_checkpoint`, a link). An info where all name"
        " one step."
    )
    why = "Each program follows its own: somebody edits one of them, and nothing happens."
    mends = "Make them agree, or remove the one that no program here reads."

    @classmethod
    def look(cls, subject: DirectorySubject) -> Iterator[Finding]:
        from ckpttool.model.other_pointers import other_pointers

        pointer, others = subject.directory.pointer, other_pointers(subject.directory)
        ours = pointer.file_step if pointer.step is None else pointer.step
        told = [(one.name, one.says, one.step) for one in others]
        if pointer.state != "missing":
            told.insert(0, (POINTER_NAME, pointer.file or "nothing", ours))
        if len(told) < 2:
            return
        agree = len({step for _, _, step in told}) == 1 and told[0][2] is not None
        if agree and all(one.is_link for one in others):
            return  # a convenience, which many runs have
        said = ", ".join(f'{name} says "{says[:60]}"' for name, says, _ in told)
        words = f"{len(told)} pointers, which {'agree' if agree else 'disagree'}: {said}"
        remedy = None if agree else "make them agree, or remove the one that no program reads"
        yield cls.finding(
            Place(subject.directory.path),
            words,
            remedy,
            severity=Severity.INFO if agree else None,
            pointers=[{"name": name, "says": says, "step": step} for name, says, step in told],
        )


CHECKS: tuple[type[PointerCheck], ...] = (
    PointerMissing,
    PointerMalformed,
    PointerUnsafe,
    PointerBehind,
    PointerDangling,
    PointerStepDiffers,
    PointerTargetInvalid,
    PointerNotAFile,
    PointerRecordDiffers,
    PointerUnreadable,
    SeveralPointers,
)
