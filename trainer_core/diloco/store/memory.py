"""The memory of one process, for tests and simulations: fsspec's, so that others see it as well."""

from __future__ import annotations

import threading
from typing import Any, BinaryIO

from trainer_core.diloco.store.backend import Backend, Found, Take

# fsspec's memory is one for the whole process and knows no threads, so the lock is one as well.
_LOCK = threading.RLock()


class MemoryBackend(Backend):
    """Files under one path of fsspec's memory; gone when the process ends."""

    def __init__(self, root: str) -> None:
        from fsspec.implementations.memory import MemoryFileSystem

        self._fs: Any = MemoryFileSystem(skip_instance_cache=True)
        self._root = "/" + root.strip("/")

    def read(self, name: str, start: int, end: int | None, take: Take) -> None:
        with _LOCK:
            if (size := self.size(name)) is None:
                raise FileNotFoundError(name)
            last = size if end is None else min(end, size)
            content = self._fs.cat_file(self._path(name), start, last) if start < last else b""
        take(content)

    def size(self, name: str) -> int | None:
        with _LOCK:
            file = self._fs.store.get(self._path(name))
            return None if file is None else len(file.getbuffer())

    def write(self, name: str, file: BinaryIO, size: int) -> None:
        content = file.read()
        with _LOCK:
            self._fs.pipe_file(self._path(name), content)

    def create(self, name: str, content: bytes) -> bool:
        with _LOCK:
            if self.size(name) is not None:
                return False
            self._fs.pipe_file(self._path(name), content)
            return True

    def listing(self, folder: str) -> list[Found]:
        with _LOCK:
            try:
                entries = self._fs.ls(self._path(folder), detail=True, refresh=True)
            except FileNotFoundError:
                return []
            return [_found(entry) for entry in entries]

    def tree(self, folder: str) -> list[Found]:
        """One look at everything, as on S3."""
        start = self._path(folder) + "/"
        with _LOCK:
            files = list(self._fs.store.items())
        return [
            Found(path[len(start) :], len(file.getbuffer()))
            for path, file in files
            if path.startswith(start)
        ]

    def remove(self, name: str) -> None:
        with _LOCK:
            self._fs.store.pop(self._path(name), None)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}".rstrip("/")


def _found(entry: dict[str, Any]) -> Found:
    name = entry["name"].rsplit("/", 1)[-1]
    return Found(name, None if entry["type"] == "directory" else int(entry["size"]))
