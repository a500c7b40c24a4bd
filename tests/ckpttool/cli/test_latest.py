"""`latest`: one path for a script, or a reason and exit code 1."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ckpttool.cli.support import (
    CORPUS,
    ROOT,
    ckpttool,
    ckpttool_json,
    cut,
    flip,
    make_run,
    write_step,
    write_unchecked,
)


def test_path_and_nothing_else(tmp_path: Path) -> None:
    make_run(tmp_path, 2, 4, 6, pointer=2)
    done = ckpttool("latest", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{tmp_path}/step_000000000006.pt\n"
    done = ckpttool("latest", cwd=tmp_path)
    assert done.stdout == "./step_000000000006.pt\n"


def test_damaged_ones_are_passed_over_aloud(tmp_path: Path) -> None:
    make_run(tmp_path, 2, 4, 6)
    flip(tmp_path / "step_000000000006.pt")
    done = ckpttool("latest", tmp_path)
    assert done.returncode == 0
    assert done.stdout == f"{tmp_path}/step_000000000004.pt\n"
    assert done.stderr.startswith("step 6 passed over: step_000000000006.pt: FIL")
    # A quick look does not see a flipped bit, and is asked for.
    done = ckpttool("latest", tmp_path, "--quick")
    assert done.stdout == f"{tmp_path}/step_000000000006.pt\n"


def test_only_the_newest_is_read(tmp_path: Path) -> None:
    make_run(tmp_path, 2, 4)
    os.mkfifo(tmp_path / "step_000000000003.pt")
    cut(tmp_path / "step_000000000002.pt")
    done = ckpttool("latest", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_valid_step(tmp_path: Path) -> None:
    done = ckpttool("latest", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "no valid step: there are no step files" in done.stderr
    write_step(tmp_path, 2)
    cut(tmp_path / "step_000000000002.pt")
    done = ckpttool("latest", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "the only step file is not valid" in done.stderr
    document = ckpttool_json("latest", tmp_path, code=1)
    assert document["file"] is None
    assert document["passed_over"][0]["step"] == 2


def test_json(tmp_path: Path) -> None:
    make_run(tmp_path, 2)
    assert ckpttool_json("latest", tmp_path) == {
        "schema_version": 1,
        "path": str(tmp_path),
        "quick": False,
        "step": 2,
        "file": f"{tmp_path}/step_000000000002.pt",
        "passed_over": [],
    }


def test_a_single_file(tmp_path: Path) -> None:
    make_run(tmp_path, 2, 4)
    done = ckpttool("latest", tmp_path / "step_000000000002.pt")
    assert done.stdout == f"{tmp_path}/step_000000000002.pt\n"
    (tmp_path / "notes.txt").touch()
    assert ckpttool("latest", tmp_path / "notes.txt").returncode == 1


@pytest.mark.parametrize("name", ["plain", "master", "worker", "pending"])
def test_real_runs(name: str) -> None:
    newest = max((CORPUS / "seed-runs" / name).glob("step_*.pt"))
    assert ckpttool("latest", newest.parent).stdout == f"{newest}\n"


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_a_script_finds_the_file_whatever_its_name(tmp_path: Path, locale: str) -> None:
    run = tmp_path / os.fsdecode("имя \x1b\n$(x) '\"".encode() + b"\xff")
    make_run(run, 2)
    script = 'RESUME=$("$0" -m ckpttool latest "$1") || exit 1; test -f "$RESUME" && echo found'
    done = subprocess.run(
        ["bash", "-c", script, sys.executable, os.fsencode(run)],
        cwd=ROOT,
        env={**os.environ, "LC_ALL": locale},
        capture_output=True,
    )
    assert done.stdout == b"found\n"


def test_unreadable_newest_is_not_called_absent(tmp_path: Path) -> None:
    """What can't be read may be good: exit 3, unless an older one is proven good."""
    make_run(tmp_path, 2)
    if os.geteuid() == 0:
        pytest.skip("root may read anything")
    (tmp_path / "step_000000000002.pt").chmod(0)
    assert ckpttool("latest", tmp_path).returncode == 3


def test_a_newer_step_that_could_not_be_checked_ends_it(tmp_path: Path) -> None:
    """Step 6 may be the newest valid one: a script must not go on from step 4 unawares."""
    make_run(tmp_path, 2, 4, 8)
    write_unchecked(tmp_path, 6)
    cut(tmp_path / "step_000000000008.pt")
    for options in ([], ["--quick"]):
        done = ckpttool("latest", tmp_path, *options)
        assert (done.returncode, done.stdout) == (3, "")
        first, last = done.stderr.splitlines()
        assert first.startswith("step 6 could not be checked: step_000000000006.pt: FIL124: ")
        assert "nobody knows whether step 4, which is valid, is the newest" in last
    document = ckpttool_json("latest", tmp_path, code=3)
    assert (document["step"], document["file"]) == (None, None)
    assert [(one["step"], one["could_not_check"]) for one in document["passed_over"]] == [
        (8, False),
        (6, True),
    ]
    write_step(tmp_path, 10)  # above it nothing depends on step 6
    assert ckpttool("latest", tmp_path).stdout == f"{tmp_path}/step_000000000010.pt\n"


def test_only_a_file_that_could_not_be_checked_is_not_called_invalid(tmp_path: Path) -> None:
    write_unchecked(tmp_path, 6)
    done = ckpttool("latest", tmp_path)
    assert (done.returncode, done.stdout) == (3, "")
    assert "no step is proven valid" in done.stderr


def test_what_is_proven_bad_is_passed_over_though_not_wholly_checked(tmp_path: Path) -> None:
    make_run(tmp_path, 4)
    path = write_unchecked(tmp_path, 6)
    data = bytearray(path.read_bytes())
    data[data.index(b"little")] ^= 1  # the checksum of another record proves the damage
    path.write_bytes(data)
    done = ckpttool("latest", tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/step_000000000004.pt\n")


def test_an_empty_directory_by_a_steps_name_is_passed_over(tmp_path: Path) -> None:
    write_step(tmp_path, 2)
    (tmp_path / "step_000000000004").mkdir()
    done = ckpttool("latest", tmp_path)
    assert done.stdout == f"{tmp_path}/step_000000000002.pt\n"
    assert "step 4 passed over: step_000000000004: incomplete" in done.stderr
