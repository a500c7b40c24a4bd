"""`manifest.jsonl`: a line for each step that is kept, so that it can be proven later what it was.

    {"step": 4, "file": "step_000000000004.pt", "size": 7200, "sha256": "…", "run_id": "…",
     "parent": 2, "saved": "2026-11-29T19:40:42Z"}

The last line for a file counts. A line is added after its file is safe; of a file that is about to
be replaced it is removed before, so that after no crash a line belies a good file.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

from ckpttool.io.durable import fsync_directory
from ckpttool.model.names import MANIFEST_NAME
from trainer_core.saving.publishing import PlainBytes, Written, publish

MOST_BYTES = 64 << 20
"""Of a file that is larger nothing is believed, and it is begun anew."""


class KeptSteps:
    """The manifest of one directory. `sync` as in `publish`; every method may raise OSError."""

    def __init__(self, directory: str | os.PathLike[str], *, sync: bool = True) -> None:
        self.path = os.path.join(os.fspath(directory), MANIFEST_NAME)
        self._sync = sync

    def find(self, file: str) -> dict[str, Any] | None:
        """What the last line for `file` says."""
        found = [entry for _, entry in self._lines() if entry["file"] == file]
        return found[-1] if found else None

    def entries(self) -> dict[str, dict[str, Any]]:
        """What the last line for each file says."""
        return {entry["file"]: entry for _, entry in self._lines()}

    def places(self) -> dict[str, int]:
        """The number of each file's last line: what was saved later has the higher one."""
        return {entry["file"]: place for place, (_, entry) in enumerate(self._lines())}

    def add(self, step: int, file: str, written: Written, run_id: str, parent: int | None) -> None:
        """Adds the line of a file that is safe on disk."""
        entry = {"step": step, "file": file, "size": written.size, "sha256": written.sha256}
        saved = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        entry |= {"run_id": run_id, "parent": parent, "saved": saved}
        line = (json.dumps(entry) + "\n").encode()
        is_new = not os.path.lexists(self.path)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        descriptor = os.open(self.path, flags | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            if not _ends_well(descriptor):
                line = b"\n" + line  # a line before it was cut short
            os.write(descriptor, line)
            if self._sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if is_new and self._sync:
            fsync_directory(os.path.dirname(self.path) or ".")

    def forget(self, *files: str) -> None:
        """Removes the lines of these files, and whatever is no line."""
        lines = list(self._lines())
        kept = [line for line, entry in lines if entry["file"] not in files]
        if len(kept) < len(lines):
            publish(PlainBytes(b"".join(kept)), self.path, sync=self._sync)

    def _lines(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        try:
            with open(self.path, "rb") as file:
                content = file.read(MOST_BYTES + 1)
        except FileNotFoundError:
            return
        for line in content.splitlines() if len(content) <= MOST_BYTES else ():
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(entry, dict) and isinstance(entry.get("file"), str):
                yield line + b"\n", entry


def _ends_well(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"
