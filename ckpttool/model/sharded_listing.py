"""What lies in a sharded step's directory, by a listing alone."""

from __future__ import annotations

import os
import stat
from typing import NamedTuple

from ckpttool.errors import UnreadableError

METADATA_NAME = ".metadata"
SHARD_SUFFIX = ".distcp"


class Listed(NamedTuple):
    """What lies in a sharded step's directory.

    `sizes` are those of its regular files, in bytes, `odd` the names of what is no regular file.
    `mtime_ns` is the newest time of the directory and of all that is in it.
    """

    sizes: dict[str, int]
    odd: tuple[str, ...]
    mtime_ns: int

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes.values())

    @property
    def shards(self) -> list[str]:
        """The names of its shards."""
        return sorted(name for name in self.sizes if name.endswith(SHARD_SUFFIX))


def list_sharded(path: str) -> Listed:
    """Lists a sharded step's directory. Raises UnreadableError; links are not followed."""
    sizes, odd = {}, []
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
                    odd.append(entry.name)
    except OSError as error:
        raise UnreadableError(path, error.strerror or str(error)) from error
    return Listed(dict(sorted(sizes.items())), tuple(sorted(odd)), newest)


def holds_shards(path: str) -> bool:
    """Whether the directory `path`, whatever its name, is one that DCP wrote, or began to write."""
    if os.path.isfile(os.path.join(path, METADATA_NAME)):
        return True
    try:
        with os.scandir(path) as entries:
            return any(entry.name.endswith(SHARD_SUFFIX) for entry in entries)
    except OSError:
        return False
