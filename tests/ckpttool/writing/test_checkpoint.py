"""Whole files written again, against torch: equal once loaded, and where they were torch's, equal
to the last byte.
"""

from __future__ import annotations

import filecmp
import io
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

import pytest

import ckpttool
from ckpttool.errors import FormatError, UnwritableError
from ckpttool.formats.values import OrderedMap, StorageRef, TensorValue
from ckpttool.model.checkpoint import open_checkpoint
from ckpttool.writing.checkpoint import StorageSource, write_checkpoint
from ckpttool.writing.serialization_id import NAME
from tests.ckpttool.formats.streams import canonical
from tests.ckpttool.writing.conftest import CUT, Copied, copy_of

CORPUS = Path(__file__).parents[3] / "fixtures" / "corpus"
FILES = sorted(
    str(path.relative_to(CORPUS))
    for path in CORPUS.rglob("*")
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt", ".pkl") and not path.name.endswith("_ts.pt")
)
WHOLE = [file for file in FILES if file not in CUT]
MADE = [
    f"made/{name}{way}.pt"
    for name in ("views", "dtypes", "built", "wrapped")
    for way in ("", "-protocol4", "-legacy")
]
MADE += [f"made/empty-{protocol}.pt" for protocol in range(6)]
MADE += [f"contents/contents{way}.pt" for way in ("", "-protocol4", "-legacy")]
UNLIKE = ["value", "sharing", "storage", "identity", "list", "order", "type", "grad", "coalesced"]
UNLIKE += ["dtype", "array"]
# torch itself cannot load what it wrote here: its legacy format has no place for these.
NOT_EVEN_TORCHS = ("made/dtypes-legacy.pt", "made/built-legacy.pt")


@pytest.mark.parametrize("name", [*WHOLE, *MADE])
def test_torch_loads_the_same(name: str, copies: dict[str, Copied]) -> None:
    """With `weights_only` wherever the original could, and mapped into memory too."""
    said = copies[name].said
    before, after = said["weights_only"]
    if "unreadable" in said:
        assert name in NOT_EVEN_TORCHS or "transformers" in said["unreadable"], said["unreadable"]
        return
    assert said["different"] is None
    assert said["mmap"] is True
    assert after >= before or name.endswith(".pkl"), said["why"]


@pytest.mark.parametrize("name", UNLIKE)
def test_what_compares_them_sees_every_difference(name: str, copies: dict[str, Copied]) -> None:
    said = copies[f"unlike/unlike-{name}-a.pt"].said
    assert "Different" in said["different"]


@pytest.mark.parametrize("name", [*WHOLE, *MADE])
def test_the_copy_reads_as_the_original(name: str, copies: dict[str, Copied]) -> None:
    source, copy, _ = copies[name]
    with open_checkpoint(source) as one, open_checkpoint(copy) as two:
        assert canonical(one.tree) == canonical(two.tree)
        assert one.trust.rank >= two.trust.rank
        assert [list(one.tensors), one.stored_bytes] == [list(two.tensors), two.stored_bytes]


@pytest.mark.parametrize("name", [f for f in [*WHOLE, *MADE] if not f.endswith(".pkl")])
def test_nothing_is_wrong_with_the_copy(name: str, copies: dict[str, Copied]) -> None:
    source, copy, _ = copies[name]
    before, after = ckpttool.verify(source), ckpttool.verify(copy)
    assert {file.state for file in after.files} <= {"valid", "intact"}
    known = {finding.id for finding in before.findings}
    new = [finding for finding in after.findings if finding.id not in known]
    assert [finding for finding in new if finding.severity.value != "info"] == []
    with zipfile.ZipFile(copy) as archive:
        assert archive.testzip() is None
    assert zipfile_is_content(copy)


def zipfile_is_content(path: Path) -> bool:
    """Every local header says what the directory says: zipfile compares the names."""
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            with archive.open(entry) as file:
                file.read(1)
    return True


def test_the_command_line_of_zipfile_too(copies: dict[str, Copied]) -> None:
    command = [sys.executable, "-m", "zipfile", "-t", str(copies["contents/contents.pt"].copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["Done", "testing"]


# What torch 2.13 wrote with its defaults comes out equal to the last byte, and so with the same
# SHA-256. The others differ by design: older versions have fewer records, other protocols another
# pickle, and torch spells empty bytes in a way that its own weights-only loader refuses.
DIFFERENT = {
    "torch-2.13.0/rezipped_deflated.pt": "zipped again",
    "torch-2.13.0/rezipped_no_byteorder.pt": "zipped again",
    "torch-2.13.0/zip_trailing_junk.pt": "bytes behind the archive",
    "torch-2.13.0/train_no_crc32.pt": "no checksums",
    "torch-2.13.0/train_proto4.pt": "protocol 4",
    "torch-2.13.0/train_legacy.pt": "legacy",
    "torch-2.13.0/plain_pickle.pkl": "no container",
    "torch-2.13.0/lightning.ckpt": "edited after it was written, so with another id",
    "torch-2.13.0/hf_trainer/checkpoint-10/training_args.bin": "edited after it was written",
    "torch-2.13.0/hf_trainer/checkpoint-10/rng_state.pth": "empty bytes",
    "torch-2.13.0/numpy_objects.pt": "empty bytes",
    "torch-2.13.0/py_objects.pt": "sets and empty bytes",
    "torch-2.13.0/whole_module_sequential.pt": "its layer '0' and storage '0' are one text there",
}


@pytest.mark.parametrize("file", [f for f in WHOLE if not f.startswith(("torch-1", "torch-2.0"))])
def test_equal_to_the_last_byte(file: str, copies: dict[str, Copied]) -> None:
    equal = copies[file].copy.read_bytes() == (CORPUS / file).read_bytes()
    assert equal == (file not in DIFFERENT), DIFFERENT.get(file)


@pytest.mark.parametrize("name", ["views", "dtypes"])
def test_equal_to_what_torch_wrote_now(name: str, copies: dict[str, Copied]) -> None:
    source, copy, _ = copies[f"made/{name}.pt"]
    assert copy.read_bytes() == source.read_bytes()


@pytest.mark.parametrize("file", CUT)
def test_a_storage_that_is_cut_is_no_storage(file: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError):
        copy_of(CORPUS / file, tmp_path / "copy.pt")


# ---- The parts.


def storage(key: str, content: bytes) -> StorageSource:
    return StorageSource(key, len(content), lambda: iter([content]))


def tensor(key: str, numel: int) -> TensorValue:
    ref = StorageRef("uint8", key, "cpu", numel)
    return TensorValue(ref, 0, (numel,), (1,), False, "uint8")


def written(tree: object, *storages: StorageSource, **options: object) -> dict[str, bytes]:
    target = io.BytesIO()
    write_checkpoint(target, tree, storages, **options)  # type: ignore[arg-type]
    with zipfile.ZipFile(target) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def test_records_and_their_order() -> None:
    records = written(
        {"a": tensor("0", 3), "b": tensor("1", 1)}, storage("0", b"abc"), storage("1", b"d")
    )
    assert list(records) == [
        *("data.pkl", ".format_version", ".storage_alignment", "byteorder"),
        *("data/0", "data/1", "version", ".data/serialization_id"),
    ]
    assert list(records.values())[1:7] == [b"1", b"64", b"little", b"abc", b"d", b"3\n"]


def test_further_records_come_behind_the_version() -> None:
    extra = {".ckpttool/mended.json": b"{}", "version": b"2\n"}
    records = written([], extra=extra, byteorder="big", pickle=b"\x80\x02N.", root="r")
    assert list(records)[-3:] == ["version", ".ckpttool/mended.json", NAME]
    assert (records["version"], records["byteorder"]) == (b"2\n", b"big")
    assert records["data.pkl"] == b"\x80\x02N."


def test_the_serialization_id_is_kept_or_made() -> None:
    kept = written([], extra={NAME: b"7" * 40})
    made = written([])
    assert kept[NAME] == b"7" * 40
    assert made[NAME] != kept[NAME]
    assert len(made[NAME]) == 40
    assert made[NAME].isdigit()
    assert written([]) == made
    assert written([1])[NAME] != made[NAME]


def test_storages_are_streamed_and_progress_is_told() -> None:
    seen: list[tuple[int, int, str]] = []
    alive = 0

    def pieces() -> Iterator[bytes]:
        nonlocal alive
        for _ in range(4):
            alive += 1
            assert alive - len(seen) <= 1  # each is used up before the next is asked for
            yield bytes(10)

    source = StorageSource("0", 40, pieces)
    records = written(tensor("0", 40), source, progress=lambda *told: seen.append(told))
    assert records["data/0"] == bytes(40)
    assert seen == [(done, 40, "writing") for done in (10, 20, 30, 40)]


COPY = """
import resource, sys
from pathlib import Path
from tests.ckpttool.writing.conftest import copy_of
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
copy_of(Path(sys.argv[1]), Path(sys.argv[2]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_the_file(tmp_path: Path, repository: Path) -> None:
    piece, one, two = bytes(1 << 20), tmp_path / "one.pt", tmp_path / "two.pt"
    big = [StorageSource(key, 100 << 20, lambda: repeat(piece, 100)) for key in "012"]
    with one.open("wb") as file:
        write_checkpoint(file, [tensor(key, 100 << 20) for key in "012"], big)
    command = [sys.executable, "-c", COPY, str(one), str(two)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=repository)
    assert int(done.stdout) < 20 << 10  # kilobytes
    assert filecmp.cmp(one, two, shallow=False)


def test_nothing_is_written_where_the_content_has_no_form() -> None:
    target = io.BytesIO()
    with pytest.raises(UnwritableError) as caught:
        write_checkpoint(target, {"model": [1, object()]}, [])
    assert (caught.value.path, target.getvalue()) == ("model.1", b"")


def test_a_storage_of_another_size() -> None:
    with pytest.raises(FormatError) as caught:
        written(tensor("0", 3), StorageSource("0", 3, lambda: iter([b"ab"])))
    assert caught.value.record == "data/0"


def test_an_ordered_map_without_anything() -> None:
    assert b"OrderedDict" in written(OrderedMap())["data.pkl"]
