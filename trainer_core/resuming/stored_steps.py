"""The steps of one directory: which one to go on from, proven whole before it is loaded."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpttool.model.names import parse_step_directory_name, parse_step_name
from ckpttool.model.pointer import Pointer, read_pointer
from trainer_core.resuming.loading import RefusedFileError, load_state
from trainer_core.resuming.looking import look_at, say_if_replaced
from trainer_core.resuming.unpointed import unpointed as unpointed_steps
from trainer_core.saving.retention import newest_first, scan_if_there
from trainer_core.saving.savable import CheckpointError

if TYPE_CHECKING:
    from ckpttool.actions.newest import Judged, Newest

logger = logging.getLogger(__name__)


class CheckpointWarning(UserWarning):
    """Another checkpoint than the newest was loaded."""


class StoredSteps:
    """The steps, files and sharded ones, in `directory`. `is_good` hears of each proven whole."""

    def __init__(self, directory: Path, is_good: Callable[[Path], None]) -> None:
        self.directory = directory
        self._is_good = is_good

    def select(self) -> tuple[Pointer, Path | None]:
        """The pointer, and the step that it names; else the highest one, if there is any.

        A pointer that cannot be followed is told in the log. Raises CheckpointError.
        """
        pointer = read_pointer(self.directory)
        if pointer.target is not None:
            return pointer, Path(pointer.target)
        if pointer.state != "missing":
            logger.warning("%s is not followed: %s", pointer.path, pointer.problem)
        directory = scan_if_there(self.directory)
        files = newest_first(directory) if directory is not None else []
        return pointer, Path(files[0].path) if files else None

    def newest_valid(self, but: Path | None = None) -> Newest:
        """The newest valid step, `but` left out, and the newer ones that are not; these it logs.

        Raises CheckpointError for a directory that cannot be read.
        """
        from ckpttool.actions.newest import Newest, find_newest_valid, judge

        directory = scan_if_there(self.directory)
        if directory is None:
            return Newest(None, [])
        refused = [file for file in directory.steps if but is not None and file.name == but.name]
        directory.steps = [file for file in directory.steps if file not in refused]
        newest = find_newest_valid(directory)
        # What was refused counts among the others: whether it could be checked is asked later on.
        judgements = (judge(file) for file in refused)
        newest.passed_over.extend(judged for judged in judgements if not judged.is_valid)
        for judged in newest.passed_over:
            logger.warning("%s is not valid: %s", judged.file.path, judged.why())
        return newest

    def load(
        self, *, fallback: bool, weights_only: bool, unpointed: bool = False
    ) -> dict[Any, Any] | None:
        """What `select` gives, loaded, or the newest valid step instead of it.

        See `CheckpointManager.load_latest`.
        """
        pointer, path = self.select()
        if path is None:
            return None
        newer = self._load_unpointed(pointer, weights_only) if unpointed else None
        if newer is not None:
            return newer
        self._say_if_behind(path)
        say_if_replaced(pointer, path)
        unusable: Path | None = path
        try:
            if pointer.target is not None and pointer.step not in (None, pointer.file_step):
                unusable = None  # the step may be good: it is the pointer that makes no sense
                words = f"says step {pointer.step} and names {pointer.file}, another step's"
                raise CheckpointError(f"{pointer.path}: {words}")
            return self._load_proven(path, weights_only)
        except RefusedFileError:
            raise
        except CheckpointError as error:
            return self._load_other(error, unusable, fallback, weights_only)

    def _load_other(
        self, error: CheckpointError, unusable: Path | None, fallback: bool, weights_only: bool
    ) -> dict[Any, Any]:
        newest = self.newest_valid(but=unusable)
        if newest.found is None or not fallback:
            raise CheckpointError(f"{error}. {self._advice(newest)}") from error
        path = Path(newest.found.file.path)
        words = f"{error}. Loading {path.name} instead, the newest valid step."
        warnings.warn(words, CheckpointWarning, stacklevel=4)
        return load_step(path, weights_only)

    def _load_unpointed(self, pointer: Pointer, weights_only: bool) -> dict[Any, Any] | None:
        for path in unpointed_steps(self.directory, pointer):
            try:
                state = self._load_proven(path, weights_only, by_checksums=True)
            except CheckpointError as error:
                logger.warning("%s; it is newer than the pointer's step, and not used", error)
                continue
            words = "%s: going on from %s, saved by the same run after %s was written (step %s)"
            logger.warning(words, self.directory, path.name, pointer.path, pointer.step)
            return state
        return None

    def _load_proven(
        self, path: Path, weights_only: bool, by_checksums: bool = False
    ) -> dict[Any, Any]:
        problem, has_checksums = look_at(path, weights_only)
        if problem is None and by_checksums and not has_checksums:
            problem = "has no checksums that could prove it good"
        if problem is not None:
            raise CheckpointError(f"{path}: {problem}")
        if has_checksums:
            self._is_good(path)
        state = load_step(path, weights_only)
        step = parse_step_name(path.name)
        if state.get("step", step) != step:
            raise CheckpointError(f"{path}: holds step {state['step']!r}, unlike its name")
        return state

    def _say_if_behind(self, path: Path) -> None:
        directory = scan_if_there(self.directory)
        files = newest_first(directory) if directory is not None else []
        step = parse_step_name(path.name)
        if files and step is not None and files[0].step > step:
            logger.warning(
                "%s: the pointer names step %d, while there is a file for step %d; "
                "`%s` looks whether that one is valid and points at it",
                *(self.directory, step, files[0].step, self._command("fix-pointer")),
            )

    def _advice(self, newest: Newest) -> str:
        unchecked: list[Judged] = [judged for judged in newest.passed_over if judged.unchecked]
        if newest.found is not None:
            found, command = newest.found.file, self._command("fix-pointer")
            if unchecked:  # a newer one, perhaps: then the step has to be asked for by its number
                command += f" --step {found.step}"
            return (
                f"The newest valid step is {found.step} ({found.name}): "
                f"`{command}` makes the pointer name it"
            )
        more = f", but {len(unchecked)} could not be read" if unchecked else ""
        return (
            f"No valid step is left in {self.directory}{more}: "
            f"`{self._command('verify')}` says what is wrong with each"
        )

    def _command(self, verb: str) -> str:
        from ckpttool.checks.base import command

        return command(verb, self.directory)


def load_step(path: str | os.PathLike[str], weights_only: bool = True) -> dict[Any, Any]:
    """A step file; or all of a sharded step but what is in its shards. Raises CheckpointError."""
    if parse_step_directory_name(os.path.basename(path)) is None:
        return load_state(path, weights_only=weights_only)
    from trainer_core.site.metadata_trust import read_metadata
    from trainer_core.site.sharded import read_step

    try:
        read_metadata(path)
        return read_step(path)
    except OSError as error:
        raise CheckpointError(f"{os.fspath(path)}: cannot be read: {error.strerror}") from error
