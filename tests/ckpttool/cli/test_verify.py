"""`verify` on the command line: what is printed, and the exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ckpttool.cli.support import (
    CORPUS,
    ckpttool,
    ckpttool_json,
    cut,
    flip,
    make_run,
    names,
    write_pointer,
    write_step,
)


def test_healthy(tmp_path: Path) -> None:
    make_run(tmp_path, 2, 4)
    before = names(tmp_path)
    done = ckpttool("verify", tmp_path)
    assert done.returncode == 0, done.stdout
    last = done.stdout.splitlines()[-3:]
    assert last[0] == "2 files checked: 2 valid"
    assert last[2] == f"newest valid step: 4 ({tmp_path}/step_000000000004.pt)"
    assert names(tmp_path) == before


@pytest.mark.parametrize("damage", [flip, cut])
def test_damaged(tmp_path: Path, damage: object) -> None:
    make_run(tmp_path, 2, 4, 6)
    assert callable(damage)
    damage(tmp_path / "step_000000000006.pt")
    done = ckpttool("verify", tmp_path)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert f"{tmp_path}/step_000000000006.pt" in lines
    assert any(line.startswith("  error    FIL") for line in lines)
    assert f"ckpttool repair {tmp_path}" in done.stdout
    assert "3 files checked: 2 valid, 1 damaged" in lines
    assert lines[-1] == f"newest valid step: 4 ({tmp_path}/step_000000000004.pt)"


def test_quick_says_what_it_leaves_out(tmp_path: Path) -> None:
    make_run(tmp_path, 2)
    flip(tmp_path / "step_000000000002.pt")
    done = ckpttool("verify", "--quick", tmp_path)
    assert done.returncode == 0
    assert "checksums were not checked" in done.stdout
    assert ckpttool("verify", tmp_path).returncode == 1


def test_strict_makes_warnings_count(tmp_path: Path) -> None:
    write_step(tmp_path, 2)  # without a pointer, which is a warning
    assert ckpttool("verify", tmp_path).returncode == 0
    assert ckpttool("verify", "--strict", tmp_path).returncode == 1


def test_json(tmp_path: Path) -> None:
    make_run(tmp_path, 2, 4, 6)
    flip(tmp_path / "step_000000000006.pt")
    write_pointer(tmp_path, 6)
    document = ckpttool_json("verify", tmp_path, code=1)
    assert document["newest_valid"] == 4
    assert document["quick"] is False
    states = {file["step"]: file["state"] for file in document["files"]}
    assert states == {2: "valid", 4: "valid", 6: "damaged"}
    errors = [found for found in document["findings"] if found["severity"] == "error"]
    assert {found["id"][:3] for found in errors} == {"FIL", "PTR"}
    for found in document["findings"]:
        assert set(found) == {"id", "severity", "place", "words", "remedy", "facts"}


@pytest.mark.parametrize("name", ["plain", "master", "worker", "pending"])
def test_real_runs(name: str) -> None:
    done = ckpttool("verify", CORPUS / "seed-runs" / name, "--jobs", "2", "--finite")
    assert done.returncode == 0, done.stdout
    assert "3 files checked: 3 valid" in done.stdout


def test_a_single_file(tmp_path: Path) -> None:
    path = write_step(tmp_path, 2)
    assert "1 file checked: 1 valid" in ckpttool("verify", path).stdout
    path = write_step(tmp_path, 2, name="best.pt")
    assert "1 file checked: 1 intact" in ckpttool("verify", path).stdout


def test_the_same_remark_on_many_files_is_made_once() -> None:
    done = ckpttool("verify", CORPUS / "seed-runs" / "plain")
    assert done.stdout.count("TRU103") == 1
    assert "TRU103  3 files" in done.stdout
    assert "3 notes" in done.stdout


def test_what_a_file_says_is_escaped(tmp_path: Path) -> None:
    make_run(tmp_path, 2)
    (tmp_path / "latest.json").write_text('{"file": "../\\u001b[2J\\n\\u202e.pt"}')
    done = ckpttool("verify", tmp_path)
    assert done.returncode == 1
    assert "\x1b" not in done.stdout
    assert "\u202e" not in done.stdout
    assert r"\x1b[2J" in done.stdout
