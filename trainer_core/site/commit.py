"""A sharded step gets its name, or loses it, in one rename: half a step is never seen.

A step that is written, replaced or deleted meanwhile lies in
`.step_<12 digits>.tmp-<pid>-<random>`. What a crash leaves so, the next save removes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ckpttool.io.durable import copy_durably, fsync_directory, temporary_name, write_error


def temporary_path(path: Path) -> Path:
    """A name beside `path`, for it while it is not itself; nobody has it yet."""
    return path.with_name(f"{temporary_name(path.name, os.getpid())}-{os.urandom(4).hex()}")


def make_temporary(path: Path) -> Path:
    """The directory that is to become `path`. Raises WriteError."""
    temporary = temporary_path(path)
    try:
        os.mkdir(temporary)
    except OSError as error:
        raise write_error(temporary, error) from error
    return temporary


@contextlib.contextmanager
def in_place(temporary: Path, path: Path, *, sync: bool) -> Iterator[None]:
    """Renames a whole directory to `path`, then does the body, then removes what was there before.

    What was there before is put aside first, and put back if the rename fails. Raises WriteError.
    """
    aside: Path | None = None
    try:
        if sync:
            fsync_directory(temporary)
        if os.path.lexists(path):
            aside = temporary_path(path)
            os.rename(path, aside)
        try:
            os.rename(temporary, path)
        except OSError:
            if aside is not None:
                os.rename(aside, path)
            raise
        if sync:
            fsync_directory(path.parent)
    except OSError as error:
        raise write_error(path, error) from error
    yield
    if aside is not None:
        discard(aside)


def remove(path: Path) -> bool:
    """Removes a step's directory; False if it is gone already, or is being removed by another.

    It loses its name first, so that a crash leaves no half of it.
    """
    aside = temporary_path(path)
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return False
    discard(aside)
    return True


def discard(path: Path) -> None:
    """Removes a directory that has no step's name, or a file. Another process may do the same."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    with os.scandir(path) as entries:
        found = [Path(entry.path) for entry in entries]
    for inner in found:
        if inner.is_dir() and not inner.is_symlink():
            shutil.rmtree(inner, ignore_errors=True)
        else:
            inner.unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(path)


def copy(source: Path, target: Path) -> None:
    """Copies a step's directory, durably, `.metadata` last; what is at `target` is replaced."""
    temporary = make_temporary(target)
    try:
        names = sorted(os.listdir(source), key=lambda name: (name == ".metadata", name))
        for name in names:
            copy_durably(source / name, temporary / name, force=True)
        shutil.copystat(source, temporary)
        with in_place(temporary, target, sync=True):
            pass
    except BaseException:
        with contextlib.suppress(OSError):
            discard(temporary)
        raise
