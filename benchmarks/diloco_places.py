"""Where the store of a run is: a directory, or moto's S3 server in a process of its own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.diloco_nodes import ROOT
from trainer_core.diloco.commits import CommitLog
from trainer_core.diloco.errors import DiLoCoError
from trainer_core.diloco.store import Store


class Place(NamedTuple):
    """Where a run's store is. `options`: those of Store.open, as a file of JSON."""

    url: str
    options: Path | None = None

    def open(self) -> Store:
        """The store."""
        given = json.loads(self.options.read_text()) if self.options else {}
        return Store.open(self.url, options=given)


@contextlib.contextmanager
def s3_place(folder: Path) -> Iterator[Place]:
    """moto's S3 server, on loopback, at a port that the system gives."""
    command = [sys.executable, "-m", "tests.trainer_core.diloco.servers", "s3", str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as server:
        try:
            assert server.stdout is not None and server.stdin is not None
            url, _, options = server.stdout.readline().partition(" ")
            path = folder / "s3.json"
            path.write_text(options)
            yield Place(f"{url}/run", path)
        finally:
            server.kill()


def outer_step_at(store: Store) -> int:
    """The newest outer step; -1 before the first, or where there is no answer."""
    try:
        pointer = CommitLog(store).pointer()
    except DiLoCoError:
        return -1
    return -1 if pointer is None else pointer.outer_step


def fetch_all(store: Store, target: Path, folder: str = "") -> None:
    """Copies every file of a store into a directory."""
    target.mkdir(parents=True, exist_ok=True)
    below = f"{folder}/" if folder else ""
    for entry in store.entries(folder):
        store.fetch(below + entry.name, target / entry.name)
    for name in store.folders(folder):
        fetch_all(store, target / name, below + name)
