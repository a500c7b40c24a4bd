"""Every error that the outer loop and its store raise on purpose."""

from __future__ import annotations


class DiLoCoError(RuntimeError):
    """Base of all errors raised on purpose by `trainer_core.diloco`."""


class BadNameError(DiLoCoError, ValueError):
    """A node id or a name on the store that isn't fit to be one; `name` is what was given."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name[:80]!r}: {reason}")
        self.name = name
        self.reason = reason


class StoreError(DiLoCoError):
    """The shared store did not do what was asked. Its words never hold credentials."""


class MissingError(StoreError):
    """There is nothing under this name."""


class PassingError(StoreError):
    """Worth another try later: no answer in time, a broken connection, a busy or full server.

    Raised when the store's own tries are used up. What was asked may have been done all the same.
    """


class PermanentError(StoreError):
    """No number of tries mends it: credentials, permission, no such bucket, an unknown host key."""
