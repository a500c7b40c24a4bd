"""What only seems to be proven: an archive without its pickle, a burst that always fits, a donor or
a bit that the known SHA-256 refutes. None of it is ever called lossless, exact or proven.
"""

from __future__ import annotations

import hashlib
import io
import math
import random
import zipfile
import zlib
from functools import cache
from pathlib import Path

import pytest
import torch

from ckpttool.errors import FormatError, RefusedError
from ckpttool.mending.plan import Burst, Mending, plan_mend
from ckpttool.mending.write import sha256_of_rewritten, write_mended
from tests import corrupt
from tests.ckpttool.mending.damaged_zip import mended, small


def planned(tmp_path: Path, data: bytes, **options: object) -> Mending:
    path = tmp_path / "damaged.pt"
    path.write_bytes(data)
    return plan_mend(path, **options)  # type: ignore[arg-type]


def mark_of(path: Path) -> str:
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith("/.ckpttool/mended.json")]
        return archive.read(names[0]).decode() if names else ""


# No pickle.


def without_pickle() -> bytes:
    """The first record, the directory and the end are gone; all other records are whole."""
    data = small()
    first = corrupt.header_offset(data, ".format_version")
    return data[first : data.index(b"PK\1\2")]


def lone_record() -> bytes:
    data = small()
    start = corrupt.header_offset(data, "data/3")
    return data[start : corrupt.content_range(data, "data/3").stop + 16]


@pytest.mark.parametrize("make", [without_pickle, lone_record])
@pytest.mark.parametrize("allow_loss", [False, True])
def test_an_archive_without_its_pickle_is_hopeless(tmp_path: Path, make, allow_loss) -> None:  # type: ignore[no-untyped-def]
    with planned(tmp_path, make()) as plan:
        assert not plan.lossless
        assert not plan.exact
        assert plan.hopeless is not None
        assert "data.pkl" in plan.hopeless
        assert "data/3" in plan.hopeless  # what survives
        with pytest.raises(FormatError, match="nothing can be got back"):
            write_mended(plan, tmp_path / "out.pt", allow_loss=allow_loss)
    assert not (tmp_path / "out.pt").exists()


def test_a_whole_zip_of_something_else_is_no_healthy_torch_file(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("notes/readme.txt", "nothing of torch's")
    with planned(tmp_path, buffer.getvalue()) as plan:
        assert plan.hopeless is not None
        assert not plan.lossless


@pytest.mark.parametrize(
    ("method", "name"), [(zipfile.ZIP_BZIP2, "bzip2"), (zipfile.ZIP_LZMA, "lzma")]
)
def test_a_pickle_compressed_in_a_way_of_other_programs(
    tmp_path: Path, method: int, name: str
) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(small())) as old, zipfile.ZipFile(buffer, "w", method) as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    with planned(tmp_path, buffer.getvalue()) as plan:
        assert plan.hopeless is not None
        assert name in plan.hopeless
        assert "lost" not in plan.hopeless


# A burst.


def damaged_at_the_start() -> bytes:
    data = small()
    start = corrupt.content_range(data, "data/0").start
    return corrupt.put_bytes(data, start, bytes((data[start] ^ 0x81, data[start + 1] ^ 0x3C)))


WRONG = Burst("data/0", 8 * 12, 32)


@pytest.mark.parametrize("bits", [31, 32])
def test_a_burst_that_nearly_always_fits_is_refused(tmp_path: Path, bits: int) -> None:
    with planned(tmp_path, damaged_at_the_start(), bursts=[WRONG._replace(bits=bits)]) as plan:
        assert not plan.lossless
        assert any("above the limit (--bit-odds 0.01)" in note for note in plan.notes)
        assert [loss.tensor for loss in plan.losses] == ["model.a"]


def test_a_burst_that_always_fits_proves_nothing(tmp_path: Path) -> None:
    """32 bits at a place that is not damaged at all: the checksum matches, and the file is wrong."""
    out, written = mended(tmp_path, damaged_at_the_start(), bursts=[WRONG], bit_odds=1)
    assert out is not None
    assert written is not None
    assert not written.proven
    with planned(tmp_path, damaged_at_the_start(), bursts=[WRONG], bit_odds=1) as plan:
        assert not plan.lossless
        assert not plan.exact
        assert "byte for byte" not in plan.proof
        assert plan.unproven == ["model.a"]
        state = next(record for record in plan.records if record.name == "data/0")
    assert state.state == "unproven"
    assert "fits, unproven, by odds of 100 %" in state.proof
    assert "fits, unproven" in mark_of(tmp_path / "mended.pt")


def test_a_known_sha256_proves_a_burst_that_always_fits(tmp_path: Path) -> None:
    known = hashlib.sha256(small()).hexdigest()
    right = Burst("data/0", 0, 32)
    options = {"bursts": [right], "bit_odds": 1.0, "known_sha256": known}
    with planned(tmp_path, damaged_at_the_start(), **options) as plan:
        assert plan.exact
        assert {record.state for record in plan.records} == {"whole", "burst"}
    out, written = mended(tmp_path, damaged_at_the_start(), **options)
    assert out == small()
    assert written is not None
    assert written.proven


def test_a_known_sha256_refutes_a_burst_at_a_wrong_place(tmp_path: Path) -> None:
    known = hashlib.sha256(small()).hexdigest()
    options = {"bursts": [WRONG], "bit_odds": 1.0, "known_sha256": known}
    with planned(tmp_path, damaged_at_the_start(), **options) as plan:
        assert not plan.lossless
        assert "would not have the SHA-256" in plan.proof
    with pytest.raises(RefusedError, match="SHA-256"):
        mended(tmp_path, damaged_at_the_start(), **options)


def test_each_place_that_is_tried_adds_to_the_odds(tmp_path: Path) -> None:
    """24 bits at one place fit by odds of 1 in 256, at three places above 1 %."""
    tries = [Burst("data/0", 8 * place, 24) for place in (0, 8, 12)]
    with planned(tmp_path, damaged_at_the_start(), bursts=tries[:1]) as plan:
        assert plan.exact
    with planned(tmp_path, damaged_at_the_start(), bursts=tries) as plan:
        assert not plan.lossless


@pytest.mark.parametrize("odds", [math.nan, math.inf, -0.1, 1.5])
def test_odds_that_are_none(tmp_path: Path, odds: float) -> None:
    with pytest.raises(ValueError, match="odds"):
        planned(tmp_path, small(), bit_odds=odds)


# One bit.


@cache
def large() -> bytes:
    """One storage of 6,000,000 bytes: any damage looks like one flipped bit in 1.1 % of cases."""
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(1_500_000, dtype=torch.int32)}, buffer)
    return buffer.getvalue()


def one_bit_off() -> bytes:
    return corrupt.flip_bit(large(), corrupt.content_range(large(), "data/0").start + 4_000, 3)


def test_a_bit_above_the_usual_odds_is_not_proven(tmp_path: Path) -> None:
    with planned(tmp_path, one_bit_off(), bit_odds=0.02) as plan:
        assert not plan.lossless
        assert not plan.exact
        assert plan.unproven == ["w"]
        state = next(record for record in plan.records if record.name == "data/0")
    assert state.state == "unproven"
    assert "unproven, by odds of 1.1 %" in state.proof
    out, _ = mended(tmp_path, one_bit_off(), bit_odds=0.02)
    assert out is not None
    assert torch.equal(
        torch.load(io.BytesIO(out), weights_only=True)["w"],
        torch.arange(1_500_000, dtype=torch.int32),
    )
    assert "unproven, by odds of 1.1 %" in mark_of(tmp_path / "mended.pt")


@pytest.mark.parametrize("odds", [0.01, 0.02])
def test_a_known_sha256_proves_it(tmp_path: Path, odds: float) -> None:
    known = hashlib.sha256(large()).hexdigest()
    out, written = mended(tmp_path, one_bit_off(), bit_odds=odds, known_sha256=known)
    assert out == large()
    assert written is not None
    assert written.proven


def test_two_bits_that_look_like_one_are_not_proven_where_the_sha256_is_known(
    tmp_path: Path,
) -> None:
    """A bit and its checksum were both damaged so that one other bit explains it."""
    data = small()
    content = corrupt.content_range(data, "data/3")
    good = data[content.start : content.stop]
    # The content is not what the known SHA-256 says, and its checksum is that of one bit more.
    false = corrupt.flip_bit(good, 5)
    turned = corrupt.flip_bit(false, 20)
    wrong = zlib.crc32(turned).to_bytes(4, "little")
    damaged = corrupt.put_bytes(data, content.start, false)
    damaged = damaged.replace(zlib.crc32(good).to_bytes(4, "little"), wrong)
    with planned(tmp_path, damaged) as plan:
        assert {r.state for r in plan.records if r.name == "data/3"} == {"bit"}
    known = hashlib.sha256(data).hexdigest()
    with planned(tmp_path, damaged, known_sha256=known) as plan:
        assert not plan.lossless
        assert not plan.exact
        assert "byte for byte" not in plan.proof


def test_a_donor_is_not_lossless_where_the_sha256_refutes_it(tmp_path: Path) -> None:
    donor = tmp_path / "donor.pt"
    donor.write_bytes(small())
    start = corrupt.content_range(small(), "data/3").start
    damaged = corrupt.put_bytes(small(), start, bytes(range(40)))
    known = hashlib.sha256(b"something else").hexdigest()
    with planned(tmp_path, damaged, siblings=[str(donor)]) as plan:
        assert plan.exact
    with planned(tmp_path, damaged, siblings=[str(donor)], known_sha256=known) as plan:
        assert not plan.lossless
        assert not plan.exact


# Noise over the end of the records and the directory.


@cache
def empties() -> bytes:
    """Empty storages, which any checksum of nothing fits."""
    state = {
        "e": torch.empty(0),
        "e2": torch.empty(0, 5),
        "s": torch.tensor(3.0),
        "w": torch.ones(2),
    }
    buffer = io.BytesIO()
    torch.save({"model": {**state, "h": torch.empty(0, dtype=torch.float16)}}, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("length", [128, 512])
def test_noise_over_empty_records_is_never_called_exact(tmp_path: Path, length: int) -> None:
    data = empties()
    exact = 0
    for seed in range(12):
        for start in range(1024, len(data) - length, 160):
            noise = random.Random(f"{seed} {start}").randbytes(length)
            with planned(tmp_path, corrupt.put_bytes(data, start, noise)) as plan:
                if plan.exact:
                    exact += 1
                    digest = sha256_of_rewritten(plan)
                    assert digest == hashlib.sha256(data).hexdigest(), (seed, start)
    assert exact
