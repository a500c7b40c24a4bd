"""Healthy zips: whatever wrote them, every record is there, readable, and nothing is odd."""

from __future__ import annotations

import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ckpttool.errors import FormatError, LimitError
from ckpttool.formats.container import Record
from ckpttool.formats.limits import DEFAULT_LIMITS
from ckpttool.formats.torch_zip import open_zip
from ckpttool.io.reading import FileReader
from tests import corrupt
from tests.ckpttool.formats.support import Opened, bad_records, codes, everything, one

CORPUS = Path(__file__).parents[3] / "fixtures" / "corpus"
# What is odd about a file of the corpus, by its page; all others have to be without a fault.
ODD = {
    "torch-2.13.0/dcp_single/__0_0.distcp": {"second-archive"},
    "torch-2.13.0/train_no_crc32.pt": {"checksums-off"},
    "torch-2.13.0/truncated_zip.pt": {"no-end-record", "record-unreadable"},
    "torch-2.13.0/zip_trailing_junk.pt": {"trailing-bytes"},
}


def is_zip(path: Path) -> bool:
    return path.is_file() and path.read_bytes()[:4] == b"PK\x03\x04"


ZIPS = sorted(str(path.relative_to(CORPUS)) for path in CORPUS.rglob("*") if is_zip(path))
READABLE = [name for name in ZIPS if "truncated" not in name]


@pytest.fixture(scope="module")
def healthy() -> bytes:
    return (CORPUS / "torch-2.13.0" / "train_zip.pt").read_bytes()


def test_the_corpus_is_there() -> None:
    assert len(ZIPS) >= 60


@pytest.mark.parametrize("name", ZIPS)
def test_nothing_odd_is_seen_in_honest_files(name: str) -> None:
    with FileReader(CORPUS / name) as reader:
        assert codes(everything(open_zip(reader, DEFAULT_LIMITS))) == ODD.get(name, set())


@pytest.mark.parametrize("name", READABLE)
def test_records_are_those_that_zipfile_lists(name: str) -> None:
    with zipfile.ZipFile(CORPUS / name) as archive:
        expected = [
            (i.filename, i.file_size, i.compress_size, i.CRC, i.compress_type, i.header_offset)
            for i in archive.infolist()
        ]
    with FileReader(CORPUS / name) as reader:
        found = [
            (r.full_name, r.size, r.stored_size, r.crc, r.method, r.header_offset)
            for r in open_zip(reader, DEFAULT_LIMITS).entries
        ]
    assert found == expected


@pytest.mark.parametrize("name", READABLE)
def test_contents_are_those_that_zipfile_reads(name: str) -> None:
    expected = dict(
        corrupt.read_records((CORPUS / name).read_bytes()) if "crc32" not in name else ()
    )
    with FileReader(CORPUS / name) as reader:
        container = open_zip(reader, DEFAULT_LIMITS)
        for record in container.entries:
            content = container.read(record)
            assert content == expected.get(record.full_name, content)
            assert b"".join(map(bytes, container.chunks(record))) == content
            span = container.span(record)
            assert (span is None) == (record.method != 0)
            assert span is None or reader.read(*span) == content
        assert not bad_records(container) or not container.has_checksums


@pytest.mark.parametrize(
    ("name", "prefix", "byteorder", "facts"),
    [
        ("torch-1.6.0/train_zip.pt", "archive", "little", {"version": 3}),
        ("torch-2.0.1/train_zip.pt", "train_zip", "little", {"version": 3}),
        ("torch-2.13.0/big_endian.pt", "big_endian", "big", {"format_version": 1}),
        ("torch-2.13.0/train_zip_stream.pt", "archive", "little", {"storage_alignment": 64}),
        ("torch-2.13.0/rezipped_no_byteorder.pt", "archive", "little", {"version": 3}),
        # Named after the temporary file that it was written to, dot and all.
        ("seed-runs/plain/step_000000000004.pt", ".step_000000000004.pt", "little", {}),
    ],
)
def test_what_a_file_says_of_itself(
    name: str, prefix: str, byteorder: str, facts: dict[str, object]
) -> None:
    with FileReader(CORPUS / name) as reader:
        container = open_zip(reader, DEFAULT_LIMITS)
        assert (container.prefix, container.byteorder) == (prefix, byteorder)
        assert facts.items() <= container.facts.items()
        assert container.has_checksums
        assert container.storage_record("0") == "data/0"
        assert container.pickles() == ["data.pkl"]


def test_opening_reads_only_the_directory_and_a_few_lines(
    healthy: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    original = FileReader.read

    def counting(self: FileReader, offset: int, length: int) -> bytes:
        data = original(self, offset, length)
        read.append(len(data))
        return data

    with Opened(tmp_path / "file", healthy) as container:
        records = len(container.entries)
        monkeypatch.setattr(FileReader, "read", counting)
        open_zip(container.reader, DEFAULT_LIMITS)
    # Tail, directory, five short records with their headers: nothing that grows with the records.
    assert len(read) < 20 < records
    assert sum(read) < 65_557 + 8_000


def test_rezipped_with_another_root(healthy: bytes, tmp_path: Path) -> None:
    with Opened(tmp_path / "file", corrupt.rezip(healthy, root="unpacked")) as container:
        assert container.prefix == "unpacked"
        assert everything(container) == []
        assert bad_records(container) == []


def test_rezipped_and_deflated(healthy: bytes, tmp_path: Path) -> None:
    with Opened(tmp_path / "file", corrupt.rezip(healthy, deflate=True)) as container:
        assert everything(container) == []
        assert bad_records(container) == []
        assert container.span("data/0") is None
        assert container.read("data/0") == dict(corrupt.read_records(healthy))["train_zip/data/0"]


def test_member_added_by_a_generic_tool(healthy: bytes, tmp_path: Path) -> None:
    added = corrupt.add_member(healthy, "train_zip/notes.txt", b"hello")
    with Opened(tmp_path / "file", added) as container:
        assert everything(container) == []
        assert bad_records(container) == []
        assert container.read("notes.txt") == b"hello"


def test_resource_forks_of_a_mac_lie_outside_of_the_root(healthy: bytes, tmp_path: Path) -> None:
    mac = corrupt.add_member(healthy, "__MACOSX/train_zip/._data.pkl", b"\0\5\x16\7")
    with Opened(tmp_path / "file", mac) as container:
        assert container.prefix == "train_zip"
        assert len(container.records) == len(container.entries) - 1
        assert not container.entries[-1].in_root
        assert one(everything(container), "several-roots").facts["count"] == 1


def test_root_is_where_the_pickle_is(healthy: bytes, tmp_path: Path) -> None:
    records = corrupt.read_records(healthy)
    first = corrupt.torch_zip([("__MACOSX/train_zip/._data.pkl", b"x"), *records])
    with Opened(tmp_path / "file", first) as container:
        assert container.prefix == "train_zip"
        assert "data.pkl" in container.records
        assert "several-roots" in codes(container.anomalies)


def test_without_a_root_folder(tmp_path: Path) -> None:
    with Opened(
        tmp_path / "file", corrupt.torch_zip([("data.pkl", b"N."), ("version", b"3")])
    ) as c:
        assert c.prefix == ""
        assert c.read("data.pkl") == b"N."


def test_folder_entries_are_no_records(healthy: bytes, tmp_path: Path) -> None:
    data = corrupt.add_member(corrupt.rezip(healthy), "train_zip/data/", b"")
    with Opened(tmp_path / "file", corrupt.add_member(data, "train_zip/", b"")) as container:
        assert len(container.entries) == len(container.records) + 2
        assert everything(container) == []


def test_bytes_of_one_content_are_found_in_place(healthy: bytes, tmp_path: Path) -> None:
    with Opened(tmp_path / "file", healthy) as container:
        span = container.span("data/3")
        assert span is not None
        assert range(span[0], sum(span)) == corrupt.content_range(healthy, "data/3")
        assert span[0] % 64 == 0


def test_unknown_record(healthy: bytes, tmp_path: Path) -> None:
    with Opened(tmp_path / "file", healthy) as container, pytest.raises(FormatError):
        container.read("data/999")


def test_reading_under_a_limit(healthy: bytes, tmp_path: Path) -> None:
    with Opened(tmp_path / "file", healthy) as container:
        size = container.records["data.pkl"].size
        assert len(container.read("data.pkl", limit=size)) == size
        with pytest.raises(LimitError):
            container.read("data.pkl", limit=size - 1)


def test_non_ascii_names(tmp_path: Path) -> None:
    records = [("räume/data.pkl", b"N."), ("räume/データ", b"1"), ("räume/x", b"22")]
    with Opened(tmp_path / "file", corrupt.torch_zip(records)) as container:
        assert container.prefix == "räume"
        assert list(container.records) == ["data.pkl", "データ", "x"]
        assert everything(container) == []


def test_names_that_are_not_utf8_stay_apart(tmp_path: Path) -> None:
    data = corrupt.torch_zip([("a/data.pkl", b"N."), ("a/x1", b"1"), ("a/x2", b"2")])
    data = data.replace(b"a/x1", b"a/\xff1").replace(b"a/x2", b"a/\xff2")
    with Opened(tmp_path / "file", data) as container:
        assert list(container.records) == ["data.pkl", "\\xff1", "\\xff2"]
        assert container.read("\\xff2") == b"2"


def test_empty_zip(tmp_path: Path) -> None:
    empty = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 0, 0, 0, 0, 0)
    with Opened(tmp_path / "file", empty) as container:
        assert container.entries == []
        assert container.anomalies == []


def test_comment_at_the_end(healthy: bytes, tmp_path: Path) -> None:
    rezipped = corrupt.rezip(healthy)
    comment = rezipped[:-2] + struct.pack("<H", 5) + b"hello"
    with Opened(tmp_path / "file", comment) as container:
        assert everything(container) == []


ZIP64 = """
import sys, torch
from torch._subclasses import FakeTensorMode
from torch.serialization import skip_data
with FakeTensorMode():
    state = {"a": torch.zeros(16), "big": torch.zeros(5 << 28), "c": torch.zeros(3)}
with skip_data(materialize_fake_tensors=True):
    torch.save(state, sys.argv[1])
"""


def test_more_than_four_gigabytes_as_torch_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "big.pt"
    try:
        subprocess.run([sys.executable, "-c", ZIP64, str(path)], check=True)
        with FileReader(path) as reader:
            container = open_zip(reader, DEFAULT_LIMITS)
            assert everything(container) == []
            assert container.records["data/1"].size == 5 << 30
            assert container.records["data/2"].header_offset > 5 << 30
            assert container.read("version") == b"3\n"
            span = container.span("data/2")
            assert span is not None and span[0] % 64 == 0 and span[1] == 12
    finally:
        path.unlink(missing_ok=True)


def test_a_record_is_small(healthy: bytes, tmp_path: Path) -> None:
    with Opened(tmp_path / "file", healthy) as container:
        assert all(isinstance(record, Record) for record in container.entries)
        assert not hasattr(container.entries[0], "__dict__")
