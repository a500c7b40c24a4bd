"""Sharded steps: what their metadata says, against what torch says of the same files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpttool.formats.values import GlobalRef, Opaque
from ckpttool.model.sharded import open_sharded
from ckpttool.model.sharded_fields import FieldCheck
from ckpttool.model.sharded_listing import holds_shards, list_sharded
from ckpttool.model.sharded_metadata import (
    Item,
    Piece,
    ShardedMetadata,
    ShardedTensor,
    coverage_problems,
)

SAYS = Path(__file__).with_name("torch_says_sharded.py")


def torch_says(path: Path) -> Any:
    command = [sys.executable, "-W", "ignore", str(SAYS), str(path)]
    return json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


@pytest.mark.parametrize("name", ["sharded/step_000000000004", "corpus/torch-2.13.0/dcp_single"])
def test_the_metadata_says_what_torch_says(fixtures: Path, name: str) -> None:
    said = torch_says(fixtures / name)
    with open_sharded(str(fixtures / name)) as sharded:
        metadata = sharded.metadata
        assert metadata is not None
        assert sharded.anomalies == []
        ours = {
            tensor.name: (
                tensor.dtype,
                list(tensor.shape),
                [[list(piece.offsets), list(piece.sizes)] for piece in tensor.pieces],
            )
            for tensor in metadata.tensors.values()
        }
        theirs = {n: (t["dtype"], t["shape"], t["chunks"]) for n, t in said["tensors"].items()}
        assert ours == theirs
        assert list(metadata.objects) == said["objects"]
        assert metadata.version == "1.0.0"
        places = sorted([it.name, it.file, it.offset, it.length] for it in metadata.items)
        assert places == said["places"]
        # Entries lie one behind another, without gaps, and fill their shards.
        for file, items in metadata.files().items():
            ends = [0, *(item.stop for item in items)]
            assert [item.offset for item in items] == ends[:-1]
            assert ends[-1] == (fixtures / name / file).stat().st_size


def test_a_sharded_step_of_two_ranks(fixtures: Path) -> None:
    path = fixtures / "sharded" / "step_000000000004"
    with open_sharded(str(path)) as sharded:
        assert sharded.world_size == 2
        assert sharded.ranks == {0: "rank_00000.pt", 1: "rank_00001.pt"}
        assert sharded.trainer is not None
        assert (sharded.trainer.step, sharded.trainer.samples) == (4, 16)
        sections = {name: (s.tensors, s.nbytes) for name, s in sharded.sections.items()}
        # 16·8, 8·8 and 8 float32, and an int64; two moments of each of the three.
        assert sections["model"] == (4, 4 * (128 + 64 + 8) + 8)
        assert sections["optimizer"] == (6, 2 * 4 * (128 + 64 + 8))
    assert list_sharded(str(path)).size == sum(one.stat().st_size for one in path.iterdir())


def test_what_is_a_directory_of_shards(fixtures: Path, tmp_path: Path) -> None:
    assert holds_shards(str(fixtures / "sharded" / "step_000000000002"))
    assert holds_shards(str(fixtures / "sharded-damaged" / "step_000000000006"))
    assert not holds_shards(str(fixtures / "sharded"))
    assert not holds_shards(str(tmp_path))
    assert not holds_shards(str(tmp_path / "missing"))


def tensor(shape: tuple[int, ...], *pieces: tuple[tuple[int, ...], tuple[int, ...]]) -> Any:
    return ShardedTensor("t", "float32", shape, [Piece(o, s, None) for o, s in pieces])


@pytest.mark.parametrize(
    ("whole", "problem"),
    [
        (tensor((), ((), ())), None),
        (tensor((4, 4), ((0, 0), (2, 4)), ((2, 0), (2, 4))), None),
        (tensor((4, 4), ((0, 0), (4, 1)), ((0, 1), (4, 3))), None),
        (tensor((2, 2), *[((i, j), (1, 1)) for i in (0, 1) for j in (0, 1)]), None),
        (tensor((0, 5), ((0, 0), (0, 5))), None),
        (tensor((3,), ((0,), (2,)), ((2,), (1,)), ((3,), (0,))), None),
        (tensor((4, 4), ((0, 0), (2, 4))), "8 of its 16"),
        (tensor((4, 4), ((0, 0), (2, 4)), ((3, 0), (2, 4))), "outside of its shape"),
        (tensor((4, 4), ((0, 0), (3, 4)), ((2, 0), (2, 4))), "overlap"),
        (tensor((4, 4), ((0, 0), (2, 4)), ((1, 0), (2, 4))), "overlap"),
        (tensor((), ((), ()), ((), ())), "overlap"),
        (tensor((2,)), "0 of its 2"),
    ],
)
def test_pieces_must_cover_a_tensor_exactly(whole: ShardedTensor, problem: str | None) -> None:
    found = [anomaly.facts["problem"] for anomaly in coverage_problems([whole])]
    assert [problem in words for words in found if problem] == ([True] if problem else [])
    assert bool(found) == bool(problem)


def test_many_pieces_are_compared_in_little_time() -> None:
    """Two hundred by a hundred: all pairs would be 200 million comparisons."""
    grid = [((200 - i, j), (1, 1)) for i in range(1, 201) for j in range(100)]
    assert list(coverage_problems([tensor((200, 100), *grid)])) == []


@pytest.mark.parametrize("tree", [None, 3, {}, [], {"state_dict_metadata": {}}])
def test_anything_else_is_an_anomaly_and_nothing_more(tree: Any) -> None:
    found = ShardedMetadata(tree)
    assert [anomaly.code for anomaly in found.anomalies] == ["sharded-metadata-malformed"]
    assert (found.tensors, found.items) == ({}, [])


def test_an_item_knows_where_it_ends() -> None:
    assert Item("a", None, "__0_0.distcp", 100, 20).stop == 120


@pytest.mark.parametrize("kind", ["ChunkStorageMetadata", "BytesStorageMetadata"])
def test_a_place_that_is_something_else_of_torchs_is_told(kind: str) -> None:
    """As one flipped bit of a memo reference makes it; torch fails on such a place."""
    of_metadata = "torch.distributed.checkpoint.metadata"
    index = Opaque(GlobalRef(of_metadata, "MetadataIndex"), (), opcode="NEWOBJ")
    index.state = {"fqn": "w", "offset": None, "index": 0}
    place = Opaque(GlobalRef(of_metadata, kind), (), opcode="NEWOBJ")
    place.state = {"relative_path": "__0_0.distcp", "offset": 0, "length": 9}
    content = {"state_dict_metadata": {}, "planner_data": {}, "storage_data": {index: place}}
    words = f"there is torch's {kind} where its place belongs"
    assert (words, "w") in list(FieldCheck().problems(content))
