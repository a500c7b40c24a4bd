"""Parts of storages: from the file as it lies there, from compressed records, from memory."""

from __future__ import annotations

import random
import zipfile
from pathlib import Path

import pytest

from ckpttool.converting.storages import StorageBytes, contiguous_stride
from ckpttool.errors import FormatError
from ckpttool.model.checkpoint import open_checkpoint

CONTENT = random.Random(5).randbytes(1_000_000) + bytes(500_000)


@pytest.fixture(params=[zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "deflated"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "file.pt"
    with zipfile.ZipFile(path, "w", request.param) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/data/0", CONTENT)
    return path


@pytest.mark.parametrize(
    ("start", "length"),
    [
        (0, 1_500_000),
        (0, 0),
        (1, 1),
        (999_990, 20),
        (300_000, 700_000),
        (1_499_999, 1),
        (1_500_000, 0),
    ],
)
def test_any_part_can_be_read(file: Path, start: int, length: int) -> None:
    with open_checkpoint(str(file)) as checkpoint:
        storages = StorageBytes(checkpoint.container, {"1": CONTENT})
        for key in ("0", "1"):
            assert storages.size(key) == len(CONTENT)
            source = storages.source(key, "new", start, length)
            assert (source.key, source.nbytes) == ("new", length)
            for _ in range(2):  # each call gives the bytes anew
                found = b"".join(bytes(chunk) for chunk in source.chunks())
                assert found == CONTENT[start : start + length]


def test_parts_that_are_not_there(file: Path) -> None:
    with open_checkpoint(str(file)) as checkpoint:
        storages = StorageBytes(checkpoint.container)
        with pytest.raises(FormatError, match="ends after"):
            list(storages.chunks("0", 1_499_990, 20))
        with pytest.raises(FormatError, match="no record"):
            storages.size("7")
        assert storages.is_plain("0") == (file.stat().st_size > len(CONTENT))


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((), ()), ((3,), (1,)), ((2, 3, 4), (12, 4, 1)), ((2, 0, 3), (3, 3, 1)), ((1, 1), (1, 1))],
)
def test_contiguous_strides(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    """As torch.empty(shape).stride() gives them."""
    assert contiguous_stride(shape) == stride
