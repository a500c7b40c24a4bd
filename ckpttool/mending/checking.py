"""Verifies what was written, and works out its SHA-256 at the same time."""

from __future__ import annotations

from ckpttool.findings import Severity

# What a whole file of another kind is found to be.
_OTHER_KIND = "FIL106"
_FAMILIES = ("FIL", "TRU")


def problems(path: str) -> list[str]:
    """Every error in the file itself that `verify` finds, in words."""
    from ckpttool.checks.verify import verify

    report = verify(path)
    return [
        f"{finding.id}: {finding.words}"
        for finding in report.findings
        if finding.severity is Severity.ERROR
        and finding.id.startswith(_FAMILIES)
        and finding.id != _OTHER_KIND
    ]


class Digest:
    """The SHA-256 of a file, worked out by a thread while something else reads it, too."""

    def __init__(self, path: str) -> None:
        from threading import Thread

        self.path = path
        self.digest = ""
        self.error: Exception | None = None
        self.thread = Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        from ckpttool.io.checksum import sha256_of
        from ckpttool.io.reading import FileReader

        try:
            with FileReader(self.path) as reader:
                self.digest = sha256_of(reader)
        except Exception as error:  # raised again where the result is asked for
            self.error = error

    def result(self) -> str:
        """64 hexadecimal digits. Raises what went wrong."""
        self.thread.join()
        if self.error is not None:
            raise self.error
        return self.digest
