"""FIL: what is wrong with the contents of records: checksums, storages, the pickle."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttool.checks.base import FileSubject, few, plural
from ckpttool.checks.container_check import (
    ContainerCheck,
    details,
    is_cut,
    plain_facts,
    short,
    tensors_of_storage,
)
from ckpttool.findings import Finding, Place, Severity
from ckpttool.formats.anomaly import Anomaly


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
        return cls.finding(place, cls.words(subject, anomaly), **plain_facts(anomaly))


class StorageSizeDiffers(ContainerCheck):
    id = "FIL112"
    codes = ("storage-size", "storage-size-word", "storage-unknown", "tensor-beyond-storage")

    title = "A storage has another size than declared"
    meaning = (
        "The record of a storage has more or fewer bytes than the pickle says, or a tensor reaches"
        " beyond the end of its storage."
    )
    why = "Loading fails, or reads what belongs to another tensor."
    mends = "Resume from another step, or copy the file again."

    @classmethod
    def look(cls, subject: FileSubject) -> Iterator[Finding]:
        # What cannot be read whole is a finding of its own.
        cut = {anomaly.record for anomaly in subject.seen("record-cut", "record-unreadable")}
        for finding in super().look(subject):
            if finding.place.record is None or finding.place.record not in cut:
                yield finding

    @classmethod
    def words(cls, subject: FileSubject, anomaly: Anomaly) -> str:
        facts = anomaly.facts
        declared, actual = facts.get("declared"), facts.get("actual", facts.get("expected"))
        what = anomaly.record or f"storage {str(facts.get('key', ''))[:40]}"
        if anomaly.code == "storage-unknown":
            return f"{what}: nothing says how long it is, so nothing behind it can be found"
        if declared == actual:
            return f"{what} has another size than declared{details(facts)}"
        return f"{what} has {short(actual)} bytes where the pickle declares {short(declared)}"


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
                yield cls.finding(place, words, cls.mends, **plain_facts(anomaly))
