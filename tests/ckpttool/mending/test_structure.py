"""Structure rebuilt from its twins: whatever one copy lost, the file comes back byte for byte."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpttool.mending.plan import plan_mend
from ckpttool.mending.write import sha256_of_rewritten
from tests import corrupt
from tests.ckpttool.mending.damaged_zip import (
    byte_changes,
    descriptor_range,
    entry_range,
    header_range,
    mended,
    overwritten,
    small,
    structure,
)

RECORDS = list(corrupt.entry_offsets(small()))
FILLED = [record for record in RECORDS if len(corrupt.content_range(small(), record))]


def test_a_healthy_file_is_left_alone(tmp_path: Path) -> None:
    out, written = mended(tmp_path, small())
    assert out is None
    assert written is None
    with plan_mend(tmp_path / "damaged.pt") as plan:
        assert plan.healthy
        assert plan.proof == "nothing to mend"
        assert {record.state for record in plan.records} == {"whole"}


@pytest.mark.slow
def test_every_single_byte_of_the_structure(tmp_path: Path) -> None:
    data, path = small(), tmp_path / "damaged.pt"
    wanted = hashlib.sha256(data).hexdigest()
    for offset in structure(data):
        for damaged in byte_changes(data, offset):
            path.write_bytes(damaged)
            with plan_mend(path) as plan:
                assert plan.exact, offset
                assert sha256_of_rewritten(plan) == wanted, offset


def test_some_bytes_of_the_structure(tmp_path: Path) -> None:
    """The same for a few, so that a quick look has them, too."""
    data = small()
    for offset in random.Random(5).sample(structure(data), 60):
        for damaged in byte_changes(data, offset):
            out, written = mended(tmp_path, damaged)
            assert out == data, offset
            assert written is not None
            assert written.sha256 == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("fill", [0, 0xFF])
@pytest.mark.parametrize("record", RECORDS)
def test_a_whole_local_header_is_gone(record: str, fill: int, tmp_path: Path) -> None:
    data = small()
    damaged = overwritten(data, header_range(data, record), fill)
    assert mended(tmp_path, damaged)[0] == data


@pytest.mark.parametrize("fill", [0, 0xFF])
@pytest.mark.parametrize("record", FILLED)
def test_a_whole_descriptor_is_gone(record: str, fill: int, tmp_path: Path) -> None:
    data = small()
    damaged = overwritten(data, descriptor_range(data, record), fill)
    assert mended(tmp_path, damaged)[0] == data


@pytest.mark.parametrize("fill", [0, 0xFF])
@pytest.mark.parametrize("record", RECORDS)
def test_a_whole_directory_entry_is_gone(record: str, fill: int, tmp_path: Path) -> None:
    data = small()
    assert mended(tmp_path, overwritten(data, entry_range(data, record), fill))[0] == data


@pytest.mark.parametrize("record", RECORDS)
def test_header_and_directory_are_gone(record: str, tmp_path: Path) -> None:
    """The descriptor tells size and checksum, the alignment the begin, the pickle the name."""
    data = small()
    damaged = corrupt.drop_directory(overwritten(data, header_range(data, record), 0xFF))
    assert mended(tmp_path, damaged)[0] == data


@pytest.mark.parametrize(
    "mutation",
    [corrupt.drop_end_record, corrupt.drop_end_records, corrupt.drop_directory],
)
def test_the_end_is_cut_off(mutation: Callable[[bytes], bytes], tmp_path: Path) -> None:
    assert mended(tmp_path, mutation(small()))[0] == small()


def test_cut_anywhere_behind_the_last_record(tmp_path: Path) -> None:
    data = small()
    start = len(corrupt.drop_directory(data))
    for length in range(start, len(data), 7):
        assert mended(tmp_path, corrupt.keep_first(data, length))[0] == data, length


def test_cut_in_the_last_record(tmp_path: Path) -> None:
    """The serialization id follows from all the other records; so does `version`."""
    data = small()
    for record in (".data/serialization_id", "version"):
        content = corrupt.content_range(data, record)
        for length in (header_range(data, record).start, content.start, content.start + 1):
            assert mended(tmp_path, corrupt.keep_first(data, length))[0] == data, (record, length)


@pytest.mark.parametrize("front", [b"x", b"HTTP/1.1 200 OK\r\n\r\n", bytes(4096)])
def test_bytes_around_the_archive(front: bytes, tmp_path: Path) -> None:
    data = small()
    assert mended(tmp_path, corrupt.prepend(data, front))[0] == data
    assert mended(tmp_path, corrupt.append(data, front))[0] == data
    assert mended(tmp_path, corrupt.prepend(corrupt.drop_directory(data), front))[0] == data


def test_several_places_at_once(tmp_path: Path) -> None:
    """Two bytes of the structure at random: each has twins, unless both are one fact's."""
    data = small()
    rng = random.Random(11)
    for _ in range(150):
        damaged = data
        for offset in rng.sample(structure(data), 2):
            damaged = corrupt.flip_byte(damaged, offset, rng.randrange(1, 256))
        assert mended(tmp_path, damaged)[0] == data


def test_bytes_lost_in_a_header_move_all_that_follows(tmp_path: Path) -> None:
    """All offsets in the directory are wrong then; names and headers are not."""
    data = small()
    padding = header_range(data, ".storage_alignment")
    damaged = corrupt.cut_out(data, padding.stop - 20, 10)
    assert mended(tmp_path, damaged)[0] == data


def test_a_wrong_checksum_in_either_copy(tmp_path: Path) -> None:
    data = small()
    assert mended(tmp_path, corrupt.set_central(data, "data/0", "crc", 1))[0] == data
    size = len(corrupt.content_range(data, "data/0"))
    damaged = corrupt.set_descriptor(data, "data/0", crc=1, stored=size, size=size)
    assert mended(tmp_path, damaged)[0] == data


def test_a_name_that_another_record_has(tmp_path: Path) -> None:
    """`data/0` reads `data/2` in one copy: the name that nobody else has is right."""
    data = small()
    assert mended(tmp_path, corrupt.rename_local(data, "data/0", "data/2"))[0] == data
    assert mended(tmp_path, corrupt.rename_central(data, "data/0", "data/2"))[0] == data


def test_every_name_of_the_pickle_is_damaged(tmp_path: Path) -> None:
    data = small()
    damaged = corrupt.rename(data, "data.pkl", "dbta.pkl")
    assert mended(tmp_path, damaged)[0] == data


@pytest.mark.parametrize("deflate", [False, True])
def test_a_file_that_was_zipped_again(deflate: bool, tmp_path: Path) -> None:
    """Its layout is not torch's; what is written is, with the same contents."""
    data = small()
    other = corrupt.rezip(data, deflate=deflate, root="there")
    for damaged in (corrupt.flip_byte(other, 0), corrupt.drop_end_record(other)):
        out, _ = mended(tmp_path, damaged)
        assert out is not None
        named = [(name.replace("archive/", "there/"), c) for name, c in corrupt.read_records(data)]
        assert corrupt.read_records(out) == named


def test_a_healthy_zip_of_another_tool_is_left_alone(tmp_path: Path) -> None:
    assert mended(tmp_path, corrupt.rezip(small(), deflate=True))[0] is None


def test_without_checksums_nothing_is_proven(tmp_path: Path) -> None:
    data = corrupt.drop_checksums(small())
    assert mended(tmp_path, data)[0] is None
    out, _ = mended(tmp_path, corrupt.drop_end_record(data))
    assert out == data
    with plan_mend(tmp_path / "damaged.pt") as plan:
        assert not plan.lossless
        assert not plan.exact
        assert len(plan.unproven) == 3  # the fourth has no bytes
        assert "no checksums" in plan.proof


@pytest.mark.parametrize("version", ["1.6.0", "2.0.1", "2.13.0"])
@pytest.mark.parametrize("name", ["quant.pt", "train_zip.pt", "train_proto4.pt"])
def test_files_of_all_versions(version: str, name: str, corpus: Path, tmp_path: Path) -> None:
    data = (corpus / f"torch-{version}" / name).read_bytes()
    assert mended(tmp_path, corrupt.drop_directory(data))[0] == data
    first = next(iter(corrupt.entry_offsets(data)))
    assert mended(tmp_path, overwritten(data, header_range(data, first), 0))[0] == data


def test_torch_loads_what_was_mended(tmp_path: Path) -> None:
    mended(tmp_path, corrupt.drop_directory(small()))
    script = "import sys, torch; print(torch.load(sys.argv[1], mmap=True)['step'])"
    command = [sys.executable, "-c", script, str(tmp_path / "mended.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "7"
