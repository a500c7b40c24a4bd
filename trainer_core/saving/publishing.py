"""Publishing one file: space looked up, written, hashed, checked, and only then given its name."""

from __future__ import annotations

import errno
import os
import sys
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple, Protocol, cast

import torch

from ckpttool.errors import WriteError
from ckpttool.io.durable import make_directories, write_durably, write_error
from trainer_core.saving.hashed import HashedFile
from trainer_core.saving.retrying import WAITS_S, retrying


class Written(NamedTuple):
    """What came to be on disk: size in bytes, and the SHA-256 of all of it where it was wanted."""

    size: int
    sha256: str | None


class Record(NamedTuple):
    """One member of an archive as it was written: size in bytes, and CRC-32."""

    size: int
    crc: int


class Content(Protocol):
    """What is to be written. `nbytes`: about how much; `beside`: see HashedFile."""

    nbytes: int
    beside: bool

    def write(self, file: HashedFile) -> None:
        """Writes all of it; may be called again, with another file, after a failure."""

    def check(self, path: str) -> str | None:
        """What is wrong with the finished file at `path`, in words. Raises OSError."""


def publish(
    content: Content,
    path: str | os.PathLike[str],
    *,
    sync: bool = True,
    digest: bool = False,
    min_free: int = 0,
    waits_s: Sequence[float] = WAITS_S,
    watch: Callable[[], object] | None = None,
) -> Written:
    """Writes `path` so that after any crash it is wholly old or wholly new.

    Makes missing directories. Refuses before it writes where less than `min_free` bytes of space
    would be left. Transient errors are met with new tries and new temporaries (see `retrying`).
    The finished file is opened again and checked before it gets its name, so that a system that
    loses bytes in silence is found out. Without `sync`, see `write_durably`; for `digest` and
    `watch`, HashedFile. Whatever goes wrong leaves the old file and no temporary. Raises
    WriteError, and what `content.write` raises.
    """
    target = os.path.abspath(path)
    directory = os.path.dirname(target)
    make_directories(directory)

    def attempt() -> Written:
        check_space(target, content.nbytes, min_free)
        return _write_once(content, target, sync, digest, watch)

    return retrying(attempt, target, waits_s=waits_s)


def _write_once(
    content: Content,
    target: str,
    sync: bool,
    digest: bool,
    watch: Callable[[], object] | None,
) -> Written:
    written: list[Written] = []

    def write(file: BinaryIO) -> None:
        beside = content.beside
        with HashedFile(file, digest=digest, beside=beside, watch=watch) as hashed:
            content.write(hashed)
            written.append(Written(hashed.size, hashed.sha256()))

    def check(temporary: str) -> None:
        arrived = os.stat(temporary).st_size
        problem = content.check(temporary)
        if arrived != written[0].size:
            problem = f"{arrived:,} bytes arrived of the {written[0].size:,} that were written"
        if problem is not None:
            raise _not_whole(target, problem)

    with _noted_as_being_written(target):
        try:
            write_durably(target, write, sync=sync, check=check)
        except OSError as error:
            raise write_error(target, error) from error
    return written[0]


def _not_whole(path: str, words: str) -> WriteError:
    """A WriteError for a file that is not what was written; with EIO, so that it is tried again."""
    error = WriteError(path, f"cannot write: {words}")
    error.errno = errno.EIO
    return error


def check_space(path: str, needed: int, min_free: int) -> None:
    """Raises WriteError (ENOSPC) if the file system of `path` has not room for `needed` bytes more.

    `min_free` bytes are to stay free beside them. Where nobody knows, nothing is raised.
    """
    free = free_bytes(os.path.dirname(path))
    if free is None or needed + min_free <= free:
        return
    rest = f" and {min_free:,} are to stay free" if min_free else ""
    error = WriteError(path, f"cannot write: {needed:,} bytes are needed{rest}, {free:,} are free")
    error.errno = errno.ENOSPC
    raise error


def free_bytes(directory: str) -> int | None:
    """What this user may still write in the file system of `directory`, in bytes, if known."""
    if not hasattr(os, "statvfs"):
        return None
    try:
        status = os.statvfs(directory)
    except OSError:
        return None
    if status.f_blocks == 0:
        return None  # some network and FUSE file systems don't count
    blocks = status.f_bfree if os.geteuid() == 0 else status.f_bavail
    return blocks * status.f_frsize


class PlainBytes:
    """A small file that is in memory already."""

    beside = False

    def __init__(self, data: bytes) -> None:
        self.nbytes = len(data)
        self._data = data

    def write(self, file: HashedFile) -> None:
        """Writes it in one go."""
        file.write(self._data)

    def check(self, path: str) -> str | None:
        """Reads it again."""
        with open(path, "rb") as file:
            same = file.read() == self._data
        return None if same else "what is read back differs from what was written"


class TorchSave:
    """A state as torch itself writes it."""

    beside = False  # torch's chunks are gone when `write` returns

    def __init__(self, state: Any) -> None:
        self.nbytes = 0  # not known before it is pickled
        self._state = state

    def write(self, file: HashedFile) -> None:
        """`torch.save`, raising what really went wrong."""
        # An open file, not a path: torch's own writer would end the process on a full disk, and
        # would name the archive's root folder after the temporary.
        outer = sys.exc_info()[1]
        try:
            torch.save(self._state, cast(BinaryIO, file))
        except RuntimeError as error:
            # When writing fails, torch still tries to finish the archive, fails over its own
            # bookkeeping, and raises that; the cause is what the caller has to hear of.
            cause = error.__context__
            if cause is None or cause is outer or not _is_from_outside(cause):
                raise
            raise cause from None

    def check(self, path: str) -> str | None:
        """What is wrong with the file's end or its directory."""
        return check_archive(path)


def check_archive(path: str, records: Mapping[str, Record] | None = None) -> str | None:
    """Reads a zip's end record and directory; says what is wrong unless it has just `records`."""
    try:
        with zipfile.ZipFile(path) as archive:
            found = {info.filename: Record(info.file_size, info.CRC) for info in archive.infolist()}
    except zipfile.BadZipFile as error:
        return f"the file cannot be read back: {error}"
    if records is not None and found != records:
        return "the archive's directory is not what was written"
    return None


def _is_from_outside(error: BaseException) -> bool:
    """An error of the disk, an interrupt or an exit: nothing that torch or pickle says."""
    return isinstance(error, OSError) or not isinstance(error, Exception)


_being_written: Counter[str] = Counter()
_counting = threading.Lock()


@contextmanager
def _noted_as_being_written(target: str) -> Iterator[None]:
    with _counting:
        _being_written[target] += 1
    try:
        yield
    finally:
        with _counting:
            _being_written[target] -= 1
            if not _being_written[target]:
                del _being_written[target]


def is_writing(pid: int, target: str) -> bool:
    """Whether the process `pid` of this host may still be writing the absolute path `target`."""
    if pid == os.getpid():
        # In a container every run may have the same number: ask what this one really does.
        return _being_written[target] > 0
    if os.name != "posix" or pid <= 0:
        return pid > 0  # elsewhere there is no harmless signal to ask with
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
