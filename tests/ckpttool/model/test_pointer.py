"""The pointer is read as what it is, whatever lies under its name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ckpttool.model.pointer import POINTER_BYTES, read_pointer

GOOD = "step_000000000004.pt"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / GOOD).write_bytes(b"anything: the pointer never opens its target")
    return tmp_path


def write(run: Path, content: bytes | str) -> Path:
    path = run / "latest.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_good_pointer_gives_the_path_of_its_target(run: Path) -> None:
    write(run, f'{{"step": 4, "file": "{GOOD}"}}')
    pointer = read_pointer(run)
    assert (pointer.state, pointer.problem) == ("ok", None)
    assert (pointer.step, pointer.file, pointer.file_step) == (4, GOOD, 4)
    assert pointer.target == str(run / GOOD)


def test_other_keys_are_kept_and_harm_nothing(run: Path) -> None:
    write(run, json.dumps({"step": 4, "file": GOOD, "size": 44, "sha256": "ab"}))
    pointer = read_pointer(run)
    assert pointer.state == "ok"
    assert pointer.extra == {"size": 44, "sha256": "ab"}


def test_a_directory_without_pointer_says_missing(run: Path) -> None:
    pointer = read_pointer(run)
    assert (pointer.state, pointer.target) == ("missing", None)
    assert pointer.path == str(run / "latest.json")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b" \n", "blanks"),
        (b"\0" * 50, "all of its 50 bytes are zero"),
        (b"null", "null"),
        (b"7", "a number"),
        (b"true", "true"),
        (b'"step_000000000004.pt"', "text"),
        (b'["step_000000000004.pt"]', "a list"),
        (b'{"step": 4, "file": "step_0000', "not JSON"),
        (b'{"step": 4}', 'no "file"'),
        (b'{"step": 4, "file": null}', "null"),
        (b'{"step": 4, "file": 4}', "a number"),
        (b'{"step": 4, "file": ["a"]}', "a list"),
        (b'{"step": 4, "file": "\xff"}', "not UTF-8 (byte 21)"),
        ("{}".encode("utf-16"), "not UTF-8 (byte 0)"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b"[" * 60_000, "nested too deep"),
        (b'{"step": ' + b"9" * 60_000 + b"}", "not JSON"),
        (b'{"file": "' + b"a" * POINTER_BYTES + b'"}', "larger than 65536 bytes"),
    ],
)
def test_malformed_content_is_told_apart(run: Path, content: bytes, words: str) -> None:
    write(run, content)
    pointer = read_pointer(run)
    assert pointer.state == "malformed"
    assert pointer.target is None
    assert pointer.problem is not None
    assert words in pointer.problem


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("", "empty name"),
        (".", "not the name of a step file"),
        ("..", "a path"),
        ("best.pt", "not the name of a step file"),
        ("latest.json", "not the name of a step file"),
        ("step_000000000004.pt ", "not the name of a step file"),
        ("step_\u0664.pt", "not the name of a step file"),
        ("step_4.pt\0", "not the name of a step file"),
        ("\ud800", "not the name of a step file"),
        ("sub/step_000000000004.pt", "a path"),
        ("sub\\step_000000000004.pt", "a path"),
        ("./step_000000000004.pt", "a path"),
        ("../other/step_000000000004.pt", "a path"),
        ("/etc/passwd", "absolute"),
        ("\\\\host\\share\\step_4.pt", "absolute"),
    ],
)
def test_only_a_step_file_beside_the_pointer_is_followed(run: Path, file: str, words: str) -> None:
    (run / "sub").mkdir()
    (run / "sub" / GOOD).write_bytes(b"x")
    write(run, json.dumps({"step": 4, "file": file}))
    pointer = read_pointer(run)
    assert (pointer.state, pointer.target) == ("unsafe-target", None)
    assert pointer.problem is not None
    assert words in pointer.problem


def test_an_absolute_path_to_a_good_file_is_not_followed_either(run: Path) -> None:
    write(run, json.dumps({"step": 4, "file": str(run / GOOD)}))
    assert read_pointer(run).state == "unsafe-target"


def test_a_target_that_is_gone_dangles(run: Path) -> None:
    write(run, '{"step": 6, "file": "step_000000000006.pt"}')
    pointer = read_pointer(run)
    assert (pointer.state, pointer.target, pointer.step) == ("dangling", None, 6)


@pytest.mark.parametrize("make", ["link", "directory", "pipe"])
def test_a_target_that_is_no_regular_file_is_not_followed(run: Path, make: str) -> None:
    target = run / "step_000000000006.pt"
    if make == "link":
        target.symlink_to(run / GOOD)
    elif make == "directory":
        target.mkdir()
    else:
        os.mkfifo(target)
    write(run, '{"step": 6, "file": "step_000000000006.pt"}')
    assert read_pointer(run).state == "unsafe-target"


@pytest.mark.parametrize(
    ("make", "words"),
    [("link", "symbolic link"), ("directory", "directory"), ("pipe", "named pipe")],
)
def test_a_pointer_that_is_no_regular_file_is_neither_read_nor_waited_for(
    run: Path, make: str, words: str
) -> None:
    place = run / "latest.json"
    if make == "link":
        (run / "elsewhere.json").write_text(f'{{"step": 4, "file": "{GOOD}"}}')
        place.symlink_to("elsewhere.json")
    elif make == "directory":
        place.mkdir()
    else:
        os.mkfifo(place)
    pointer = read_pointer(run)
    assert pointer.state == "not-a-file"
    assert pointer.problem is not None
    assert words in pointer.problem


@pytest.mark.parametrize("step", ["true", "4.0", '"4"', "null", "[]"])
def test_a_step_of_another_type_counts_as_none(run: Path, step: str) -> None:
    write(run, f'{{"step": {step}, "file": "{GOOD}"}}')
    pointer = read_pointer(run)
    assert (pointer.state, pointer.step) == ("ok", None)


def test_a_wrong_step_is_kept_beside_the_step_of_the_name(run: Path) -> None:
    write(run, f'{{"step": 999, "file": "{GOOD}"}}')
    pointer = read_pointer(run)
    assert (pointer.state, pointer.step, pointer.file_step) == ("ok", 999, 4)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_pointer_without_permission_is_unreadable(run: Path) -> None:
    write(run, "{}").chmod(0)
    assert read_pointer(run).state == "unreadable"
