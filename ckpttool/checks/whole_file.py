"""FIL: what is wrong with a file as a whole: it is empty, cut, something else, or more than one."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttool.checks.base import FileSubject, command, plural, quoted
from ckpttool.checks.container_check import (
    CUT,
    ContainerCheck,
    details,
    plain_facts,
)
from ckpttool.findings import Finding, Place, Severity
from ckpttool.formats.anomaly import Anomaly
from ckpttool.model.sharded_listing import step_with_part

# torch's zip reader looks for the end record this far back from the end of the file (miniz.c,
# mz_zip_reader_locate_header_sig: blocks of 4,096 bytes, each 4,093 before the last).
_TORCH_LOOKS_BACK = 4096 + 16 * 4093
_END_RECORD_BYTES = 22


class Unreadable(ContainerCheck):
    id = "FIL101"
    codes = ("unreadable",)
    title = "The file could not be read"
    meaning = "The system does not let us open or read the file; its own reason is given."
    why = "What could not be checked is not called good."
    mends = "Give the reading user permission, or look after the disk or mount."
    by_sibling = False

    @classmethod
    def at(cls, path: str, reason: str) -> Finding:
        """The finding for a path that could not be opened."""
        words = f"could not be read: {reason}"
        remedy = "make it readable, then verify again"
        return cls.finding(Place(path), words, remedy, could_not_check=True, reason=reason)


class Empty(ContainerCheck):
    id = "FIL102"
    codes = ("empty",)
    title = "The file is empty"
    meaning = "It has 0 bytes: it was created, and never written."
    why = "Its writer was killed, or the disk was full, before the first byte."
    mends = "Nothing: resume from another step."

    @classmethod
    def words(cls, subject: FileSubject, anomaly: Anomaly) -> str:
        return "the file is empty: it was created and never written"


class AllZero(ContainerCheck):
    id = "FIL103"
    codes = ("all-zero",)
    title = "The file holds nothing but zeros"
    meaning = "Every byte is zero (unflushed data)."
    why = (
        "The name and the size reached the disk before a power loss, the data did not: the file was"
        " renamed without being flushed first."
    )
    mends = "Nothing: resume from another step."

    @classmethod
    def words(cls, subject: FileSubject, anomaly: Anomaly) -> str:
        size = subject.checkpoint.size
        return f"all {size:,} bytes are zero: unflushed data, lost with the power or the machine"


class ZeroTail(ContainerCheck):
    id = "FIL104"
    codes = ("zero-tail",)
    title = "The end of the file is zeros"
    meaning = "From some offset on every byte is zero, and the archive's end is missing."
    why = "Unflushed data: the file got its full size, but its last blocks never reached the disk."
    mends = "Nothing brings the zeros back: resume from another step."

    @classmethod
    def words(cls, subject: FileSubject, anomaly: Anomaly) -> str:
        length = anomaly.facts.get("length", 0)
        return f"the last {length:,} bytes are zero (unflushed data); {survivors(subject)}"


class Truncated(ContainerCheck):
    id = "FIL105"
    codes = CUT
    title = "The file is truncated"
    meaning = "Its end is missing: the archive's end record, or the last storages of a stream."
    why = "A writer or a copy stopped half way. Loaders refuse it, or crash."
    mends = (
        "Copy it again if the source is whole; else `ckpttool repair` (for a lone file"
        " `ckpttool mend`) gets back what is there."
    )

    @classmethod
    def look(cls, subject: FileSubject) -> Iterator[Finding]:
        if not any(subject.seen("zero-tail")):  # then that is the better name for it
            yield from super().look(subject)

    @classmethod
    def words(cls, subject: FileSubject, anomaly: Anomaly) -> str:
        size, needed = subject.checkpoint.size, anomaly.facts.get("needed")
        present = f"truncated: {size:,} bytes are present"
        if isinstance(needed, int):
            present += f" of {needed:,} needed"
        elif (lacking := _lacking_bytes(subject)) > 0:
            present += f", at least {lacking:,} more are needed"
        elif anomaly.facts.get("found_by") == "zip64 end record":
            present += ", only the last end record is gone"
        return f"{present}; {survivors(subject)}"


def _lacking_bytes(subject: FileSubject) -> int:
    return sum(int(lost.facts.get("declared", 0)) for lost in subject.seen("storage-missing"))


def survivors(subject: FileSubject) -> str:
    """How many records of a cut archive are there whole, in words."""
    container = subject.checkpoint.container
    if container is None:
        return "nothing of it can be read"
    codes = ("crc-mismatch", "record-unreadable", "crc-missing", "record-cut")
    bad = {lost.record for lost in subject.seen(*codes)}
    whole = sum(record.name not in bad for record in container.entries)
    lost = sum(1 for _ in subject.seen("storage-missing")) + len(container.entries) - whole
    words = f"{plural(whole, 'record')} can still be found whole"
    return words if not lost else f"{words}, {lost:,} not"


class NotACheckpoint(ContainerCheck):
    id = "FIL106"
    codes = ("other-kind",)
    title = "The file is something else"
    meaning = "By its content it is no checkpoint that torch.save writes; the finding says what."
    why = (
        "A download or a clone brought a stand-in (a git-LFS pointer, an error page), or the file"
        " has the wrong name."
    )
    mends = (
        "Fetch the real file; for a git-LFS pointer, `git lfs pull`. A shard or a `.metadata` is"
        " checked with its step: verify the directory."
    )

    @classmethod
    def words(cls, subject: FileSubject, anomaly: Anomaly) -> str:
        words = f"not a checkpoint but {anomaly.facts.get('words', subject.checkpoint.words)}"
        oid = subject.checkpoint.facts.get("oid")
        words = f"{words}, SHA-256 {oid}" if oid else words
        found = anomaly.facts.get("found")
        return f"{words}; that file is here: {found}" if found else words

    @classmethod
    def judge(cls, subject: FileSubject, anomaly: Anomaly) -> Finding:
        words, remedy = cls.words(subject, anomaly), None
        whole = step_with_part(subject.path)
        if whole is not None:
            words += f"; it is a part of the sharded step {whole}"
        if anomaly.facts.get("kind") == "git-lfs-pointer":
            found = anomaly.facts.get("found")
            here = f"cp -- {quoted(str(found))} {quoted(subject.path)}"
            remedy = here if found else "git lfs pull"
        elif whole is not None:
            remedy = command("verify", whole)
        return cls.finding(subject.place(), words, remedy, **plain_facts(anomaly))


class TwoArchives(ContainerCheck):
    id = "FIL107"
    codes = ("second-archive",)
    title = "Two archives in one file"
    meaning = "The file holds one archive behind another, as two saves to one open handle leave it."
    why = "Readers see only one of them, and not all of them the same one."
    mends = "Save each to a file of its own."

    @classmethod
    def look(cls, subject: FileSubject) -> Iterator[Finding]:
        if subject.checkpoint.kind != "dcp-shard":  # which is made of archives
            yield from super().look(subject)

    @classmethod
    def words(cls, subject: FileSubject, anomaly: Anomaly) -> str:
        where = "before" if anomaly.facts.get("where") == "before" else "behind"
        length = anomaly.facts.get("length", 0)
        return f"another archive of {length:,} bytes lies {where} the one that readers see"


class StrayBytes(ContainerCheck):
    id = "FIL108"
    severity = Severity.WARNING
    codes = ("trailing-bytes", "leading-bytes")
    title = "There are bytes outside of the archive"
    meaning = (
        "Something lies before the archive or behind it. It is an error where so much lies behind"
        " that torch no longer finds the archive's end, or anything before it."
    )
    why = "A copy or a tool added them; the checkpoint itself may be untouched."
    mends = "Copy the file again from its source."
    by_sibling = False

    @classmethod
    def judge(cls, subject: FileSubject, anomaly: Anomaly) -> Finding:
        length = int(anomaly.facts.get("length", 0))
        before = anomaly.code == "leading-bytes"
        zeros = " zero" if anomaly.facts.get("zeros") else ""
        where = "before" if before else "behind"
        words = f"{length:,}{zeros} bytes lie {where} the archive"
        is_zip = subject.checkpoint.kind not in ("torch-legacy", "torch-legacy-tar")
        hidden = is_zip and (before or length + _END_RECORD_BYTES > _TORCH_LOOKS_BACK)
        if hidden:
            words += ", and torch cannot load it so"
        severity = Severity.ERROR if hidden else None
        remedy = "copy the file again from its source"
        return cls.finding(
            subject.place(), words, remedy, severity=severity, **plain_facts(anomaly)
        )


class LimitPassed(ContainerCheck):
    id = "FIL124"
    codes = ("pickle-limit", "too-many-records", "record-limit")
    title = "A limit was passed"
    meaning = (
        "Reading stopped because the file asks for more work or memory than is allowed. Nesting of"
        " more than 1,000 levels, copies of copies, and a compressed pickle that swells past a"
        " limit are in no training checkpoint: such a file cannot be used. Of one that passes a"
        " limit because it has a lot of honest content, nothing is known."
    )
    why = "A file can be made to exhaust whoever reads it. What was not read is not called good."
    mends = (
        "`ckpttool repair` sets aside what cannot be used. If you trust the source of another, use"
        " the Python API with wider limits."
    )
    by_sibling = False

    @classmethod
    def judge(cls, subject: FileSubject, anomaly: Anomaly) -> Finding:
        reason = anomaly.facts.get("reason")
        said = f": {reason}" if reason else details(anomaly.facts)
        place, words = subject.place(anomaly.record), f"reading stopped at a limit{said}"
        # A damaged record asks for anything; that it is damaged has been proven then.
        bad = any(bad.record == anomaly.record for bad in subject.seen("crc-mismatch"))
        bad = bad or is_unusable(subject, anomaly)
        return cls.finding(place, words, could_not_check=not bad, **plain_facts(anomaly))


# Limits that no amount of honest content passes: only content that was made to pass them does.
_NEVER_HONEST = frozenset({"depth", "copies", "keys"})


def is_unusable(subject: FileSubject, limit_passed: Anomaly) -> bool:
    """Whether a limit was passed in a way that no training checkpoint has.

    Counts and bytes are not such a thing: a checkpoint may just be large. In a compressed pickle
    they are: torch compresses none, and one of that size would not have been made by hand.
    """
    if limit_passed.code != "pickle-limit":
        return False
    if limit_passed.facts.get("limit") in _NEVER_HONEST:
        return True
    container = subject.checkpoint.container
    record = None if container is None else container.records.get(limit_passed.record or "")
    counted = limit_passed.facts.get("limit") in ("pickle_bytes", "opcodes", "memo_entries")
    return counted and record is not None and record.method not in (None, 0)


class ChangedWhileRead(ContainerCheck):
    id = "FIL125"
    codes = ("changed",)
    title = "The file changed while it was read"
    meaning = (
        "Its size, time or identity is not the same after reading as before. A warning where it was"
        " removed after it was listed, as a running trainer does with old steps."
    )
    why = "A writer is at work; what was found may be half old and half new."
    mends = "Verify again when the writer is done."
    by_sibling = False

    @classmethod
    def judge(cls, subject: FileSubject, anomaly: Anomaly) -> Finding:
        words = "the file changed or was replaced while it was read"
        return cls.finding(subject.place(), words, "verify again")

    @classmethod
    def gone(cls, path: str) -> Finding:
        """The finding for a file that is no longer there when it is opened."""
        words = "the file was removed after it was listed"
        return cls.finding(Place(path), words, "verify again", severity=Severity.WARNING)
