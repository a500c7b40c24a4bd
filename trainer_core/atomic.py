"""Writing files that are wholly there or not at all, whatever happens meanwhile."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import torch

from ckpttool.io.durable import make_directories, write_durably, write_error


def atomic_torch_save(state: Any, path: str | os.PathLike[str]) -> None:
    """`torch.save` to `path`, durably: after any crash the old file is there, or the whole new one.

    Makes missing directories. A state that cannot be pickled raises what pickle raises, a full disk
    WriteError (an OSError, with `errno` and the free space), an interrupt KeyboardInterrupt; each
    leaves the old file as it was and no temporary.
    """

    def write(file: BinaryIO) -> None:
        # An open file, not a path: torch's own writer would end the process on a full disk, and
        # would name the archive's root folder after the temporary.
        _save_into(state, file)

    _write_atomically(path, write)


def atomic_json_dump(value: Any, path: str | os.PathLike[str]) -> None:
    """Writes `value` as indented JSON, as durably as `atomic_torch_save`, with the same errors."""
    data = (json.dumps(value, indent=2) + "\n").encode()

    def write(file: BinaryIO) -> None:
        file.write(data)

    _write_atomically(path, write)


def _save_into(state: Any, file: BinaryIO) -> None:
    outer = sys.exc_info()[1]
    try:
        torch.save(state, file)
    except RuntimeError as error:
        # When writing fails, torch still tries to finish the archive, fails over its own
        # bookkeeping, and raises that; the cause is what the caller has to hear of.
        cause = error.__context__
        if cause is None or cause is outer or not _is_from_outside(cause):
            raise
        raise cause from None


def _is_from_outside(error: BaseException) -> bool:
    """An error of the disk, an interrupt or an exit: nothing that torch or pickle says."""
    return isinstance(error, OSError) or not isinstance(error, Exception)


_being_written: Counter[str] = Counter()
_counting = threading.Lock()


def _write_atomically(path: str | os.PathLike[str], write: Callable[[BinaryIO], None]) -> None:
    target = os.path.abspath(path)
    make_directories(os.path.dirname(target))
    with _noted_as_being_written(target):
        try:
            write_durably(target, write)
        except OSError as error:
            raise write_error(target, error) from error


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
