"""What a kind of store has to do; everything else is the Store's, the same for all of them."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import BinaryIO, NamedTuple

from trainer_core.diloco.errors import MissingError, PassingError, PermanentError, StoreError
from trainer_core.diloco.names import is_part

CHUNK = 4 << 20
"""Bytes: how much a streamed read or write moves between two looks at the clock."""

Take = Callable[[bytes], object]

_PERMANENT = frozenset(
    {
        *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ELOOP),
        *(errno.ENAMETOOLONG, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EFBIG),
        *(errno.EXDEV, errno.ENXIO, errno.ENODEV, errno.EEXIST),
    }
)


class Found(NamedTuple):
    """One thing in a folder; `size` in bytes, None for a folder."""

    name: str
    size: int | None


class Backend(ABC):
    """One kind of store. Each method makes one try, within its own time-out, from any thread.

    They raise what the system or the library under them raises; `judge` says what it means. Names
    are checked already. A folder is `""` for the top.
    """

    @abstractmethod
    def read(self, name: str, start: int, end: int | None, take: Take) -> None:
        """Gives the bytes of one state of the file, in order; fewer where it ends before `end`."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Bytes of a file; None if there is none."""

    @abstractmethod
    def write(self, name: str, file: BinaryIO, size: int) -> None:
        """Puts `size` bytes of the file under the name: whole or not at all for every reader."""

    @abstractmethod
    def create(self, name: str, content: bytes) -> bool:
        """The same if the name is free, else False; of two at once exactly one gets True."""

    @abstractmethod
    def listing(self, folder: str) -> list[Found]:
        """What is in one folder now, without temporaries; empty where there is no such folder."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""

    def tree(self, folder: str) -> list[Found]:
        """Every file below a folder, by its path from there: a listing for each folder in it."""
        files: list[Found] = []
        for name, size in self.listing(folder):
            if size is not None:
                files.append(Found(name, size))
            elif is_part(name):
                below = self.tree(f"{folder}/{name}" if folder else name)
                files += [Found(f"{name}/{one.name}", one.size) for one in below]
        return files

    def judge(self, error: Exception) -> type[StoreError]:
        """What an error of the methods above means: Missing-, Passing- or PermanentError."""
        return judge_os(error)

    def close(self) -> None:
        """Gives connections back. Nothing is asked after it."""
        return


def judge_os(error: Exception) -> type[StoreError]:
    """What the errors that Python itself has for files and connections mean."""
    if isinstance(error, FileNotFoundError):
        return MissingError
    if isinstance(error, PermissionError):
        return PermanentError
    if isinstance(error, OSError):
        return PermanentError if error.errno in _PERMANENT else PassingError
    return PassingError if isinstance(error, (TimeoutError, EOFError)) else PermanentError
