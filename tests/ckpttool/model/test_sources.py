"""Storages as sources, from every kind of container, against what lies in the files."""

from __future__ import annotations

import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest

from ckpttool.errors import FormatError
from ckpttool.formats.values import StorageRef
from ckpttool.model.checkpoint import Checkpoint, open_checkpoint
from ckpttool.model.sources import sliced_source, storage_sources, whole_source
from ckpttool.writing.checkpoint import StorageSource
from tests.ckpttool.formats import test_torch_legacy as legacy

CORPUS = Path(__file__).parents[3] / "fixtures" / "corpus" / "torch-2.13.0"


def content(source: StorageSource) -> bytes:
    return b"".join(bytes(piece) for piece in source.chunks())


def contents(checkpoint: Checkpoint, **options: Any) -> dict[str, bytes]:
    sources = storage_sources(checkpoint, **options)
    found = {source.key: content(source) for source in sources}
    assert [len(found[source.key]) for source in sources] == [s.nbytes for s in sources]
    return found


@pytest.mark.parametrize("file", ["train_zip.pt", "rezipped_deflated.pt", "many_tensors_3000.pt"])
def test_of_a_zip(file: str) -> None:
    with zipfile.ZipFile(CORPUS / file) as archive:
        names = [name for name in archive.namelist() if "/data/" in name and "serial" not in name]
        expected = {name.rpartition("/")[2]: archive.read(name) for name in names}
    with open_checkpoint(CORPUS / file) as checkpoint:
        assert contents(checkpoint) == expected
        # In the order of the file, whatever the order in which tensors come up.
        assert [source.key for source in storage_sources(checkpoint)] == list(expected)
        some = list(expected)[1::3]
        assert list(contents(checkpoint, keys=some)) == some
        assert contents(checkpoint, keys=()) == {}


def test_sources_can_be_read_again_and_side_by_side() -> None:
    with open_checkpoint(CORPUS / "train_zip.pt") as checkpoint:
        first, second, *_ = storage_sources(checkpoint)
        assert content(first) == content(first)
        one, two = iter(first.chunks()), iter(second.chunks())
        assert bytes(next(iter(one))) + bytes(next(iter(two))) == content(first) + content(second)


def test_of_a_legacy_stream() -> None:
    """The same training state as in the zip that torch wrote beside it."""
    with (
        open_checkpoint(CORPUS / "train_legacy.pt") as stream,
        open_checkpoint(CORPUS / "train_zip.pt") as beside,
    ):
        old, new = contents(stream), contents(beside)
        assert len(old) == len(new) == 44
        for name, tensor in beside.tensors.items():
            other = stream.tensors[name]
            assert old[str(other.storage)] == new[str(tensor.storage)], name


def test_of_a_legacy_tar(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    path.write_bytes(legacy.tar())
    with open_checkpoint(path) as checkpoint:
        assert contents(checkpoint) == {"11": legacy.FLOATS, "12": legacy.INTEGERS}


# A legacy stream in which a storage is a view of another one: bytes 8 to 20 of twenty-four.
FLOATS = struct.pack("<6f", *range(6))
VIEW = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0aX\x03\0\0\0cpuK\x06(X\x01\0\0\0vK\x02K\x03ttQ"
TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n(" + VIEW + b"K\x01K\x02\x85K\x01\x85\x89"
    b"ccollections\nOrderedDict\n)RtR"
)


def stream(tree: bytes) -> bytes:
    head = [
        pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})
    ]
    keys = pickle.dumps(["a"], 2)
    return b"".join(head) + b"\x80\x02" + tree + b"." + keys + struct.pack("<q", 6) + FLOATS


def test_of_views_in_a_legacy_stream(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    path.write_bytes(stream(b"](" + TENSOR + VIEW + VIEW + b"e"))
    with open_checkpoint(path) as checkpoint:
        tensor, alone, _ = checkpoint.tree
        assert isinstance(alone, StorageRef)
        assert (tensor.offset, alone.view) == (3, ("v", 2, 3))
        assert contents(checkpoint) == {"a": FLOATS, "v": FLOATS[8:20]}
        assert list(contents(checkpoint, keys=["a"])) == ["a"]
    path.write_bytes(stream(TENSOR))
    with open_checkpoint(path) as checkpoint:
        assert contents(checkpoint) == {"a": FLOATS}


def test_views_of_a_legacy_stream_load_from_the_copy(tmp_path: Path) -> None:
    """torch, in a process of its own, on the stream and on its copy."""
    from tests.ckpttool.writing.conftest import copy_of

    source, copy = tmp_path / "old.pt", tmp_path / "new.pt"
    source.write_bytes(stream(b"](" + TENSOR + VIEW + b"e"))
    copy_of(source, copy)
    load = """
import json, sys, torch
tensor, storage = torch.load(sys.argv[1], weights_only=sys.argv[2] == "True")
json.dump([tensor.tolist(), list(storage)], sys.stdout)
"""
    assert legacy.torch_process(load, str(source), "False") == [[3, 4], [2, 3, 4]]
    assert legacy.torch_process(load, str(copy), "True") == [[3, 4], [2, 3, 4]]


def test_a_view_that_leaves_its_storage(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    path.write_bytes(stream(VIEW.replace(b"K\x02K\x03", b"K\x02K\x05")))
    with open_checkpoint(path) as checkpoint, pytest.raises(FormatError, match="no bytes from"):
        storage_sources(checkpoint)


@pytest.mark.parametrize("file", ["train_zip.pt", "rezipped_deflated.pt", "train_legacy.pt"])
@pytest.mark.parametrize(
    ("start", "stop"), [(0, 0), (0, 1), (3, 200), (250, 256), (0, 256), (256, 256)]
)
def test_slices(file: str, start: int, stop: int) -> None:
    with open_checkpoint(CORPUS / file) as checkpoint:
        container = checkpoint.container
        assert container is not None
        key = next(s.key for s in storage_sources(checkpoint) if s.nbytes == 256)
        whole = content(whole_source(container, key))
        part = sliced_source(container, key, start, stop, name="part")
        assert (part.key, part.nbytes) == ("part", stop - start)
        assert content(part) == whole[start:stop]
        assert sliced_source(container, key, start, stop).key == key


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 2), (0, 257)])
def test_slices_that_are_not_there(start: int, stop: int) -> None:
    with open_checkpoint(CORPUS / "train_zip.pt") as checkpoint:
        assert checkpoint.container is not None
        key = next(s.key for s in storage_sources(checkpoint) if s.nbytes == 256)
        with pytest.raises(FormatError, match="no bytes from"):
            sliced_source(checkpoint.container, key, start, stop)
        with pytest.raises(FormatError, match="no record"):
            whole_source(checkpoint.container, "no such")


def test_a_slice_of_a_big_deflated_record(tmp_path: Path) -> None:
    """Over several pieces of what is unpacked, and no further than it has to."""
    import random

    path, raw = tmp_path / "big.pt", random.Random(1).randbytes(1_000_000)
    storage = VIEW.replace(b"(X\x01\0\0\0vK\x02K\x03t", b"").replace(
        b"K\x06", struct.pack("<BI", 0x4A, 250_000)
    )
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("r/data.pkl", b"\x80\x02" + storage + b".")
        archive.writestr("r/version", b"3\n")
        archive.writestr("r/data/a", raw)
    with open_checkpoint(path) as checkpoint:
        assert contents(checkpoint) == {"a": raw}
        assert checkpoint.container is not None
        for start, stop in ((0, 10), (262_140, 262_150), (100_000, 900_000), (999_999, 1_000_000)):
            assert content(sliced_source(checkpoint.container, "a", start, stop)) == raw[start:stop]


def test_a_storage_without_a_record(tmp_path: Path) -> None:
    path = tmp_path / "lost.pt"
    with zipfile.ZipFile(CORPUS / "train_zip.pt") as source, zipfile.ZipFile(path, "w") as archive:
        for name in source.namelist():
            if not name.endswith("/data/3"):
                archive.writestr(name, source.read(name))
    with open_checkpoint(path) as checkpoint:
        with pytest.raises(FormatError, match="data/3"):
            storage_sources(checkpoint)
        assert len(storage_sources(checkpoint, set(checkpoint.storages) - {"3"})) == 43


def test_a_file_without_storages() -> None:
    with open_checkpoint(CORPUS / "plain_pickle.pkl") as checkpoint:
        assert storage_sources(checkpoint) == []
