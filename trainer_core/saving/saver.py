"""How a step gets into a directory: claimed, written, pointed to, and only then tidied up after.

The order survives a crash at any moment. What the pointer and the manifest say of a file that is
about to be replaced goes first; then the file (see `publish`), its line in the manifest, the
pointer; last of all what is old is deleted.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ckpttool.errors import RefusedError, WriteError
from ckpttool.model.directory import scan
from ckpttool.model.names import POINTER_NAME
from ckpttool.model.pointer import Pointer, read_pointer
from trainer_core.atomic import json_bytes
from trainer_core.given import at_least, positive
from trainer_core.saving.async_lane import Lane
from trainer_core.saving.container import Container, content_of
from trainer_core.saving.directory_lock import Hold
from trainer_core.saving.kept_steps import KeptSteps
from trainer_core.saving.publishing import Content, Written, publish
from trainer_core.saving.run_identity import RunIdentity, owner_by_pointer, owner_of
from trainer_core.saving.staging import Staging
from trainer_core.state import CheckpointError

logger = logging.getLogger(__name__)

_MOST_FINISHED = 1000


class SaveWarning(UserWarning):
    """A checkpoint could not be saved, and training goes on without it (`on_error="warn"`)."""


class Policy(NamedTuple):
    """How one manager saves; see CheckpointManager."""

    durable: bool = True
    async_save: bool = False
    when_busy: str = "wait"
    on_error: str = "raise"
    min_free: int = 0
    lock_patience: float = 0.0

    def check(self) -> None:
        """Raises ValueError for what cannot be meant, TypeError for what is no number."""
        at_least(0, "min_free", self.min_free)
        _one_of("when_busy", self.when_busy, "wait", "skip")
        _one_of("on_error", self.on_error, "raise", "warn")
        positive("lock_patience", self.lock_patience, or_zero=True, finite=False)


def _one_of(name: str, value: str, *allowed: str) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be {' or '.join(map(repr, allowed))}, not {value!r}")


def _refuse_directory(pointer: str | os.PathLike[str]) -> None:
    """What the first save would fail at, when its file is written, is better known before it.

    Whatever else stands in the pointer's place (a link, a pipe) is replaced by it.
    """
    if os.path.isdir(pointer) and not os.path.islink(pointer):
        words = "cannot write: is a directory, which the pointer cannot replace: move it away"
        raise WriteError(pointer, words)


def _alike(one: Pointer, other: Pointer) -> bool:
    """Whether two pointers name the same file, as far as they say what is in it."""
    hashes = {pointer.extra.get("sha256") for pointer in (one, other)} - {None}
    return (one.step, one.file) == (other.step, other.file) and len(hashes) < 2


class Saver:
    """Saves the steps of one run into one directory.

    `finished` collects (step, path) of each save that is safe on disk, for whoever asks.
    """

    def __init__(self, directory: Path, policy: Policy, run_id: str | None) -> None:
        self.directory = directory
        self.policy = policy
        self.identity = RunIdentity(run_id)
        self.kept = KeptSteps(directory, sync=policy.durable)
        self.finished: deque[tuple[int, Path]] = deque(maxlen=_MOST_FINISHED)
        self.working = threading.RLock()
        self._lane = Lane()
        self._staging = Staging()
        self._hold: Hold | None = None
        self._let_go: Callable[[], object] | None = None
        self._last: tuple[str, Written] | None = None
        self._seen: Pointer | None = None

    def claim(self) -> None:
        """Takes the directory's lock and looks whose checkpoints are there.

        Once this is done, only the pointer is looked at. Raises CheckpointError where another
        process writes there, or where another run's checkpoints are.
        """
        where = os.fspath(self.directory)
        if self._hold is not None:
            self._hold.check()
            self.identity.settle(where, owner_by_pointer(where))
            return
        hold = Hold(where, self.identity.run_id, self.policy.lock_patience)
        try:
            found = scan(where)
            self.identity.settle(where, owner_of(found))
            self._refuse_if_overtaken(found.pointer)
            _refuse_directory(found.pointer.path)
        except BaseException:
            hold.release()
            raise
        self._hold = hold
        self._let_go = weakref.finalize(self, hold.release)

    def resumed_from(self, state: Mapping[str, Any], *, is_newest: bool = False) -> None:
        """Takes note of what the run goes on from, and of where the directory stands meanwhile.

        `is_newest`: it was just loaded by the pointer.
        """
        self.identity.resumed_from(state)
        if is_newest or self._seen is None:
            self._seen = read_pointer(self.directory)

    def _refuse_if_overtaken(self, now: Pointer) -> None:
        """Between two claims others of the same run may have saved steps that nobody here knows."""
        seen, own = self._seen, self.identity.parent_step
        if seen is None or own is None or now.step is None or now.step < own or _alike(seen, now):
            return
        raise CheckpointError(
            f"{self.directory}: step {now.step} was saved there since by another trainer of this "
            f"run, while this one stands at step {own}: it would write over what that one has "
            "done. Resume from it (load_latest), or use another directory."
        )

    def begin(self) -> None:
        """`claim`, with what the system refuses handled as that of a save."""
        try:
            self.claim()
        except OSError as error:
            self.raise_or_warn(error)

    def save(
        self, step: int, path: Path, state: Any, then: Callable[[int, Path], None]
    ) -> Path | None:
        """Saves `state` at `path`, and calls `then` when the file is safe.

        None where nothing is saved: skipped, or failed and only warned of.
        """
        self.surface()
        try:
            self.claim()
            if self._lane.is_busy and self.policy.when_busy == "skip":
                logger.info("step %d is not saved: the save before is still being written", step)
                return None
            self._lane.wait()
            self.surface()
            self._begin(step, path, state, then)
        except OSError as error:
            self.raise_or_warn(error)
            return None
        return path

    def wait(self) -> None:
        """Returns when the last save is safe on disk. Raises what went wrong with it."""
        self._lane.wait()
        self.surface()

    def settle(self) -> None:
        """Returns when nothing is being written; says nothing of how it went."""
        self._lane.wait()

    def surface(self) -> None:
        """Raises, or warns of, what went wrong on the lane since the last time."""
        error = self._lane.failure()
        if isinstance(error, OSError):
            self.raise_or_warn(error, stacklevel=5)
        elif error is not None:
            raise error

    def close(self) -> None:
        """Waits for the last save, and gives the lock back even where that failed."""
        try:
            self.wait()
        except Exception:
            self._release()
            raise
        except BaseException:  # an interrupt: something may still be written
            self.abandon()
            raise
        self._release()

    def abandon(self) -> None:
        """Gives up what is being written, without waiting; the lock goes back when it has ended."""
        self._lane.abandon()
        self._lane.afterwards(self._taken_off())

    def _release(self) -> None:
        self._taken_off()()

    def _taken_off(self) -> Callable[[], object]:
        """What gives the lock back, once; this saver has it no more."""
        let_go, self._hold, self._let_go = self._let_go, None, None
        return let_go if let_go is not None else lambda: None

    def owns(self) -> Callable[[str], bool]:
        """Tells of a file's name whether it may be this run's.

        Whoever has not claimed the directory is no run, but somebody tidying up: all is theirs.
        """
        if self._hold is None:
            return lambda file: True
        entries = self.kept.entries()
        return lambda file: self.identity.owns(entries.get(file, {}).get("run_id"))

    @property
    def is_busy(self) -> bool:
        """Whether a save is being written beside training."""
        return self._lane.is_busy

    def beside(self, work: Callable[[], object]) -> None:
        """Does this beside training, as the one save that is in flight."""
        self._lane.start(work)

    def point_to(self, step: int, file: str) -> None:
        """Writes the pointer, with all that is known of the file."""
        target: dict[str, Any] = {"step": step, "file": file} | self._facts_of(file)
        publish(json_bytes(target), self.directory / POINTER_NAME, sync=self.policy.durable)
        self._seen = read_pointer(self.directory)

    def _begin(self, step: int, path: Path, state: Any, then: Callable[[int, Path], None]) -> None:
        content = content_of(self.identity.marked(state))
        beside = self.policy.async_save
        if beside and isinstance(content, Container):
            content = Container(self._staging.copy(content.state))
        elif beside:
            logger.info("step %d is saved at once: only torch.save can write what it holds", step)
            beside = False

        def work() -> None:
            with self.working:
                self._carry_out(step, path, content, then)

        if beside:
            self._lane.start(work)
        else:
            work()

    def _carry_out(
        self, step: int, path: Path, content: Content, then: Callable[[int, Path], None]
    ) -> None:
        if os.path.lexists(path):
            self.forget(path.name)
        written = publish(
            content,
            path,
            sync=self.policy.durable,
            digest=True,
            min_free=self.policy.min_free,
            watch=self._lane.watch,
        )
        self.record(step, path, written)
        then(step, path)
        self.finished.append((step, path))

    def record(self, step: int, path: Path, written: Written) -> None:
        """Adds the line of a step that is safe on disk to the manifest."""
        self._last = path.name, written
        run_id, parent = self.identity.run_id, self.identity.parent_step
        self.identity.parent_step = step
        try:
            self.kept.add(step, path.name, written, run_id, parent)
        except OSError as error:
            logger.warning("%s: step %d has no line in it: %s", self.kept.path, step, error)

    def forget(self, file: str) -> None:
        """Before a file is replaced: nothing may go on saying what it was."""
        self._last = None
        self.kept.forget(file)
        pointer = read_pointer(self.directory)
        if pointer.file == file and pointer.step is not None and "sha256" in pointer.extra:
            kept = {key: pointer.extra[key] for key in ("run_id",) if key in pointer.extra}
            target = {"step": pointer.step, "file": file, **kept}
            publish(json_bytes(target), pointer.path, sync=self.policy.durable)

    def _facts_of(self, file: str) -> dict[str, Any]:
        if self._last is not None and self._last[0] == file:
            size, sha256 = self._last[1]
            return {"size": size, "sha256": sha256, "run_id": self.identity.run_id}
        entry = self.kept.find(file) or {}
        return {key: entry[key] for key in ("size", "sha256", "run_id") if key in entry}

    def raise_or_warn(self, error: OSError, stacklevel: int = 4) -> None:
        """Raises what the system refused, or with `on_error="warn"` warns of it."""
        if self.policy.on_error != "warn" or isinstance(error, RefusedError):
            raise error
        words = f"no checkpoint was saved, training goes on without it: {error}"
        logger.error(words)
        warnings.warn(words, SaveWarning, stacklevel=stacklevel)
