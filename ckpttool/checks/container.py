"""FIL: the file's bytes, its container, and whether every record is what it was when written.

Most checks turn what the formats noticed (anomalies, by their codes) into findings; what needs
measuring (checksums, changes while reading) is measured by `verify` and noted in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckpttool.checks import archive, contents, whole_file
from ckpttool.checks.base import FileCheck, FileSubject
from ckpttool.checks.container_check import MOST_FINDINGS, ContainerCheck, details, plain_facts
from ckpttool.findings import Finding, Severity


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
            yield cls.finding(subject.place(anomaly.record), words, **plain_facts(anomaly))


FROM_ANOMALIES: tuple[type[ContainerCheck], ...] = (
    whole_file.Unreadable,
    whole_file.Empty,
    whole_file.AllZero,
    whole_file.ZeroTail,
    whole_file.Truncated,
    whole_file.NotACheckpoint,
    whole_file.TwoArchives,
    whole_file.StrayBytes,
    contents.ChecksumMismatch,
    contents.ChecksumsOff,
    contents.StorageMissing,
    contents.StorageSizeDiffers,
    archive.HeadersDisagree,
    archive.DirectoryDamaged,
    archive.DuplicateRecords,
    archive.CaseTwins,
    archive.RecordsOverlap,
    archive.RecordOutsideFile,
    contents.UnreferencedRecords,
    archive.Deflated,
    archive.Misaligned,
    contents.CannotDecode,
    contents.PickleMalformed,
    whole_file.LimitPassed,
    whole_file.ChangedWhileRead,
    contents.NoChecksumsInFormat,
    archive.SeveralRoots,
    archive.BadRecordName,
    archive.PaddingUsed,
    contents.TensorNotUnderstood,
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
