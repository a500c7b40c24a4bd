"""FIL: what is wrong with how an archive is put together: its directory, headers, names, gaps."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttool.checks.base import FileSubject, plural
from ckpttool.checks.container_check import (
    ContainerCheck,
    details,
    is_cut,
    short,
)
from ckpttool.findings import Finding, Severity
from ckpttool.formats.anomaly import Anomaly


class HeadersDisagree(ContainerCheck):
    id = "FIL113"
    codes = (
        "local-header-damaged",
        "header-mismatch",
        "descriptor-mismatch",
        "zip64-mismatch",
        "bad-byteorder",
        "legacy-header-damaged",
    )
    title = "The archive contradicts itself"
    meaning = "A field that the archive states twice (or that can have few values) is not the same."
    why = "A bit flipped outside of the data, or somebody edited the archive."
    mends = "Copy the file again, or resume from another step."

    @classmethod
    def words(cls, subject: FileSubject, anomaly: Anomaly) -> str:
        of = f" of {anomaly.record}" if anomaly.record else ""
        return f"{_HEADERS.get(anomaly.code, anomaly.code)}{of}{details(anomaly.facts)}"


_HEADERS = {
    "local-header-damaged": "the local header is damaged",
    "header-mismatch": "local header and directory disagree",
    "descriptor-mismatch": "data descriptor and directory disagree",
    "zip64-mismatch": "zip64 fields and plain fields disagree",
    "bad-byteorder": "the byte order is neither little nor big",
    "legacy-header-damaged": "a part of the legacy stream makes no sense",
}


class DirectoryDamaged(ContainerCheck):
    id = "FIL114"
    codes = ("end-record-damaged", "central-directory-damaged")
    title = "The archive's directory is damaged"
    meaning = "The central directory or the end record that leads to it is not what it should be."
    why = "Other readers may see fewer records, or none."
    mends = "`ckpttool repair` (for a lone file `ckpttool mend`) rebuilds it from the records."

    @classmethod
    def words(cls, subject: FileSubject, anomaly: Anomaly) -> str:
        end = anomaly.code == "end-record-damaged"
        what = "end record" if end else "central directory"
        return f"the {what} is damaged{details(anomaly.facts)}"


class DuplicateRecords(ContainerCheck):
    id = "FIL115"
    codes = ("duplicate-record",)
    title = "Two records have the same name"
    meaning = "The archive's directory names a record more than once."
    why = "Which one is read depends on the program: one may be checked and another one loaded."
    mends = "Do not load it before you know how that came about; resume from another step."

    @classmethod
    def words(cls, subject: FileSubject, anomaly: Anomaly) -> str:
        return f"several records are named {anomaly.record}{details(anomaly.facts)}"


class CaseTwins(ContainerCheck):
    id = "FIL116"
    codes = ("case-twin-record",)
    title = "Two records differ only in upper and lower case"
    meaning = "torch takes names that differ only in case for the same name."
    why = "Which of the two torch reads cannot be seen from the names."
    mends = "Do not load it before you know how that came about; resume from another step."

    @classmethod
    def words(cls, subject: FileSubject, anomaly: Anomaly) -> str:
        return f"{anomaly.record} has a twin in another case{details(anomaly.facts)}"


class RecordsOverlap(ContainerCheck):
    id = "FIL117"
    codes = ("records-overlap",)
    title = "Records overlap"
    meaning = "Two records claim the same bytes of the file."
    why = "No writer does that: the directory is damaged or forged."
    mends = "Resume from another step."


class RecordOutsideFile(ContainerCheck):
    id = "FIL118"
    codes = ("record-outside-file", "record-unreadable", "record-cut")
    title = "A record cannot be read"
    meaning = "A record is cut, would lie outside of the file, or its compressed data is damaged."
    why = "The file was cut, or its directory is damaged. Its tensors cannot be loaded."
    mends = "Copy the file again, or resume from another step."

    @classmethod
    def look(cls, subject: FileSubject) -> Iterator[Finding]:
        gone = list(subject.seen("record-unreadable"))
        if len(gone) > 1 and is_cut(subject):
            yield cls._all(subject, [str(anomaly.record) for anomaly in gone])
        else:
            yield from super().look(subject)

    @classmethod
    def _all(cls, subject: FileSubject, records: list[str]) -> Finding:
        """One finding for all that went with the end of a file."""
        tensors = [name for record in records for name in subject.tensors_in(record)]
        what = plural(len(records), "record")
        return cls.went_with_the_end(subject, what, tensors, records=records)

    @classmethod
    def words(cls, subject: FileSubject, anomaly: Anomaly) -> str:
        facts = anomaly.facts
        if (reason := facts.get("reason")) is not None:
            return f"{anomaly.record} cannot be read: {reason}"
        if anomaly.code == "record-cut":
            present = f"{short(facts.get('present', 0))} bytes of it are there"
            return f"{anomaly.record} is cut: {present}; {facts.get('problem', '')}"
        return f"{anomaly.record} lies outside of the file{details(anomaly.facts)}"


class Deflated(ContainerCheck):
    id = "FIL120"
    severity = Severity.INFO
    codes = ("deflated",)
    title = "Records are compressed"
    meaning = "The archive was zipped again by another tool; torch itself never compresses."
    why = "It loads, but cannot be memory-mapped."
    mends = "Nothing has to be done; saving it anew stores it plainly."
    by_sibling = False

    @classmethod
    def words(cls, subject: FileSubject, anomaly: Anomaly) -> str:
        count = plural(int(anomaly.facts.get("records", 0)), "storage")
        return f"{count} compressed: cannot be memory-mapped"


class Misaligned(ContainerCheck):
    id = "FIL121"
    severity = Severity.INFO
    codes = ("misaligned",)
    title = "Records are not aligned"
    meaning = "Storages do not begin on the boundaries that torch's writer keeps."
    why = "It loads; memory-mapped tensors may be slower or refused."
    mends = "Nothing has to be done; saving it anew aligns it."
    by_sibling = False

    @classmethod
    def look(cls, subject: FileSubject) -> Iterator[Finding]:
        names = [str(anomaly.record) for anomaly in subject.seen(*cls.codes)]
        moved = any(subject.seen("leading-bytes", "second-archive"))  # then that is why
        if names and not moved:
            words = f"{plural(len(names), 'storage')} not aligned"
            yield cls.finding(subject.place(), words, records=names[:1000])


class SeveralRoots(ContainerCheck):
    id = "FIL127"
    severity = Severity.WARNING
    codes = ("several-roots",)
    title = "Records lie outside of the archive's root folder"
    meaning = "torch puts all records in one folder, and sees only that one."
    why = "Another tool added something; torch never reads it."
    mends = "Nothing has to be done, unless you wonder where it came from."
    by_sibling = False

    @classmethod
    def words(cls, subject: FileSubject, anomaly: Anomaly) -> str:
        return f"there are records outside of the root folder{details(anomaly.facts)}"


class BadRecordName(ContainerCheck):
    id = "FIL128"
    severity = Severity.WARNING
    codes = ("bad-record-name",)
    title = "A record has a bad name"
    meaning = "A name is absolute, climbs with `..`, or holds control characters."
    why = "A careless unzip would write outside of its folder."
    mends = "Do not unpack it; find out where it came from."
    by_sibling = False

    @classmethod
    def words(cls, subject: FileSubject, anomaly: Anomaly) -> str:
        return f"the record name {str(anomaly.record)[:120]!r} is not a plain one"


class PaddingUsed(ContainerCheck):
    id = "FIL129"
    severity = Severity.WARNING
    codes = ("gap-not-padding", "gap", "padding-damaged", "extra-field")
    title = "There is something between the records"
    meaning = "Bytes that should be padding, or should not be there, hold something else."
    why = "Nothing loads them: a bit flipped there, a tool left them, or somebody hides something."
    mends = "Nothing has to be done for the tensors; copy the file again to be rid of it."
    by_sibling = False

    @classmethod
    def words(cls, subject: FileSubject, anomaly: Anomaly) -> str:
        of = f" at {anomaly.record}" if anomaly.record else ""
        return f"bytes between the records are not padding{of}{details(anomaly.facts)}"
