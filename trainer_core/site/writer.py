"""torch's writer and reader of shards, with what is needed beside. Imports much of torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future


class Writer(FileSystemWriter):
    """Notes no path in the metadata: that of a temporary says nothing, and is an object.

    `shards` are the names of the files that this rank wrote; no directory is listed for them, since
    a network file system's cache may know nothing of them yet.
    """

    def __init__(self, path: Path, sync: bool) -> None:
        super().__init__(path, sync_files=sync)
        self.shards: list[str] = []

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """As torch does it; notes the names of the files."""
        written = super().write_data(plan, planner)
        self.shards = sorted({one.storage_data.relative_path for one in written.wait()})
        return written

    def storage_meta(self) -> StorageMeta | None:
        """Without the place where it was written."""
        return StorageMeta(save_id=self.save_id)


class Reader(FileSystemReader):
    """Uses metadata that were read and found harmless, instead of unpickling the file itself."""

    def __init__(self, path: str | os.PathLike[str], metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata that were given."""
        return self._metadata
