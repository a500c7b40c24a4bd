"""The shared store as everything above sees it: whole files under names, whichever kind it is.

What it promises, for every kind: a reader sees a file whole or not at all; of two creators exactly
one wins; a listing is what the store says now; no call waits for ever.
"""

from __future__ import annotations

import io
import logging
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, NamedTuple, TypeVar

from trainer_core.diloco.errors import MissingError, PassingError, PermanentError, StoreError
from trainer_core.diloco.names import check_name, is_part
from trainer_core.diloco.repeating import Rarely
from trainer_core.diloco.store.backend import Backend, Take
from trainer_core.diloco.store.urls import open_backend, parse

T = TypeVar("T")

logger = logging.getLogger(__name__)

FIRST_WAIT_S = 0.2
"""Seconds: the longest wait before the second try; it doubles with each try …"""
LONGEST_WAIT_S = 20.0
"""… up to this. Each wait is drawn evenly between 0 and that bound ("full jitter"), so that nodes
which failed together don't come back together (M. Brooker, "Exponential Backoff And Jitter")."""


class Entry(NamedTuple):
    """A file in a folder: its name without the folder, and its bytes."""

    name: str
    size: int


class Store:
    """Files under names, on any kind of store. Made by `Store.open`; safe to use from any thread.

    Names are relative and portable (`names.check_name`); folders need not be made. Each method
    waits at most `timeout` seconds for an answer (for each piece of a long file), and tries again
    what fails for a passing reason, `attempts` times in all. They raise BadNameError, MissingError,
    PassingError once the tries are used up, PermanentError at once.

    After a PassingError, and a time-out above all, what was asked may have been done, or may still
    be: a request that is on its way can't be called back.

    Attributes: `url` for words, without credentials; `requests` counts the tries by method,
    `bytes_read` and `bytes_written` what they moved, `listed` the names in listings.
    """

    first_wait_s = FIRST_WAIT_S

    def __init__(
        self,
        backend: Backend,
        url: str,
        *,
        attempts: int = 5,
        secrets: tuple[str, ...] = (),
    ) -> None:
        if attempts < 1:
            raise ValueError(f"attempts must be at least 1, not {attempts}")
        self.url = url
        self.requests: Counter[str] = Counter()
        self.bytes_read = 0
        self.bytes_written = 0
        self.listed = 0
        self._backend = backend
        self._attempts = attempts
        self._secrets = secrets
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._rarely = Rarely(logger)
        # Its own, so that training's random numbers stay as they are; seeded by the system.
        self._jitter = random.Random()  # noqa: S311  (not for secrets)

    @classmethod
    def open(
        cls,
        url: str | os.PathLike[str],
        *,
        timeout: float = 60.0,
        attempts: int = 5,
        options: Mapping[str, Any] | None = None,
    ) -> Store:
        """The store at a path or URL: a directory, `memory://`, `s3://`, `sftp://` or `hf://`.

        `options` go to the library under it: for S3 those of `s3fs.S3FileSystem` (`key`, `secret`,
        `endpoint_url`, …), for SFTP those of `asyncssh.connect` (`client_keys`, `known_hosts`, …),
        for the Hub those of `huggingface_hub.HfApi` (`token`, `endpoint`).
        Credentials belong there or in the environment. Nothing is asked of the store yet. Raises
        PermanentError for a scheme that isn't known or whose package is missing.
        """
        if not 0 < timeout <= 10**9:
            raise ValueError(f"timeout must be above 0 seconds, and finite, not {timeout}")
        given = dict(options or {})
        place = parse(url, given)
        backend = open_backend(place, timeout, given)
        return cls(backend, place.words, attempts=attempts, secrets=place.secrets)

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Bytes `start` to `end` (excluded; None: to the end), fewer where the file is shorter."""
        check_name(name)
        if start < 0 or (end is not None and end < start):
            raise ValueError(f"bytes {start} to {end} are no range")

        def once() -> bytes:
            parts: list[bytes] = []
            self._backend.read(name, start, end, self._counting(parts.append))
            return parts[0] if len(parts) == 1 else b"".join(parts)

        return self._tried("read", name, once)

    def fetch(self, name: str, path: str | os.PathLike[str]) -> None:
        """Streams a whole file to a local one, which appears when it is complete."""
        from ckpttool.io.durable import write_durably

        check_name(name)

        def copy(file: BinaryIO) -> None:
            try:
                self._backend.read(name, 0, None, self._counting(_local_write(file, path)))
            except Exception as error:
                failure, cause = self._failure("fetch", name, error)
                raise failure from cause

        def once() -> None:
            try:
                write_durably(path, copy, sync=False)
            except OSError as error:  # of our own disk: the store's are StoreErrors by now
                words = f"cannot write {os.fspath(path)}: {error.strerror or error}"
                raise PermanentError(words) from error

        self._tried("fetch", name, once)

    def size(self, name: str) -> int | None:
        """Bytes of a file, None if it isn't there."""
        check_name(name)
        return self._tried("size", name, lambda: self._backend.size(name))

    def write(self, name: str, content: bytes | memoryview) -> None:
        """Puts a file there or replaces it; whole or not at all, for every reader."""
        check_name(name)

        def once() -> None:
            self._backend.write(name, io.BytesIO(content), len(content))
            self._count_written(len(content))

        self._tried("write", name, once)

    def put(self, path: str | os.PathLike[str], name: str) -> None:
        """The same, streamed from a local file. Raises PermanentError if that can't be read."""
        check_name(name)

        def once() -> None:
            with _open_local(path) as file:
                size = os.fstat(file.fileno()).st_size
                self._backend.write(name, file, size)
            self._count_written(size)

        self._tried("put", name, once)

    def create(self, name: str, content: bytes) -> bool:
        """Puts a file there if the name is free: True. False where it is taken.

        Of two creators at once exactly one gets True, as long as their contents differ: after a try
        whose outcome isn't known the file is read back, and content that is ours means that we won.
        """
        check_name(name)
        unknown = [False]

        def once() -> bool:
            try:
                won = self._backend.create(name, content)
            except Exception as error:
                unknown[0] |= self._backend.judge(error) is not PermanentError
                raise
            if won:
                self._count_written(len(content))
            return won or (unknown[0] and self._holds(name, content))

        try:
            return self._tried("create", name, once)
        except PassingError:
            if self._holds_or_unknown(name, content):
                return True
            raise

    def entries(self, folder: str) -> list[Entry]:
        """The files in one folder (`""`: the top) by name, as they are now; [] if it isn't there.

        Without those in folders of it, and without names that `check_name` wouldn't take.
        """
        found = self._listing("entries", folder)
        return [Entry(name, size) for name, size in found if size is not None]

    def folders(self, folder: str) -> list[str]:
        """The names of the folders in one folder, in order; [] if it isn't there."""
        return [name for name, size in self._listing("folders", folder) if size is None]

    def tree(self, folder: str) -> list[Entry]:
        """The files below one folder and in all folders in it, by their path from there.

        On S3 and the Hub that is one request for each 1,000 files; elsewhere a listing of each
        folder.
        """
        found = self._listing("tree", folder)
        return [Entry(name, size) for name, size in found if size is not None]

    def remove(self, name: str) -> None:
        """Removes a file; one that isn't there is fine."""
        check_name(name)
        self._tried("remove", name, lambda: self._backend.remove(name))

    def close(self) -> None:
        """Ends waits between tries and gives connections back. Later calls raise PassingError."""
        self._closed.set()
        self._backend.close()

    def _listing(self, method: str, folder: str) -> list[tuple[str, int | None]]:
        if folder:
            check_name(folder)
        look = self._backend.tree if method == "tree" else self._backend.listing
        found = self._tried(method, folder, lambda: look(folder))
        with self._lock:
            self.listed += len(found)
        return sorted((one.name, one.size) for one in found if _is_portable(one.name))

    def _holds(self, name: str, content: bytes) -> bool:
        """Whether the file is there with just this content."""
        parts: list[bytes] = []
        with self._lock:
            self.requests["read"] += 1
        try:
            self._backend.read(name, 0, len(content) + 1, self._counting(parts.append))
        except Exception as error:
            if self._backend.judge(error) is MissingError:
                return False
            raise
        return b"".join(parts) == content

    def _holds_or_unknown(self, name: str, content: bytes) -> bool:
        try:
            return not self._closed.is_set() and self._holds(name, content)
        except Exception as error:
            logger.debug("whether %s was created can't be told: %s", name, type(error).__name__)
            return False

    def _counting(self, take: Take) -> Take:
        def counted(chunk: bytes) -> None:
            with self._lock:
                self.bytes_read += len(chunk)
            take(chunk)

        return counted

    def _count_written(self, size: int) -> None:
        with self._lock:
            self.bytes_written += size

    def _tried(self, method: str, name: str, once: Callable[[], T]) -> T:
        """What `once` gives, with as many tries as there are for passing errors."""
        attempt = 1
        while True:
            if self._closed.is_set():
                raise PassingError(f"{self._place(method, name)}: the store has been closed")
            with self._lock:
                self.requests[method] += 1
            try:
                return once()
            except Exception as error:
                failure, cause = self._failure(method, name, error)
            if not isinstance(failure, PassingError) or attempt == self._attempts:
                raise failure from cause
            bound = min(LONGEST_WAIT_S, self.first_wait_s * 2 ** (attempt - 1))
            wait = self._jitter.uniform(0, bound)
            words = "try %d of %d failed, the next in %.1f s: %s"
            self._rarely.info(words, attempt, self._attempts, wait, failure, about=str(failure))
            self._closed.wait(wait)
            attempt += 1

    def _failure(
        self, method: str, name: str, error: Exception
    ) -> tuple[StoreError, Exception | None]:
        """A backend's error in our words, and itself as the cause unless it holds a secret."""
        if isinstance(error, StoreError):
            return error, error.__cause__ if isinstance(error.__cause__, Exception) else None
        words = self._redacted(_words(error))
        failure = self._backend.judge(error)(f"{self._place(method, name)}: {words}")
        return failure, None if self._secrets else error

    def _place(self, method: str, name: str) -> str:
        return f"{method} {name or 'the top folder'!r} on {self.url}"

    def _redacted(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def _is_portable(path: str) -> bool:
    return all(is_part(part) for part in path.split("/"))


def _words(error: Exception) -> str:
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    line = text.strip().splitlines()[0] if text.strip() else ""
    return f"{line} ({type(error).__name__})" if line else type(error).__name__


def _local_write(file: BinaryIO, path: str | os.PathLike[str]) -> Take:
    """Writes to our own disk; its errors must not be taken for the store's."""

    def take(chunk: bytes) -> None:
        try:
            file.write(chunk)
        except OSError as error:
            raise PermanentError(f"cannot write {os.fspath(path)}: {error.strerror}") from error

    return take


def _open_local(path: str | os.PathLike[str]) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise PermanentError(f"cannot read {os.fspath(path)}: {error.strerror}") from error
