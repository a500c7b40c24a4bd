"""What lies in a sharded step's directory, by a listing alone."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.errors import UnreadableError
from ckpttool.model.names import parse_step_directory_name, parse_step_name

if TYPE_CHECKING:
    from collections.abc import Mapping

METADATA_NAME = ".metadata"
SHARD_SUFFIX = ".distcp"


class Listed(NamedTuple):
    """What lies in a sharded step's directory.

    `sizes` are those of its regular files, in bytes; `odd` says by name what else there is (`a
    symbolic link`), which is never opened or followed.
    `mtime_ns` is the newest time of the directory and of all that is in it. `open_to_all` are the
    names of the files that everybody may write.
    """

    sizes: dict[str, int]
    odd: dict[str, str]
    mtime_ns: int
    open_to_all: frozenset[str] = frozenset()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes.values())

    @property
    def shards(self) -> list[str]:
        """The names of its shards."""
        return sorted(name for name in self.sizes if name.endswith(SHARD_SUFFIX))

    def with_places(self, path: str, places: Mapping[str, str]) -> Listed:
        """What would be listed if each file of `places` lay in the directory `path` by its name.

        Raises UnreadableError where one of them is gone.
        """
        if not places:
            return self
        moved = {
            name for folder, name in map(os.path.split, places.values()) if folder == bare(path)
        }
        sizes = {name: size for name, size in self.sizes.items() if name not in moved}
        for name, file in places.items():
            try:
                sizes[name] = os.lstat(file).st_size
            except OSError as error:
                raise UnreadableError(file, error.strerror or str(error)) from error
        odd = {name: kind for name, kind in self.odd.items() if name not in places}
        return self._replace(sizes=dict(sorted(sizes.items())), odd=odd)


def bare(path: str) -> str:
    """A directory's path without separators at its end, so that it begins those of its files."""
    return path.rstrip(os.sep) or path


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
    open_to_all: set[str] = set()
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
                    if facts.st_mode & stat.S_IWOTH:
                        open_to_all.add(entry.name)
                else:
                    odd[entry.name] = kind_in_words(facts.st_mode)
    except OSError as error:
        raise UnreadableError(path, error.strerror or str(error)) from error
    sizes, odd = dict(sorted(sizes.items())), dict(sorted(odd.items()))
    return Listed(sizes, odd, newest, frozenset(open_to_all))


def step_with_part(path: str) -> str | None:
    """The directory of the sharded step that the file `path` is a shard or the metadata of.

    None for any other file, and for a `.metadata` beside which nothing is a shard.
    """
    folder, name = os.path.split(path)
    if name != METADATA_NAME and not name.endswith(SHARD_SUFFIX):
        return None
    step = os.path.realpath(folder) if folder in ("", os.curdir) else folder
    if not os.path.lexists(path) or os.path.isdir(path) or not holds_shards(step):
        return None
    if parse_step_directory_name(os.path.basename(os.path.normpath(step))) is not None:
        return step
    try:
        return step if any(one.endswith(SHARD_SUFFIX) for one in os.listdir(step)) else None
    except OSError:
        return None


def holds_shards(path: str) -> bool:
    """Whether the directory `path`, whatever its name, is one that DCP wrote, or began to write.

    A directory with steps in it is a run's, even with a shard astray in it.
    """
    try:
        kind = os.lstat(os.path.join(path, METADATA_NAME)).st_mode
    except OSError:
        kind = 0
    is_step = parse_step_directory_name(os.path.basename(os.path.normpath(path))) is not None
    # Other programs have directories of this name.
    found = bool(kind) and (is_step or not stat.S_ISDIR(kind))
    if found and is_step:
        return True
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if not is_step and parse_step_name(entry.name) is not None:
                    return False
                found = found or entry.name.endswith(SHARD_SUFFIX)
    except OSError:
        return found
    return found
