"""Contents that do not match their checksum: donors, one bit, bursts, and a known SHA-256."""

from __future__ import annotations

import hashlib
import io
import random
import zipfile
from functools import cache
from pathlib import Path

import pytest
import torch

from ckpttool.errors import RefusedError
from ckpttool.mending.plan import Burst, plan_mend
from tests import corrupt
from tests.ckpttool.mending.damaged_zip import mended, small


@cache
def with_baseline() -> bytes:
    """A model that stands in the file twice, in storages of their own."""
    weight = torch.arange(200.0)
    buffer = io.BytesIO()
    torch.save({"model": {"w": weight}, "coordinator": {"baseline": weight.clone()}}, buffer)
    return buffer.getvalue()


def damage(data: bytes, record: str, *, seed: int = 1, count: int = 3) -> bytes:
    """Some bytes of a record overwritten by others."""
    content = corrupt.content_range(data, record)
    rng = random.Random(seed)
    for offset in rng.sample(content, count):
        data = corrupt.flip_byte(data, offset, rng.randrange(1, 256))
    return data


def state_of(tmp_path: Path, record: str, **options: object) -> object:
    with plan_mend(tmp_path / "damaged.pt", **options) as plan:  # type: ignore[arg-type]
        return next(found.state for found in plan.records if found.name == record)


def test_a_donor_in_the_same_file(tmp_path: Path) -> None:
    data = with_baseline()
    for record in ("data/0", "data/1"):
        assert mended(tmp_path, damage(data, record, count=64))[0] == data
        assert state_of(tmp_path, record) == "donor"


def test_a_donor_in_a_sibling(tmp_path: Path) -> None:
    data, sibling = small(), tmp_path / "sibling.pt"
    sibling.write_bytes(data)
    damaged = damage(data, "data/3", count=9)
    with pytest.raises(RefusedError):
        mended(tmp_path, damaged)
    assert mended(tmp_path, damaged, siblings=[str(sibling)])[0] == data
    with plan_mend(tmp_path / "damaged.pt", siblings=[str(sibling)]) as plan:
        record = next(found for found in plan.records if found.name == "data/3")
        assert record.state == "donor"
        assert "sibling.pt" in record.facts["words"]
        assert plan.exact


def test_a_donor_for_a_record_that_is_gone(tmp_path: Path) -> None:
    """Header, content and descriptor zeroed: the directory still knows size and checksum."""
    data, sibling = small(), tmp_path / "sibling.pt"
    sibling.write_bytes(data)
    start = corrupt.header_offset(data, "data/2")
    count = corrupt.header_offset(data, "data/3") - start
    damaged = corrupt.zero_range(data, start, count)
    assert mended(tmp_path, damaged, siblings=[str(sibling)])[0] == data


def test_every_bit_of_a_record(tmp_path: Path) -> None:
    data = small()
    content = corrupt.content_range(data, "data/2")
    for offset in content:
        for bit in (0, 5):
            assert mended(tmp_path, corrupt.flip_bit(data, offset, bit))[0] == data
    assert state_of(tmp_path, "data/2") == "bit"


def test_bits_of_the_pickle_and_the_small_records(tmp_path: Path) -> None:
    data = small()
    for record in ("data.pkl", "version", ".format_version", ".data/serialization_id"):
        for offset in list(corrupt.content_range(data, record))[::23]:
            assert mended(tmp_path, corrupt.flip_bit(data, offset, 2))[0] == data, record


def test_a_bit_in_a_cut_file(tmp_path: Path) -> None:
    """The pickle is mended first, so that it can say what the cut record was."""
    data = corrupt.drop_directory(small())
    offset = corrupt.content_range(small(), "data.pkl").start + 3
    assert mended(tmp_path, corrupt.flip_bit(data, offset))[0] == small()


def test_what_a_bit_changes_is_said(tmp_path: Path) -> None:
    data = small()
    offset = corrupt.content_range(data, "data/0").start + 4 * 2 + 3
    mended(tmp_path, corrupt.flip_bit(data, offset, 6))
    with plan_mend(tmp_path / "damaged.pt") as plan:
        record = next(found for found in plan.records if found.name == "data/0")
    assert record.facts["bit"]["place"] == "model.a[2]"
    assert record.facts["bit"]["odds"] == pytest.approx(8 * 20 / 2**32)
    assert "1 in" in record.proof


def test_a_bit_above_the_odds_is_refused_unless_the_sha256_is_known(tmp_path: Path) -> None:
    data = small()
    damaged = corrupt.flip_bit(data, corrupt.content_range(data, "data/3").start)
    with pytest.raises(RefusedError):
        mended(tmp_path, damaged, bit_odds=1e-9)
    with plan_mend(tmp_path / "damaged.pt", bit_odds=1e-9) as plan:
        assert len(plan.refused) == 1
        assert plan.losses[0].tensor == "optimizer.c"
    known = hashlib.sha256(data).hexdigest()
    out, written = mended(tmp_path, damaged, bit_odds=1e-9, known_sha256=known)
    assert out == data
    assert written is not None
    assert written.proven


def test_bits_in_two_records_at_once(tmp_path: Path) -> None:
    data = small()
    damaged = corrupt.flip_bit(data, corrupt.content_range(data, "data/0").start)
    damaged = corrupt.flip_bit(damaged, corrupt.content_range(data, "data/3").start)
    assert mended(tmp_path, damaged)[0] == data


def test_two_bits_in_one_record_are_not_mended(tmp_path: Path) -> None:
    data = small()
    start = corrupt.content_range(data, "data/0").start
    damaged = corrupt.flip_bit(corrupt.flip_bit(data, start), start + 9, 4)
    with pytest.raises(RefusedError, match=r"model\.a"):
        mended(tmp_path, damaged)


def test_a_burst_whose_place_is_known(tmp_path: Path) -> None:
    data = small()
    start = corrupt.content_range(data, "data/0").start
    damaged = corrupt.put_bytes(data, start + 4, bytes(2))
    wanted = Burst("data/0", 8 * 4, 16)
    out, _ = mended(tmp_path, damaged, bursts=[wanted])
    assert out == data
    assert state_of(tmp_path, "data/0", bursts=[wanted]) == "burst"


def test_a_burst_so_long_that_it_explains_anything(tmp_path: Path) -> None:
    data = small()
    start = corrupt.content_range(data, "data/0").start
    damaged = corrupt.put_bytes(data, start + 4, b"\1\2\3\4")
    wanted = Burst("data/0", 8 * 4, 32)
    with pytest.raises(RefusedError):
        mended(tmp_path, damaged, bursts=[wanted])
    with plan_mend(tmp_path / "damaged.pt", bursts=[wanted]) as plan:
        assert any("above the limit (--bit-odds 0.01)" in note for note in plan.notes)
    out, written = mended(tmp_path, damaged, bursts=[wanted], bit_odds=1)
    assert out is not None
    assert written is not None
    assert not written.proven
    assert out[slice(*_span(out))] == data[slice(*_span(data))]
    assert "fits, unproven, by odds of 100 %" in open_mark(tmp_path / "mended.pt")


def _span(data: bytes) -> tuple[int, int]:
    content = corrupt.content_range(data, "data/0")
    return content.start, content.stop


def open_mark(path: Path) -> str:
    with zipfile.ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/mended.json"))
        return archive.read(name).decode()


def test_a_burst_at_the_wrong_place(tmp_path: Path) -> None:
    data = small()
    start = corrupt.content_range(data, "data/0").start
    damaged = corrupt.put_bytes(data, start + 4, bytes(2))
    with pytest.raises(RefusedError):
        mended(tmp_path, damaged, bursts=[Burst("data/0", 8 * 12, 16)])


def test_a_mended_file_with_another_sha256_is_refused(tmp_path: Path) -> None:
    known = hashlib.sha256(b"another file").hexdigest()
    with pytest.raises(RefusedError, match="SHA-256"):
        mended(tmp_path, corrupt.drop_directory(small()), known_sha256=known)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged.pt"]


def test_the_known_sha256_is_said_to_prove_the_file(tmp_path: Path) -> None:
    known = hashlib.sha256(small()).hexdigest()
    damaged = corrupt.drop_directory(small())
    _, written = mended(tmp_path, damaged, known_sha256=known.upper())
    assert written is not None
    assert written.proven
    _, written = mended(tmp_path, damaged)
    assert written is not None
    assert not written.proven
