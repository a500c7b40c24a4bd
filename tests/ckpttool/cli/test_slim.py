"""`ckpttool slim` as a person uses it."""

from __future__ import annotations

from pathlib import Path

from tests.ckpttool.cli.support import CORPUS, ckpttool, ckpttool_json, names

VIEW = CORPUS / "torch-2.13.0" / "small_view_of_big_storage.pt"
MASTER = CORPUS / "seed-runs" / "master" / "step_000000000006.pt"


def test_it_says_what_it_saves(tmp_path: Path) -> None:
    done = ckpttool("slim", VIEW, "-o", tmp_path / "new.pt")
    assert done.returncode == 0, done.stderr
    assert "unused bytes  of the storage of (the whole)  78.1 KiB" in done.stdout
    size = (tmp_path / "new.pt").stat().st_size
    assert f"79.9 KiB before, {size / 1024:.1f} KiB now" in done.stdout
    again = ckpttool("slim", tmp_path / "new.pt", "-o", tmp_path / "again.pt")
    assert "nothing to leave out" in again.stdout
    assert (tmp_path / "again.pt").stat().st_size == size


def test_sections(tmp_path: Path) -> None:
    out = tmp_path / "new.pt"
    document = ckpttool_json("slim", MASTER, "-o", out, "--keep", "model", "--keep", "step")
    assert "model" not in document["dropped"]
    assert {"optimizer", "rng", "coordinator"} < set(document["dropped"])
    assert document["saved"] == sum(saving["nbytes"] for saving in document["savings"])
    shown = ckpttool_json("inspect", out)
    assert list(shown["sections"]) == ["model", "step"]
    ckpttool_json("slim", MASTER, "-o", out, "--force", "--drop", "coordinator")
    left = set(ckpttool_json("inspect", out)["sections"])
    assert left == {*document["dropped"], "model", "step"} - {"coordinator"}


def test_wrong_usage(tmp_path: Path) -> None:
    out = tmp_path / "new.pt"
    done = ckpttool("slim", MASTER, "-o", out, "--keep", "modle")
    assert done.returncode == 2
    assert "no section 'modle'; there are: model, optimizer, " in done.stderr
    assert ckpttool("slim", MASTER, "-o", out, "--keep", "model", "--drop", "rng").returncode == 2
    assert ckpttool("slim", VIEW, "-o", out, "--keep", "model").returncode == 2
    assert names(tmp_path) == []


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    done = ckpttool("slim", VIEW, "-o", tmp_path / "new.pt", "--dry-run")
    assert done.returncode == 0
    assert "78.1 KiB" in done.stdout
    assert names(tmp_path) == []
