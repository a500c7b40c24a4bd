"""Several archives in one file: saved twice to one handle, or one behind a cut one."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path

import pytest
import torch

from ckpttool.errors import RefusedError
from ckpttool.io.reading import BytesReader
from ckpttool.mending.plan import plan_mend
from ckpttool.mending.regions import Region, find_regions
from tests import corrupt
from tests.ckpttool.mending.damaged_zip import mended, small


@cache
def other() -> bytes:
    buffer = io.BytesIO()
    torch.save({"model": {"z": torch.arange(40)}, "step": 8}, buffer)
    return buffer.getvalue()


def same_layout() -> bytes:
    """Another state in the same layout, so that all offsets are the same."""
    content = corrupt.content_range(small(), "data/3")
    return corrupt.fix_checksums(corrupt.flip_byte(small(), content.start))


def regions(data: bytes) -> list[Region]:
    return find_regions(BytesReader(data))


def test_one_archive() -> None:
    assert regions(small()) == [Region(0, len(small()), True)]
    assert regions(b"x" * 9 + small()) == [Region(9, 9 + len(small()), True)]
    assert regions(small() + b"x" * 9) == [Region(0, len(small()), True)]


def test_two_whole_ones() -> None:
    first, second = small(), other()
    stop = len(first) + len(second)
    assert regions(first + second) == [
        Region(0, len(first), True),
        Region(len(first), stop, True),
    ]
    assert len(regions(first + same_layout())) == 2


def test_a_zip_inside_of_a_tensor_is_none_of_them() -> None:
    """Not even when the outer archive has lost its end."""
    buffer = io.BytesIO()
    inner = torch.frombuffer(bytearray(other()), dtype=torch.uint8)
    torch.save({"bytes": inner, "more": torch.ones(3)}, buffer)
    data = buffer.getvalue()
    assert len(regions(data)) == 1
    assert regions(corrupt.drop_end_record(data))[0].begin == 0
    assert len(regions(corrupt.drop_end_record(data))) == 1


@pytest.mark.parametrize("second", [other(), same_layout()])
def test_the_last_whole_one_is_taken(second: bytes, tmp_path: Path) -> None:
    data = small() + second
    assert mended(tmp_path, data)[0] == second
    assert mended(tmp_path, data, archive=1)[0] == small()
    assert mended(tmp_path, data, archive=2)[0] == second


def test_both_are_said_with_what_they_hold(tmp_path: Path) -> None:
    mended(tmp_path, small() + other())
    with plan_mend(tmp_path / "damaged.pt") as plan:
        assert [archive.begin for archive in plan.archives] == [0, len(small())]
        assert "step 7 (model, optimizer, step)" in plan.archives[0].words
        assert "step 8 (model, step)" in plan.archives[1].words
        assert plan.archive == 2
        assert not plan.healthy


def test_an_archive_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="the file has 1"):
        mended(tmp_path, small(), archive=2)


def test_a_cut_one_before_a_whole_one(tmp_path: Path) -> None:
    cut = corrupt.keep_first(small(), len(small()) // 2)
    assert mended(tmp_path, cut + other())[0] == other()


def test_a_cut_one_behind_a_whole_one(tmp_path: Path) -> None:
    cut = corrupt.keep_first(other(), len(other()) // 2)
    assert mended(tmp_path, small() + cut)[0] == small()


def test_a_damaged_one_behind_a_whole_one(tmp_path: Path) -> None:
    """The last one that can be proven whole is taken: here the end of the second is gone."""
    damaged = corrupt.drop_directory(other())
    assert mended(tmp_path, small() + damaged)[0] == other()
