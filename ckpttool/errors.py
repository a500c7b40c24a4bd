"""Every error that `ckpttool` raises on purpose.

One hierarchy under `CkptToolError`. Each class also subclasses the built-in that fits, so that a
caller who knows nothing of this package can still catch it, and carries its facts as attributes.
What is wrong *inside* a checkpoint is never an exception: it is an `Anomaly` or a `Finding`.
"""

from __future__ import annotations

import os


class CkptToolError(Exception):
    """Base of all errors raised on purpose by `ckpttool`."""


class UnreadableError(CkptToolError, OSError):
    """A path could not be opened or read: missing, no permission, not a regular file, I/O error."""

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        super().__init__(f"{os.fspath(path)}: {reason}")
        self.path = os.fspath(path)
        self.reason = reason


class WriteError(CkptToolError, OSError):
    """Something could not be written: full disk, no permission, read-only file system."""

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        super().__init__(f"{os.fspath(path)}: {reason}")
        self.path = os.fspath(path)
        self.reason = reason


class FormatError(CkptToolError, ValueError):
    """The bytes of a file are not what its format says. `record` names the member, if any."""

    def __init__(self, message: str, *, record: str | None = None) -> None:
        super().__init__(message)
        self.record = record


class PickleError(FormatError):
    """A pickle stream that cannot be read: malformed, cut short, or of an unknown protocol.

    `position` is the byte offset in the stream at which reading stopped.
    """

    def __init__(self, message: str, *, position: int, record: str | None = None) -> None:
        super().__init__(message, record=record)
        self.position = position


class LimitError(FormatError):
    """Reading stopped because a bound was passed.

    `limit` names the field of `ReaderLimits`; or `memory` (there is not enough), `copies` (the
    content copies more than it holds) or `keys` (they were chosen to be costly).
    """

    def __init__(self, message: str, *, limit: str, record: str | None = None) -> None:
        super().__init__(message, record=record)
        self.limit = limit


class UnwritableError(CkptToolError, ValueError):
    """Content that has no form in the file that is to be written.

    `path` is its dotted place in the content, empty for the whole; `reason` says why.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.path = path
        self.reason = reason


class RefusedError(CkptToolError, PermissionError):
    """The action would lose data or run untrusted code, and was not confirmed."""
