"""copy: verified before and after, never over anything, payload before pointer."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from ckpttool.actions.copy import plan_copy
from ckpttool.errors import CkptToolError, RefusedError, WriteError
from tests.ckpttool.cli.support import (
    cut,
    flip,
    make_run,
    names,
    pointer_of,
    write_pointer,
    write_step,
)


def copy(source: Path | str, destination: Path | str, **options: Any) -> None:
    plan_copy(os.fspath(source), os.fspath(destination), **options).plan.apply()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", 2, 4, 6)


def test_newest_valid_into_a_directory(tmp_path: Path, run: Path) -> None:
    flip(run / "step_000000000006.pt")
    source = run / "step_000000000004.pt"
    source.chmod(0o600)
    os.utime(source, ns=(5, 1_000_000_000_000_000_007))
    (tmp_path / "to").mkdir()
    copy(run, tmp_path / "to")
    target = tmp_path / "to" / "step_000000000004.pt"
    assert names(tmp_path / "to") == [target.name]
    assert target.read_bytes() == source.read_bytes()
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert target.stat().st_mtime_ns == 1_000_000_000_000_000_007


def test_to_a_name(tmp_path: Path, run: Path) -> None:
    copy(run, tmp_path / "best.pt", step=2)
    assert (tmp_path / "best.pt").read_bytes() == (run / "step_000000000002.pt").read_bytes()
    copy(run / "step_000000000004.pt", tmp_path / "four.pt")
    assert (tmp_path / "four.pt").read_bytes() == (run / "step_000000000004.pt").read_bytes()


def test_into_a_new_directory_with_pointer(tmp_path: Path, run: Path) -> None:
    copy(run, f"{tmp_path}/new/deep/", with_pointer=True)
    assert names(tmp_path / "new" / "deep") == ["latest.json", "step_000000000006.pt"]
    assert pointer_of(tmp_path / "new" / "deep") == {"step": 6, "file": "step_000000000006.pt"}


def test_pointer_comes_last(tmp_path: Path, run: Path) -> None:
    kinds = [
        a.kind for a in plan_copy(f"{run}", f"{tmp_path}/new/", with_pointer=True).plan.actions
    ]
    assert kinds == ["make-directory", "copy-file", "write-pointer"]


def test_nothing_is_overwritten(tmp_path: Path, run: Path) -> None:
    target = tmp_path / "best.pt"
    target.write_bytes(b"old")
    with pytest.raises(RefusedError, match="--force"):
        copy(run, target)
    assert target.read_bytes() == b"old"
    copy(run, target, force=True)
    assert target.read_bytes() == (run / "step_000000000006.pt").read_bytes()
    (tmp_path / "to").mkdir()
    write_pointer(tmp_path / "to", 1)
    with pytest.raises(RefusedError, match="--force"):
        copy(run, tmp_path / "to", with_pointer=True)
    assert names(tmp_path / "to") == ["latest.json"]


def test_a_file_that_appears_meanwhile_is_kept(tmp_path: Path, run: Path) -> None:
    plan = plan_copy(f"{run}", f"{tmp_path}/best.pt").plan
    (tmp_path / "best.pt").write_bytes(b"somebody's")
    with pytest.raises(RefusedError, match="--force"):
        plan.apply()
    assert (tmp_path / "best.pt").read_bytes() == b"somebody's"
    assert names(tmp_path) == ["best.pt", "run"]


def test_same_file(tmp_path: Path, run: Path) -> None:
    (tmp_path / "link").symlink_to(run)
    for destination in (run, tmp_path / "link", run / "step_000000000006.pt"):
        with pytest.raises(RefusedError, match="very file"):
            copy(run, destination, force=True)


@pytest.mark.parametrize(
    ("source", "destination", "options"),
    [
        ("run", "missing/best.pt", {}),
        ("run", "step_000000000007.pt", {}),
        ("run", "best.pt", {"with_pointer": True}),
        ("run", "best.pt", {"step": 5}),
        ("run", "best.pt", {"step": 2}),
        ("run/step_000000000006.pt", "best.pt", {"step": 4}),
        ("missing", "best.pt", {}),
    ],
)
def test_refusals(
    tmp_path: Path, run: Path, source: str, destination: str, options: dict[str, Any]
) -> None:
    cut(run / "step_000000000002.pt")
    with pytest.raises(CkptToolError):
        copy(tmp_path / source, tmp_path / destination, **options)
    assert names(tmp_path) == ["run"]


def test_no_valid_step(tmp_path: Path) -> None:
    make_run(tmp_path / "run", 2)
    cut(tmp_path / "run" / "step_000000000002.pt")
    found = plan_copy(f"{tmp_path}/run", f"{tmp_path}/new/")
    assert found.source is None
    assert found.plan.actions == []


def test_failure_leaves_nothing_behind(tmp_path: Path, run: Path) -> None:
    plan = plan_copy(f"{run}", f"{tmp_path}/best.pt").plan
    source = run / "step_000000000006.pt"

    def spoil(*_: Any) -> None:
        source.write_bytes(b"")

    for _ in range(2):  # while it is copied, and before
        with pytest.raises(CkptToolError, match="changed"):
            plan.apply(spoil)
        assert names(tmp_path) == ["run"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission(tmp_path: Path, run: Path) -> None:
    (tmp_path / "to").mkdir(0o500)
    with pytest.raises(WriteError, match="Permission denied"):
        copy(run, tmp_path / "to")


def test_step_files_that_are_links_are_not_followed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 2)
    outside = write_step(tmp_path / "outside", 8)
    (run / outside.name).symlink_to(outside)
    copy(run, f"{tmp_path}/to/")
    assert names(tmp_path / "to") == ["step_000000000002.pt"]


def test_never_in_the_pointers_place(tmp_path: Path, run: Path) -> None:
    before = (run / "latest.json").read_bytes()
    for destination in (
        f"{run}/latest.json",
        f"{tmp_path}/latest.json",
        f"{tmp_path}/latest.json/",
    ):
        for force in (False, True):
            with pytest.raises(RefusedError, match="pointer's name"):
                copy(run, destination, force=force)
    assert (run / "latest.json").read_bytes() == before
    assert names(tmp_path) == ["run"]


def test_no_second_file_of_a_step(tmp_path: Path, run: Path) -> None:
    before = names(run)
    with pytest.raises(RefusedError, match=r"step_000000000004\.pt beside it .*--force"):
        copy(run / "step_000000000004.pt", run / "step_4.pt")
    assert names(run) == before
    write_step(tmp_path / "to", 6, name="step_6.pt")
    with pytest.raises(RefusedError, match=r"step_6\.pt beside it"):
        copy(run, tmp_path / "to")
    assert names(tmp_path / "to") == ["step_6.pt"]
    copy(run / "step_000000000004.pt", run / "step_4.pt", force=True)
    assert names(run) == sorted([*before, "step_4.pt"])
    copy(run, tmp_path / "to", step=2)  # another step's file is in nobody's way
    assert names(tmp_path / "to") == ["step_000000000002.pt", "step_6.pt"]
