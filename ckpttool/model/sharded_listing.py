"""What lies in a sharded step's directory, by a listing alone."""

from __future__ import annotations

import os
import stat
from typing import NamedTuple

from ckpttool.errors import UnreadableError
from ckpttool.model.names import parse_step_directory_name

METADATA_NAME = ".metadata"
SHARD_SUFFIX = ".distcp"


class Listed(NamedTuple):
    """What lies in a sharded step's directory.

    `sizes` are those of its regular files, in bytes; `odd` says by name what else there is (`a
    symbolic link`), which is never opened or followed.
    `mtime_ns` is the newest time of the directory and of all that is in it.
    """

    sizes: dict[str, int]
    odd: dict[str, str]
    mtime_ns: int

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes.values())

    @property
    def shards(self) -> list[str]:
        """The names of its shards."""
        return sorted(name for name in self.sizes if name.endswith(SHARD_SUFFIX))


_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
}


def kind_in_words(mode: int) -> str:
    """What is no regular file, by its `st_mode`."""
    return _KINDS.get(stat.S_IFMT(mode), "a device")


def list_sharded(path: str) -> Listed:
    """Lists a sharded step's directory. Raises UnreadableError; links are not followed."""
    sizes: dict[str, int] = {}
    odd: dict[str, str] = {}
    try:
        newest = os.lstat(path).st_mtime_ns
        with os.scandir(path) as entries:
            for entry in entries:
                try:
                    facts = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # it has gone since
                newest = max(newest, facts.st_mtime_ns)
                if stat.S_ISREG(facts.st_mode):
                    sizes[entry.name] = facts.st_size
                else:
                    odd[entry.name] = kind_in_words(facts.st_mode)
    except OSError as error:
        raise UnreadableError(path, error.strerror or str(error)) from error
    return Listed(dict(sorted(sizes.items())), dict(sorted(odd.items())), newest)


def holds_shards(path: str) -> bool:
    """Whether the directory `path`, whatever its name, is one that DCP wrote, or began to write."""
    try:
        kind = os.lstat(os.path.join(path, METADATA_NAME)).st_mode
    except OSError:
        kind = 0
    name = os.path.basename(os.path.normpath(path))
    # Other programs have directories of this name.
    if kind and (not stat.S_ISDIR(kind) or parse_step_directory_name(name) is not None):
        return True
    try:
        with os.scandir(path) as entries:
            return any(entry.name.endswith(SHARD_SUFFIX) for entry in entries)
    except OSError:
        return False
