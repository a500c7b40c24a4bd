"""A directory, on this machine or shared by a network file system.

Without fsspec: its local file system neither syncs what it writes nor offers the link on which
`create` rests, and both are in `ckpttool.io.durable` already.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

from ckpttool.io.durable import (
    NO_LINKS,
    fsync_directory,
    make_directories,
    parse_temporary_name,
    write_durably,
)
from trainer_core.diloco.store.backend import CHUNK, Backend, Found, Take
from trainer_core.diloco.store.deadline import Pulse, run_watched

OLD_S = 24 * 3600.0
"""Seconds, by the file system's own clock, after which a temporary belongs to nobody."""
SYNC_EVERY = 64 << 20
"""Bytes, roughly: a file is synced in such pieces, so that the last sync of a long one on a slow
disk isn't taken for one that hangs."""


class LocalBackend(Backend):
    """Files under one directory, which is made when the first is written; its parent must exist."""

    def __init__(self, directory: str, timeout: float) -> None:
        self.root = os.path.abspath(directory)
        self.timeout = timeout
        self._swept: set[str] = set()
        self._has_seen = False  # the directory: one that is gone later is never made anew

    def read(self, name: str, start: int, end: int | None, take: Take) -> None:
        run_watched(lambda pulse: self._read(name, start, end, take, pulse), self.timeout)

    def size(self, name: str) -> int | None:
        return run_watched(lambda _: self._size(name), self.timeout)

    def write(self, name: str, file: BinaryIO, size: int) -> None:
        run_watched(lambda pulse: self._write(name, file, pulse), self.timeout)

    def create(self, name: str, content: bytes) -> bool:
        """Through a link of a finished file, which never overwrites.

        Where the file system has no links the name itself is opened exclusively. Still exactly one
        creator wins, but a reader may meet the file half written, and it stays so if the winner
        dies: whoever reads what was created must take an unreadable file for a passing error.
        """
        return run_watched(lambda pulse: self._create(name, content, pulse), self.timeout)

    def listing(self, folder: str) -> list[Found]:
        return run_watched(lambda _: self._listing(folder), self.timeout)

    def remove(self, name: str) -> None:
        run_watched(lambda _: self._remove(name), self.timeout)

    def _read(self, name: str, start: int, end: int | None, take: Take, pulse: Pulse) -> None:
        path = self._inside(name)
        # O_NONBLOCK: a named pipe must not keep us waiting for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        with open(descriptor, "rb", buffering=0) as file:
            _require_file(os.fstat(descriptor), path)
            file.seek(start)
            left = None if end is None else max(0, end - start)
            while chunk := file.read(CHUNK if left is None else min(CHUNK, left)):
                left = None if left is None else left - len(chunk)
                pulse.beat()
                take(chunk)

    def _size(self, name: str) -> int | None:
        try:
            status = os.lstat(self._inside(name))
        except FileNotFoundError:
            return None
        _require_file(status, name)
        return status.st_size

    def _write(self, name: str, file: BinaryIO, pulse: Pulse) -> None:
        path = self._target(name)

        def copy(output: BinaryIO) -> None:
            written = 0
            while chunk := file.read(CHUNK):
                pulse.beat()
                output.write(chunk)
                written += len(chunk)
                if written % SYNC_EVERY < len(chunk):
                    output.flush()
                    os.fsync(output.fileno())

        write_durably(path, copy, check=lambda _: pulse.beat())
        self._sweep(path)

    def _create(self, name: str, content: bytes, pulse: Pulse) -> bool:
        path = self._target(name)
        if os.path.lexists(path):
            return False
        temporary = _temporary_beside(path)
        try:
            write_durably(temporary, lambda output: output.write(content))
            pulse.beat()
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            return _create_in_place(path, content)
        finally:
            _unlink(temporary)
        fsync_directory(os.path.dirname(path))
        return True

    def _listing(self, folder: str) -> list[Found]:
        try:
            with os.scandir(self._inside(folder)) as entries:
                found = [self._found(entry) for entry in entries]
                self._has_seen = True
        except FileNotFoundError:
            return []
        return [one for one in found if one is not None]

    def _found(self, entry: os.DirEntry[str]) -> Found | None:
        if entry.is_symlink() and not self._is_inside(os.path.realpath(entry.path)):
            return None
        try:
            status = entry.stat()
        except FileNotFoundError:  # removed meanwhile, or a link to nothing
            return None
        except OSError:
            if entry.is_symlink():  # to itself
                return None
            raise
        if stat.S_ISDIR(status.st_mode):
            return Found(entry.name, None)
        return Found(entry.name, status.st_size) if stat.S_ISREG(status.st_mode) else None

    def _remove(self, name: str) -> None:
        try:
            os.unlink(self._target(name, make=False))
        except FileNotFoundError:
            return

    def _inside(self, name: str) -> str:
        """Where the name leads, links followed; PermissionError if that is outside of the store."""
        path = os.path.realpath(os.path.join(self.root, name))
        if not self._is_inside(path):
            words = "is a symbolic link that leads out of the store"
            raise PermissionError(errno.EPERM, words, name)
        return path

    def _is_inside(self, path: str) -> bool:
        root = os.path.realpath(self.root)
        return os.path.commonpath([root, path]) == root

    def _target(self, name: str, *, make: bool = True) -> str:
        """The path to write to, its folder made and inside; a link as the last part is replaced."""
        folder, last = os.path.split(name)
        directory = self._inside(folder)
        if make:
            self._require_root()
            make_directories(directory)
            self._has_seen = True
        return os.path.join(directory, last)

    def _require_root(self) -> None:
        """That it is there, or may be made: that might hide that a file system isn't mounted."""
        if os.path.isdir(self.root):
            return
        if self._has_seen:
            words = "the directory of the store is gone: was it moved away, or not mounted?"
            raise OSError(errno.ESTALE, words, self.root)
        parent = os.path.dirname(self.root)
        if not os.path.isdir(parent):
            raise NotADirectoryError(errno.ENOTDIR, "no such directory", parent)

    def _sweep(self, written: str) -> None:
        """Removes what killed writers left in this folder; once for each folder, never fails."""
        folder = os.path.dirname(written)
        if folder in self._swept:
            return
        self._swept.add(folder)
        try:
            now = os.stat(written).st_mtime
            with os.scandir(folder) as entries:
                for entry in entries:
                    old = parse_temporary_name(entry.name) and now - entry.stat().st_mtime > OLD_S
                    if old:
                        os.unlink(entry.path)
        except OSError:
            return


def _require_file(status: os.stat_result, path: str) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.ENXIO, "not a regular file", path)


def _temporary_beside(path: str) -> str:
    import secrets

    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")


def _create_in_place(path: str, content: bytes) -> bool:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        return False
    try:
        with open(descriptor, "wb") as output:
            output.write(content)
            output.flush()
            os.fsync(descriptor)
    except BaseException:
        _unlink(path)
        raise
    fsync_directory(os.path.dirname(path))
    return True


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
