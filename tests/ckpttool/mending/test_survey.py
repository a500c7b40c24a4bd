"""The walk over a damaged zip: what it calls proven, and how long it may take."""

from __future__ import annotations

import struct
from pathlib import Path

from ckpttool.formats.limits import DEFAULT_LIMITS
from ckpttool.io.reading import BytesReader
from ckpttool.mending.naming import name_records
from ckpttool.mending.plan import plan_mend
from ckpttool.mending.regions import Region
from ckpttool.mending.survey import Survey, survey
from tests import corrupt
from tests.ckpttool.mending.damaged_zip import descriptor_range, overwritten, small


def look(data: bytes) -> Survey:
    return survey(BytesReader(data), Region(0, len(data), False), DEFAULT_LIMITS)


def names(found: Survey) -> list[str | None]:
    sizes = found.skeleton.sizes if found.skeleton else None
    return name_records(found.records, sizes).names


def test_a_healthy_file() -> None:
    found = look(small())
    assert all(record.matches and record.usual for record in found.records)
    assert names(found) == list(corrupt.entry_offsets(small()))
    assert found.stopped is None


def test_a_checksum_that_is_nowhere_left_is_not_made_up() -> None:
    """Directory and descriptor gone: size and place are clear, and nothing is proven."""
    data = corrupt.drop_directory(overwritten(small(), descriptor_range(small(), "data/2"), 0))
    found = look(data)
    record = found.records[names(found).index("data/2")]
    assert not record.matches
    assert record.crcs == ()
    content = corrupt.content_range(small(), "data/2")
    assert (record.start, record.size) == (content.start, len(content))


def test_the_content_of_one_record_is_never_anothers() -> None:
    """The header of one record before the content and descriptor of another of its size."""
    records = [("archive/data.pkl", b"\x80\x02}q\x00."), ("archive/data/0", b"a" * 64)]
    records += [("archive/data/1", b"b" * 64), ("archive/version", b"3\n")]
    data = corrupt.torch_zip(records)
    first, second = (corrupt.content_range(data, f"data/{n}") for n in (0, 1))
    spliced = corrupt.cut_out(data, first.start, second.start - first.start)
    found = look(spliced)
    for record, name in zip(found.records, names(found), strict=True):
        content = spliced[record.start : record.start + record.size]
        if record.matches and str(name).startswith("data/"):
            assert content == dict(records)[f"archive/{name}"]


def test_contradictions_cost_no_more_than_some_passes(tmp_path: Path) -> None:
    """Four thousand headers of which each says that all the others are its content."""
    name = b"archive/data.pkl"
    numbers = (0, 0x808, 0, 0, 0, 0, 0, 0, len(name), 0)
    header = struct.pack("<4s5H3I2H", b"PK\x03\x04", *numbers) + name
    path = tmp_path / "hostile.pt"
    path.write_bytes(header * 4_000)
    with plan_mend(path) as plan:
        assert plan.hopeless is not None
