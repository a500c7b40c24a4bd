"""What an operation on files did, in enough detail to do it again: see `tests/power_cut.py`.

Each function gives plain data for one operation that has just been done. Paths are absolute. Bytes
that were written are read back from the file, so that it does not matter how they got there.
"""

# Imported before `os` is wrapped, and keeps its functions as they are then: see tests/crash.py.
from __future__ import annotations

import base64
import os
import stat
from typing import Any

Detail = dict[str, Any]

_open, _close, _pread, _fstat, _stat = os.open, os.close, os.pread, os.fstat, os.stat
_lseek, _readlink = os.lseek, os.readlink
_GONE = " (deleted)"


def opened(path: Any, truncated: bool, dir_fd: int | None = None) -> Detail:
    """A file was opened with permission to make it; `truncated`: whatever was in it is gone."""
    where = absolute(path, dir_fd)
    return {"path": where, "truncated": truncated, **_attributes(where)}


def written(fd: int, count: int, at: int | None = None) -> Detail:
    """The `count` bytes at `at`, or before where the descriptor stands now."""
    start = _lseek(fd, 0, os.SEEK_CUR) - count if at is None else at
    own = _open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = _pread(own, count, start)
    finally:
        _close(own)
    return {**_of(fd), "at": start, "data": base64.b64encode(data).decode()}


def resized(target: Any) -> Detail:
    """A file was cut or lengthened."""
    facts = _of(target) if isinstance(target, int) else _named(absolute(target, None))
    size = _fstat(target).st_size if isinstance(target, int) else _stat(target).st_size
    return {**facts, "size": size}


def synced(target: Any) -> Detail:
    """A file, or a folder, was made durable."""
    return _of(target) if isinstance(target, int) else {}


def named(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Detail:
    """Something was done with names or attributes by the function `name` of `os`."""
    dir_fd = options.get("dir_fd")
    if name in ("rename", "replace", "link"):
        return {
            "path": absolute(args[0], options.get("src_dir_fd")),
            "to": absolute(args[1], options.get("dst_dir_fd")),
        }
    if name == "symlink":
        return {"path": absolute(args[1], dir_fd), "text": os.fsdecode(args[0])}
    if isinstance(args[0], int):
        return _of(args[0])
    where = absolute(args[0], dir_fd)
    if where.startswith("/proc/self/fd/"):
        where = _readlink(where)
    return _named(where)


def absolute(path: Any, dir_fd: int | None) -> str:
    """The path from the root on, its links unfollowed."""
    folder = os.getcwd() if dir_fd is None else _readlink(f"/proc/self/fd/{dir_fd}")
    return os.path.normpath(os.path.join(folder, os.fsdecode(path)))


def _of(fd: int) -> Detail:
    path = _readlink(f"/proc/self/fd/{fd}")
    if path.endswith(_GONE):
        return {"path": None}
    status = _fstat(fd)
    return {"path": path, "mode": stat.S_IMODE(status.st_mode), "mtime": status.st_mtime_ns}


def _named(path: str) -> Detail:
    return {"path": path, **_attributes(path)}


def _attributes(path: str) -> Detail:
    try:
        status = _stat(path, follow_symlinks=False)
    except OSError:
        return {}
    return {"mode": stat.S_IMODE(status.st_mode), "mtime": status.st_mtime_ns}
