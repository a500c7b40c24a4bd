"""Durable changes of whole directories of files: a sharded step is copied, or deleted, as one."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from ckpttool.io.durable import copy_durably, fsync_directory, temporary_name
from ckpttool.io.folder import Folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpttool.io.durable import Progress


def copy_directory_durably(
    source: str,
    destination: str,
    *,
    last: str,
    force: bool = False,
    check: Callable[[str], object] | None = None,
    progress: Progress | None = None,
) -> None:
    """Copies the regular files of a directory so that `destination` is whole or not there.

    They are written into a temporary directory beside it, each read back, the file `last` after all
    others; `check(temporary)` may look at it; then it gets its name in one rename. What is there is
    kept, and FileExistsError raised, unless `force`; then it is put aside, and removed afterwards.
    Links and folders in `source` are left out. Raises what `copy_durably` raises; nothing is left
    behind then.
    """
    import shutil

    if os.path.lexists(destination) and not force:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), destination)
    temporary = _make_temporary(destination)
    try:
        for name in sorted(_files(source), key=lambda name: (name == last, name)):
            copy_durably(
                os.path.join(source, name), os.path.join(temporary, name), progress=progress
            )
        shutil.copystat(source, temporary)
        fsync_directory(temporary)
        if check is not None:
            check(temporary)
        _publish(temporary, destination)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_step(home: Folder, name: str, pid: int) -> None:
    """Removes an entry of a directory for good: a file at once, a folder after it lost its name.

    So no half of a folder is ever seen under its name. What its writer wrote last, a hidden file,
    goes first. Raises OSError; FileNotFoundError where it is gone.
    """
    status = home.status(name)
    if status is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    if not stat.S_ISDIR(status.st_mode):
        home.remove(name)
        return
    aside, attempt = temporary_name(name, pid), 0
    while home.status(aside) is not None:
        attempt += 1
        aside = temporary_name(name, pid, attempt)
    home.rename(name, home, aside)
    home.sync()
    home.remove_tree(aside)


def _files(source: str) -> list[str]:
    with os.scandir(source) as entries:
        return [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]


def _make_temporary(destination: str) -> str:
    directory, name = os.path.split(os.path.normpath(destination))
    attempt = 0
    while True:
        temporary = os.path.join(directory, temporary_name(name, os.getpid(), attempt))
        try:
            os.mkdir(temporary)
        except FileExistsError:
            attempt += 1
        else:
            return temporary


def _publish(temporary: str, destination: str) -> None:
    """One rename; what has the name by now goes aside before, and away afterwards."""
    parent = os.path.dirname(os.path.normpath(destination)) or os.curdir
    aside = None
    if os.path.lexists(destination):
        aside = f"{temporary}-old"
        os.rename(destination, aside)
    try:
        os.rename(temporary, destination)
    except OSError:
        if aside is not None:
            os.rename(aside, destination)
        raise
    fsync_directory(parent)
    if aside is not None:
        with Folder(parent) as home:
            home.remove_tree(os.path.basename(aside))
