"""The global model as a node takes it from the store: asked for, checked, fetched."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import NamedTuple

from trainer_core.diloco.commit import Commit, File, LogError, Pointer
from trainer_core.diloco.commits import CommitLog
from trainer_core.diloco.errors import MissingError
from trainer_core.diloco.fingerprint import Spec, State
from trainer_core.diloco.repeating import Rarely
from trainer_core.diloco.store import Store
from trainer_core.diloco.tensorfile import BadFileError, Header, file_sha256, load, read_header

logger = logging.getLogger(__name__)


class Published(NamedTuple):
    """A global model that was fetched and proven; floating tensors in `state` are in FP32."""

    commit: Commit
    state: State

    @property
    def outer_step(self) -> int:
        """How many outer steps made it."""
        return self.commit.outer_step


def fetch_tensors(store: Store, file: File, spec: Spec, *, only_floats: bool) -> State:
    """The tensors of a file that a commit names: header, then body, then size and SHA-256.

    Raises BadFileError for what does not fit the model or the commit, MissingError, StoreError.
    """
    header = header_of(store, file)
    if (problem := spec.problem(header.tensors, only_floats=only_floats)) is not None:
        raise BadFileError(f"{file.name} {problem}")
    with tempfile.TemporaryDirectory(prefix="diloco-") as folder:
        path = Path(folder, "tensors.safetensors")
        store.fetch(file.name, path)
        if path.stat().st_size != file.size or file_sha256(path) != file.sha256:
            raise BadFileError(f"{file.name} is not what its commit says: size or SHA-256 differ")
        return load(path)


def header_of(store: Store, file: File) -> Header:
    """The header of a file that a commit names. Raises BadFileError with its name, StoreError."""
    try:
        return read_header(store, file.name, file.size)
    except BadFileError as error:
        raise BadFileError(f"{file.name} {error}") from None


class Reader:
    """Asks for the global model. One small request where there is nothing new."""

    def __init__(self, store: Store, spec: Spec, log: CommitLog) -> None:
        self._store, self._spec, self._log = store, spec, log
        self._rarely = Rarely(logger)

    def newer_than(self, outer_step: int) -> Published | None:
        """The newest global model, if it is newer than this outer step; else None.

        Raises LogError, BadFileError, StoreError.
        """
        pointer = self._log.pointer()
        if pointer is None or pointer.outer_step <= outer_step:
            self._say_older(pointer, outer_step)
            return None
        try:
            return self._fetched(self._log.accepted(pointer.outer_step), pointer.model_file)
        except MissingError:
            # Cleaned away since the pointer was read, or a master that slept put the pointer back.
            commit = self._log.latest()
            if commit is None or commit.outer_step <= outer_step:
                return None
            return self._fetched(commit, commit.model.name)

    def _say_older(self, pointer: Pointer | None, outer_step: int) -> None:
        if (-1 if pointer is None else pointer.outer_step) < outer_step:
            words = "the Hub's pointer is behind outer step %d, which this node has installed:"
            words += " it is an older copy or another Hub, if that lasts"
            self._rarely.warning(words, outer_step, about=words)

    def _fetched(self, commit: Commit, model_file: str) -> Published:
        if commit.model.name != model_file:
            raise LogError(f"the pointer names {model_file}, its commit {commit.model.name}")
        if commit.fingerprint != self._spec.fingerprint:
            words = f"the global model has the fingerprint {commit.fingerprint}, this node's model"
            raise LogError(f"{words} {self._spec.fingerprint}: they are not the same model")
        state = fetch_tensors(self._store, commit.model, self._spec, only_floats=False)
        return Published(commit, state)
