"""The forty digits against those that torch put into its own files."""

from __future__ import annotations

import zipfile
from pathlib import Path

from ckpttool.writing.serialization_id import NAME, serialization_id

CORPUS = Path(__file__).parents[3] / "fixtures" / "corpus"
# Paths in these were made anonymous after torch had written them: the checksums are no longer those
# that went into the digits. The names still are.
EDITED = ("export.pt2", "training_args.bin", "lightning.ckpt")
DEFLATED = ("rezipped_deflated.pt",)


def id_and_records(path: Path) -> tuple[str, list[tuple[str, int, int]]]:
    """The digits in a file, and what they were made from; an empty text where there are none."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        root = entries[0].filename.partition("/")[0] + "/"
        if entries[-1].filename != root + NAME:
            return "", []
        with archive.open(entries[-1]) as file:
            file._expected_crc = None  # type: ignore[attr-defined] # torch can leave it out
            found = file.read().decode("ascii")
    return found, [(e.filename.removeprefix(root), e.file_size, e.CRC) for e in entries[:-1]]


def test_files_written_now(torch_files: Path) -> None:
    files = sorted(torch_files.glob("*.pt"))
    assert len(files) == 17
    for path in files:
        found, records = id_and_records(path)
        assert len(found) == 40
        assert serialization_id(records) == found, path.name


def test_files_of_the_corpus() -> None:
    checked = 0
    for path in CORPUS.rglob("*"):
        if not path.is_file() or not zipfile.is_zipfile(path):
            continue
        found, records = id_and_records(path)
        if found:
            made = serialization_id(records)
            assert made[:20] == found[:20], path.name
            assert (made == found) == (path.name not in EDITED), path.name
            checked += 1
    assert checked >= 40


def test_the_order_of_names_matters_as_little_as_in_a_set_that_never_grew() -> None:
    """Checksums are combined in the file's order, and one digit more or less changes all."""
    records = [("data.pkl", 3, 17), ("version", 2, 5)]
    assert serialization_id(records) != serialization_id([("data.pkl", 3, 18), ("version", 2, 5)])
    assert serialization_id(records) != serialization_id([("data.pkl", 3, 17), ("versiom", 2, 5)])
    assert serialization_id([]) == "0" * 40
