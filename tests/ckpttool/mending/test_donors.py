from __future__ import annotations

import os
import random
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.formats.limits import DEFAULT_LIMITS
from ckpttool.formats.torch_zip import ZipContainer, open_zip
from ckpttool.io.reading import FileReader
from ckpttool.mending.damaged import DamagedRecord, damaged_record
from ckpttool.mending.donors import Donor, compare, find_donor, find_donors
from tests import corrupt

SIZE = 65_536


@pytest.fixture
def readers() -> Iterator[list[FileReader]]:
    opened: list[FileReader] = []
    yield opened
    for reader in opened:
        reader.close()


def numbers(seed: int, size: int = SIZE) -> torch.Tensor:
    return torch.frombuffer(bytearray(random.Random(seed).randbytes(size)), dtype=torch.float32)


def saved(path: Path, state: object, **options: Any) -> Path:
    torch.save(state, path, **options)
    return path


def content_of(path: Path, record: str) -> bytes:
    data = path.read_bytes()
    span = corrupt.content_range(data, record)
    return data[span.start : span.stop]


def hurt(path: Path, record: str, offset: int = 1024, count: int = 64) -> bytes:
    """Inverts bytes of a record in place; gives the content that it had."""
    data = path.read_bytes()
    span = corrupt.content_range(data, record)
    start = span.start + offset
    wrong = bytes(byte ^ 0xFF for byte in data[start : start + count])
    path.write_bytes(corrupt.put_bytes(data, start, wrong))
    return data[span.start : span.stop]


def opened(path: Path, readers: list[FileReader]) -> ZipContainer:
    readers.append(FileReader(path))
    return open_zip(readers[-1], DEFAULT_LIMITS)


def damaged_in(container: ZipContainer, name: str) -> DamagedRecord:
    return damaged_record(container, container.records[name])


def bytes_of(donor: Donor, container: ZipContainer) -> bytes:
    return b"".join(bytes(chunk) for chunk in donor.chunks(container))


# Where donors come from.


def test_a_twin_in_the_same_file(tmp_path: Path, readers: list[FileReader]) -> None:
    state = {"model": {"w": numbers(1)}, "coordinator": {"baseline": numbers(1)}, "x": numbers(2)}
    path = saved(tmp_path / "a.pt", state)
    good = hurt(path, "data/0")
    container = opened(path, readers)
    donor = find_donor(damaged_in(container, "data/0"), container)
    assert donor is not None
    assert (donor.record, donor.path, donor.donor_record) == ("data/0", None, "data/1")
    assert (donor.size, donor.crc) == (SIZE, zlib.crc32(good))
    assert bytes_of(donor, container) == good
    assert donor.agreement == (SIZE, 64, 1, 1024)
    assert donor.words == "data/1 of the same file"
    assert "differs in 64 of 65,536 bytes, in one run at 1,024" in donor.proof
    assert donor.candidates == 2  # two others of this size


def test_a_frozen_layer_of_an_older_step(tmp_path: Path, readers: list[FileReader]) -> None:
    older = saved(tmp_path / "step_1.pt", {"frozen": numbers(1), "w": numbers(2), "step": 1})
    path = saved(tmp_path / "step_2.pt", {"frozen": numbers(1), "w": numbers(3), "step": 2})
    good = hurt(path, "data/0")
    hurt(path, "data/1")
    container = opened(path, readers)
    both = [damaged_in(container, name) for name in ("data/0", "data/1")]
    search = find_donors(both, container, [older])
    frozen, other = search.donors
    assert frozen is not None
    assert (frozen.path, frozen.donor_record) == (str(older), "data/0")
    assert frozen.words == "data/0 of step_1.pt"
    assert bytes_of(frozen, container) == good
    assert other is None
    assert search.skipped == []


def test_the_record_of_the_same_name_comes_first(tmp_path: Path, readers: list[FileReader]) -> None:
    sibling = saved(tmp_path / "b.pt", {"a": numbers(1), "b": numbers(9), "c": numbers(1)})
    path = saved(tmp_path / "a.pt", {"a": numbers(5), "b": numbers(6), "c": numbers(1)})
    hurt(path, "data/2")
    container = opened(path, readers)
    donor = find_donor(damaged_in(container, "data/2"), container, [sibling])
    assert donor is not None
    assert donor.donor_record == "data/2"
    hurt(sibling, "data/2")
    donor = find_donor(damaged_in(container, "data/2"), container, [sibling])
    assert donor is not None
    assert donor.donor_record == "data/0"


def test_the_same_file_comes_before_siblings_and_these_in_their_order(
    tmp_path: Path, readers: list[FileReader]
) -> None:
    paths = [saved(tmp_path / f"{n}.pt", {"a": numbers(1)}) for n in range(3)]
    path = saved(tmp_path / "a.pt", {"a": numbers(1), "b": numbers(1)})
    hurt(path, "data/0")
    container = opened(path, readers)
    donor = find_donor(damaged_in(container, "data/0"), container, paths)
    assert donor is not None
    assert donor.path is None
    hurt(path, "data/1")
    container = opened(path, readers)
    donor = find_donor(damaged_in(container, "data/0"), container, reversed(paths))
    assert donor is not None
    assert donor.path == str(paths[2])


def test_a_compressed_donor(tmp_path: Path, readers: list[FileReader]) -> None:
    path = saved(tmp_path / "a.pt", {"a": torch.zeros(5000)})
    sibling = tmp_path / "b.pt"
    sibling.write_bytes(corrupt.rezip(path.read_bytes(), deflate=True))
    good = hurt(path, "data/0")
    container = opened(path, readers)
    donor = find_donor(damaged_in(container, "data/0"), container, [sibling])
    assert donor is not None
    assert bytes_of(donor, container) == good


def test_a_sibling_without_its_directory(tmp_path: Path, readers: list[FileReader]) -> None:
    path = saved(tmp_path / "a.pt", {"a": numbers(1)})
    sibling = tmp_path / "b.pt"
    sibling.write_bytes(corrupt.drop_directory(path.read_bytes()))
    good = hurt(path, "data/0")
    container = opened(path, readers)
    donor = find_donor(damaged_in(container, "data/0"), container, [sibling])
    assert donor is not None
    assert bytes_of(donor, container) == good


def test_a_cut_record_compared_as_far_as_it_goes(tmp_path: Path, readers: list[FileReader]) -> None:
    whole = saved(tmp_path / "b.pt", {"a": numbers(1)})
    good = content_of(whole, "data/0")
    left = [good[:9000], good[:100] + b"\0\0\0\0" + good[104:9000], b""]
    agreements = [(9000, 0, 0, None), (9000, 4, 1, 100), (0, 0, 0, None)]
    words = ["9,000 bytes that are left are the same", "one run at 100", "nothing of the damaged"]
    for content, agreement, text in zip(left, agreements, words, strict=True):
        damaged = DamagedRecord("data/0", SIZE, zlib.crc32(good), None, _reading(content))
        donor = find_donor(damaged, None, [whole])
        assert donor is not None
        assert donor.agreement == agreement
        assert text in donor.proof


# What is no donor.


def test_a_donor_that_is_damaged_itself(tmp_path: Path, readers: list[FileReader]) -> None:
    path = saved(tmp_path / "a.pt", {"a": numbers(1), "b": numbers(1)})
    hurt(path, "data/0")
    hurt(path, "data/1", offset=5, count=1)
    container = opened(path, readers)
    assert find_donor(damaged_in(container, "data/0"), container) is None


def test_same_size_and_other_content(tmp_path: Path, readers: list[FileReader]) -> None:
    path = saved(tmp_path / "a.pt", {"a": numbers(1), "b": numbers(2)})
    sibling = saved(tmp_path / "b.pt", {"a": numbers(3), "b": numbers(4)})
    hurt(path, "data/0")
    container = opened(path, readers)
    assert find_donor(damaged_in(container, "data/0"), container, [sibling]) is None


def test_same_checksum_and_other_size(tmp_path: Path, readers: list[FileReader]) -> None:
    content = random.Random(1).randbytes(400)
    longer = content + _tail_for(content, zlib.crc32(content))
    assert zlib.crc32(longer) == zlib.crc32(content)
    path, sibling = tmp_path / "a.pt", tmp_path / "b.pt"
    path.write_bytes(corrupt.torch_zip([("a/data/0", content)]))
    sibling.write_bytes(corrupt.torch_zip([("a/data/0", longer)]))
    hurt(path, "data/0", offset=3, count=1)
    container = opened(path, readers)
    assert find_donor(damaged_in(container, "data/0"), container, [sibling]) is None


def test_files_without_checksums_give_and_take_nothing(
    tmp_path: Path, readers: list[FileReader]
) -> None:
    path = saved(tmp_path / "a.pt", {"a": numbers(1), "b": numbers(1)})
    sibling = tmp_path / "b.pt"
    sibling.write_bytes(corrupt.drop_checksums(path.read_bytes()))
    hurt(path, "data/0")
    hurt(path, "data/1")
    container = opened(path, readers)
    search = find_donors([damaged_in(container, "data/0")], container, [sibling])
    assert search.donors == [None]
    assert search.skipped == [(str(sibling), "was written without checksums")]
    without = opened(sibling, readers)
    assert find_donor(damaged_in(without, "data/0"), without, [path]) is None


def test_a_checksum_of_zero_and_a_record_without_bytes(
    tmp_path: Path, readers: list[FileReader]
) -> None:
    # Content whose true checksum is zero: it could be anything's, where checksums are off.
    content = b"anything" + _tail_for(b"anything", 0)
    assert zlib.crc32(content) == 0
    path = tmp_path / "a.pt"
    path.write_bytes(corrupt.torch_zip([("a/data/0", content), ("a/data/1", b""), ("a/x", b"x")]))
    container = opened(path, readers)
    for size, crc in ((len(content), 0), (0, 0), (0, 17)):
        damaged = DamagedRecord("data/9", size, crc, 1, _reading(b""))
        assert find_donor(damaged, container, [path]) is None


def test_the_record_itself_through_a_link(tmp_path: Path, readers: list[FileReader]) -> None:
    path = saved(tmp_path / "a.pt", {"a": numbers(1)})
    hurt(path, "data/0")
    os.link(path, tmp_path / "hard.pt")
    (tmp_path / "soft.pt").symlink_to(path)
    container = opened(path, readers)
    links = [path, tmp_path / "hard.pt", tmp_path / "soft.pt"]
    search = find_donors([damaged_in(container, "data/0")], container, links)
    assert search.donors == [None]


def test_siblings_that_cannot_be_used_are_listed(tmp_path: Path, readers: list[FileReader]) -> None:
    path = saved(tmp_path / "a.pt", {"a": numbers(1)})
    good = saved(tmp_path / "z.pt", {"a": numbers(1)})
    hurt(path, "data/0")
    legacy = saved(tmp_path / "legacy.pt", {"a": numbers(1)}, _use_new_zipfile_serialization=False)
    (tmp_path / "empty.pt").touch()
    (tmp_path / "folder.pt").mkdir()
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "zeros.pt").write_bytes(bytes(1000))
    (tmp_path / "junk.pt").write_bytes(b"PK\x03\x04" + bytes(1000))
    names = ["missing.pt", "folder.pt", "pipe.pt", "empty.pt", "zeros.pt", "junk.pt"]
    siblings = [*(tmp_path / name for name in names), legacy, "nul\0.pt"]
    container = opened(path, readers)
    search = find_donors([damaged_in(container, "data/0")], container, [*siblings, good])
    assert search.donors[0] is not None
    skipped = dict(search.skipped)
    assert skipped[str(tmp_path / "missing.pt")] == "No such file or directory"
    assert skipped[str(tmp_path / "folder.pt")] == "is a directory"
    assert skipped[str(tmp_path / "pipe.pt")] == "is a named pipe, not a file"
    for file in (tmp_path / "empty.pt", tmp_path / "zeros.pt", legacy):
        assert skipped[str(file)] == "is no zip, so its records have no checksums"
    assert "nul\0.pt" in skipped


def test_siblings_are_left_alone_once_all_have_donors(
    tmp_path: Path, readers: list[FileReader]
) -> None:
    path = saved(tmp_path / "a.pt", {"a": numbers(1), "b": numbers(1)})
    hurt(path, "data/0")
    container = opened(path, readers)
    missing = [tmp_path / "missing.pt"]
    search = find_donors([damaged_in(container, "data/0")], container, missing)
    assert search.donors[0] is not None
    assert search.skipped == []


# Comparing.


@given(st.binary(max_size=300), st.data())
def test_counts_differing_bytes_and_their_runs(content: bytes, data: st.DataObject) -> None:
    places = data.draw(st.sets(st.integers(0, max(0, len(content) - 1)), max_size=20))
    places = {place for place in places if place < len(content)}
    other = bytes(b ^ 1 if i in places else b for i, b in enumerate(content))
    runs = sum(1 for place in places if place - 1 not in places)
    expected = (len(content), len(places), runs, min(places, default=None))
    for _ in range(3):
        assert compare(_pieces(content, data), _pieces(other, data)) == expected


def test_compares_as_far_as_both_go() -> None:
    assert compare([b"abc", b"def"], [b"abX"]) == (3, 1, 1, 2)
    assert compare([], [b"abc"]) == (0, 0, 0, None)


def test_facts_for_json(tmp_path: Path, readers: list[FileReader]) -> None:
    path = saved(tmp_path / "a.pt", {"a": numbers(1), "b": numbers(1)})
    good = hurt(path, "data/0", offset=0, count=1)
    container = opened(path, readers)
    donor = find_donor(damaged_in(container, "data/0"), container)
    assert donor is not None
    assert donor.as_dict() == {
        "record": "data/0",
        "path": None,
        "donor_record": "data/1",
        "size": SIZE,
        "crc": zlib.crc32(good),
        "agreement": {"compared": SIZE, "differing": 1, "runs": 1, "first": 0},
        "candidates": 1,
        "words": "data/1 of the same file",
        "proof": "same size and same checksum, which the donor's bytes match (by chance: "
        "1 in 4,294,967,296); differs in 1 of 65,536 bytes, in one run at 0",
    }


def _pieces(content: bytes, data: st.DataObject) -> list[bytes]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=4)))
    return [content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True)]


def _reading(content: bytes) -> Any:
    return lambda offset, length: content[offset : offset + length]


def _tail_for(content: bytes, target: int) -> bytes:
    """Four bytes that give `content` and themselves the checksum `target`: by elimination."""
    base = zlib.crc32(content + bytes(4)) ^ target
    rows = [
        (zlib.crc32(content + struct.pack("<I", 1 << i)) ^ zlib.crc32(content + bytes(4)), 1 << i)
        for i in range(32)
    ]
    tail = 0
    for bit in reversed(range(32)):
        pivot = next(row for row in rows if row[0] >> bit & 1)
        rows = [
            (row[0] ^ pivot[0], row[1] ^ pivot[1]) if row[0] >> bit & 1 else row
            for row in rows
            if row is not pivot
        ]
        if base >> bit & 1:
            base, tail = base ^ pivot[0], tail ^ pivot[1]
    return struct.pack("<I", tail)
