"""An open directory in which files are moved about by plain names.

A path is looked up anew each time, and whoever may write in the directory can put a link in its
way.
Here every name is one component, looked up in a directory that is held open, and links are moved
themselves, never followed (`openat(2)`, `renameat(2)`, `linkat(2)`).
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from ckpttool.errors import FormatError
from ckpttool.io.durable import sync_open_directory

if TYPE_CHECKING:
    from types import TracebackType

_ENTER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MAKE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def plain_name(name: object) -> str:
    """The name itself, when it names an entry of a directory and nothing else; else FormatError."""
    if not isinstance(name, str) or name in ("", ".", ".."):
        raise FormatError(f"not the name of a file: {str(name)[:80]!r}")
    if "/" in name or "\0" in name or (os.altsep and os.altsep in name) or len(name) > 1024:
        raise FormatError(f"not a plain name: {name[:80]!r}")
    return name


def same_file(one: os.stat_result | None, other: os.stat_result | None) -> bool:
    """Whether both are there, and are one file under two names."""
    if one is None or other is None:
        return False
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


class Folder:
    """An open directory; a context manager. Methods raise OSError for what the system says.

    The directory at `path` may be reached through links, as the user gave it; one that is entered
    from it by name may not.
    """

    __slots__ = ("_descriptor", "path")

    def __init__(self, path: str | os.PathLike[str], descriptor: int | None = None) -> None:
        self.path = os.fspath(path)
        self._descriptor = -1
        self._descriptor = os.open(self.path, _ENTER) if descriptor is None else descriptor

    def enter(self, name: str) -> Folder:
        """The folder `name` in this one. NotADirectoryError for a link or anything else."""
        path = os.path.join(self.path, plain_name(name))
        try:
            descriptor = os.open(name, _ENTER | os.O_NOFOLLOW, dir_fd=self._descriptor)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise NotADirectoryError(errno.ENOTDIR, "is a link, not a directory", path) from error
        return Folder(path, descriptor)

    def make(self, name: str) -> None:
        """Makes an empty folder, durably. FileExistsError where the name is taken."""
        os.mkdir(plain_name(name), dir_fd=self._descriptor)
        self.sync()

    def names(self) -> list[str]:
        """What is in it, sorted."""
        return sorted(os.listdir(self._descriptor))

    def status(self, name: str) -> os.stat_result | None:
        """What `lstat` says of an entry, None where there is none."""
        try:
            return os.stat(plain_name(name), dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def read(self, name: str, most: int) -> bytes | None:
        """The content of a regular file of at most `most` bytes, None where there is nothing.

        OSError with EINVAL for what is no regular file, EFBIG for a larger one.
        """
        try:
            descriptor = os.open(plain_name(name), _READ, dir_fd=self._descriptor)
        except FileNotFoundError:
            return None
        with open(descriptor, "rb", buffering=0) as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "is not a regular file", self._path(name))
            parts, room = [], most + 1
            while room > 0 and (part := file.read(room)):
                parts.append(part)
                room -= len(part)
            if room <= 0:
                raise OSError(errno.EFBIG, f"is larger than {most:,} bytes", self._path(name))
        return b"".join(parts)

    def write_new(self, name: str, content: bytes, mode: int | None = None) -> None:
        """Makes a file with this content, synced; its name is durable after `sync`.

        What a failed or killed try has left under the name is replaced.
        """
        self.remove(name)
        descriptor = os.open(plain_name(name), _MAKE, 0o666, dir_fd=self._descriptor)
        with open(descriptor, "wb", buffering=0) as file:
            write_all(descriptor, content)
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())

    def appender(self, name: str) -> int:
        """A descriptor that appends to a file, which is made if missing. The caller closes it."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(plain_name(name), flags, 0o666, dir_fd=self._descriptor)

    def sync_file(self, name: str) -> None:
        """Makes the content of a regular file durable."""
        descriptor = os.open(plain_name(name), _READ, dir_fd=self._descriptor)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def sync_tree(self, name: str, depth: int = 100) -> None:
        """Makes the content of a file durable, or of a folder with all that is in it.

        Links in a folder are left alone. OSError with EINVAL for more than `depth` levels.
        """
        status = self.status(name)
        if status is None or not stat.S_ISDIR(status.st_mode):
            self.sync_file(name)
            return
        if depth <= 0:
            raise OSError(errno.EINVAL, "folders are nested too deep", self._path(name))
        with self.enter(name) as folder:
            for inner in folder.names():
                found = folder.status(inner)
                if found is not None and stat.S_IFMT(found.st_mode) in (stat.S_IFREG, stat.S_IFDIR):
                    folder.sync_tree(inner, depth - 1)
            folder.sync()

    def change_mode(self, name: str, mode: int) -> None:
        """Sets the permission bits of a regular file, never through a link.

        Durable, unless the file may not be read then: only what can be opened can be synced.
        """
        flags = getattr(os, "O_PATH", os.O_RDONLY) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(plain_name(name), flags, dir_fd=self._descriptor)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "is not a regular file", self._path(name))
            # One that is opened only as a place needs no right to read, and takes no fchmod; so it
            # is named by its number (`proc_pid_fd(5)`).
            named = f"/proc/self/fd/{descriptor}"
            os.chmod(named if os.path.lexists(named) else descriptor, mode)
        finally:
            os.close(descriptor)
        try:
            self.sync_file(name)
        except PermissionError:
            return

    def rename(self, name: str, into: Folder, new: str) -> None:
        """Moves an entry, replacing what has the new name; not durable before both are synced."""
        os.rename(
            plain_name(name),
            plain_name(new),
            src_dir_fd=self._descriptor,
            dst_dir_fd=into._descriptor,
        )

    def link(self, name: str, into: Folder, new: str) -> None:
        """Gives a file a second name. FileExistsError where that is taken."""
        os.link(
            plain_name(name),
            plain_name(new),
            src_dir_fd=self._descriptor,
            dst_dir_fd=into._descriptor,
            follow_symlinks=False,
        )

    def move(self, name: str, into: Folder, new: str) -> None:
        """Moves an entry durably, never over another: FileExistsError where the name is taken.

        Killed half-way, it leaves one file with both names, and does the rest when called again.
        The new name is durable before the old one goes: after a power cut, one of them is there.
        """
        try:
            self.link(name, into, new)
        except FileExistsError:
            if not same_file(self.status(name), into.status(new)):
                raise
            into.sync()
            self.remove(name)
        except OSError:
            # No links here, or not of directories. What holds the name then holds it by itself: a
            # rename would replace it.
            if into.status(new) is not None:
                raise FileExistsError(
                    errno.EEXIST, os.strerror(errno.EEXIST), into._path(new)
                ) from None
            self.rename(name, into, new)
            into.sync()
        else:
            into.sync()
            self.remove(name)
        self.sync()

    def remove(self, name: str) -> None:
        """Removes a name that is no folder's, if it is there."""
        try:
            os.unlink(plain_name(name), dir_fd=self._descriptor)
        except FileNotFoundError:
            return

    def remove_tree(self, name: str, depth: int = 100) -> None:
        """Removes an entry for good, a folder with all that is in it, `depth` levels at most."""
        status = self.status(name)
        if status is None or not stat.S_ISDIR(status.st_mode):
            self.remove(name)
            return
        if depth <= 0:
            raise OSError(errno.EINVAL, "folders are nested too deep", self._path(name))
        with self.enter(name) as folder:
            for inner in folder.names():
                folder.remove_tree(inner, depth - 1)
        self.remove_folder(name)

    def remove_folder(self, name: str) -> None:
        """Removes an empty folder."""
        os.rmdir(plain_name(name), dir_fd=self._descriptor)

    def sync(self) -> None:
        """Makes what was made, moved and removed in it durable."""
        sync_open_directory(self._descriptor)

    def identity(self) -> os.stat_result:
        """What `fstat` says of the directory itself."""
        return os.fstat(self._descriptor)

    def close(self) -> None:
        """Closes it. A second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _path(self, name: str) -> str:
        return os.path.join(self.path, name)

    def __enter__(self) -> Folder:
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


def write_all(descriptor: int, content: bytes) -> None:
    """Writes all of it: the system may take less at a time."""
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
