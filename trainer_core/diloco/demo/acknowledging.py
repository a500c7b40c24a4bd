"""A store that keeps a diary of what it took: what was acknowledged can be asked for afterwards."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from trainer_core.diloco.deltas import NODES
from trainer_core.diloco.store import Store


class AcknowledgingStore(Store):
    """Appends a line to the file `diary` whenever an upload of a delta has returned, and fsyncs it.

    Each line is JSON: `name` on the store, and `sha256` of the file's bytes. A process that is
    killed between the upload and the line has not acknowledged it; nothing is claimed of that one.
    """

    diary: Path | None = None

    def put(self, path: str | os.PathLike[str], name: str) -> None:
        """See Store. A delta is written down afterwards."""
        super().put(path, name)
        if self.diary is None or not name.startswith(f"{NODES}/"):
            return
        line = {"name": name, "sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest()}
        with self.diary.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
