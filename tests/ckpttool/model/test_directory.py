"""A directory is listed without opening a file, and ordered by number."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpttool.errors import UnreadableError
from ckpttool.model.directory import scan


def touch(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).write_bytes(b"x" * 3)


def test_steps_ascend_by_number_whatever_the_width_of_the_name(tmp_path: Path) -> None:
    touch(tmp_path, "step_9.pt", "step_10.pt", "step_0100000.pt", "step_020000.pt")
    assert [file.step for file in scan(tmp_path).steps] == [9, 10, 20_000, 100_000]


@pytest.mark.parametrize("times", [(3, 2, 1), (5, 5, 5), (0, 0, 0)])
def test_time_stamps_decide_nothing(tmp_path: Path, times: tuple[int, int, int]) -> None:
    for step, time in zip((2, 4, 6), times, strict=True):
        touch(tmp_path, name := f"step_{step:012d}.pt")
        os.utime(tmp_path / name, (time, time))
    assert [file.step for file in scan(tmp_path).steps] == [2, 4, 6]


def test_every_kind_of_entry_is_named_for_what_it_is(tmp_path: Path) -> None:
    touch(tmp_path, "step_000000000002.pt", ".step_000000000004.pt.tmp-77", "latest.json")
    touch(tmp_path, ".latest.json.tmp-78-1", ".DS_Store", "._step_000000000002.pt", "Thumbs.db")
    touch(tmp_path, "step_-hf.pt", "step_backup.pt", "step_1.pt.bak", "step_2.PT")
    touch(tmp_path, ".writer.lock", "manifest.jsonl", "..writer.lock.tmp-79")
    (tmp_path / ".quarantine").mkdir()
    (tmp_path / "old").mkdir()
    (tmp_path / "latest").symlink_to("step_000000000002.pt")
    os.mkfifo(tmp_path / "pipe")
    found = scan(tmp_path)
    assert [file.name for file in found.steps] == ["step_000000000002.pt"]
    assert {other.name: other.kind for other in found.others} == {
        ".step_000000000004.pt.tmp-77": "temporary",
        ".latest.json.tmp-78-1": "temporary",
        ".DS_Store": "foreign",
        "._step_000000000002.pt": "foreign",
        "Thumbs.db": "foreign",
        "step_-hf.pt": "foreign",
        "step_backup.pt": "foreign",
        "step_1.pt.bak": "foreign",
        "step_2.PT": "foreign",
        ".writer.lock": "lock",
        "manifest.jsonl": "manifest",
        "..writer.lock.tmp-79": "temporary",
        ".quarantine": "quarantine",
        "old": "directory",
        "latest": "link",
        "pipe": "special",
    }
    by_name = {other.name: other for other in found.others}
    assert by_name["latest"].link == "step_000000000002.pt"
    assert by_name[".step_000000000004.pt.tmp-77"].temporary == ("step_000000000004.pt", 77)


def test_links_and_directories_with_the_name_of_a_step_are_listed_as_such(tmp_path: Path) -> None:
    touch(tmp_path, "step_000000000002.pt")
    (tmp_path / "step_000000000004.pt").symlink_to(tmp_path / "step_000000000002.pt")
    (tmp_path / "step_000000000006.pt").mkdir()
    (tmp_path / "step_000000000008.pt").symlink_to("step_000000000008.pt")
    facts = [(file.step, file.is_link, file.is_regular) for file in scan(tmp_path).steps]
    assert facts == [(2, False, True), (4, True, False), (6, False, False), (8, True, False)]


def test_sizes_modes_and_paths_are_those_of_the_entry(tmp_path: Path) -> None:
    touch(tmp_path, "step_000000000002.pt")
    (tmp_path / "step_000000000002.pt").chmod(0o640)
    os.utime(tmp_path / "step_000000000002.pt", ns=(0, 1_234_567_890))
    (file,) = scan(tmp_path).steps
    assert file.path == str(tmp_path / "step_000000000002.pt")
    assert (file.size, file.mode & 0o7777, file.mtime_ns) == (3, 0o640, 1_234_567_890)


def test_find_takes_the_twelve_digit_name_and_no_link(tmp_path: Path) -> None:
    touch(tmp_path, "step_000000000004.pt", "step_4.pt", "step_0000000000004.pt")
    (tmp_path / "step_000000000006.pt").symlink_to("step_4.pt")
    found = scan(tmp_path)
    assert (file := found.find(4)) is not None
    assert file.name == "step_000000000004.pt"
    assert found.find(6) is None
    assert found.find(5) is None


def test_names_that_are_not_utf8_or_hold_glob_characters_are_no_trouble(tmp_path: Path) -> None:
    directory = tmp_path / "тест [1] \U0001f600*"
    directory.mkdir()
    touch(directory, "step_000000000002.pt")
    (Path(os.fsdecode(os.fsencode(directory) + b"/\xff.bin"))).write_bytes(b"x")
    found = scan(directory)
    assert [file.step for file in found.steps] == [2]
    assert [os.fsencode(other.name) for other in found.others] == [b"\xff.bin"]


def test_the_pointer_is_read_along(tmp_path: Path) -> None:
    touch(tmp_path, "step_000000000002.pt")
    (tmp_path / "latest.json").write_text('{"step": 2, "file": "step_000000000002.pt"}')
    assert scan(tmp_path).pointer.state == "ok"


def test_a_path_that_cannot_be_listed_is_an_error_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="No such file"):
        scan(tmp_path / "none")
    touch(tmp_path, "file")
    with pytest.raises(UnreadableError, match="Not a directory"):
        scan(tmp_path / "file")


def test_as_dict_is_plain_data(tmp_path: Path) -> None:
    touch(tmp_path, "step_000000000002.pt", "x")
    plain = scan(tmp_path).as_dict()
    assert plain["steps"][0]["step"] == 2
    assert plain["others"] == [
        {"name": "x", "path": str(tmp_path / "x"), "kind": "foreign", "size": 3}
    ]
    assert plain["pointer"]["state"] == "missing"
