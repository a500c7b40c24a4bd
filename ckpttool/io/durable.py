"""Durable, atomic writing, and the names of the temporaries that it goes through.

The order is the one that survives a power cut (Pillai et al., OSDI 2014, "All File Systems Are Not
Created Equal"): write to a temporary in the target's directory, fsync it, rename it over the
target, fsync the directory. A reader sees the old file or the new one, never a part of either.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.errors import UnreadableError, WriteError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO, TypeVar

    from ckpttool.io.reading import FileReader

    T = TypeVar("T")
    # (bytes done, bytes in all, label): called from time to time by whatever takes long.
    Progress = Callable[[int, int, str], object]

_TEMPORARY = re.compile(r"\.(?P<target>.+)\.tmp-(?P<pid>[0-9]+)(?:-[0-9a-z]+)?\Z", re.DOTALL)
_COPY_CHUNK = 1 << 20
# Says "a directory cannot be fsynced here" on some network and FUSE file systems; not an I/O error.
_NO_DIRECTORY_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.ENOSYS})
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# The attribute in which such an error carries the space in words, counted before tidying up.
_SPACE = "ckpttool_space"
# Says "no hard links here" (exFAT, some FUSE and network file systems).
NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EACCES})

_BUSY = frozenset({errno.EACCES, errno.EPERM, errno.EBUSY})
_BUSY_WAITS_S = (0.05, 0.1, 0.2, 0.4)


class Temporary(NamedTuple):
    """The parts of a temporary's name: the file that it was to become, and its writer's pid."""

    target: str
    pid: int


def temporary_name(target: str, pid: int, attempt: int = 0) -> str:
    """The name that a writer with this pid gives to `target` while it is being written."""
    suffix = f"-{attempt}" if attempt else ""
    return f".{target}.tmp-{pid}{suffix}"


def parse_temporary_name(name: str) -> Temporary | None:
    """Target and pid if the name is that of a temporary, else None."""
    match = _TEMPORARY.match(name)
    return Temporary(match["target"], int(match["pid"][:18])) if match else None


def write_durably(
    path: str | os.PathLike[str],
    write: Callable[[BinaryIO], T],
    *,
    mode: int | None = None,
    replace: bool = True,
    sync: bool = True,
    check: Callable[[str], object] | None = None,
) -> T:
    """Writes a file so that after any crash `path` is wholly old or wholly new.

    `write` gets a binary file that is open for writing, and what it returns is returned. `mode` is
    the permission bits of the new file; None leaves them to the umask. The directory must exist. A
    symbolic link at `path` is replaced, never followed. With `replace=False` a file that is at
    `path`, or comes to be there meanwhile, stays, and FileExistsError is raised.
    `check(temporary)` may look at the finished file, synced and closed, before it gets its name.
    Without `sync`, nothing is: whole after a crash of the program, perhaps not after a power cut.

    Any error, an interrupt included, leaves the old file as it was, removes the temporary, and is
    raised as it came (OSError for what the system says). Only when the last step fails, the fsync
    of the directory, is the new file there already: whole, but perhaps not yet safe from a power
    cut.
    """
    target = os.fspath(path)
    temporary, file = _create_temporary(target)
    try:
        result = write(file)
        file.flush()
        if mode is not None:
            os.fchmod(file.fileno(), mode)
        if sync:
            os.fsync(file.fileno())
        file.close()
        if check is not None:
            check(temporary)
        _publish(temporary, target, replace=replace)
    except BaseException as error:
        _note_space(error, lambda: _free_words(target))  # before the temporary gives its own back
        _discard(file, temporary)
        raise
    if sync:
        fsync_directory(os.path.dirname(target) or ".")
    return result


def fsync_directory(path: str | os.PathLike[str]) -> None:
    """Makes renames, creations and deletions in a directory durable. Raises OSError."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows: a directory can't be opened, nor need it be
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_open_directory(descriptor)
    finally:
        os.close(descriptor)


def sync_open_directory(descriptor: int) -> None:
    """`fsync_directory` of one that is open. Raises OSError."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise


def make_directories(directory: str) -> None:
    """Makes a directory and its parents, and makes their names durable. Raises WriteError."""
    made: list[str] = []
    parent = directory
    while not os.path.isdir(parent) and os.path.dirname(parent) != parent:
        made.append(parent)
        parent = os.path.dirname(parent)
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        # Distributed file systems have been seen to say EEXIST for a directory that is there.
        if not os.path.isdir(directory):
            raise write_error(directory, error) from error
    for name in reversed(made):
        try:
            fsync_directory(os.path.dirname(name))
        except PermissionError:
            pass  # a parent that we may not read, only enter


def copy_durably(
    source: str | os.PathLike[str] | FileReader,
    destination: str | os.PathLike[str],
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> int:
    """Copies a regular file durably, reads the copy back before it gets its name, and counts bytes.

    Permission bits and modification time are kept. An existing `destination` is kept too, and
    FileExistsError raised, unless `force`; the source itself is never overwritten.
    `progress(done, total, label)` counts the bytes written and those read back. Raises
    UnreadableError when the source can't be read or changes meanwhile, WriteError when what is
    read back differs, OSError when the system refuses; in each case no file is left behind and
    an old one is untouched.
    """
    from ckpttool.io.reading import FileReader

    if isinstance(source, FileReader):
        return _copy(source, os.fspath(destination), force, progress)
    with FileReader(os.fspath(source)) as reader:
        return _copy(reader, os.fspath(destination), force, progress)


def write_error(path: str | os.PathLike[str], error: OSError) -> WriteError:
    """An OSError met while writing `path`, as a WriteError in plain words.

    For a full disk it says the free space at the failure; for a copy that was needed and was free.
    """
    if isinstance(error, WriteError):
        return error
    reason = error.strerror or str(error) or type(error).__name__
    _note_space(error, lambda: _free_words(os.fspath(path)))
    if space := getattr(error, _SPACE, ""):
        reason += f" ({space})"
    wrapped = WriteError(path, f"cannot write: {reason}")
    wrapped.errno = error.errno
    return wrapped


def _create_temporary(target: str) -> tuple[str, BinaryIO]:
    directory, name = os.path.split(target)
    attempt = 0
    while True:
        temporary = os.path.join(directory, temporary_name(name, os.getpid(), attempt))
        try:
            # Python creates with 0o666, so that the umask decides as it does for any other file.
            return temporary, open(temporary, "xb")
        except FileExistsError:
            attempt += 1


def _publish(temporary: str, target: str, *, replace: bool) -> None:
    if replace:
        _replace(temporary, target)
        return
    try:
        # Unlike a rename, a link never overwrites: nobody's file is lost, not even in a race.
        os.link(temporary, target)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from None
        os.replace(temporary, target)
    else:
        os.unlink(temporary)


def _replace(temporary: str, target: str) -> None:
    """Renames; tries again where somebody holds the target for a moment, as scanners on Windows."""
    for wait in _BUSY_WAITS_S:
        try:
            return os.replace(temporary, target)
        except OSError as error:
            if error.errno not in _BUSY:
                raise
        time.sleep(wait)
    return os.replace(temporary, target)


def _discard(file: BinaryIO, temporary: str) -> None:
    """Closes and removes, quietly: what went wrong first is what the caller must hear of."""
    try:
        file.close()  # a full disk makes the last flush fail again here
    except (OSError, ValueError):
        pass
    try:
        os.unlink(temporary)
    except OSError:
        pass


def _copy(reader: FileReader, destination: str, force: bool, progress: Progress | None) -> int:
    status = os.stat(reader.path)
    _refuse_overwriting(reader.path, destination, force)

    def write(file: BinaryIO) -> int:
        checksum = _copy_bytes(reader, file, progress)
        file.flush()
        os.fsync(file.fileno())
        if reader.changed():
            raise UnreadableError(reader.path, "changed while it was being copied")
        _read_back(file, destination, checksum, reader.size, progress)
        os.utime(file.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
        return reader.size

    mode = stat.S_IMODE(status.st_mode)
    before = _free_bytes(destination)
    writing = f"{reader.size:,} bytes needed"
    words = writing if before is None else f"{writing}, {before:,} free before"

    def write_or_say(file: BinaryIO) -> int:
        try:
            return write(file)
        except OSError as error:
            _note_space(error, lambda: words)
            raise

    return write_durably(destination, write_or_say, mode=mode, replace=force)


def _refuse_overwriting(source: str, destination: str, force: bool) -> None:
    """Before gigabytes are copied for nothing; the last word has the link in `_publish`."""
    if not os.path.lexists(destination):
        return
    if os.path.exists(destination) and os.path.samefile(source, destination):
        raise FileExistsError(errno.EEXIST, "is the very file that is to be copied", destination)
    if not force:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), destination)


def _copy_bytes(reader: FileReader, file: BinaryIO, progress: Progress | None) -> int:
    from ckpttool.io.checksum import crc32

    checksum = done = 0
    for chunk in reader.chunks(0, reader.size, chunk_bytes=_COPY_CHUNK):
        checksum = crc32(chunk, checksum)
        file.write(chunk)
        done += len(chunk)
        if progress:
            progress(done, 2 * reader.size, "copying")
    if done != reader.size:
        raise UnreadableError(reader.path, f"ends after {done} of {reader.size} bytes")
    return checksum


def _read_back(
    file: BinaryIO, destination: str, checksum: int, size: int, progress: Progress | None
) -> None:
    from ckpttool.io.checksum import crc32
    from ckpttool.io.reading import FileReader

    if hasattr(os, "posix_fadvise"):
        # So that the disk is read, where the system lets us, and not just the page cache.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    found = done = 0
    with FileReader(file.name) as copy:
        for chunk in copy.chunks(0, copy.size, chunk_bytes=_COPY_CHUNK):
            found = crc32(chunk, found)
            done += len(chunk)
            if progress:
                progress(size + done, 2 * size, "reading back")
    if (done, found) != (size, checksum):
        raise WriteError(destination, "what was read back differs from what was written")


def _note_space(error: BaseException, words: Callable[[], str]) -> None:
    """Lets an error of a full disk carry the space, unless it does so already."""
    if isinstance(error, OSError) and error.errno in FULL and not hasattr(error, _SPACE):
        setattr(error, _SPACE, words())


def _free_words(path: str) -> str:
    free = _free_bytes(path)
    return "" if free is None else f"{free:,} bytes free"


def _free_bytes(path: str) -> int | None:
    """What an ordinary user may still write in the directory of `path`; None if nobody knows."""
    if not hasattr(os, "statvfs"):
        return None
    try:
        status = os.statvfs(os.path.dirname(path) or ".")
    except OSError:
        return None
    return status.f_bavail * status.f_frsize
