"""A directory of checkpoints: writing them so that no crash costs one, and choosing what to load.

    <directory>/
    ├── .writer.lock               who writes here, while somebody does
    ├── latest.json                {"step": 4, "file": "step_000000000004.pt", "size": …, …}
    ├── manifest.jsonl             a line like that for each step that is kept
    ├── step_000000000002.pt
    ├── step_000000000004.pt
    └── step_000000000006/         a sharded step: see trainer_core.site.sharded

A save writes the step file (temporary, fsync, check, rename, fsync of the directory) and then the
pointer in the same way, so that the pointer never names a file that is not safe on disk. A crash
between the two leaves the pointer behind: `ckpttool fix-pointer` mends that, and so does a run that
`Trainer.fit(resume="auto")` goes on with.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from ckpttool.model.names import step_directory_name, step_file_name
from trainer_core.atomic import atomic_json_dump, atomic_torch_save
from trainer_core.given import at_least, positive
from trainer_core.resuming.loading import RefusedFileError, TrustWarning
from trainer_core.resuming.stored_steps import CheckpointWarning, StoredSteps
from trainer_core.saving.copying import copy_step
from trainer_core.saving.saver import Policy, Saver, SaveWarning
from trainer_core.saving.tidying import Tidying
from trainer_core.state import CheckpointError

if TYPE_CHECKING:
    from trainer_core.site.ranks import Site

T = TypeVar("T")

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "CheckpointWarning",
    "RefusedFileError",
    "SaveWarning",
    "TrustWarning",
    "atomic_json_dump",
    "atomic_torch_save",
]

logger = logging.getLogger(__name__)


class CheckpointManager:
    """Saves, finds, loads and prunes the step files of one directory, for one run.

    `every_steps`: the interval at which `should_save` says so; with `save_every_seconds` it also
    does when that long has passed since the last save. `keep_last`: how many step files `prune`
    leaves, None for all. `enabled=False` makes `should_save` say no; everything else works.

    `durable=False` leaves out every fsync. `async_save`: `save` copies the state and returns, and
    the file is written beside the training; a save that finds the one before unfinished waits for
    it, or is left out (`when_busy="skip"`). `on_error="warn"`: what the system refuses (a full
    disk) becomes a SaveWarning and a line in the log instead of an error. `min_free`: bytes that a
    save must leave free. `run_id`: see `claim`; a new one by default.

    `lock_patience`: seconds. A container that is started again finds the lock of the one before, of
    which nobody here can say whether it lives. That lock is watched: after one sign of life the
    directory is refused at once; after 90 s without any (300 s where the other is no trainer) it is
    taken over. Both are said in the log. With 0 there is no wait, but a refusal.

    Under torchrun every rank has a manager of the same directory, and `Trainer` makes them one.
    Then all ranks call its methods together, except `finished`, `close` and `abandon`: rank 0 alone
    locks, looks, decides, writes the pointer and prunes, and all get the same result or raise the
    same error. A model in DistributedDataParallel is saved as a step file, by rank 0, with the
    random numbers and the place in the data of every rank in it (`ranks`). One that `fully_shard`
    has sharded is saved by all ranks, as the directory `step_000000000004/`, which gets its name
    when it is whole; it counts for `keep_last` like a file. Other ranks need no sight of the
    directory for a step file, and for a sharded step they need one file system.

    Raises ValueError unless `every_steps` is positive (even if disabled), `keep_last` is at least
    1, and the others are what is said here, TypeError for what is no number. The
    directory is made by the first save.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_steps: int = 500,
        keep_last: int | None = 3,
        enabled: bool = True,
        save_every_seconds: float | None = None,
        durable: bool = True,
        async_save: bool = False,
        when_busy: str = "wait",
        on_error: str = "raise",
        min_free: int = 0,
        run_id: str | None = None,
        lock_patience: float = 330.0,
    ) -> None:
        self.directory = Path(directory)
        self.every_steps = at_least(1, "every_steps", every_steps)
        self.keep_last = None if keep_last is None else at_least(1, "keep_last", keep_last)
        self.save_every_seconds = save_every_seconds
        if save_every_seconds is not None:
            self.save_every_seconds = positive(
                "save_every_seconds", save_every_seconds, finite=False
            )
        self.enabled = enabled
        policy = Policy(durable, async_save, when_busy, on_error, min_free, lock_patience)
        policy.check()
        self._saver = Saver(self.directory, policy, run_id)
        self._tidying = Tidying(self._saver)
        self._steps = StoredSteps(self.directory, self._tidying.retention.remember_good)
        self._saved_at = time.monotonic()
        self._site: Site | None = None

    def join(self, site: Site) -> None:
        """Makes this manager one of those that all ranks of a site have for the same directory.

        `Trainer` does this. From then on all ranks call the methods together; see the class.
        """
        self._site = site

    def led(self, work: Callable[[], T]) -> T:
        """What `work` gives (small and plain), done by rank 0 alone where there are several."""
        return work() if self._site is None else self._site.first(work)

    @property
    def run_id(self) -> str:
        """The run that is written for: its own, or that of the checkpoint that was gone on from."""
        return self._saver.identity.run_id

    def claim(self) -> None:
        """Makes this process the only writer of the directory, until `close`; `save` does it too.

        The directory is made if it is missing. Raises CheckpointError where another process writes
        there, naming it; where the checkpoints there are those of another run; and where another
        trainer of this run has saved since. `load_latest` and `resumed_from` make their run this
        one; a `run_id` that is theirs does, too.
        """
        identity = self._saver.identity
        identity.run_id = self.led(self._claim)
        self._saved_at = time.monotonic()

    def _claim(self) -> str:
        self._saver.begin()
        return self._saver.identity.run_id

    def resumed_from(self, state: Mapping[str, Any]) -> None:
        """Takes note that the run goes on from this checkpoint, wherever it was loaded from."""
        self._saver.resumed_from(state)

    def should_save(self, step: int) -> bool:
        """Whether a checkpoint is due after `step`: enabled, positive, and on an interval.

        Seconds are those of a clock that never goes backwards.
        """
        if not self.enabled or step <= 0:
            return False
        seconds = self.save_every_seconds
        if step % self.every_steps == 0:
            return True
        return seconds is not None and self.led(lambda: self._seconds_since_save() >= seconds)

    def _seconds_since_save(self) -> float:
        return time.monotonic() - self._saved_at

    def path_for(self, step: int) -> Path:
        """The step file's path: `step_000000000004.pt` for 4. Raises ValueError below 0."""
        return self.directory / step_file_name(_whole(step))

    def save(self, step: int, state: Any) -> Path | None:
        """Writes the checkpoint, moves the pointer to it, and prunes; gives the file's path.

        Whether a save is due is for the caller to ask. When this returns, file and pointer are safe
        on disk; with `async_save`, the state is copied, and `wait` returns when they are. A
        training checkpoint also gets the keys `run_id` and `parent_step`. Leftovers of writers that
        have died are removed. What goes wrong after that, in tidying up, is logged, never raised.
        None where nothing is saved because of `when_busy` or `on_error`.

        Raises CheckpointError, and writes nothing, when `state` has a `step` that is not the
        integer it is saved as; see `claim` and `atomic_torch_save` for the rest. What went wrong
        with an asynchronous save is raised by the next one, by `wait` and by `close`.
        """
        path = self.path_for(step)
        if isinstance(state, Mapping) and "step" in state:
            inside = state["step"]
            if type(inside) is not int or inside != step:
                words = f"the state holds step {inside!r}, but is to be saved as {step}"
                raise CheckpointError(words)
        try:
            if self._site is None:
                return self._saver.save(step, path, state, self._after_file)
            from trainer_core.site.saving import save_together

            return save_together(self._site, self._saver, step, path, state, self._after_file)
        finally:
            self._saved_at = time.monotonic()

    def wait(self) -> None:
        """Returns when the last save is safe on disk. Raises what went wrong with it."""
        if self._site is None:
            self._saver.wait()
        else:
            self._site.every(self._saver.wait)

    @property
    def is_busy(self) -> bool:
        """Whether a save is being written beside training."""
        return self._saver.is_busy

    def finished(self) -> list[tuple[int, Path]]:
        """(step, path) of each save that has become safe on disk since the last time."""
        done = self._saver.finished
        return [done.popleft() for _ in range(len(done))]

    def close(self) -> None:
        """Waits for the last save and gives the directory free. Raises what went wrong with it.

        The manager may be used again: the next save claims the directory anew.
        """
        self._saver.close()

    def abandon(self) -> None:
        """For an end at once: gives up the save that is being written, and then the directory.

        Nothing is damaged by it.
        """
        self._saver.abandon()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        elif not isinstance(error, Exception):
            self.abandon()  # an interrupt or an exit wants the end at once
        else:
            try:
                self.close()
            except Exception as second:  # the first error is what ended the block
                logger.error("%s: the last save failed as well: %s", self.directory, second)

    def point_to(self, step: int) -> None:
        """Makes `latest.json` name the file of `step`, durably: the last act of a save.

        Where there is none, but a sharded step, that one.
        """
        self.led(lambda: self._point_to(step, self._name_that_is_there(_whole(step))))

    def _name_that_is_there(self, step: int) -> str:
        file, sharded = step_file_name(step), step_directory_name(step)
        is_file = os.path.lexists(self.directory / file)
        return sharded if not is_file and (self.directory / sharded).is_dir() else file

    def _point_to(self, step: int, name: str) -> None:
        with self._saver.working:
            self._saver.point_to(step, name)

    def _after_file(self, step: int, path: Path) -> None:
        self._tidying.retention.remember_good(path)
        if self._site is None:
            self.point_to(step)
        else:  # rank 0 is here alone: nobody else is asked
            self._point_to(step, path.name)
        self._tidying.after(step, path, self.keep_last)

    def latest_path(self) -> Path | None:
        """The checkpoint to resume from: what the pointer names, else the highest step, else None.

        The pointer is trusted if it names an existing plain step file in this directory, even where
        a higher one exists. One that does not (malformed, dangling, a path elsewhere, a link) is
        not followed, and a log warning says why. Nothing is opened but the pointer. Raises
        CheckpointError for a directory that cannot be read.
        """
        return self.led(lambda: self._steps.select()[1])

    def latest_valid_path(self) -> Path | None:
        """The highest step that proves valid, or None: intact, checksums too, and the right step.

        Reads files from the highest step down to the first valid one, and logs why those before it
        are not. Raises CheckpointError for a directory that cannot be read.
        """
        return self.led(self._newest_valid_path)

    def _newest_valid_path(self) -> Path | None:
        found = self._steps.newest_valid().found
        return None if found is None else Path(found.file.path)

    def load_latest(
        self, *, fallback: bool = False, weights_only: bool = True, unpointed: bool = False
    ) -> dict[Any, Any] | None:
        """The dictionary in the file that `latest_path` selects, on the CPU; None if there is none.

        Of a sharded step it has all but the tensors of model and optimizer: `Trainer.resume` reads
        these from their shards, for any number of ranks, also for a process alone.

        The file is verified first, checksums included. If it is damaged, is no dictionary, or has
        another step than its name or the pointer says, a CheckpointError names the newest valid
        step and the command that mends the directory; with `fallback` that step is loaded instead
        and a CheckpointWarning says so. A file that needs more than safe loading allows raises
        RefusedFileError. `weights_only=False` emits a TrustWarning: the file may run any code.
        `unpointed`: a newer step that a crash kept the pointer from naming comes first (what tells
        it from one that the pointer was moved back from: `trainer_core.resuming.unpointed`), if
        its checksums prove it good; the log says so. `Trainer.fit(resume="auto")` asks for that.
        The run that saved it becomes the one of this manager (see `claim`).
        """
        self._saver.settle()
        load = partial(
            self._steps.load, fallback=fallback, weights_only=weights_only, unpointed=unpointed
        )
        if self._site is None:
            state = load()
        else:
            from trainer_core.site.loading import load_together

            state = load_together(self._site, load)
        if state is not None:
            self._saver.resumed_from(state, is_newest=True)
        return state

    def prune(self) -> list[Path]:
        """Deletes the oldest step files so that the `keep_last` newest stay; gives what it deleted.

        Steps are compared as numbers, times are ignored. A file counts only if it opens and its
        sizes are right, so damaged files never push out good ones; where not one is good, the
        number alone decides. The pointer's target always stays; so do files of another run once
        the directory is claimed, and whatever is not a regular step file directly in it. Beside the
        pointer's target at least one file stays that is proven good, checksums and all (with a
        `keep_last` of 1 the target itself is read for that); those that this manager wrote or
        loaded are. With `keep_last=None` nothing is deleted. Files that are gone already don't
        matter. Raises OSError for one that can't be deleted, after the others.
        """
        return self.led(lambda: self._tidying.prune(self.keep_last))

    def copy_to(self, destination: str | os.PathLike[str]) -> Path:
        """Copies the file that `latest_path` selects, durably; gives the copy's path.

        `destination` is a name, or an existing directory to copy into; a file there is replaced
        once the copy is whole. Mode and time are kept. Raises CheckpointError when there is no
        checkpoint, OSError when reading or writing fails.
        """
        self._saver.settle()
        return self.led(lambda: self._copy_to(Path(destination)))

    def _copy_to(self, destination: Path) -> Path:
        source = self._steps.select()[1]
        if source is None:
            raise CheckpointError(f"{self.directory}: there is no checkpoint to copy")
        return copy_step(source, destination)


def _whole(step: int) -> int:
    """What is below 0 has no name, and is refused where it would get one."""
    return step if type(step) is int else at_least(0, "step", step)
