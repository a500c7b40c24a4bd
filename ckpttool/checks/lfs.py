"""The file that a git-LFS pointer stands for, if it is on this machine already.

Pointer format and object store: git-lfs/docs/spec.md. An object lies under `.git/lfs/objects/` by
the first two and the next two digits of its SHA-256.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator

from ckpttool.errors import UnreadableError

_MOST_CANDIDATES = 8


def find_object(path: str, oid: str, size: int) -> str | None:
    """A regular file with this SHA-256 near the pointer at `path`, or None.

    Looks into the object store of the repository around it (where the name is proof enough,
    together with the size), and at files of the same size beside it, which are read.
    """
    if not re.fullmatch(r"[0-9a-f]{64}", oid):
        return None
    directory = os.path.dirname(os.path.abspath(path))
    return _in_store(directory, oid, size) or _beside(directory, oid, size)


def _in_store(directory: str, oid: str, size: int) -> str | None:
    while True:
        stored = os.path.join(directory, ".git", "lfs", "objects", oid[:2], oid[2:4], oid)
        if _regular_size(stored) == size:
            return stored
        parent = os.path.dirname(directory)
        if parent == directory:
            return None
        directory = parent


def _beside(directory: str, oid: str, size: int) -> str | None:
    from ckpttool.io.checksum import sha256_of
    from ckpttool.io.reading import FileReader

    for candidate in _of_size(directory, size):
        try:
            with FileReader(candidate) as reader:
                if sha256_of(reader) == oid:
                    return candidate
        except UnreadableError:
            continue
    return None


def _of_size(directory: str, size: int) -> Iterator[str]:
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return
    paths = (os.path.join(directory, name) for name in names)
    found = [path for path in paths if _regular_size(path) == size]
    yield from found[:_MOST_CANDIDATES]


def _regular_size(path: str) -> int | None:
    try:
        facts = os.lstat(path)
    except OSError:
        return None
    return facts.st_size if stat.S_ISREG(facts.st_mode) else None
