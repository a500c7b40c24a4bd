"""`.metadata` is a pickle that torch would run: what it may hold, and what is refused."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from trainer_core import CheckpointError
from trainer_core.site.metadata_trust import read_metadata


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """What torch's own writer writes, of tensors of several kinds and of an object."""
    state = {"model": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2).bfloat16()}}
    more: dict[str, Any] = {**state, "step": 3, "flags": torch.tensor([True, False])}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(more, storage_writer=FileSystemWriter(tmp_path / "step"), no_dist=True)
    return tmp_path / "step"


def rewritten(directory: Path, change: Any) -> None:
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(change(metadata) or metadata))


def test_what_torch_writes_is_read(saved: Path) -> None:
    metadata = read_metadata(saved)
    sizes = {
        name: tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if hasattr(entry, "size")
    }
    assert sizes == {"model.a": (2, 3), "model.b": (2,), "flags": (2,)}


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_what_would_run_code_is_refused_unrun(saved: Path, tmp_path: Path) -> None:
    mark = tmp_path / "run"

    def plant(metadata: Any) -> None:
        metadata.planner_data["x"] = Evil(mark)

    rewritten(saved, plant)
    with pytest.raises(CheckpointError, match="posix.mkdir, and could run code"):
        read_metadata(saved)
    assert not mark.exists()
    (saved / ".metadata").write_bytes(b"cos\nsystem\n(S'mkdir " + str(mark).encode() + b"'\ntR.")
    with pytest.raises(CheckpointError, match="needs os.system"):
        read_metadata(saved)
    assert not mark.exists()


@pytest.mark.parametrize("path", ["../../x.distcp", "/etc/passwd", "sub/__0_0.distcp", ""])
def test_a_shard_that_lies_elsewhere_is_refused(saved: Path, path: str) -> None:
    def lead_away(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            place.relative_path = path

    rewritten(saved, lead_away)
    with pytest.raises(CheckpointError, match="which is no shard beside it"):
        read_metadata(saved)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be read"),
        (pickle.dumps({"a": 1}), "holds a dict, not torch's Metadata"),
        (b"\x80\x04\x95", "cannot be read"),
    ],
)
def test_what_makes_no_sense_is_refused(saved: Path, content: bytes, words: str) -> None:
    (saved / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        read_metadata(saved)


def test_places_without_numbers_and_transformed_shards_are_refused(saved: Path) -> None:
    def negative(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            place.offset = -1

    rewritten(saved, negative)
    with pytest.raises(CheckpointError, match="has no place in its shard"):
        read_metadata(saved)

    def squeezed(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            place.offset, place.transform_descriptors = 0, ["zstd"]

    rewritten(saved, squeezed)
    with pytest.raises(CheckpointError, match="stored in a transformed way"):
        read_metadata(saved)
