"""What a directory needs no more: steps that are too old, twins, what dead writers left."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from ckpttool.model.names import parse_step_name, step_directory_name, step_file_name
from trainer_core.saving.retention import Retention, delete, scan_if_there, sweep
from trainer_core.saving.saver import Saver

logger = logging.getLogger(__name__)


class Tidying:
    """Deletes from the directory that `saver` writes to. `retention` knows which steps are good."""

    def __init__(self, saver: Saver) -> None:
        self.retention = Retention()
        self._saver = saver

    def after(self, step: int, path: Path, keep_last: int | None) -> None:
        """All of it, once `path` is safe. What goes wrong is logged, never raised."""
        acts: list[Callable[[], object]] = [
            lambda: self._drop_twin(step, path),
            lambda: self._sweep(step),
            lambda: self.prune(keep_last),
        ]
        for act in acts:
            try:
                act()
            except Exception as error:
                where = self._saver.directory
                logger.warning("%s: saved, but could not tidy up: %s", where, error)

    def prune(self, keep_last: int | None) -> list[Path]:
        """See `CheckpointManager.prune`."""
        with self._saver.working:
            directory = scan_if_there(self._saver.directory)
            if keep_last is None or directory is None:
                return []
            going = self.retention.choose(directory, keep_last, self._saver.owns())
            try:
                return delete(going)
            finally:
                if going:
                    self._saver.kept.forget(*(path.name for path in going if not path.exists()))

    def _drop_twin(self, step: int, path: Path) -> None:
        """The same step in the other form, file or shards: what was saved last replaces it."""
        if parse_step_name(path.name) != step:
            return
        names = {step_file_name(step), step_directory_name(step)} - {path.name}
        for twin in (path.with_name(name) for name in names):
            if os.path.lexists(twin):
                delete([twin])
                self._saver.kept.forget(twin.name)

    def _sweep(self, step: int) -> None:
        directory = scan_if_there(self._saver.directory)
        for path in sweep(directory, step) if directory is not None else ():
            logger.info("removing %s, left by a writer that has died", path)
            delete([path])
