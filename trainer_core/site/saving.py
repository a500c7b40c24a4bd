"""A save that all ranks make together.

Replicated state: rank 0 writes a step file, with what belongs to each rank in it. Sharded state:
every rank writes into one temporary directory, and rank 0 gives it its name when all have written.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpttool.io.durable import fsync_directory, write_error
from ckpttool.model.names import step_directory_name
from trainer_core.saving.container import content_of
from trainer_core.saving.publishing import Written, check_space, publish
from trainer_core.saving.saver import Saver
from trainer_core.site import commit
from trainer_core.site.metadata_trust import METADATA_NAME
from trainer_core.site.per_rank import BUFFERS, own_section
from trainer_core.site.per_rank import KEY as RANKS
from trainer_core.site.ranks import Site
from trainer_core.site.sharded import (
    SHARDS,
    TRAINER_NAME,
    digests_of,
    is_sharded,
    local_bytes,
    rank_file_name,
    staged,
    take_apart,
    write_shards,
)

logger = logging.getLogger(__name__)

After = Callable[[int, Path], None]


def save_together(
    site: Site, saver: Saver, step: int, path: Path, state: Any, then: After
) -> Path | None:
    """Saves what is at `path`, or at the directory of that step; gives what it is on all ranks.

    As `Saver.save` does it on one: see there. All raise what one of them raises.
    """
    if is_sharded(state):
        return _ShardedSave(site, saver, step, path, then).save(state)
    whole = state
    if isinstance(state, dict) and "rng" in state:
        sections = site.gather(own_section(state))
        whole = {key: value for key, value in state.items() if key != BUFFERS}
        whole[RANKS] = {str(rank): section for rank, section in enumerate(sections)}
    saved = site.first(lambda: saver.save(step, path, whole, then) is not None)
    return path if saved else None


class _ShardedSave:
    """One save of a sharded step, as one rank makes it."""

    def __init__(self, site: Site, saver: Saver, step: int, file: Path, then: After) -> None:
        self.site, self.saver, self.step, self.then = site, saver, step, then
        self.path = file.with_name(step_directory_name(step))
        self.sync = saver.policy.durable

    def save(self, state: dict[str, Any]) -> Path | None:
        """On this thread, or with `async_save` on the saver's own once all is copied."""
        site, saver = self.site, self.saver
        if saver.policy.when_busy == "skip" and site.first(lambda: saver.is_busy):
            if site.leads:
                words = "step %d is not saved: the save before is still being written"
                logger.info(words, self.step)
            return None
        site.every(saver.wait)
        try:
            site.first(saver.claim)
            tensors, rest = site.every(lambda: take_apart(state, site.rank, site.size))
            own = {"rank": site.rank, "world_size": site.size, "step": self.step}
            own |= own_section(state)
            rest = saver.identity.marked({**rest, "model": {}})
            if saver.policy.async_save:
                tensors, rest, own = site.every(lambda: _copied(tensors, rest, own))
                saver.beside(lambda: self._carry_out(tensors, rest, own, site.beside))
            else:
                self._carry_out(tensors, rest, own, site)
        except OSError as error:
            saver.raise_or_warn(error)
            return None
        return self.path

    def _carry_out(
        self, tensors: dict[str, Any], rest: Any, own: dict[str, Any], site: Site
    ) -> None:
        needed = site.sum(local_bytes(tensors))[0]
        temporary = site.first(lambda: self._temporary(needed))
        try:
            shards = site.every(lambda: write_shards(tensors, temporary, site, sync=self.sync))
            site.every(lambda: self._write_beside(temporary, rest, own, shards))
            site.first(lambda: self._commit(temporary))
        except BaseException:
            if site.leads:
                with contextlib.suppress(OSError):
                    commit.discard(temporary)
            raise

    def _temporary(self, needed: int) -> Path:
        check_space(os.path.abspath(self.path), needed, self.saver.policy.min_free)
        return commit.make_temporary(self.path)

    def _write_beside(
        self, directory: Path, rest: Any, own: dict[str, Any], shards: list[str]
    ) -> None:
        """What is no shard, after the shards: each rank notes the digests of its own.

        They bind the shards to this step: `.metadata` names them, but looks alike in all steps. And
        all files say of which save they are, by the name that rank 0 has made for the temporary.
        """
        save_id = hashlib.sha256(directory.name.encode()).hexdigest()[:16]
        own = {**own, SHARDS: digests_of(directory, shards), "save_id": save_id}
        rest = {**rest, "save_id": save_id}
        publish(content_of(own), directory / rank_file_name(self.site.rank), sync=self.sync)
        if self.site.leads:
            publish(content_of(rest), directory / TRAINER_NAME, sync=self.sync)

    def _commit(self, temporary: Path) -> None:
        saver, path = self.saver, self.path
        with saver.working:
            written = _written(temporary / METADATA_NAME)
            if os.path.lexists(path):
                saver.forget(path.name)
            with commit.in_place(temporary, path, sync=self.sync):
                saver.record(self.step, path, written)
                self.then(self.step, path)
            saver.finished.append((self.step, path))


def _copied(tensors: dict[str, Any], rest: Any, own: Any) -> tuple[dict[str, Any], Any, Any]:
    return staged(tensors), copy.deepcopy(rest), copy.deepcopy(own)


def _written(path: Path) -> Written:
    try:
        data = path.read_bytes()
        fsync_directory(path.parent)
    except OSError as error:
        raise write_error(path, error) from error
    return Written(len(data), hashlib.sha256(data).hexdigest())
