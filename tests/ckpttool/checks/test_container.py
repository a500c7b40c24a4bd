"""FIL: each kind of damage, made by a named mutation, and what is said of it."""

from __future__ import annotations

import gzip
import hashlib
import os
import struct
import subprocess
import sys
from functools import cache
from pathlib import Path
from shlex import quote

import pytest
import torch

from ckpttool.checks.verify import Report, verify
from ckpttool.findings import Finding, Severity
from tests import corrupt
from tests.ckpttool.checks.builders import name, put, saved, step_bytes, training_state

ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO


def broken(run: Path, content: bytes) -> Report:
    """The report on the healthy run after its newest file became `content`."""
    put(run, 6, content)
    return verify(run)


def of_file(report: Report) -> list[Finding]:
    return [item for item in report.findings if item.place.path.endswith(name(6))]


def only(report: Report, id: str) -> Finding:
    (finding,) = of_file(report)
    assert finding.id == id, finding
    return finding


def state(report: Report) -> str:
    return report.files[-1].state


def test_fil101_a_file_without_permission_could_not_be_checked(run: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    (run / name(6)).chmod(0)
    report = verify(run)
    finding = only(report, "FIL101")
    assert finding.facts["could_not_check"] is True
    assert report.could_not_check
    assert state(report) == "unreadable"
    assert report.newest_valid == 4


def test_fil102_empty(run: Path) -> None:
    report = broken(run, b"")
    assert only(report, "FIL102").severity is ERROR
    assert state(report) == "damaged"


@pytest.mark.parametrize("size", [1, 4096, 100_000])
def test_fil103_nothing_but_zeros(run: Path, size: int) -> None:
    report = broken(run, bytes(size))
    finding = only(report, "FIL103")
    assert "unflushed" in finding.words
    assert f"{size:,}" in finding.words
    assert state(report) == "damaged"


def test_fil104_a_tail_of_zeros_is_unflushed_data(run: Path) -> None:
    report = broken(run, corrupt.zero_tail(step_bytes(6), 2000))
    ids = [item.id for item in of_file(report)]
    assert "FIL104" in ids
    assert "FIL105" not in ids
    finding = next(item for item in of_file(report) if item.id == "FIL104")
    assert "unflushed" in finding.words
    assert report.newest_valid == 4


@pytest.mark.parametrize("kept", [0.6, 0.9])
def test_fil105_truncated(run: Path, kept: float) -> None:
    data = step_bytes(6)
    report = broken(run, corrupt.keep_first(data, int(len(data) * kept)))
    finding = next(item for item in of_file(report) if item.id == "FIL105")
    assert f"{int(len(data) * kept):,} bytes are present" in finding.words
    assert finding.remedy == f"ckpttool repair '{run}'"
    assert state(report) == "damaged"


def test_fil105_the_first_4_kib_are_a_truncated_archive_and_nothing_unknown(run: Path) -> None:
    report = broken(run, step_bytes(6)[:4096])
    assert "FIL105" in [item.id for item in of_file(report)]
    assert "FIL106" not in [item.id for item in of_file(report)]


def test_fil105_only_the_end_record_is_gone_and_every_record_survives(run: Path) -> None:
    data = step_bytes(6)
    report = broken(run, data[:-22])
    finding = next(item for item in of_file(report) if item.id == "FIL105")
    records = len(corrupt.entry_offsets(data))
    assert f"{records} records can still be found whole" in finding.words
    assert state(report) == "damaged"


def test_fil105_a_cut_file_that_is_not_the_pointers(run: Path) -> None:
    put(run, 8, step_bytes(8)[:-30])
    finding = next(item for item in verify(run).findings if item.id == "FIL105")
    assert finding.remedy == f"ckpttool repair '{run}'"


def test_fil105_legacy_says_what_is_needed(run: Path) -> None:
    data = saved(training_state(6), _use_new_zipfile_serialization=False)
    report = broken(run, corrupt.cut_end(data, 8))
    finding = next(item for item in of_file(report) if item.id == "FIL105")
    assert f"{len(data) - 8:,} bytes are present of {len(data):,} needed" in finding.words
    assert state(report) == "damaged"


LFS = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (LFS, ["LFS", "12,345", "4d7a214614ab"]),
        (b"<!DOCTYPE html><html><title>404 Not found</title></html>", ["HTML", "404 Not found"]),
        (gzip.compress(step_bytes(6)), ["gzip"]),
        (b"7z\xbc\xaf\x27\x1c" + bytes(range(256)), ["7z"]),
        (b"\x80\x02]q\x00.", ["pickle"]),
        (b"just some text\n", []),
        (os.urandom(0) + bytes(range(1, 256)) * 9, []),
    ],
)
def test_fil106_something_else_is_named(run: Path, content: bytes, words: list[str]) -> None:
    report = broken(run, content)
    finding = only(report, "FIL106")
    for word in words:
        assert word in finding.words
    assert state(report) == "not-a-checkpoint"
    assert report.newest_valid == 4


def test_fil106_a_zip_that_is_not_torchs(run: Path) -> None:
    report = broken(run, corrupt.torch_zip([("photos/a.jpg", b"abc"), ("photos/b.jpg", b"d")]))
    assert "zip" in only(report, "FIL106").words
    assert state(report) == "not-a-checkpoint"


@pytest.mark.parametrize("where", ["beside", "store"])
def test_fil106_the_file_that_a_git_lfs_pointer_stands_for_is_found(run: Path, where: str) -> None:
    data = step_bytes(8)
    oid = hashlib.sha256(data).hexdigest()
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {len(data)}\n"
    place = run / "copy.bin"
    if where == "store":
        place = run.parent / ".git" / "lfs" / "objects" / oid[:2] / oid[2:4] / oid
        place.parent.mkdir(parents=True)
    place.write_bytes(data)
    finding = only(broken(run, pointer.encode()), "FIL106")
    assert f"that file is here: {place}" in finding.words
    assert finding.remedy == f"cp -- {quote(str(place))} '{run / name(6)}'"
    place.write_bytes(bytes(len(data) - (where == "store")))
    finding = only(verify(run), "FIL106")
    assert finding.remedy == "git lfs pull"


def test_fil107_two_saves_to_one_handle(run: Path) -> None:
    report = broken(run, corrupt.concatenate(step_bytes(4), step_bytes(6)))
    assert "FIL107" in [item.id for item in of_file(report)]
    assert state(report) == "damaged"


@pytest.mark.parametrize("junk", [b"junk", bytes(512), bytes(65_536)])
def test_fil108_a_little_behind_the_archive_is_a_warning(run: Path, junk: bytes) -> None:
    report = broken(run, corrupt.append(step_bytes(6), junk))
    finding = only(report, "FIL108")
    assert finding.severity is WARNING
    assert f"{len(junk):,}" in finding.words
    assert state(report) == "valid"
    assert report.newest_valid == 6


def test_fil108_so_much_behind_it_that_torch_gives_up_is_an_error(run: Path) -> None:
    report = broken(run, corrupt.append(step_bytes(6), bytes(70_000)))
    assert only(report, "FIL108").severity is ERROR
    assert state(report) == "damaged"


def test_fil108_anything_before_it_is_an_error_as_for_torch(run: Path) -> None:
    report = broken(run, corrupt.prepend(step_bytes(6), b"#!/bin/sh\n"))
    assert only(report, "FIL108").severity is ERROR
    with pytest.raises(Exception, match=r"."):
        torch.load(run / name(6), weights_only=True)


@cache
def tensor_names(data: bytes) -> list[str]:
    """Names of the tensors in their order, by torch in a process of its own."""
    code = (
        "import io, sys, torch\n"
        "data = sys.stdin.buffer.read()\n"
        "raw = torch.load(io.BytesIO(data), weights_only=True)\n"
        "def walk(at, place):\n"
        "    if isinstance(at, torch.Tensor): print(place)\n"
        "    elif isinstance(at, dict):\n"
        "        [walk(at[key], f'{place}.{key}') for key in at]\n"
        "walk(raw, '')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True)
    return [line.removeprefix(".") for line in done.stdout.decode().split()]


def tensor_of(data: bytes, record: str) -> set[str]:
    """The tensor in a record: torch.save numbers storages in the order of a walk."""
    return {tensor_names(data)[int(record.removeprefix("data/"))]}


@pytest.mark.parametrize("record", ["data/0", "data/2", "data/5"])
def test_fil109_a_flipped_bit_is_named_with_its_tensor(run: Path, record: str) -> None:
    data = step_bytes(6)
    middle = corrupt.content_range(data, record)
    report = broken(run, corrupt.flip_bit(data, middle.start + len(middle) // 2, 6))
    finding = only(report, "FIL109")
    assert (finding.severity, finding.place.record) == (ERROR, record)
    assert set(finding.place.tensors) == tensor_of(data, record)
    assert finding.place.tensors[0] in finding.words
    assert state(report) == "damaged"
    assert report.newest_valid == 4


def test_fil109_every_bad_record_is_listed(run: Path) -> None:
    data = step_bytes(6)
    records = [record for record in corrupt.entry_offsets(data) if record.startswith("data/")]
    changed = data
    for record in records:
        changed = corrupt.flip_byte(changed, corrupt.content_range(data, record).start)
    report = broken(run, changed)
    bad = [item.place.record for item in of_file(report) if item.id == "FIL109"]
    assert sorted(str(record) for record in bad) == sorted(records)


def test_fil109_zeroes_in_the_middle(run: Path) -> None:
    data = step_bytes(6)
    start = corrupt.content_range(data, "data/8").start  # a state of 5,056 bytes
    report = broken(run, corrupt.zero_range(data, start, 256))
    assert "FIL109" in [item.id for item in of_file(report)]


def test_fil109_one_missing_checksum_among_others_is_damage(run: Path) -> None:
    report = broken(run, corrupt.set_crc(step_bytes(6), "data/0", 0))
    finding = next(item for item in of_file(report) if item.id == "FIL109")
    assert finding.place.record == "data/0"
    assert finding.facts["code"] == "crc-missing"
    assert state(report) == "damaged"


def test_a_quick_look_leaves_checksums_out_and_says_so(run: Path) -> None:
    data = step_bytes(6)
    put(run, 6, corrupt.flip_bit(data, corrupt.content_range(data, "data/0").start))
    report = verify(run, quick=True)
    assert report.quick is True
    assert report.findings == []
    assert {file.checksums for file in report.files} == {"skipped"}
    assert report.newest_valid == 6


def test_fil110_checksums_switched_off(run: Path) -> None:
    report = broken(run, corrupt.drop_checksums(step_bytes(6)))
    finding = only(report, "FIL110")
    assert finding.severity is WARNING
    assert state(report) == "valid"
    assert report.files[-1].checksums == "none stored"


def test_fil111_a_storage_without_its_record(run: Path) -> None:
    data = step_bytes(6)
    report = broken(run, corrupt.drop_record(data, "data/0"))
    finding = only(report, "FIL111")
    assert set(finding.place.tensors) == tensor_of(data, "data/0")
    assert state(report) == "damaged"


@pytest.mark.parametrize("length", [0, 40, 52])
def test_fil112_a_record_of_another_size(run: Path, length: int) -> None:
    # data/0 is a weight of 3 x 4 float32: 48 bytes.
    report = broken(run, corrupt.replace_record(step_bytes(6), "data/0", bytes(length)))
    finding = only(report, "FIL112")
    assert finding.place.record == "data/0"
    assert "48" in finding.words
    assert state(report) == "damaged"


@pytest.mark.parametrize("count", [1 << 61, 0])
def test_fil112_a_damaged_size_word_in_a_legacy_stream(run: Path, count: int) -> None:
    data = saved(training_state(6), _use_new_zipfile_serialization=False)
    weight = training_state(6)["model"]["0.weight"].numpy().tobytes()
    word = data.index(weight) - 8
    assert struct.unpack_from("<q", data, word) == (12,)
    report = broken(run, corrupt.put_bytes(data, word, struct.pack("<q", count)))
    finding = next(item for item in of_file(report) if item.id == "FIL112")
    assert "0.weight" in str(finding.place.tensors)
    assert state(report) == "damaged"


def test_fil113_a_field_that_is_stated_twice(run: Path) -> None:
    report = broken(run, corrupt.set_local(step_bytes(6), "data/0", "method", 8))
    assert ("FIL113", ERROR) in [(item.id, item.severity) for item in of_file(report)]
    assert state(report) == "damaged"


def test_fil113_what_torch_does_not_read_is_a_warning(run: Path) -> None:
    report = broken(run, corrupt.set_local(step_bytes(6), "data/0", "time", 7))
    assert [(item.id, item.severity) for item in of_file(report)] == [("FIL113", WARNING)]
    assert state(report) == "valid"


def test_fil114_a_damaged_directory(run: Path) -> None:
    data = step_bytes(6)
    place = corrupt.entry_offsets(data)["data/1"]
    report = broken(run, corrupt.flip_bit(data, place))
    assert "FIL114" in [item.id for item in of_file(report)]
    assert state(report) == "damaged"


def test_fil115_two_records_of_one_name(run: Path) -> None:
    report = broken(run, corrupt.duplicate_record(step_bytes(6), "data/0", bytes(48)))
    assert "FIL115" in [item.id for item in of_file(report)]
    assert state(report) == "damaged"


def test_fil116_names_that_differ_in_case(run: Path) -> None:
    twin = corrupt.duplicate_record(step_bytes(6), "data/0", bytes(48), name="DATA/0")
    assert "FIL116" in [item.id for item in of_file(broken(run, twin))]


def test_fil117_records_that_overlap(run: Path) -> None:
    data = step_bytes(6)
    offset = struct.unpack_from("<I", data, corrupt.entry_offsets(data)["data/0"] + 42)[0]
    report = broken(run, corrupt.set_central(data, "data/1", "offset", offset))
    assert "FIL117" in [item.id for item in of_file(report)]


def test_fil118_a_record_that_would_leave_the_file(run: Path) -> None:
    report = broken(run, corrupt.set_central(step_bytes(6), "data/0", "offset", 0x7FFFFFF0))
    assert "FIL118" in [item.id for item in of_file(report)]
    assert state(report) == "damaged"


def test_fil119_a_record_that_nothing_refers_to(run: Path) -> None:
    data = corrupt.duplicate_record(step_bytes(6), "data/0", b"abcd" * 12, name="data/99")
    finding = only(broken(run, data), "FIL119")
    assert finding.severity is WARNING
    assert finding.facts["records"] == ["data/99"]


def test_fil120_and_121_zipped_again(run: Path) -> None:
    report = broken(run, corrupt.rezip(step_bytes(6), deflate=True))
    assert [(item.id, item.severity) for item in of_file(report)] == [("FIL120", INFO)]
    assert state(report) == "valid"
    report = broken(run, corrupt.rezip(step_bytes(6)))
    assert [(item.id, item.severity) for item in of_file(report)] == [("FIL121", INFO)]
    assert state(report) == "valid"


def test_a_flipped_bit_in_compressed_data_is_found(run: Path) -> None:
    data = corrupt.rezip(step_bytes(6), deflate=True)
    place = corrupt.content_range(data, "data/8")
    report = broken(run, corrupt.flip_bit(data, place.start + len(place) // 2))
    assert {"FIL109", "FIL118"} & {item.id for item in of_file(report)}
    assert state(report) == "damaged"


def test_fil122_an_unknown_method(run: Path) -> None:
    data = corrupt.set_central(step_bytes(6), "data/0", "method", 99)
    report = broken(run, data)
    assert "FIL122" in [item.id for item in of_file(report)]
    assert state(report) == "damaged"


def test_fil123_a_pickle_that_is_cut(run: Path) -> None:
    data = step_bytes(6)
    pickle = dict(corrupt.read_records(data))["archive/data.pkl"]
    report = broken(run, corrupt.replace_record(data, "data.pkl", pickle[:-9]))
    assert "FIL123" in [item.id for item in of_file(report)]
    assert state(report) == "damaged"


def test_fil124_a_limit_is_no_verdict(run: Path) -> None:
    from ckpttool.formats.limits import DEFAULT_LIMITS

    report = verify(run, limits=DEFAULT_LIMITS._replace(opcodes=50))
    assert [item.id for item in of_file(report)] == ["FIL124"]
    assert report.could_not_check
    assert report.newest_valid is None
    assert {file.state for file in report.files} == {"unreadable"}


def test_fil124_a_bomb_is_stopped(run: Path) -> None:
    report = broken(run, corrupt.zip_bomb(size=1 << 26, claim=100))
    assert state(report) != "valid"
    assert report.newest_valid == 4


def test_fil125_a_file_that_is_replaced_meanwhile(run: Path) -> None:
    put(run, 6, step_bytes(6))

    def replace(done: int, total: int, label: str) -> None:
        if label == name(6):
            fresh = run / "fresh"
            fresh.write_bytes(step_bytes(6))
            fresh.replace(run / name(6))

    report = verify(run, progress=replace)
    assert "FIL125" in [item.id for item in of_file(report)]
    assert state(report) == "changing"
    assert report.newest_valid == 4


def test_fil125_a_file_that_is_pruned_meanwhile_is_only_a_warning(run: Path) -> None:
    def prune(done: int, total: int, label: str) -> None:
        (run / name(4)).unlink(missing_ok=True)

    report = verify(run, progress=prune)
    assert [(item.id, item.severity) for item in report.findings] == [("FIL125", WARNING)]
    assert not report.could_not_check
    assert report.newest_valid == 6


def test_fil126_legacy_streams_have_no_checksums(run: Path) -> None:
    report = broken(run, saved(training_state(6), _use_new_zipfile_serialization=False))
    assert [(item.id, item.severity) for item in of_file(report)] == [("FIL126", INFO)]
    assert state(report) == "valid"
    assert report.files[-1].checksums == "none stored"


def test_fil127_a_record_outside_of_the_root(run: Path) -> None:
    report = broken(run, corrupt.add_member(step_bytes(6), "notes.txt", b"hello"))
    assert ("FIL127", WARNING) in [(item.id, item.severity) for item in of_file(report)]


def test_fil128_a_name_that_climbs_out(run: Path) -> None:
    report = broken(run, corrupt.add_member(step_bytes(6), "../evil", b"hello"))
    assert "FIL128" in [item.id for item in of_file(report)]


def test_fil129_a_flipped_bit_in_the_padding(run: Path) -> None:
    data = step_bytes(6)
    place = data.index(b"ZZZZ")
    report = broken(run, corrupt.flip_bit(data, place + 1))
    assert [(item.id, item.severity) for item in of_file(report)] == [("FIL129", WARNING)]
    assert state(report) == "valid"


def test_many_findings_of_a_kind_are_counted(run: Path) -> None:
    tensors = {f"t{index:03d}": torch.zeros(2) for index in range(120)}
    data = saved({**training_state(6), "extra": tensors})
    for record in [key for key in corrupt.entry_offsets(data) if key.startswith("data/")]:
        data = corrupt.set_local(data, record, "time", 7)
    found = of_file(broken(run, data))
    assert len(found) == 51
    assert "more" in next(item.words for item in found if "more" in item.facts)


@pytest.mark.parametrize("cut", range(0, 4000, 97))
def test_a_cut_anywhere_near_the_end_is_found(run: Path, cut: int) -> None:
    data = step_bytes(6)
    report = broken(run, corrupt.cut_end(data, cut + 1))
    assert state(report) == "damaged"
    assert report.newest_valid == 4


def test_words_for_a_lone_file(run: Path) -> None:
    data = step_bytes(6)
    path = put(run, 6, corrupt.flip_bit(data, corrupt.content_range(data, "data/0").start))
    (finding,) = verify(path).findings
    assert finding.remedy == f"ckpttool latest '{run}'"
