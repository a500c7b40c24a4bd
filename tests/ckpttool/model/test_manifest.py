"""The manifest is read line by line, and nothing in it raises."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ckpttool.model.manifest import known_sha256, pointer_record, read_manifest

A, B = "a1" * 32, "b2" * 32
STEP = "step_000000000004.pt"


def line(**facts: Any) -> dict[str, Any]:
    whole = {
        "step": 4,
        "file": STEP,
        "size": 100,
        "sha256": A,
        "run_id": "r1",
        "parent": 2,
        "saved": "2026-11-29T19:40:42Z",
    }
    return {**whole, **facts}


def write(directory: Path, *lines: Any, end: str = "\n") -> None:
    text = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines)
    (directory / "manifest.jsonl").write_text(text + end)


def test_a_whole_line(tmp_path: Path) -> None:
    write(tmp_path, line())
    manifest = read_manifest(tmp_path)
    assert (manifest.exists, manifest.problems) == (True, [])
    assert manifest.entries[STEP]._asdict() == line()


def test_the_last_line_for_a_file_counts(tmp_path: Path) -> None:
    write(tmp_path, line(), line(file="step_000000000002.pt", step=2), line(sha256=B.upper()))
    entries = read_manifest(tmp_path).entries
    assert list(entries) == ["step_000000000002.pt", STEP]  # as their last lines stand
    assert entries[STEP].sha256 == B


def test_a_line_that_was_being_written_when_its_writer_died(tmp_path: Path) -> None:
    write(tmp_path, line(), json.dumps(line(sha256=B))[:-20], end="")
    manifest = read_manifest(tmp_path)
    assert manifest.problems == []
    assert manifest.entries[STEP].sha256 == A


def test_no_manifest(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) == ({}, [], False, {})
    assert read_manifest(tmp_path / "missing").problems != []


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ("{", "line 2: is not JSON"),
        ("[1]", "line 2: is not an object"),
        ("\0\0", "line 2: is not JSON"),
        ('{"step": 4}', "line 2: names no step file"),
        ('{"file": "../step_000000000004.pt"}', "line 2: names no step file"),
        ("[" * 100_000, "line 2: is not JSON"),
    ],
)
def test_a_bad_line_is_told_and_the_others_count(tmp_path: Path, bad: str, problem: str) -> None:
    write(tmp_path, line(), bad, "", line(file="step_6.pt"))
    manifest = read_manifest(tmp_path)
    assert manifest.problems == [problem]
    assert list(manifest.entries) == [STEP, "step_6.pt"]


@pytest.mark.parametrize("key", ["step", "size", "sha256", "run_id", "parent", "saved"])
@pytest.mark.parametrize("value", [None, -1, 1.5, [], "0x", True, "c3" * 31])
def test_a_fact_of_the_wrong_type_is_no_fact(tmp_path: Path, key: str, value: Any) -> None:
    write(tmp_path, line(**{key: value}))
    found = read_manifest(tmp_path).entries[STEP]._asdict()
    fits = isinstance(value, str) and key in ("run_id", "saved")
    assert found == line(**{key: value if fits else None})


@pytest.mark.parametrize("kind", ["link", "directory", "pipe", "large"])
def test_what_is_no_manifest(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "manifest.jsonl"
    if kind == "link":
        (tmp_path / "real").write_text(json.dumps(line()) + "\n")
        path.symlink_to("real")
    elif kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.touch()
        os.truncate(path, (64 << 20) + 1)
    manifest = read_manifest(tmp_path)
    assert (manifest.entries, manifest.exists) == ({}, True)
    assert manifest.problems[0].startswith("it could not be read: ")


def test_the_known_sha256_is_the_pointers_or_the_manifests(tmp_path: Path) -> None:
    path = tmp_path / STEP
    path.write_bytes(b"x")
    assert known_sha256(path) is None
    write(tmp_path, line())
    assert known_sha256(path) == A
    pointer = {"step": 4, "file": STEP, "size": 7, "sha256": B.upper(), "run_id": "r1"}
    (tmp_path / "latest.json").write_text(json.dumps(pointer))
    assert known_sha256(path) == B
    assert known_sha256(tmp_path / "step_6.pt") is None
    record = pointer_record(tmp_path, STEP)
    assert record is not None
    assert (record.size, record.sha256, record.run_id) == (7, B, "r1")
    assert pointer_record(tmp_path, "step_6.pt") is None
    (tmp_path / "latest.json").write_text(json.dumps({**pointer, "sha256": 5}))
    assert known_sha256(path) == A


def test_a_name_without_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, line())
    monkeypatch.chdir(tmp_path)
    assert known_sha256(STEP) == A
