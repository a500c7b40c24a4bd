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
between the two leaves the pointer behind: `ckpttool fix-pointer` mends that.
"""

from __future__ import annotations

import logging
import operator
import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from ckpttool.errors import UnreadableError
from ckpttool.io.durable import copy_durably, make_directories, write_error
from ckpttool.model.directory import CheckpointDirectory, scan
from ckpttool.model.names import (
    parse_step_directory_name,
    parse_step_name,
    step_directory_name,
    step_file_name,
)
from ckpttool.model.pointer import Pointer, read_pointer
from trainer_core.atomic import atomic_json_dump, atomic_torch_save
from trainer_core.resuming.loading import RefusedFileError, TrustWarning, load_state
from trainer_core.resuming.looking import look_at, say_if_replaced
from trainer_core.saving.retention import Retention, delete, newest_first, sweep
from trainer_core.saving.saver import Policy, Saver, SaveWarning
from trainer_core.site import commit
from trainer_core.state import CheckpointError

if TYPE_CHECKING:
    from ckpttool.actions.newest import Judged
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


class CheckpointWarning(UserWarning):
    """Another checkpoint than the newest was loaded."""


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
    1, and the others are what is said here. The directory is made by the first save.
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
        if operator.index(every_steps) < 1:
            raise ValueError(f"every_steps must be positive, not {every_steps}")
        if keep_last is not None and operator.index(keep_last) < 1:
            raise ValueError(f"keep_last must be None or at least 1, not {keep_last}")
        if save_every_seconds is not None and not save_every_seconds > 0:
            raise ValueError(
                f"save_every_seconds must be None or positive, not {save_every_seconds}"
            )
        if operator.index(min_free) < 0:
            raise ValueError(f"min_free must not be negative, but is {min_free}")
        _one_of("when_busy", when_busy, "wait", "skip")
        _one_of("on_error", on_error, "raise", "warn")
        self.directory = Path(directory)
        self.every_steps = every_steps
        self.save_every_seconds = save_every_seconds
        self.keep_last = keep_last
        self.enabled = enabled
        if not lock_patience >= 0:
            raise ValueError(f"lock_patience must not be negative, but is {lock_patience}")
        policy = Policy(durable, async_save, when_busy, on_error, min_free, lock_patience)
        self._saver = Saver(self.directory, policy, run_id)
        self._retention = Retention()
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
        there, naming it; and where the checkpoints there are those of another run. `load_latest`
        and `resumed_from` make their run this one; a `run_id` that is theirs does, too.
        """
        identity = self._saver.identity
        identity.run_id = self.led(self._claim)
        self._saved_at = time.monotonic()

    def _claim(self) -> str:
        self._saver.begin()
        return self._saver.identity.run_id

    def resumed_from(self, state: Mapping[str, Any]) -> None:
        """Takes note that the run goes on from this checkpoint, wherever it was loaded from."""
        self._saver.identity.resumed_from(state)

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
        return self.directory / step_file_name(operator.index(step))

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
        """For an end at once: gives up the save that is being written. Nothing is damaged by it."""
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
        name = step_file_name(operator.index(step))
        self.led(lambda: self._point_to(step, self._name_that_is_there(name)))

    def _name_that_is_there(self, name: str) -> str:
        sharded = name.removesuffix(".pt")
        is_file = os.path.lexists(self.directory / name)
        return sharded if not is_file and (self.directory / sharded).is_dir() else name

    def _point_to(self, step: int, name: str) -> None:
        with self._saver.working:
            self._saver.point_to(step, name)

    def _after_file(self, step: int, path: Path) -> None:
        self._retention.remember_good(path)
        if self._site is None:
            self.point_to(step)
        else:  # rank 0 is here alone: nobody else is asked
            self._point_to(step, path.name)
        for tidy in (lambda: self._drop_twin(path), lambda: self._sweep(step), self._prune):
            try:
                tidy()
            except Exception as error:
                logger.warning("%s: saved, but could not tidy up: %s", self.directory, error)

    def latest_path(self) -> Path | None:
        """The checkpoint to resume from: what the pointer names, else the highest step, else None.

        The pointer is trusted if it names an existing plain step file in this directory, even where
        a higher one exists. One that does not (malformed, dangling, a path elsewhere, a link) is
        not followed, and a log warning says why. Nothing is opened but the pointer. Raises
        CheckpointError for a directory that cannot be read.
        """
        return self.led(lambda: self._select()[1])

    def latest_valid_path(self) -> Path | None:
        """The highest step that proves valid, or None: intact, checksums too, and the right step.

        Reads files from the highest step down to the first valid one, and logs why those before it
        are not. Raises CheckpointError for a directory that cannot be read.
        """
        return self.led(lambda: self._newest_valid()[0])

    def load_latest(
        self, *, fallback: bool = False, weights_only: bool = True
    ) -> dict[Any, Any] | None:
        """The dictionary in the file that `latest_path` selects, on the CPU; None if there is none.

        Of a sharded step it has all but the tensors of model and optimizer: `Trainer.resume` reads
        these from their shards, for any number of ranks, also for a process alone.

        The file is verified first, checksums included. If it is damaged, is no dictionary, or has
        another step than its name or the pointer says, a CheckpointError names the newest valid
        step and the command that mends the directory; with `fallback` that step is loaded instead
        and a CheckpointWarning says so. A file that needs more than safe loading allows raises
        RefusedFileError. `weights_only=False` emits a TrustWarning: the file may run any code.
        The run that saved it becomes the one of this manager (see `claim`).
        """
        self._saver.settle()
        if self._site is None:
            state = self._load_latest(fallback, weights_only)
        else:
            state = self._load_together(self._site, fallback, weights_only)
        if state is not None:
            self.resumed_from(state)
        return state

    def _load_together(
        self, site: Site, fallback: bool, weights_only: bool
    ) -> dict[Any, Any] | None:
        """Rank 0 decides and loads; the others get it from there, and look at no file."""
        from trainer_core.site.sharded import ShardedState

        found: list[dict[Any, Any] | None] = []

        def load() -> str | None:
            found.append(self._load_latest(fallback, weights_only))
            return found[0].path if isinstance(found[0], ShardedState) else None

        path = site.first(load)
        state: dict[Any, Any] | None = site.share(found[0] if found else None)
        return state if path is None or state is None else ShardedState(state, path)

    def _load_latest(self, fallback: bool, weights_only: bool) -> dict[Any, Any] | None:
        pointer, path = self._select()
        if path is None:
            return None
        self._say_if_behind(path)
        say_if_replaced(pointer, path)
        if pointer.target is not None and pointer.step not in (None, pointer.file_step):
            words = f"says step {pointer.step} and names {pointer.file}, another step's"
            error, unusable = CheckpointError(f"{pointer.path}: {words}"), None
        else:
            try:
                return self._load_checked(path, weights_only)
            except RefusedFileError:
                raise
            except CheckpointError as problem:
                error, unusable = problem, path
        found, passed_over = self._newest_valid(but=unusable)
        if found is None or not fallback:
            raise CheckpointError(f"{error}. {self._advice(found, passed_over)}") from error
        words = f"{error}. Loading {found.name} instead, the newest valid step."
        warnings.warn(words, CheckpointWarning, stacklevel=3)
        return _load_one(found, weights_only)

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
        return self.led(self._prune)

    def _prune(self) -> list[Path]:
        with self._saver.working:
            directory = self._scan()
            if self.keep_last is None or directory is None:
                return []
            going = self._retention.choose(directory, self.keep_last, self._saver.owns())
            try:
                return delete(going)
            finally:
                if going:
                    self._saver.kept.forget(*(path.name for path in going if not path.exists()))

    def copy_to(self, destination: str | os.PathLike[str]) -> Path:
        """Copies the file that `latest_path` selects, durably; gives the copy's path.

        `destination` is a name, or an existing directory to copy into; a file there is replaced
        once the copy is whole. Mode and time are kept. Raises CheckpointError when there is no
        checkpoint, OSError when reading or writing fails.
        """
        self._saver.settle()
        return self.led(lambda: self._copy_to(Path(destination)))

    def _copy_to(self, target: Path) -> Path:
        source = self._select()[1]
        if source is None:
            raise CheckpointError(f"{self.directory}: there is no checkpoint to copy")
        if target.is_dir() and parse_step_directory_name(target.name) is None:
            target = target / source.name
        make_directories(os.path.dirname(os.path.abspath(target)))
        try:
            if _is_sharded(source):
                commit.copy(source, target)
            else:
                copy_durably(source, target, force=True)
        except UnreadableError:
            raise
        except OSError as error:
            raise write_error(target, error) from error
        return target

    def _scan(self) -> CheckpointDirectory | None:
        try:
            return scan(self.directory)
        except UnreadableError as error:
            if not os.path.lexists(self.directory):
                return None
            raise CheckpointError(f"the checkpoint directory cannot be read: {error}") from error

    def _select(self) -> tuple[Pointer, Path | None]:
        pointer = read_pointer(self.directory)
        if pointer.target is not None:
            return pointer, Path(pointer.target)
        directory = self._scan()
        if pointer.state != "missing":
            logger.warning("%s is not followed: %s", pointer.path, pointer.problem)
        files = newest_first(directory) if directory is not None else []
        return pointer, Path(files[0].path) if files else None

    def _say_if_behind(self, path: Path) -> None:
        directory = self._scan()
        files = newest_first(directory) if directory is not None else []
        step = parse_step_name(path.name)
        if files and step is not None and files[0].step > step:
            logger.warning(
                "%s: the pointer names step %d, while there is a file for step %d; "
                "`%s` looks whether that one is valid and points at it",
                *(self.directory, step, files[0].step, self._command("fix-pointer")),
            )

    def _newest_valid(self, but: Path | None = None) -> tuple[Path | None, list[Judged]]:
        """The newest valid file, `but` left out, and the newer ones that are not."""
        from ckpttool.actions.newest import find_newest_valid, judge

        directory = self._scan()
        if directory is None:
            return None, []
        refused = [file for file in directory.steps if but is not None and file.name == but.name]
        directory.steps = [file for file in directory.steps if file not in refused]
        newest = find_newest_valid(directory)
        # What was refused counts among the others: whether it could be checked is asked later on.
        judgements = (judge(file) for file in refused)
        newest.passed_over.extend(judged for judged in judgements if not judged.is_valid)
        for judged in newest.passed_over:
            logger.warning("%s is not valid: %s", judged.file.path, judged.why())
        found = None if newest.found is None else Path(newest.found.file.path)
        return found, newest.passed_over

    def _advice(self, found: Path | None, passed_over: list[Judged]) -> str:
        if found is not None:
            step = parse_step_name(found.name)
            command = self._command("fix-pointer")
            if any(judged.unchecked for judged in passed_over):
                # Something newer could not be checked: then the step has to be asked for by name.
                command += f" --step {step}"
            return (
                f"The newest valid step is {step} ({found.name}): "
                f"`{command}` makes the pointer name it"
            )
        unchecked = sum(judged.unchecked for judged in passed_over)
        more = f", but {unchecked} could not be read" if unchecked else ""
        return (
            f"No valid step is left in {self.directory}{more}: "
            f"`{self._command('verify')}` says what is wrong with each"
        )

    def _command(self, verb: str) -> str:
        from ckpttool.checks.base import command

        return command(verb, self.directory)

    def _drop_twin(self, path: Path) -> None:
        """The same step in the other form, file or shards: what was saved last replaces it."""
        step = parse_step_name(path.name)
        if step is None:
            return
        names = {step_file_name(step), step_directory_name(step)} - {path.name}
        for twin in (path.with_name(name) for name in names):
            if os.path.lexists(twin):
                delete([twin])
                self._saver.kept.forget(twin.name)

    def _sweep(self, step: int) -> None:
        directory = self._scan()
        for path in sweep(directory, step) if directory is not None else ():
            logger.info("removing %s, left by a writer that has died", path)
            delete([path])

    def _load_checked(self, path: Path, weights_only: bool) -> dict[Any, Any]:
        """Loads a file after proving that it is whole. Raises CheckpointError."""
        problem, proven = look_at(path, weights_only)
        if problem is not None:
            raise CheckpointError(f"{path}: {problem}")
        if proven:
            self._retention.remember_good(path)
        state = _load_one(path, weights_only)
        step = parse_step_name(path.name)
        if state.get("step", step) != step:
            raise CheckpointError(f"{path}: holds step {state['step']!r}, unlike its name")
        return state


def _load_one(path: Path, weights_only: bool) -> dict[Any, Any]:
    """A file that is whole, or all of a sharded step but what is in its shards."""
    if not _is_sharded(path):
        return load_state(path, weights_only=weights_only)
    from trainer_core.site.metadata_trust import read_metadata
    from trainer_core.site.sharded import read_step

    try:
        read_metadata(path)
        return read_step(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _is_sharded(path: Path) -> bool:
    return parse_step_directory_name(path.name) is not None


def _one_of(name: str, value: str, *allowed: str) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be {' or '.join(map(repr, allowed))}, not {value!r}")
