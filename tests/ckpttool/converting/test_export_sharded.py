"""Sharded steps as safetensors: what torch loads from the shards, bit for bit."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from safetensors import safe_open

from ckpttool.cli.main import main
from ckpttool.converting.assembled import assembled_chunks
from ckpttool.formats.limits import DEFAULT_LIMITS
from ckpttool.io.reading import BytesReader
from ckpttool.model.sharded_metadata import Item, Piece, ShardedTensor

FOUR = "step_000000000004"
SAYS = Path(__file__).parents[1] / "model" / "torch_says_sharded.py"


def call(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(main, [str(one) for one in arguments], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.output


def exported(path: Path) -> dict[str, tuple[str, list[int], str]]:
    """dtype, shape and bytes, in hexadecimal, of each tensor; the header read by hand."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__")
    body = data[8 + length :]
    return {
        name: (entry["dtype"], entry["shape"], body[slice(*entry["data_offsets"])].hex())
        for name, entry in header.items()
    }


@pytest.mark.parametrize("source", [f"sharded/{FOUR}", "corpus/torch-2.13.0/dcp_single"])
def test_every_tensor_is_what_torch_loads(fixtures: Path, tmp_path: Path, source: str) -> None:
    command = [sys.executable, "-W", "ignore", str(SAYS), str(fixtures / source)]
    said = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    names = {"float32": "F32", "int64": "I64"}
    for section in ("model", "optimizer"):
        out = tmp_path / f"{section}.safetensors"
        options = ["--allow-loss"] if section == "optimizer" else []
        call("export", fixtures / source, "-o", out, "--section", section, *options)
        start = f"{section}."
        assert exported(out) == {
            name.removeprefix(start): (names[one["dtype"]], one["shape"], one["bytes"])
            for name, one in said["tensors"].items()
            if name.startswith(start)
        }


def test_the_model_is_what_is_exported_and_nothing_is_lost_unasked(
    fixtures: Path, tmp_path: Path
) -> None:
    source, out = fixtures / "sharded" / FOUR, tmp_path / "model.safetensors"
    assert "section model: 4 tensors, 808 B" in call("export", source, "-o", out)
    with safe_open(out, framework="numpy") as file:
        assert set(file.keys()) == {
            *("embed.weight", "block.linear.weight", "block.linear.bias", "steps"),
        }
        assert file.metadata() == {"format": "pt"}
    call("export", source, "-o", tmp_path / "o", "--section", "optimizer", code=4)
    call("export", source, "-o", tmp_path / "o", "--section", "nothing", code=2)
    call("export", fixtures / "sharded", "-o", tmp_path / "o", code=3)
    document = json.loads(call("export", source, "-o", tmp_path / "o", "--dry-run", "--json"))
    assert (document["section"], document["tensors"], document["nbytes"]) == ("model", 4, 808)
    assert not (tmp_path / "o").exists()


def test_a_step_that_is_not_whole_is_not_exported(fixtures: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(fixtures / "sharded-damaged", tmp_path / "run"))
    for step in (FOUR, "step_000000000006"):
        output = call("export", run / step, "-o", tmp_path / "out", code=4)
        assert "incomplete" in output
    assert not (tmp_path / "out").exists()


def shards_of(whole: Any, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Any:
    """A tensor cut into boxes, saved one behind another as DCP does it, and its description."""
    import torch

    shard, pieces = io.BytesIO(), []
    for offsets, sizes in boxes:
        part = whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        begin = shard.tell()
        archive = io.BytesIO()
        torch.save(part.clone(), archive)
        shard.write(archive.getvalue())
        item = Item("t", offsets, "__0_0.distcp", begin, len(archive.getvalue()))
        pieces.append(Piece(offsets, sizes, item))
    dtype = str(whole.dtype).removeprefix("torch.")
    return shard.getvalue(), ShardedTensor("t", dtype, tuple(whole.shape), pieces)


def assembled(data: bytes, tensor: ShardedTensor) -> bytes:
    reader = BytesReader(data)
    return b"".join(map(bytes, assembled_chunks(tensor, lambda _: reader, DEFAULT_LIMITS)))


BOXES: dict[str, tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]] = {
    "a number": ((), [((), ())]),
    "rows": ((7, 3), [((0, 0), (4, 3)), ((4, 0), (3, 3))]),
    "columns": ((5, 7), [((0, 0), (5, 4)), ((0, 4), (5, 3))]),
    "a grid": ((4, 6), [((i, j), (2, 3)) for j in (0, 3) for i in (2, 0)]),
    "uneven": ((5, 4), [((0, 0), (5, 1)), ((0, 1), (2, 3)), ((2, 1), (3, 3))]),
    "one row": ((1, 9), [((0, 0), (1, 5)), ((0, 5), (1, 4))]),
    "three axes": ((2, 3, 4), [((0, 0, 0), (2, 3, 2)), ((0, 0, 2), (2, 3, 2))]),
    "the middle axis": ((2, 4, 3), [((0, 0, 0), (2, 1, 3)), ((0, 1, 0), (2, 3, 3))]),
    "an empty piece": ((4,), [((0,), (2,)), ((2,), (2,)), ((4,), (0,))]),
    "nothing": ((0, 3), [((0, 0), (0, 3))]),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool", "complex128"])
@pytest.mark.parametrize("name", list(BOXES))
def test_pieces_of_any_shape_come_together(name: str, dtype: str) -> None:
    import torch

    shape, boxes = BOXES[name]
    count = torch.Size(shape).numel()
    whole = (torch.arange(count) % 5).to(getattr(torch, dtype)).reshape(shape)
    data, tensor = shards_of(whole, boxes)
    expected = whole.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    assert assembled(data, tensor) == expected


def test_pieces_in_another_order_of_memory_come_together() -> None:
    """Channels last, as a convolution's weights may be."""
    import torch

    whole = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
    laid = whole.to(memory_format=torch.channels_last)
    data, tensor = shards_of(laid, [((0, 0, 0, 0), (1, 3, 4, 5)), ((1, 0, 0, 0), (1, 3, 4, 5))])
    assert assembled(data, tensor) == whole.numpy().tobytes()


def test_memory_stays_small_whatever_the_tensor_has() -> None:
    """64 MiB in two halves of columns, from a file on disk: a few blocks of 4 MiB at a time."""
    import torch

    whole = torch.zeros(4096, 4096)
    data, tensor = shards_of(whole, [((0, 0), (4096, 2048)), ((0, 2048), (4096, 2048))])
    reader = BytesReader(data)
    tracemalloc.start()
    total = sum(map(len, assembled_chunks(tensor, lambda _: reader, DEFAULT_LIMITS)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == 64 << 20
    assert peak < 24 << 20
