"""The zip writer against torch's own: equal to the last byte, for the same records and root."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpttool.errors import FormatError
from ckpttool.writing.container import TorchZipWriter
from ckpttool.writing.serialization_id import NAME, serialization_id

CORPUS = Path(__file__).parents[3] / "fixtures" / "corpus"
SMALL = [
    *("empty", "sizes", "zeros", "records", "stream", "a name with spaces, and ümläuts", "x" * 200),
    *("aligned-1", "aligned-8", "aligned-256", "aligned-4096", "no-checksums"),
]
SPARSE = ["one-below", "one-at", "one-above", "many", "offset"]
# Whatever of these lies in the corpus was laid out by torch's writer, of torch 1.6, 2.0 and 2.13;
# for the others there is a reason.
NOT_TORCHS_LAYOUT = {
    "torch-2.13.0/rezipped_deflated.pt": "zipped again by Python",
    "torch-2.13.0/rezipped_no_byteorder.pt": "zipped again by Python",
    "torch-2.13.0/zip_trailing_junk.pt": "bytes behind the archive",
    "torch-2.13.0/truncated_zip.pt": "cut",
    "torch-2.13.0/dcp_single/__0_0.distcp": "archives one behind the other",
    **{
        f"torch-{version}/{name}_ts.pt": "TorchScript's code is deflated"
        for version in ("1.6.0", "2.0.1", "2.13.0")
        for name in ("scripted", "traced")
    },
}
ZIPS = sorted(
    str(path.relative_to(CORPUS))
    for path in CORPUS.rglob("*")
    if path.is_file() and path.read_bytes()[:4] == b"PK\x03\x04"
)


def records_of(path: Path) -> tuple[str, list[tuple[str, bytes]]]:
    """Root, and name and content of each record, by Python's zipfile."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        root = names[0].partition("/")[0]
        return root, [(name.removeprefix(f"{root}/"), content(archive, name)) for name in names]


def content(archive: zipfile.ZipFile, name: str) -> bytes:
    """What a record holds, whatever its checksum says: torch can leave checksums out."""
    with archive.open(name) as file:
        file._expected_crc = None  # type: ignore[attr-defined]
        return file.read()


def written(path: Path, **options: object) -> bytes:
    """The records of a zip, laid out again."""
    root, records = records_of(path)
    target = io.BytesIO()
    writer = TorchZipWriter(target, root, **options)  # type: ignore[arg-type]
    for name, content in records:
        writer.add(name, content)
    writer.finish()
    return target.getvalue()


@pytest.mark.parametrize("name", SMALL)
def test_equal_to_what_torch_writes(name: str, torch_files: Path) -> None:
    path = torch_files / f"{name}.pt"
    kind, _, number = name.partition("-")
    options: dict[str, object] = {"alignment": int(number)} if kind == "aligned" else {}
    if name == "no-checksums":
        options["checksums"] = False
    assert written(path, **options) == path.read_bytes()


@pytest.mark.parametrize("file", [file for file in ZIPS if file not in NOT_TORCHS_LAYOUT])
def test_files_of_the_corpus_come_out_as_they_were(file: str) -> None:
    path = CORPUS / file
    assert written(path, checksums="no_crc32" not in file) == path.read_bytes()


def test_the_others_of_the_corpus_have_another_layout() -> None:
    assert NOT_TORCHS_LAYOUT.keys() <= set(ZIPS)
    for file in NOT_TORCHS_LAYOUT.keys() - {"torch-2.13.0/truncated_zip.pt"}:
        assert written(CORPUS / file) != (CORPUS / file).read_bytes()


# ---- Beyond four gigabytes: sparse files, of which only the structure is there.


def data_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of what a sparse file really stores, without zeros at the ends."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        yield end, b""
        position = 0
        while position < end:
            try:
                start = os.lseek(file.fileno(), position, os.SEEK_DATA)
            except OSError:
                return
            position = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            file.seek(start)
            content = file.read(position - start)
            lead = len(content) - len(content.lstrip(b"\0"))
            yield start + lead, content.strip(b"\0")


class Holes(io.RawIOBase):
    """A file in which zeros are passed over instead of written."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("wb")

    def write(self, data: object) -> int:
        if data is ZEROS:
            return self.file.seek(len(ZEROS), 1)
        return self.file.write(data)  # type: ignore[arg-type]

    def close(self) -> None:
        self.file.close()


ZEROS = bytes(1 << 20)


def zeros(size: int) -> Iterator[bytes]:
    for _ in range(size // len(ZEROS)):
        yield ZEROS
    yield bytes(size % len(ZEROS))


@pytest.mark.parametrize("name", SPARSE)
def test_sizes_and_offsets_beyond_32_bits(name: str, torch_files: Path, tmp_path: Path) -> None:
    """Once past the contents, and once through `add`, with contents of zeros and no checksums."""
    path = torch_files / f"sparse-{name}.pt"
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        small = {e.filename: archive.read(e) for e in entries if "/data/" not in e.filename}
    past, through = tmp_path / "past", tmp_path / "through"
    with past.open("wb") as file:
        skipping = TorchZipWriter(file, f"sparse-{name}")
        for entry in entries:
            _, _, record = entry.filename.partition("/")
            if entry.filename in small:
                skipping.add(record, small[entry.filename])
            else:
                skipping.skip(record, entry.file_size)
        skipping.finish()
    assert list(data_of(past)) == list(data_of(path))
    holes = Holes(through)
    adding = TorchZipWriter(holes, f"sparse-{name}", checksums=False)  # type: ignore[arg-type]
    for entry in entries:
        adding.add(entry.filename.partition("/")[2], zeros(entry.file_size), entry.file_size)
    adding.finish()
    holes.close()
    # The same structure, but for the content and the checksums of the small records.
    assert through.stat().st_size == path.stat().st_size
    with zipfile.ZipFile(through) as archive:
        ours = [(e.filename, e.file_size, e.header_offset, e.flag_bits) for e in archive.infolist()]
    assert ours == [(e.filename, e.file_size, e.header_offset, e.flag_bits) for e in entries]


@pytest.mark.slow
def test_more_records_than_16_bits_count(tmp_path: Path) -> None:
    make = (
        "import sys, torch; "
        "torch.save([torch.full((1,), float(i)) for i in range(66_000)], sys.argv[1])"
    )
    path = tmp_path / "many.pt"
    subprocess.run([sys.executable, "-c", make, str(path)], check=True)
    assert written(path) == path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        *entries, last = archive.infolist()
        records = [(e.filename.removeprefix("many/"), e.file_size, e.CRC) for e in entries]
        assert serialization_id(records) == archive.read(last).decode("ascii")


# ---- The writer by itself.


def test_content_in_pieces_of_any_kind() -> None:
    content = bytes(range(256)) * 5000
    results = set()
    for whole in (content, bytearray(content), memoryview(content), memoryview(content).cast("I")):
        target = io.BytesIO()
        writer = TorchZipWriter(target)
        crc = writer.add("data/0", whole)
        writer.finish()
        results.add((crc, target.getvalue()))
    for step in (1000, 65536, 10_000_000):
        target = io.BytesIO()
        writer = TorchZipWriter(target)
        pieces = (memoryview(content)[at : at + step] for at in range(0, len(content), step))
        crc = writer.add("data/0", pieces, len(content))
        writer.finish()
        results.add((crc, target.getvalue()))
    assert len(results) == 1
    (crc, data) = results.pop()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert archive.read("archive/data/0") == content
        assert crc == archive.getinfo("archive/data/0").CRC


def test_nothing_big_is_copied() -> None:
    """What arrives at the file is the very memory that was given."""
    content = bytearray(3 << 20)

    class Sink(io.BytesIO):
        shared = 0

        def write(self, data: object) -> int:
            view = memoryview(data)  # type: ignore[arg-type]
            self.shared += len(view) if view.obj is content else 0
            return len(view)

    sink = Sink()
    TorchZipWriter(sink).add("data/0", content)
    assert sink.shared == len(content)


def test_empty_buffers_of_other_shapes() -> None:
    import numpy as np

    target = io.BytesIO()
    writer = TorchZipWriter(target)
    assert writer.add("data/0", memoryview(np.zeros((0, 3), np.float32))) == 0
    writer.finish()
    with zipfile.ZipFile(io.BytesIO(target.getvalue())) as archive:
        assert archive.read("archive/data/0") == b""


def test_offsets_are_told_before_they_are_used() -> None:
    target = io.BytesIO()
    writer = TorchZipWriter(target, "r")
    for name, content in (("a", b"12345"), ("b" * 50, b""), ("c", bytes(1000))):
        told = writer.content_offset(name, len(content))
        writer.add(name, content)
        assert told % 64 == 0
        assert target.getvalue()[told : told + len(content)] == content
    assert writer.records[0][:2] == ("a", 5)
    assert writer.position == len(target.getvalue()) + 16  # the last descriptor is yet to come


def test_a_file_that_does_not_begin_at_zero() -> None:
    target = io.BytesIO(b"front")
    target.seek(5)
    writer = TorchZipWriter(target)
    writer.add("a", b"1")
    writer.finish()
    alone = io.BytesIO()
    writer = TorchZipWriter(alone)
    writer.add("a", b"1")
    writer.finish()
    assert target.getvalue() == b"front" + alone.getvalue()


def test_what_is_refused() -> None:
    writer = TorchZipWriter(io.BytesIO())
    writer.add("a", b"1")
    with pytest.raises(ValueError, match="there already"):
        writer.add("a", b"2")
    with pytest.raises(ValueError, match="size"):
        writer.add("b", iter([b"2"]))
    with pytest.raises(ValueError, match="name"):
        writer.add("b" * 70_000, b"")
    with pytest.raises(ValueError, match="name"):
        writer.add("b\0", b"")
    writer.finish()
    with pytest.raises(ValueError, match="finished"):
        writer.add("c", b"2")
    for alignment in (0, 3, 1 << 16, -64):
        with pytest.raises(ValueError, match="power of two"):
            TorchZipWriter(io.BytesIO(), alignment=alignment)


@pytest.mark.parametrize("pieces", [[b"12"], [b"123", b"4567"], []])
def test_a_source_of_another_size_than_it_said(pieces: list[bytes]) -> None:
    writer = TorchZipWriter(io.BytesIO())
    with pytest.raises(FormatError, match="announced") as caught:
        writer.add("data/0", pieces, 5)
    assert caught.value.record == "data/0"


def test_finishing_twice_writes_once() -> None:
    target = io.BytesIO()
    writer = TorchZipWriter(target)
    writer.add(NAME, b"0" * 40)
    writer.finish()
    size = len(target.getvalue())
    writer.finish()
    assert len(target.getvalue()) == size
