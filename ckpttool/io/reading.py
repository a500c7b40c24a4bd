"""Reading regular files by offset, without mapping them and without trusting a declared length.

Nothing here maps a file into memory: a file that another process cuts short while it is mapped is a
SIGBUS, which no Python code can turn into a message. `pread(2)` has no such trap, needs no shared
file position (so several threads may read through one `FileReader`), and costs little.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from ckpttool.errors import UnreadableError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

# Fits the second-level cache of common processors, so that a checksum finds the bytes still there.
CHUNK_BYTES = 1 << 18
_MOST_SKIPPED = 1 << 16

_KINDS = (
    (stat.S_ISDIR, "is a directory"),
    (stat.S_ISFIFO, "is a named pipe, not a file"),
    (stat.S_ISSOCK, "is a socket, not a file"),
    (stat.S_ISCHR, "is a device, not a file"),
    (stat.S_ISBLK, "is a device, not a file"),
)


class FileReader:
    """A regular file opened for reading. Use it as a context manager, or call `close`.

    `path` is as given, `size` is in bytes and as it was when the file was opened. A symbolic link
    is followed. Raises UnreadableError when the path is missing, forbidden, or no regular file;
    opening a named pipe or a device never blocks.
    """

    __slots__ = ("_descriptor", "_seen", "path", "size")

    is_whole_file = True
    """Whether offsets here are those of the file at `path`, so that it may be mapped instead."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._descriptor = -1
        self._descriptor, status = _open_regular(self.path)
        self._seen = _identity(status)
        self.size = status.st_size

    def read(self, offset: int, length: int) -> bytes:
        """Up to `length` bytes from `offset`; fewer only where the file ends.

        `length` may come from the file itself: never more than what the file holds is allocated.
        """
        length = min(length, self.size - offset)
        if length <= 0 or offset < 0:
            return b""
        data = self._pread(offset, length)
        if len(data) == length:
            return data
        parts = [data]
        while data and (length := length - len(data)) > 0:
            offset += len(data)
            data = self._pread(offset, length)
            parts.append(data)
        return b"".join(parts)

    def chunks(
        self, offset: int, length: int, *, chunk_bytes: int = CHUNK_BYTES
    ) -> Iterator[memoryview]:
        """The bytes from `offset` on in pieces of at most `chunk_bytes`, through one buffer.

        Each piece is valid only until the next is asked for. Ends early where the file ends.
        """
        remaining = min(length, self.size - offset)
        if remaining <= 0 or offset < 0:
            return
        buffer = memoryview(bytearray(min(remaining, chunk_bytes)))
        while remaining > 0:
            count = self._read_into(buffer[:remaining], offset)
            if count == 0:
                return
            yield buffer[:count]
            offset += count
            remaining -= count

    def next_data(self, offset: int) -> int:
        """Where the next bytes lie that are stored at all, from `offset` on; `size` if none are.

        A sparse file has holes, which read as zeros and can be terabytes long (`lseek(2)`,
        SEEK_DATA). Where the system does not tell, everything counts as stored.
        """
        try:
            return min(self.size, os.lseek(self._descriptor, offset, os.SEEK_DATA))
        except OSError as error:
            return self.size if error.errno == errno.ENXIO else offset
        except AttributeError:
            return offset

    def data_end(self) -> int:
        """An offset behind which nothing is stored; what lies there reads as zeros."""
        low, high = 0, self.size
        while low < high:
            middle = (low + high) // 2
            if self.next_data(middle) >= self.size:
                high = middle
            else:
                low = middle + 1
        return low

    def changed(self) -> bool:
        """Whether the file, or what its path leads to, is no longer what was opened.

        Compares device, inode, size and modification time. A path that is gone counts as changed.
        """
        try:
            now = os.fstat(self._descriptor)
            there = os.stat(self.path)
        except OSError:
            return True
        return _identity(now) != self._seen or _identity(there) != self._seen

    def fileno(self) -> int:
        """The file descriptor, for calls such as `posix_fadvise`; it stays this object's."""
        return self._descriptor

    def close(self) -> None:
        """Closes the file. A second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> FileReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _pread(self, offset: int, length: int) -> bytes:
        try:
            return os.pread(self._descriptor, length, offset)
        except OSError as error:
            raise _unreadable(self.path, error) from error

    def _read_into(self, buffer: memoryview, offset: int) -> int:
        try:
            return os.preadv(self._descriptor, [buffer], offset)
        except OSError as error:
            raise _unreadable(self.path, error) from error


class BytesReader(FileReader):
    """Bytes in memory, read as if they were a file: what a pickle carries inside itself."""

    __slots__ = ("_data",)

    is_whole_file = False

    def __init__(self, data: bytes, path: str = "bytes") -> None:
        self.path = path
        self.size = len(data)
        self._data = data
        self._descriptor = -1

    def next_data(self, offset: int) -> int:
        """Bytes have no holes."""
        return offset

    def changed(self) -> bool:
        """Bytes never change."""
        return False

    def _pread(self, offset: int, length: int) -> bytes:
        return self._data[offset : offset + length]

    def _read_into(self, buffer: memoryview, offset: int) -> int:
        piece = self._data[offset : offset + len(buffer)]
        buffer[: len(piece)] = piece
        return len(piece)


class HashingReader(FileReader):
    """A file whose SHA-256 is taken on the way, from what is read of it in order: for one thread.

    What is read once for its checksums is not read again for the hash. What is skipped in between,
    a few headers, is read for it; where reading went otherwise, `sha256` reads what is left.
    """

    __slots__ = ("_digest", "_hashed")

    def __init__(self, path: str | os.PathLike[str]) -> None:
        from hashlib import sha256

        self._digest = sha256()
        self._hashed = 0
        super().__init__(path)

    def sha256(self) -> str:
        """The SHA-256 of the whole file as 64 hexadecimal digits. Raises UnreadableError."""
        for _ in self.chunks(self._hashed, self.size - self._hashed):
            pass
        return self._digest.hexdigest()

    def _pread(self, offset: int, length: int) -> bytes:
        data = super()._pread(offset, length)
        self._take(data, offset)
        return data

    def _read_into(self, buffer: memoryview, offset: int) -> int:
        gap = offset - self._hashed
        if 0 < gap <= _MOST_SKIPPED:
            self._take(super()._pread(self._hashed, gap), self._hashed)
        count = super()._read_into(buffer, offset)
        self._take(buffer[:count], offset)
        return count

    def _take(self, data: bytes | memoryview, offset: int) -> None:
        end = offset + len(data)
        if offset <= self._hashed < end:
            self._digest.update(memoryview(data)[self._hashed - offset :])
            self._hashed = end


class WindowReader(FileReader):
    """A part of an open file, read as if it were a file: one archive of several in a shard.

    It begins at `offset` of `whole` and has `length` bytes, or as many as are there. The file stays
    the caller's to close.
    """

    __slots__ = ("_offset", "_whole")

    def __init__(self, whole: FileReader, offset: int, length: int) -> None:
        self.path = whole.path
        self.size = max(0, min(length, whole.size - offset))
        self._whole = whole
        self._offset = offset
        self._descriptor = -1

    is_whole_file = False

    def next_data(self, offset: int) -> int:
        """See `FileReader.next_data`."""
        return min(self.size, self._whole.next_data(self._offset + offset) - self._offset)

    def changed(self) -> bool:
        """Whether the whole file has changed."""
        return self._whole.changed()

    def fileno(self) -> int:
        """The whole file's descriptor, whose offsets are not this reader's."""
        return self._whole.fileno()

    def _pread(self, offset: int, length: int) -> bytes:
        return self._whole._pread(self._offset + offset, length)

    def _read_into(self, buffer: memoryview, offset: int) -> int:
        return self._whole._read_into(buffer[: self.size - offset], self._offset + offset)


def _open_regular(path: str) -> tuple[int, os.stat_result]:
    # Non-blocking: opening a named pipe that has no writer would otherwise wait for ever.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags)
    except ValueError as error:  # a null character in the path
        raise UnreadableError(path, str(error)) from error
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UnreadableError(path, _kind_in_words(status.st_mode))
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, UnreadableError):
            raise
        raise _unreadable(path, error) from error
    return descriptor, status


def _kind_in_words(mode: int) -> str:
    return next((words for test, words in _KINDS if test(mode)), "is not a regular file")


def _unreadable(path: str, error: OSError) -> UnreadableError:
    return UnreadableError(path, error.strerror or str(error))


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
