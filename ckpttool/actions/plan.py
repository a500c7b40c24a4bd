"""A plan: the small actions that a verb is about to take, which can be shown first."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from ckpttool.io.durable import write_error

if TYPE_CHECKING:
    from ckpttool.io.durable import Progress


class Action(ABC):
    """One small change on disk. `path` is what it changes, `kind` says how in one word."""

    __slots__ = ("path",)
    kind = ""

    def __init__(self, path: str) -> None:
        self.path = path

    @abstractmethod
    def describe(self) -> str:
        """The change in words that begin with a verb."""

    @abstractmethod
    def apply(self, progress: Progress | None = None) -> None:
        """Makes the change, durably. Raises OSError when the system refuses."""

    def facts(self) -> dict[str, Any]:
        """What `as_dict` says beyond kind and path."""
        return {}

    def as_dict(self) -> dict[str, Any]:
        """The action as plain data."""
        return {"action": self.kind, "path": self.path, **self.facts()}


class Plan:
    """Actions in the order in which they are to be taken: payload first, pointer last."""

    __slots__ = ("actions",)

    def __init__(self, actions: list[Action] | None = None) -> None:
        self.actions = actions or []

    def apply(self, progress: Progress | None = None) -> None:
        """Takes every action; the first that fails ends it with a `WriteError`, in plain words."""
        for action in self.actions:
            try:
                action.apply(progress)
            except OSError as error:
                raise _in_words(action, error) from error

    def as_list(self) -> list[dict[str, Any]]:
        """The actions as plain data."""
        return [action.as_dict() for action in self.actions]


def _in_words(action: Action, error: OSError) -> OSError:
    # Errors of this package's own say already what could not be read or written.
    from ckpttool.errors import CkptToolError

    return error if isinstance(error, CkptToolError) else write_error(action.path, error)


class MakeDirectory(Action):
    """Creates a directory, and makes its entry in the parent durable."""

    __slots__ = ()
    kind = "make-directory"

    def describe(self) -> str:
        """`create the directory …`."""
        return f"create the directory {self.path}"

    def apply(self, progress: Progress | None = None) -> None:
        """Creates it; one that is there meanwhile is as good."""
        from ckpttool.io.durable import make_directories

        make_directories(os.path.abspath(self.path))
