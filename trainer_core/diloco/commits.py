"""The commit log: what the global model is, and which deltas made it, in one file for each step.

`global/commits/<12 digits>.json` is made by an exclusive create: of two masters exactly one commits
an outer step (what is in it: `trainer_core.diloco.commit`). So the log is the truth;
`global/step_count.json` only points at its newest entry, for readers to poll with one request.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import re
import time

from trainer_core.diloco.commit import (
    FOLDER,
    TENSORS,
    Commit,
    HalfWrittenError,
    LogError,
    Pointer,
    check_tensor_name,
    commit_name,
    commit_of,
    document_of,
)
from trainer_core.diloco.deltas import delta_name
from trainer_core.diloco.errors import MissingError, PassingError, PermanentError
from trainer_core.diloco.repeating import Rarely
from trainer_core.diloco.store import Store

logger = logging.getLogger(__name__)

POINTER = "global/step_count.json"
_MOST_POINTER = 64 << 10
_MOST_COMMIT = 256 << 20
COMMIT = re.compile(r"(\d{12})\.json")
"""The name of a commit within its folder."""


class Presence:
    """Whether this process has ever seen a commit on its store: `is_known`.

    Where there is none any more, it is not that Hub: a directory that was moved away, or a file
    system that is not mounted. Nothing may be written there.
    """

    is_known = False


class CommitLog:
    """The log on one store. `fence` is the highest fencing number that was seen in it.

    `patience`: seconds after which half of a commit, unchanged meanwhile, is of a writer that died.
    `presence`: shared by all logs of one node.
    """

    def __init__(
        self, store: Store, patience: float = 30.0, presence: Presence | None = None
    ) -> None:
        self._presence = Presence() if presence is None else presence
        self.fence = 0
        self._store = store
        self._patience = patience
        self._half: tuple[str, bytes, float] | None = None
        self._rarely = Rarely(logger)

    def pointer(self) -> Pointer | None:
        """What readers poll; None if nothing was ever committed, or it is damaged: the commits
        themselves say it all. Raises LogError where it is another program's.
        """
        try:
            document = document_of(self._store.read(POINTER, 0, _MOST_POINTER), POINTER)
        except MissingError:
            return None
        except HalfWrittenError as error:
            self._rarely.warning("%s; a master that runs writes it anew", error)
            return None
        step, name = document.get("outer_step"), document.get("model_file")
        if type(step) is not int or step < 0 or not isinstance(name, str):
            raise LogError(f"{POINTER} has no outer step and model file")
        if document.get("commit") != commit_name(step):
            words = f"{POINTER} names no commit: it is of another program or an older one"
            raise LogError(f"{words}. Use an empty folder for this run")
        check_tensor_name(name, "model", step)
        self._presence.is_known = True
        return Pointer(step, name)

    def read(self, outer_step: int) -> Commit:
        """One commit. Raises MissingError, LogError, StoreError."""
        name = commit_name(outer_step)
        commit = commit_of(document_of(self._store.read(name, 0, _MOST_COMMIT), name), name)
        if commit.outer_step != outer_step:
            raise LogError(f"{name} is of outer step {commit.outer_step}")
        return commit

    def accepted(self, outer_step: int) -> Commit:
        """The same; also raises LogError where its fencing number is lower than one before."""
        commit = self.read(outer_step)
        if commit.fence < self.fence:
            words = f"{commit_name(outer_step)} by {commit.master} has the fencing number"
            raise LogError(f"{words} {commit.fence}, after {self.fence}: it is refused")
        self.fence = commit.fence
        return commit

    def steps(self) -> list[int]:
        """Every outer step in the listing, in order."""
        names = [COMMIT.fullmatch(entry.name) for entry in self._store.entries(FOLDER)]
        return sorted(int(match[1]) for match in names if match)

    def latest(self) -> Commit | None:
        """The newest commit that stands, whatever pointer and listing say; None if there is none.

        A commit with a lower fencing number than the one before it doesn't stand.
        """
        pointer, steps = self.pointer(), self.steps()
        known = [*steps, *([] if pointer is None else [pointer.outer_step])]
        if not known:
            return None
        newest = max(known)
        # Neither may be the newest: the pointer moves last, and a listing may be an old one.
        while self._store.size(commit_name(newest + 1)) is not None:
            newest += 1
        try:
            return self._standing(newest)
        except HalfWrittenError:
            # Nobody has read it, so it was not committed yet.
            return self._standing(newest - 1) if newest else None

    def _standing(self, newest: int) -> Commit:
        commit, before = self.read(newest), self._known(newest - 1)
        if before is not None and commit.fence < before.fence:
            words = "outer step %d by %s is refused: its fencing number %d is lower than %d"
            self._rarely.warning(words, newest, commit.master, commit.fence, before.fence)
            return self._standing(newest - 1)
        if before is not None and commit.previous != before.sha256:
            raise LogError(f"{commit_name(newest)} does not follow from the commit before it")
        self.fence = max(self.fence, commit.fence)
        self._presence.is_known = True
        return commit

    def require(self) -> None:
        """Raises PassingError where commits were there, and none is any more."""
        if self._presence.is_known and self._store.size(POINTER) is None and not self.steps():
            words = "the Hub is gone: no commit is left of those that were there. Was it moved away"
            words += (
                ", or is a file system not mounted? If it is lost, a master that is resumed with"
            )
            raise PassingError(f"{words} accept_other={{'hub'}} begins it anew")

    def _known(self, outer_step: int) -> Commit | None:
        """A commit before the newest one, where it can be read.

        It may be cleaned away, or damaged since: whoever made the next one has read it.
        """
        if outer_step < 0:
            return None
        try:
            return self.read(outer_step)
        except (MissingError, HalfWrittenError, LogError, PermanentError):
            return None

    def append(self, commit: Commit) -> bool:
        """Commits; False if another one has this outer step. One that doesn't stand gives way."""
        name, content = commit_name(commit.outer_step), commit.as_bytes()
        if self._store.create(name, content):
            self.fence = max(self.fence, commit.fence)
            return True
        try:
            there = self.read(commit.outer_step)
        except HalfWrittenError:
            if not self._is_left(name):
                raise
            logger.warning("half of %s was left by a master that died: it gives way", name)
            self._store.remove(name)
            return self._store.create(name, content)
        if there.fence >= self.fence or commit.fence < self.fence:
            return there == commit
        logger.warning(
            "%s with the fencing number %d gives way to %d", name, there.fence, commit.fence
        )
        self._store.remove(name)
        return self._store.create(name, content)

    def _is_left(self, name: str) -> bool:
        """Whether half a file has stayed as it is for longer than any writer needs."""
        content, now = self._store.read(name, 0, _MOST_COMMIT), time.monotonic()
        if self._half is None or self._half[:2] != (name, content):
            self._half = name, content, now
        return now - self._half[2] >= self._patience

    def point_to(self, commit: Commit) -> None:
        """Moves the pointer. Its time is for people only; nothing is decided by it."""
        now = datetime.datetime.now(datetime.timezone.utc)
        document = {
            "outer_step": commit.outer_step,
            "model_file": commit.model.name,
            "updated_at": now.isoformat(timespec="seconds"),
            "commit": commit_name(commit.outer_step),
            "fence": commit.fence,
        }
        self._store.write(POINTER, json.dumps(document, indent=1).encode())

    def named(self, newest: Commit, keep: int) -> set[str]:
        """Every file that the `keep` newest commits name."""
        named: set[str] = set()
        for step in range(max(0, newest.outer_step - keep + 1), newest.outer_step + 1):
            # One that is damaged is only history: what it named goes with it.
            if (commit := self._known(step)) is not None:
                named |= self._files(commit)
        return named

    def clean(self, newest: Commit, keep: int) -> None:
        """Removes what only older commits than the `keep` newest need, and what nobody ever named.

        Of a commit its files go first and the commit last, so that nothing is forgotten halfway.
        """
        kept_from = newest.outer_step - keep + 1
        old = [step for step in self.steps() if step < kept_from]
        named = self.named(newest, keep)
        for step in old:
            commit = self._known(step)
            for name in set() if commit is None else self._files(commit) - named:
                with contextlib.suppress(PermanentError):  # no file: that must not keep all others
                    self._store.remove(name)
            self._store.remove(commit_name(step))
        self._remove_orphans(newest.outer_step, named)

    @staticmethod
    def _files(commit: Commit) -> set[str]:
        tensors = {file.name for file in (commit.model, commit.momentum) if file is not None}
        deltas = {delta_name(one.node_id, one.local_step) for one in commit.applied}
        refused = {delta_name(one.node_id, one.local_step) for one in commit.refused}
        return tensors | deltas | refused

    def _remove_orphans(self, newest: int, named: set[str]) -> None:
        """Weights that were written, but whose commit another master or a crash forestalled."""
        for entry in self._store.entries("global"):
            name = f"global/{entry.name}"
            match = TENSORS.fullmatch(name)
            if match and int(match[2]) <= newest and name not in named:
                self._store.remove(name)
