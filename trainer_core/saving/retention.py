"""Which steps of a directory stay, which go, and what dead writers left behind."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ckpttool.errors import UnreadableError
from ckpttool.model.directory import CheckpointDirectory, StepFile, scan, step_entry
from ckpttool.model.manifest import read_manifest
from ckpttool.model.names import (
    LOCK_NAME,
    MANIFEST_NAME,
    POINTER_NAME,
    parse_step_directory_name,
    parse_step_name,
)
from ckpttool.model.records import Records
from trainer_core.saving.publishing import is_writing
from trainer_core.saving.savable import CheckpointError
from trainer_core.site import commit

if TYPE_CHECKING:
    from ckpttool.actions.newest import Judged

logger = logging.getLogger(__name__)

_OUR_NAMES = frozenset({POINTER_NAME, MANIFEST_NAME, LOCK_NAME})


class Retention:
    """Knows which files of one directory are good, and chooses by that which may go.

    What was looked at once is not looked at again while its size and time stay the same.
    """

    def __init__(self) -> None:
        self._glanced: dict[str, tuple[tuple[int, int], bool | None]] = {}
        self._proven: dict[str, tuple[int, int]] = {}

    def remember_good(self, path: Path) -> None:
        """Notes a file that was just written and checked, or read with all its checksums."""
        try:
            step = step_entry(os.fspath(path), path.lstat())
        except FileNotFoundError:
            return  # pruned meanwhile by whoever writes here
        if step is None:
            return
        signature = step.size, step.mtime_ns
        self._glanced[path.name] = signature, True
        self._proven[path.name] = signature

    def choose(
        self, directory: CheckpointDirectory, keep_last: int, is_ours: Callable[[str], bool]
    ) -> list[Path]:
        """The files that may go, oldest first, so that the `keep_last` newest good ones stay.

        The pointer's target stays, and so do files that are not `is_ours`. Where not one is good
        the number alone decides. Else the new one (the pointer's target) is not to be all that
        anybody relies on: beside it at least one stays that is proven good by its checksums; and
        where it is to be the only one, it is read again itself before the others go.
        """
        files = newest_first(directory)
        keep, any_good = self._names_to_keep(files, keep_last)
        new = directory.pointer.file if directory.pointer.target is not None else None
        if new is not None:
            keep.add(new)
        going = [file for file in files if file.name not in keep and is_ours(file.name)]
        staying = [file for file in files if file not in going]
        if going and any_good and not self._has_proof(staying, new or files[0].name):
            # The newest proven one of those that were to go stays instead.
            while going and not self.is_proven(going.pop(0)):
                pass
        return [Path(file.path) for file in reversed(going)]

    def is_proven(self, file: StepFile, *, again: bool = False) -> bool:
        """Whether every checksum of a file is right; `again` reads it even where that is known."""
        from ckpttool.actions.newest import judge

        signature = file.size, file.mtime_ns
        if not again and self._proven.get(file.name) == signature:
            return True
        if not _is_whole(judge(file)):
            return False
        self._proven[file.name] = signature
        return True

    def _has_proof(self, staying: list[StepFile], new: str) -> bool:
        others = [file for file in staying if file.name != new]
        if others:
            return any(self.is_proven(file) for file in others)
        return any(self.is_proven(file, again=True) for file in staying)

    def _names_to_keep(self, files: list[StepFile], count: int) -> tuple[set[str], bool]:
        """Newest first until `count` good ones are met, with whatever lies between them.

        Also tells whether any is good.
        """
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
            return keep, True
        return {file.name for file in files[:count]} | unknown, False

    def _is_good(self, file: StepFile) -> bool | None:
        """Whether a quick look finds nothing wrong; None if there could be no look.

        Checksums are not read: that would cost as much as loading.
        """
        from ckpttool.actions.newest import judge

        signature = file.size, file.mtime_ns
        known = self._glanced.get(file.name)
        if known is None or known[0] != signature or known[1] is None:
            judged = judge(file, quick=True)
            known = signature, None if judged.unchecked else judged.is_valid
            self._glanced[file.name] = known
        return known[1]


def sweep(directory: CheckpointDirectory, step: int) -> list[Path]:
    """The temporaries that can never be finished: writer dead, and of `step` or one before.

    Those of later steps stay: they may be all that is left of them.
    """
    found = []
    for other in directory.others:
        if other.kind != "temporary" or other.temporary is None:
            continue
        target, pid = other.temporary
        of_step = parse_step_name(target)
        ours = (of_step is not None and of_step <= step) or (target in _OUR_NAMES and pid > 0)
        if ours and not is_writing(pid, os.path.join(os.path.abspath(directory.path), target)):
            found.append(Path(other.path))
    return found


def scan_if_there(path: Path) -> CheckpointDirectory | None:
    """What lies in a directory; None where there is no such one. Raises CheckpointError."""
    try:
        return scan(path)
    except UnreadableError as error:
        if not os.path.lexists(path):
            return None
        raise CheckpointError(f"the checkpoint directory cannot be read: {error}") from error


def newest_first(directory: CheckpointDirectory) -> list[StepFile]:
    """Step files and sharded steps; of several names for one step the one that is meant first."""
    files = [file for file in directory.steps if file.opens]
    records = Records(directory.pointer, read_manifest(directory.path))
    rank = records.precedence
    return sorted(files, key=lambda file: (file.step, rank(file.name)), reverse=True)


def delete(paths: list[Path]) -> list[Path]:
    """Deletes what is there, and gives what it deleted. Raises the first error after all."""
    deleted: list[Path] = []
    errors: list[OSError] = []
    for path in paths:
        try:
            if not _delete_one(path):
                continue
        except FileNotFoundError:
            continue  # another process was faster
        except OSError as error:
            errors.append(error)
            continue
        deleted.append(path)
    if errors:
        raise errors[0]
    return deleted


def _delete_one(path: Path) -> bool:
    """False for a sharded step that is gone already."""
    name = path.name
    if parse_step_directory_name(name) is not None:
        return commit.remove(path)
    if path.is_dir() and not path.is_symlink():
        commit.discard(path)  # what a writer of a sharded step has left
    else:
        path.unlink()
    return True


def _is_whole(judged: Judged) -> bool:
    """Nothing is wrong with the file itself; what is in it is another matter."""
    if judged.unchecked or not judged.file.opens:
        return False
    errors = [finding for finding in judged.findings if finding.severity.value == "error"]
    return not any(finding.id.startswith("FIL") for finding in errors)
