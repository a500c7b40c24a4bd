"""A directory of checkpoints: writing them so that no crash costs one, and choosing what to load.

    <directory>/
    ├── latest.json                {"step": 4, "file": "step_000000000004.pt"}
    ├── step_000000000002.pt
    └── step_000000000004.pt

A save writes the step file (temporary, fsync, rename, fsync of the directory) and then the pointer
in the same way, so that the pointer never names a file that is not safe on disk. A crash between
the two leaves the pointer behind: `ckpttool fix-pointer` mends that.
"""

from __future__ import annotations

import logging
import operator
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpttool.errors import UnreadableError
from ckpttool.io.durable import copy_durably, make_directories, write_error
from ckpttool.model.directory import CheckpointDirectory, StepFile, scan
from ckpttool.model.names import POINTER_NAME, parse_step_file_name, step_file_name
from ckpttool.model.pointer import Pointer, read_pointer
from trainer_core.atomic import (
    atomic_json_dump,
    atomic_torch_save,
    is_writing,
)
from trainer_core.loading import RefusedFileError, TrustWarning, load_state
from trainer_core.state import CheckpointError

if TYPE_CHECKING:
    from ckpttool.actions.newest import Judged

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "CheckpointWarning",
    "RefusedFileError",
    "TrustWarning",
    "atomic_json_dump",
    "atomic_torch_save",
]

logger = logging.getLogger(__name__)


class CheckpointWarning(UserWarning):
    """Another checkpoint than the newest was loaded."""


class CheckpointManager:
    """Saves, finds, loads and prunes the step files of one directory.

    `every_steps`: the interval at which `should_save` says so. `keep_last`: how many step files
    `prune` leaves, None for all. `enabled=False` makes `should_save` say no; everything else works.
    Raises ValueError unless `every_steps` is positive (even if disabled) and `keep_last` is at
    least 1. The directory is made by the first save.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_steps: int = 500,
        keep_last: int | None = 3,
        enabled: bool = True,
    ) -> None:
        if operator.index(every_steps) < 1:
            raise ValueError(f"every_steps must be positive, not {every_steps}")
        if keep_last is not None and operator.index(keep_last) < 1:
            raise ValueError(f"keep_last must be None or at least 1, not {keep_last}")
        self.directory = Path(directory)
        self.every_steps = every_steps
        self.keep_last = keep_last
        self.enabled = enabled
        self._judged: dict[str, tuple[tuple[int, int], bool | None]] = {}

    def should_save(self, step: int) -> bool:
        """Whether a checkpoint is due after `step`: enabled, positive, and on the interval."""
        return self.enabled and step > 0 and step % self.every_steps == 0

    def path_for(self, step: int) -> Path:
        """The step file's path: `step_000000000004.pt` for 4. Raises ValueError below 0."""
        return self.directory / step_file_name(operator.index(step))

    def save(self, step: int, state: Any) -> Path:
        """Writes the checkpoint, moves the pointer to it, and prunes; gives the file's path.

        Whether a save is due is for the caller to ask. When this returns, file and pointer are safe
        on disk. Leftovers of writers that have died are removed. What goes wrong after that, in
        tidying up, is logged and never raised. Raises CheckpointError, and writes nothing, when
        `state` has a `step` that is not the integer it is saved as; see `atomic_torch_save`.
        """
        path = self.path_for(step)
        if isinstance(state, Mapping) and "step" in state:
            inside = state["step"]
            if type(inside) is not int or inside != step:
                words = f"the state holds step {inside!r}, but is to be saved as {step}"
                raise CheckpointError(words)
        atomic_torch_save(state, path)
        self._remember_own(path)
        self.point_to(step)
        for tidy in (lambda: self._sweep(step), self.prune):
            try:
                tidy()
            except Exception as error:
                logger.warning("%s: saved, but could not tidy up: %s", self.directory, error)
        return path

    def point_to(self, step: int) -> None:
        """Makes `latest.json` name the file of `step`, durably: the last act of a save."""
        target = {"step": operator.index(step), "file": step_file_name(step)}
        atomic_json_dump(target, self.directory / POINTER_NAME)

    def latest_path(self) -> Path | None:
        """The checkpoint to resume from: what the pointer names, else the highest step, else None.

        The pointer is trusted if it names an existing plain step file in this directory, even where
        a higher one exists. One that does not (malformed, dangling, a path elsewhere, a link) is
        not followed, and a log warning says why. Nothing is opened but the pointer. Raises
        CheckpointError for a directory that cannot be read.
        """
        return self._select()[1]

    def latest_valid_path(self) -> Path | None:
        """The highest step that proves valid, or None: intact, checksums too, and the right step.

        Reads files from the highest step down to the first valid one, and logs why those before it
        are not. Raises CheckpointError for a directory that cannot be read.
        """
        found, _ = self._newest_valid()
        return found

    def load_latest(
        self, *, fallback: bool = False, weights_only: bool = True
    ) -> dict[Any, Any] | None:
        """The dictionary in the file that `latest_path` selects, on the CPU; None if there is none.

        The file is verified first, checksums included. If it is damaged, is no dictionary, or has
        another step than its name or the pointer says, a CheckpointError names the newest valid
        step and the command that mends the directory; with `fallback` that step is loaded instead
        and a CheckpointWarning says so. A file that needs more than safe loading allows raises
        RefusedFileError. `weights_only=False` emits a TrustWarning: the file may run any code.
        """
        pointer, path = self._select()
        if path is None:
            return None
        self._say_if_behind(path)
        if pointer.target is not None and pointer.step not in (None, pointer.file_step):
            words = f"says step {pointer.step} and names {pointer.file}, another step's"
            error, unusable = CheckpointError(f"{pointer.path}: {words}"), None
        else:
            try:
                return _load_checked(path, weights_only)
            except RefusedFileError:
                raise
            except CheckpointError as problem:
                error, unusable = problem, path
        found, passed_over = self._newest_valid(but=unusable)
        if found is None or not fallback:
            raise CheckpointError(f"{error}. {self._advice(found, passed_over)}") from error
        words = f"{error}. Loading {found.name} instead, the newest valid step."
        warnings.warn(words, CheckpointWarning, stacklevel=2)
        return load_state(found, weights_only=weights_only)

    def prune(self) -> list[Path]:
        """Deletes the oldest step files so that the `keep_last` newest stay; gives what it deleted.

        Steps are compared as numbers, times are ignored. A file counts only if it opens and its
        sizes are right (checksums are not read: that would cost as much as loading), so damaged
        files never push out good ones; where not one is good, the number alone decides. The
        pointer's target always stays, and so does whatever is not a regular step file directly in
        this directory. With `keep_last=None` nothing is deleted. Files that are gone already don't
        matter. Raises OSError for one that can't be deleted, after the others.
        """
        directory = self._scan()
        if self.keep_last is None or directory is None:
            return []
        files = _newest_first(directory)
        keep = self._names_to_keep(files, self.keep_last)
        if directory.pointer.target is not None and directory.pointer.file is not None:
            keep.add(directory.pointer.file)
        return _delete([Path(file.path) for file in reversed(files) if file.name not in keep])

    def copy_to(self, destination: str | os.PathLike[str]) -> Path:
        """Copies the file that `latest_path` selects, durably; gives the copy's path.

        `destination` is a name, or an existing directory to copy into; a file there is replaced
        once the copy is whole. Mode and time are kept. Raises CheckpointError when there is no
        checkpoint, OSError when reading or writing fails.
        """
        source = self.latest_path()
        if source is None:
            raise CheckpointError(f"{self.directory}: there is no checkpoint to copy")
        target = Path(destination)
        if target.is_dir():
            target = target / source.name
        make_directories(os.path.dirname(os.path.abspath(target)))
        try:
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
        files = _newest_first(directory) if directory is not None else []
        return pointer, Path(files[0].path) if files else None

    def _say_if_behind(self, path: Path) -> None:
        directory = self._scan()
        files = _newest_first(directory) if directory is not None else []
        step = parse_step_file_name(path.name)
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
            step = parse_step_file_name(found.name)
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

    def _names_to_keep(self, files: list[StepFile], count: int) -> set[str]:
        """Newest first until `count` good ones are met, with whatever lies between them."""
        keep: set[str] = set()
        good, unknown = 0, set()
        for file in files:
            if good == count:
                break
            keep.add(file.name)
            verdict = self._is_good(file)
            good += verdict is True
            if verdict is None:
                unknown.add(file.name)
        if good:
            return keep
        return {file.name for file in files[:count]} | unknown

    def _is_good(self, file: StepFile) -> bool | None:
        """Whether a quick look finds nothing wrong; None if there could be no look.

        Files that this manager wrote are known, and so is what was looked at before.
        """
        from ckpttool.actions.newest import judge

        signature = file.size, file.mtime_ns
        known = self._judged.get(file.name)
        if known is None or known[0] != signature or known[1] is None:
            judged = judge(file, quick=True)
            known = signature, None if judged.unchecked else judged.is_valid
            self._judged[file.name] = known
        return known[1]

    def _remember_own(self, path: Path) -> None:
        status = path.stat()
        self._judged[path.name] = (status.st_size, status.st_mtime_ns), True

    def _sweep(self, step: int) -> None:
        """Removes temporaries that can never be finished: of this step or before, writer dead."""
        directory = self._scan()
        for other in directory.others if directory is not None else ():
            if other.kind != "temporary" or other.temporary is None:
                continue
            target, pid = other.temporary
            of_step = parse_step_file_name(target)
            ours = target == POINTER_NAME or (of_step is not None and of_step <= step)
            if ours and not is_writing(pid, os.path.abspath(self.directory / target)):
                logger.info("removing %s, left by a writer that has died", other.path)
                _delete([Path(other.path)])


def _load_checked(path: Path, weights_only: bool) -> dict[Any, Any]:
    """Loads a file after proving that it is whole. Raises CheckpointError."""
    problem = _problem_with(path, weights_only)
    if problem is not None:
        raise CheckpointError(f"{path}: {problem}")
    state = load_state(path, weights_only=weights_only)
    step = parse_step_file_name(path.name)
    if state.get("step", step) != step:
        raise CheckpointError(f"{path}: holds step {state['step']!r}, unlike its name")
    return state


def _problem_with(path: Path, weights_only: bool) -> str | None:
    """What verification finds wrong with a file, in words; None if it may be loaded."""
    from ckpttool.checks.verify import verify

    try:
        report = verify(path)
    except UnreadableError as error:
        return f"could not be read: {error.reason}"
    verdict = report.files[0]
    if verdict.state in ("valid", "intact"):
        return None
    errors = [finding for finding in report.findings if finding.severity.value == "error"]
    families = ["FIL"]
    if verdict.state == "dangerous" and weights_only:
        families.insert(0, "TRU")
    if verdict.checksums not in ("checked", "none stored") or verdict.state == "wrong-step":
        families.append("SCH")
    # Else it is whole, only without a step: whoever saved that may have it back.
    for finding in (error for family in families for error in errors if error.id[:3] == family):
        return f"is {verdict.state}: {finding.id}: {finding.words}"
    return None


def _newest_first(directory: CheckpointDirectory) -> list[StepFile]:
    """Regular step files; of several names for one step the usual one first."""
    files = [file for file in directory.steps if file.is_regular]
    return sorted(
        files, key=lambda file: (file.step, file.name == step_file_name(file.step)), reverse=True
    )


def _delete(paths: list[Path]) -> list[Path]:
    """Deletes what is there, and gives what it deleted. Raises the first error after all."""
    deleted, errors = [], []
    for path in paths:
        try:
            path.unlink()
        except FileNotFoundError:
            continue  # another process was faster
        except OSError as error:
            errors.append(error)
            continue
        deleted.append(path)
    if errors:
        raise errors[0]
    return deleted
