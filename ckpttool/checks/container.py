"""FIL: the file's bytes, its container, and whether every record is what it was when written.

Most checks here turn what the formats noticed (anomalies, by their codes) into findings; what needs
measuring (checksums, changes while reading) is measured by `verify` and noted in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckpttool.checks.base import FileCheck, FileSubject, few, plural, quoted
from ckpttool.findings import Finding, Place, Severity
from ckpttool.formats.anomaly import Anomaly

MOST_FINDINGS = 50
"""More findings of one kind in one file are counted, not listed; bad checksums are all listed."""

# torch's zip reader looks for the end record this far back from the end of the file (miniz.c,
# mz_zip_reader_locate_header_sig: blocks of 4,096 bytes, each 4,093 before the last).
_TORCH_LOOKS_BACK = 4096 + 16 * 4093
_END_RECORD_BYTES = 22


class ContainerCheck(FileCheck):
    """A check that turns the anomalies with `codes` into findings, one each.

    `by_sibling`: what mends it is another step file, so `verify` names the newest valid one.
    """

    codes: tuple[str, ...] = ()
    by_sibling = True
    most: int | None = MOST_FINDINGS

    @classmethod
    def look(cls, subject: FileSubject) -> Iterator[Finding]:
        seen = list(subject.seen(*cls.codes))
        shown = seen if cls.most is None else seen[: cls.most]
        for anomaly in shown:
            yield cls.judge(subject, anomaly)
        if len(shown) < len(seen):
            more = len(seen) - len(shown)
            yield cls.finding(subject.place(), f"the same {more:,} times more", more=more)

    @classmethod
    def judge(cls, subject: FileSubject, anomaly: Anomaly) -> Finding:
        """The finding for one anomaly; a warning where the formats know it to do no harm."""
        words, severity = cls.words(subject, anomaly), None
        if anomaly.facts.get("harmless"):
            words += " (harmless: torch does not read it)"
            severity = min(cls.severity, Severity.WARNING, key=lambda item: item.rank)
        place = subject.place(anomaly.record)
        return cls.finding(place, words, severity=severity, **_plain(anomaly))

    @classmethod
    def words(cls, subject: FileSubject, anomaly: Anomaly) -> str:
        """The sentence for one anomaly."""
        return f"{anomaly.code.replace('-', ' ')}{details(anomaly.facts)}"

    @classmethod
    def went_with_the_end(
        cls, subject: FileSubject, what: str, tensors: list[str], **facts: Any
    ) -> Finding:
        """One finding for `what` was lost, all of it, when the end of a file was cut off."""
        words = f"{what} went with the end of the file"
        words += f": {few(tensors)}" if tensors else ""
        return cls.finding(Place(subject.path, tensors=tuple(tensors)), words, **facts)


def details(facts: dict[str, Any]) -> str:
    """Facts in words, to follow a sentence: `: field size, declared 5, found 3`."""
    shown = {name: value for name, value in facts.items() if name != "harmless"}
    plain = [f"{name.replace('_', ' ')} {_short(value)}" for name, value in shown.items()]
    return f": {', '.join(plain)}" if plain else ""


def _short(value: Any) -> str:
    return f"{value:,}" if type(value) is int else str(value)[:120]


def _plain(anomaly: Anomaly) -> dict[str, Any]:
    """Facts fit for JSON, with the anomaly's code."""
    kinds = (str, int, float, bool, type(None))
    facts = {
        name: value if isinstance(value, kinds) else str(value)[:200]
        for name, value in anomaly.facts.items()
        if name not in ("place", "words", "remedy", "severity")
    }
    return {"code": anomaly.code, **facts}


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
    codes = ("no-end-record", "truncated")
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
    mends = "Fetch the real file; for a git-LFS pointer, `git lfs pull`."

    @classmethod
    def words(cls, subject: FileSubject, anomaly: Anomaly) -> str:
        words = f"not a checkpoint but {anomaly.facts.get('words', subject.checkpoint.words)}"
        oid = subject.checkpoint.facts.get("oid")
        words = f"{words}, SHA-256 {oid}" if oid else words
        found = anomaly.facts.get("found")
        return f"{words}; that file is here: {found}" if found else words

    @classmethod
    def judge(cls, subject: FileSubject, anomaly: Anomaly) -> Finding:
        remedy = None
        if anomaly.facts.get("kind") == "git-lfs-pointer":
            found = anomaly.facts.get("found")
            here = f"cp -- {quoted(str(found))} {quoted(subject.path)}"
            remedy = here if found else "git lfs pull"
        words = cls.words(subject, anomaly)
        return cls.finding(subject.place(), words, remedy, **_plain(anomaly))


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
        return cls.finding(subject.place(), words, remedy, severity=severity, **_plain(anomaly))


class ChecksumMismatch(ContainerCheck):
    id = "FIL109"
    codes = ("crc-mismatch", "crc-missing")
    title = "A record's checksum does not match"
    meaning = "The bytes of a record are not those that were written: they have another CRC-32."
    why = "torch does not look at checksums: it would load the damaged values in silence."
    mends = (
        "`ckpttool repair` (for a lone file `ckpttool mend`) turns a single flipped bit back, and"
        " takes a record that is stored elsewhere, too, from there. Else copy the file again, or"
        " resume from another step."
    )
    most = None

    @classmethod
    def words(cls, subject: FileSubject, anomaly: Anomaly) -> str:
        record = anomaly.record or ""
        tensors = subject.tensors_in(record)
        hit = f", which holds {few(tensors)}" if tensors else ""
        if anomaly.code == "crc-missing":
            return f"the checksum of {record}{hit} is zero, unlike those of other records"
        return f"{record}{hit}, is damaged" if hit else f"{record} is damaged"


class ChecksumsOff(ContainerCheck):
    id = "FIL110"
    severity = Severity.WARNING
    codes = ("checksums-off",)
    title = "The file keeps no checksums"
    meaning = "Every checksum in the archive is zero: it was saved with checksums switched off."
    why = "Whether its tensors are what was written cannot be checked."
    mends = "Save with checksums on (`torch.serialization.set_crc32_options(True)`)."
    by_sibling = False

    @classmethod
    def words(cls, subject: FileSubject, anomaly: Anomaly) -> str:
        return "saved with checksums switched off: its tensors cannot be checked"


class StorageMissing(ContainerCheck):
    id = "FIL111"
    codes = ("storage-missing",)
    title = "A storage's record is missing"
    meaning = "The pickle refers to a storage for which the archive has no record."
    why = "Loading fails as soon as its tensors are reached."
    mends = "Resume from another step, or copy the file again."

    @classmethod
    def look(cls, subject: FileSubject) -> Iterator[Finding]:
        lost = list(subject.seen(*cls.codes))
        if len(lost) > 1 and is_cut(subject):
            yield cls._all(subject, lost)
        else:
            yield from super().look(subject)

    @classmethod
    def _all(cls, subject: FileSubject, lost: list[Anomaly]) -> Finding:
        """One finding for all that went with the end of a file."""
        keys = [str(anomaly.facts.get("key", ""))[:40] for anomaly in lost]
        tensors = [name for key in keys for name in tensors_of_storage(subject, key)]
        return cls.went_with_the_end(subject, plural(len(lost), "storage"), tensors, keys=keys)

    @classmethod
    def words(cls, subject: FileSubject, anomaly: Anomaly) -> str:
        return f"the record of storage {str(anomaly.facts.get('key', ''))[:40]} is missing"

    @classmethod
    def judge(cls, subject: FileSubject, anomaly: Anomaly) -> Finding:
        tensors = tensors_of_storage(subject, str(anomaly.facts.get("key", "")))
        place = Place(subject.path, record=anomaly.record, tensors=tensors)
        return cls.finding(place, cls.words(subject, anomaly), **_plain(anomaly))


def is_cut(subject: FileSubject) -> bool:
    """Whether the end of the file is missing, or was never written."""
    return any(subject.seen("zero-tail", *Truncated.codes))


def tensors_of_storage(subject: FileSubject, key: str) -> tuple[str, ...]:
    """Dotted names of the tensors that lie in the storage with this key."""
    container = subject.checkpoint.container
    return () if container is None else subject.tensors_in(container.storage_record(key))


class StorageSizeDiffers(ContainerCheck):
    id = "FIL112"
    codes = ("storage-size", "storage-size-word", "storage-unknown", "tensor-beyond-storage")

    @classmethod
    def look(cls, subject: FileSubject) -> Iterator[Finding]:
        # What cannot be read whole is a finding of its own.
        cut = {anomaly.record for anomaly in subject.seen("record-cut", "record-unreadable")}
        for finding in super().look(subject):
            if finding.place.record is None or finding.place.record not in cut:
                yield finding

    title = "A storage has another size than declared"
    meaning = (
        "The record of a storage has more or fewer bytes than the pickle says, or a tensor reaches"
        " beyond the end of its storage."
    )
    why = "Loading fails, or reads what belongs to another tensor."
    mends = "Resume from another step, or copy the file again."

    @classmethod
    def words(cls, subject: FileSubject, anomaly: Anomaly) -> str:
        facts = anomaly.facts
        declared, actual = facts.get("declared"), facts.get("actual", facts.get("expected"))
        what = anomaly.record or f"storage {str(facts.get('key', ''))[:40]}"
        if anomaly.code == "storage-unknown":
            return f"{what}: nothing says how long it is, so nothing behind it can be found"
        if declared == actual:
            return f"{what} has another size than declared{details(facts)}"
        return f"{what} has {_short(actual)} bytes where the pickle declares {_short(declared)}"


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
            present = f"{_short(facts.get('present', 0))} bytes of it are there"
            return f"{anomaly.record} is cut: {present}; {facts.get('problem', '')}"
        return f"{anomaly.record} lies outside of the file{details(anomaly.facts)}"


class UnreferencedRecords(ContainerCheck):
    id = "FIL119"
    severity = Severity.WARNING
    codes = ("unreferenced-record",)
    title = "Nothing refers to a record"
    meaning = "The archive holds data that the pickle does not refer to."
    why = "It takes space, is never loaded, and should not be there."
    mends = "Nothing has to be done, unless you wonder where it came from."
    by_sibling = False

    @classmethod
    def look(cls, subject: FileSubject) -> Iterator[Finding]:
        names = [str(anomaly.record) for anomaly in subject.seen(*cls.codes)]
        if names:
            words = f"the pickle does not refer to {plural(len(names), 'record')}: {few(names)}"
            remedy = "nothing has to be done"
            yield cls.finding(subject.place(names[0]), words, remedy, records=names[:1000])


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


class CannotDecode(ContainerCheck):
    id = "FIL122"
    codes = ("unsupported-method",)
    title = "A record is compressed in an unknown way"
    meaning = "The archive's directory names a method of compression that torch does not read."
    why = "Its content cannot be checked; a flipped bit in the directory looks the same."
    mends = "Resume from another step."

    @classmethod
    def words(cls, subject: FileSubject, anomaly: Anomaly) -> str:
        method = anomaly.facts.get("method")
        return f"{anomaly.record} is compressed by a method that torch does not know ({method})"


class PickleMalformed(ContainerCheck):
    id = "FIL123"
    codes = ("pickle-malformed", "pickle-missing")
    title = "The pickle cannot be read"
    meaning = "The pickle that describes all tensors is cut short, malformed, or missing."
    why = "Without it nobody knows what the storages are."
    mends = "Resume from another step, or copy the file again."

    @classmethod
    def look(cls, subject: FileSubject) -> Iterator[Finding]:
        said = is_cut(subject) or any(subject.seen("other-kind"))
        for anomaly in subject.seen(*cls.codes):
            if anomaly.code != "pickle-missing" or not said:
                yield cls.judge(subject, anomaly)

    @classmethod
    def words(cls, subject: FileSubject, anomaly: Anomaly) -> str:
        reason = anomaly.facts.get("reason")
        what = anomaly.record or "the pickle"
        if anomaly.code == "pickle-missing":
            return "the archive has no data.pkl: torch.save did not write it"
        return f"{what} cannot be read: {reason}" if reason else f"{what} cannot be read"


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
        return cls.finding(place, words, could_not_check=not bad, **_plain(anomaly))


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


class NoChecksumsInFormat(ContainerCheck):
    id = "FIL126"
    severity = Severity.INFO
    codes = ("no-checksums",)
    title = "The format has no checksums"
    meaning = "Files of torch before 1.6, and legacy saves since, keep none."
    why = "Only sizes can be checked; a flipped bit in a tensor cannot be seen."
    mends = "Nothing has to be done; a new save in the zip format has checksums."
    by_sibling = False

    @classmethod
    def words(cls, subject: FileSubject, anomaly: Anomaly) -> str:
        return "this format keeps no checksums: its tensors cannot be checked"


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


class TensorNotUnderstood(ContainerCheck):
    id = "FIL130"
    codes = ("call-malformed",)
    title = "The description of a tensor makes no sense"
    meaning = "The pickle describes a tensor or a storage in a way that nobody can follow."
    why = "torch refuses it, or makes something else of it than was saved."
    mends = "Resume from another step."
    by_sibling = False

    @classmethod
    def look(cls, subject: FileSubject) -> Iterator[Finding]:
        """Only for what stands for tensors: other calls are shown as they are, and do no harm.

        In a plain pickle storages are objects of their own, which is no fault there.
        """
        if subject.checkpoint.container is None:
            return
        for anomaly in list(subject.seen(*cls.codes))[: cls.most]:
            path = str(anomaly.facts.get("call", ""))
            if path.startswith("torch.") or path == "persistent id":
                words = f"a call of {path[:120]} makes no sense: {anomaly.facts.get('reason')}"
                place = subject.place(anomaly.record)
                yield cls.finding(place, words, cls.mends, **_plain(anomaly))


class OtherAnomaly(FileCheck):
    """Catches the anomalies that no other check names, so that none is lost."""

    id = "FIL199"
    severity = Severity.WARNING
    title = "Something else is odd about the archive"
    meaning = "The reader noticed something that has no finding of its own yet."
    why = "It is not what torch writes."
    mends = "See the finding's facts."

    @classmethod
    def look(cls, subject: FileSubject) -> Iterator[Finding]:
        known = known_codes()
        unknown = [item for item in subject.anomalies if item.code not in known]
        for anomaly in unknown[:MOST_FINDINGS]:
            words = f"{anomaly.code.replace('-', ' ')}{details(anomaly.facts)}"
            yield cls.finding(subject.place(anomaly.record), words, **_plain(anomaly))


FROM_ANOMALIES: tuple[type[ContainerCheck], ...] = (
    Unreadable,
    Empty,
    AllZero,
    ZeroTail,
    Truncated,
    NotACheckpoint,
    TwoArchives,
    StrayBytes,
    ChecksumMismatch,
    ChecksumsOff,
    StorageMissing,
    StorageSizeDiffers,
    HeadersDisagree,
    DirectoryDamaged,
    DuplicateRecords,
    CaseTwins,
    RecordsOverlap,
    RecordOutsideFile,
    UnreferencedRecords,
    Deflated,
    Misaligned,
    CannotDecode,
    PickleMalformed,
    LimitPassed,
    ChangedWhileRead,
    NoChecksumsInFormat,
    SeveralRoots,
    BadRecordName,
    PaddingUsed,
    TensorNotUnderstood,
)
CHECKS: tuple[type[FileCheck], ...] = (*FROM_ANOMALIES, OtherAnomaly)


def known_codes() -> frozenset[str]:
    """Every anomaly code that some check turns into a finding."""
    from ckpttool.checks import schema, trust, values

    return (
        frozenset(code for check in FROM_ANOMALIES for code in check.codes)
        | {check.code for check in schema.FROM_ANOMALIES}
        | {check.code for check in values.CHECKS}
        | trust.CODES
    )
