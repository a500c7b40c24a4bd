"""`ckpttool mend` as a person runs it: exit codes, what it says, and what it leaves alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import corrupt
from tests.ckpttool.cli.support import ckpttool, ckpttool_json, names

NAME = "step_000000000006.pt"


@pytest.fixture
def healthy(fixtures: Path) -> bytes:
    return (fixtures / "healthy" / NAME).read_bytes()


@pytest.fixture
def damaged(tmp_path: Path, healthy: bytes) -> Path:
    """Its end record is gone: nothing is lost."""
    path = tmp_path / "damaged.pt"
    path.write_bytes(corrupt.drop_end_record(healthy))
    return path


@pytest.fixture
def cut(tmp_path: Path, healthy: bytes) -> Path:
    """Half of a tensor is gone, with all that follows."""
    path = tmp_path / "cut.pt"
    path.write_bytes(corrupt.keep_first(healthy, 15_000))
    return path


def test_it_comes_back_byte_for_byte(damaged: Path, healthy: bytes) -> None:
    out = damaged.parent / "out.pt"
    done = ckpttool("mend", damaged, "-o", out)
    assert done.returncode == 0, done.stderr
    assert out.read_bytes() == healthy
    assert "the end records are cut off" in done.stdout
    assert "byte for byte" in done.stdout
    assert hashlib.sha256(healthy).hexdigest() in done.stdout
    assert damaged.read_bytes() == corrupt.drop_end_record(healthy)
    assert names(damaged.parent) == ["damaged.pt", "out.pt"]


def test_a_healthy_file(fixtures: Path, tmp_path: Path) -> None:
    done = ckpttool("mend", fixtures / "healthy" / NAME, "-o", tmp_path / "out.pt")
    assert done.returncode == 0
    assert "nothing to mend" in done.stdout
    assert names(tmp_path) == []


def test_a_dry_run_writes_nothing(damaged: Path) -> None:
    done = ckpttool("mend", damaged, "--dry-run")
    assert done.returncode == 0
    assert "nothing was written" in done.stdout
    assert names(damaged.parent) == ["damaged.pt"]


def test_loss_is_refused_with_the_list(cut: Path) -> None:
    done = ckpttool("mend", cut, "-o", cut.parent / "out.pt")
    assert done.returncode == 4
    assert "rng.torch" in done.stdout
    assert "--allow-loss" in done.stderr
    assert names(cut.parent) == ["cut.pt"]
    assert ckpttool("mend", cut, "--dry-run").returncode == 4


def test_loss_allowed(cut: Path) -> None:
    out = cut.parent / "out.pt"
    done = ckpttool("mend", cut, "-o", out, "--allow-loss")
    assert done.returncode == 0, done.stderr
    assert ckpttool("verify", out).returncode == 0
    shown = ckpttool("inspect", out).stdout
    assert "put together by ckpttool mend from cut.pt" in shown
    assert "1 lost" in shown
    document = ckpttool_json("inspect", out)
    assert document["mended"]["lost"][0]["tensor"] == "rng.torch"


def test_from_another_step(cut: Path, fixtures: Path) -> None:
    out = cut.parent / "out.pt"
    other = fixtures / "healthy" / "step_000000000004.pt"
    done = ckpttool("mend", cut, "-o", out, "--allow-loss", "--from", other)
    assert done.returncode == 0, done.stderr
    assert "taken from the other file: 1 tensor" in done.stdout
    names_of = [
        {tensor["name"] for tensor in ckpttool_json("inspect", path)["tensors"]}
        for path in (other, out)
    ]
    assert names_of[0] == names_of[1]


def test_nothing_can_be_got_back(tmp_path: Path, healthy: bytes) -> None:
    path = tmp_path / "stub.pt"
    path.write_bytes(corrupt.keep_first(healthy, 4_000))
    done = ckpttool("mend", path, "-o", tmp_path / "out.pt", "--allow-loss")
    assert done.returncode == 1
    assert "nothing can be got back" in done.stdout
    assert names(tmp_path) == ["stub.pt"]


def test_an_unreadable_path(tmp_path: Path) -> None:
    assert ckpttool("mend", tmp_path / "none.pt", "-o", tmp_path / "out.pt").returncode == 3


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["-o", "x", "--missing", "zeros", "--from", "y"],
        ["-o", "x", "--sha256", "12"],
        ["-o", "x", "--burst", "data/0"],
        ["-o", "x", "--burst", "data/0@3:33"],
        ["-o", "x", "--burst", "nope@1"],
        ["-o", "x", "--burst", "archive/data/0@1"],
        ["-o", "x", "--burst", "data/0@99999999"],
        ["-o", "x", "--bit-odds", "nan"],
        ["-o", "x", "--bit-odds", "inf"],
        ["-o", "x", "--bit-odds", "0"],
        ["-o", "x", "--bit-odds", "1.5"],
        ["-o", "x", "--bit-odds", "2"],
        ["-o", "x", "--missing", "nan"],
    ],
)
def test_wrong_usage(arguments: list[str], damaged: Path) -> None:
    assert ckpttool("mend", damaged, *arguments).returncode == 2


def test_an_existing_file_is_kept(damaged: Path, healthy: bytes) -> None:
    out = damaged.parent / "out.pt"
    out.write_bytes(b"mine")
    assert ckpttool("mend", damaged, "-o", out).returncode == 4
    assert out.read_bytes() == b"mine"
    assert ckpttool("mend", damaged, "-o", out, "--force").returncode == 0
    assert out.read_bytes() == healthy
    assert ckpttool("mend", damaged, "-o", damaged, "--force").returncode == 4


def test_donors_beside_it(fixture_copy: Callable[[str], Path], healthy: bytes) -> None:
    """A record that another step has as well: here a copy of the same step under another number."""
    directory = fixture_copy("healthy")
    (directory / "step_000000000008.pt").write_bytes(healthy)
    start = corrupt.content_range(healthy, "data/1").start
    path = directory / NAME
    path.write_bytes(corrupt.put_bytes(healthy, start, bytes(40)))
    out = directory / "out.pt"
    assert ckpttool("mend", path, "-o", out, "--no-donors").returncode == 4
    done = ckpttool("mend", path, "-o", out)
    assert done.returncode == 0, done.stderr
    assert "step_000000000008.pt" in done.stdout
    assert out.read_bytes() == healthy


def test_the_recorded_sha256(fixture_copy: Callable[[str], Path], healthy: bytes) -> None:
    """The pointer records what the file was: the mended one must be that, and is then proven."""
    directory = fixture_copy("healthy")
    (directory / NAME).write_bytes(corrupt.drop_directory(healthy))
    pointer = {"step": 6, "file": NAME, "sha256": hashlib.sha256(healthy).hexdigest()}
    (directory / "latest.json").write_text(json.dumps(pointer))
    done = ckpttool("mend", directory / NAME, "-o", directory / "out.pt")
    assert done.returncode == 0, done.stderr
    assert "as it is recorded: proven" in done.stdout
    pointer["sha256"] = "0" * 64
    (directory / "latest.json").write_text(json.dumps(pointer))
    done = ckpttool("mend", directory / NAME, "-o", directory / "other.pt")
    assert done.returncode == 4
    assert "SHA-256" in done.stderr
    assert not (directory / "other.pt").exists()


def test_a_flipped_bit_is_said_with_its_values(fixtures: Path, tmp_path: Path) -> None:
    path = fixtures / "bit-flipped" / NAME
    done = ckpttool("mend", path, "-o", tmp_path / "out.pt", "--no-donors")
    assert done.returncode == 0, done.stderr
    assert "model.block.linear.weight[" in done.stdout
    assert "->" in done.stdout
    assert "the odds" in done.stdout


def test_a_burst(tmp_path: Path, healthy: bytes) -> None:
    start = corrupt.content_range(healthy, "data/1").start
    path = tmp_path / "burst.pt"
    path.write_bytes(corrupt.flip_byte(healthy, start + 8, 0x5A))
    out = tmp_path / "out.pt"
    assert ckpttool("mend", path, "-o", out).returncode == 4
    assert ckpttool("mend", path, "-o", out, "--burst", "data/1@8").returncode == 0
    assert out.read_bytes() == healthy


def test_json(cut: Path, damaged: Path) -> None:
    out = cut.parent / "out.pt"
    document = ckpttool_json("mend", cut, "-o", out, code=4)
    assert document["written"] is None
    assert document["losses"][0]["tensor"] == "rng.torch"
    assert not document["lossless"]
    document = ckpttool_json("mend", damaged, "-o", out)
    assert document["exact"]
    assert document["written"]["sha256"] == hashlib.sha256(out.read_bytes()).hexdigest()
    assert {record["state"] for record in document["records"]} == {"whole"}


def test_two_archives(tmp_path: Path, fixtures: Path, healthy: bytes) -> None:
    first = (fixtures / "healthy" / "step_000000000004.pt").read_bytes()
    path, out = tmp_path / "two.pt", tmp_path / "out.pt"
    path.write_bytes(first + healthy)
    done = ckpttool("mend", path, "-o", out)
    assert done.returncode == 0, done.stderr
    assert "archive 1: " in done.stdout
    assert "step 4" in done.stdout
    assert out.read_bytes() == healthy
    assert ckpttool("mend", path, "-o", out, "--force", "--archive", "1").returncode == 0
    assert out.read_bytes() == first
    assert ckpttool("mend", path, "-o", out, "--force", "--archive", "3").returncode == 4


def test_names_from_a_file_cannot_move_the_cursor(tmp_path: Path, fixtures: Path) -> None:
    path = fixtures / "hostile-files" / "escape-names.pt"
    damaged = tmp_path / "damaged.pt"
    damaged.write_bytes(corrupt.drop_end_record(path.read_bytes()))
    done = ckpttool("mend", damaged, "-o", tmp_path / "out.pt", "--allow-loss")
    assert "\x1b" not in done.stdout + done.stderr


def test_a_burst_that_always_fits_is_not_called_proven(tmp_path: Path, healthy: bytes) -> None:
    """Two bytes are damaged; 32 bits elsewhere give the record its checksum, and are wrong."""
    start = corrupt.content_range(healthy, "data/1").start
    path, out = tmp_path / "burst.pt", tmp_path / "out.pt"
    path.write_bytes(corrupt.put_bytes(healthy, start + 8, b"\x5a\xa5"))
    refused = ckpttool("mend", path, "-o", out, "--burst", "data/1@16:32")
    assert refused.returncode == 4
    assert "100 % of cases" in refused.stdout
    assert not out.exists()
    done = ckpttool("mend", path, "-o", out, "--burst", "data/1@16:32", "--bit-odds", "1")
    assert done.returncode == 0, done.stderr
    assert "fits, unproven, by odds of 100 %" in done.stdout
    assert "there, but not proven: 1 tensor" in done.stdout
    assert "byte for byte" not in done.stdout
    document = ckpttool_json(
        "mend", path, "--dry-run", "--burst", "data/1@16:32", "--bit-odds", "1"
    )
    assert not document["lossless"]
    assert not document["exact"]


def test_a_wrong_recorded_sha256_is_said_before_anything_is_claimed(damaged: Path) -> None:
    out = damaged.parent / "out.pt"
    for where in (["-o", out], ["--dry-run"]):
        done = ckpttool("mend", damaged, *where, "--sha256", "0" * 64)
        assert done.returncode == 4
        assert "would not have the SHA-256 that is recorded" in done.stdout
        assert "byte for byte" not in done.stdout
    assert not out.exists()


def test_an_archive_without_its_pickle(tmp_path: Path, healthy: bytes) -> None:
    path, out = tmp_path / "headless.pt", tmp_path / "out.pt"
    path.write_bytes(healthy[corrupt.header_offset(healthy, "data/0") : -22])
    for more in ([], ["--allow-loss"]):
        done = ckpttool("mend", path, "-o", out, *more)
        assert done.returncode == 1
        assert "data.pkl" in done.stdout
        assert not out.exists()
