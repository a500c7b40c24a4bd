"""Where a new file may be written: asked before anything is read, and again before it is named."""

from __future__ import annotations

import errno
import os
import stat

from ckpttool.errors import RefusedError, WriteError

_KINDS = (
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


def refuse_output(out: str, source: str, *, force: bool) -> None:
    """Raises RefusedError or WriteError where `out` must not or cannot be made from `source`.

    `force` lets a regular file be replaced, and nothing else: a link, a device or a pipe would be
    lost, and what it leads to not written.
    """
    if not out:
        raise WriteError("OUT", "is empty: it must name the file to write")
    try:
        status = os.lstat(out)
    except FileNotFoundError:
        _require_directory(out)
        return
    except (OSError, ValueError) as error:
        raise _cannot(out, error) from error
    if _same(out, source):
        raise RefusedError(
            f"{out}: is the very file that it would be made from, which is never touched"
        )
    kind = _kind(status.st_mode)
    if kind is not None:
        raise RefusedError(f"{out}: is {kind}; --force replaces only regular files")
    if not force:
        raise already_there(out)
    _require_directory(out)


def already_there(out: str) -> RefusedError:
    """What is said of a file that would be overwritten."""
    return RefusedError(f"{out}: exists already, and is overwritten only with --force")


def _kind(mode: int) -> str | None:
    """What is there, where that is no regular file."""
    if stat.S_ISREG(mode):
        return None
    if stat.S_ISDIR(mode):
        return "a directory"
    if stat.S_ISLNK(mode):
        return "a symbolic link, which would be replaced, not followed (name the file it leads to)"
    return next((words for is_it, words in _KINDS if is_it(mode)), "no regular file")


def _same(out: str, source: str) -> bool:
    try:
        return os.path.samefile(out, source)
    except (OSError, ValueError):
        return False  # a link that leads nowhere; a source that is missing has its own error


def _require_directory(out: str) -> None:
    directory = os.path.dirname(out) or os.curdir
    if not os.path.isdir(directory):
        missing = not os.path.lexists(directory)
        error = WriteError(
            directory, "there is no such directory" if missing else "is not a directory"
        )
        error.errno = errno.ENOENT if missing else errno.ENOTDIR
        raise error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise _cannot(out, PermissionError(errno.EACCES, "its directory may not be written to"))


def _cannot(out: str, error: OSError | ValueError) -> WriteError:
    wrapped = WriteError(out, f"cannot write: {getattr(error, 'strerror', None) or error}")
    wrapped.errno = getattr(error, "errno", None)
    return wrapped
