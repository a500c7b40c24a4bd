"""prune: what goes, and all that must not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpttool.actions.prune import PrunePlan, carry_out, plan_prune
from ckpttool.errors import UnreadableError
from tests.ckpttool.cli.support import (
    ROOT,
    cut,
    flip,
    make_run,
    names,
    write_pointer,
    write_step,
)


def steps(directory: Path) -> list[int]:
    return [int(name[5:-3]) for name in names(directory) if name.startswith("step_")]


def prune(path: Path | str, keep_last: int, **options: Any) -> PrunePlan:
    plan = plan_prune(os.fspath(path), keep_last=keep_last, **options)
    carry_out(plan)
    return plan


@pytest.mark.parametrize(
    ("first", "options", "left"),
    [
        (range(13), {"keep_last": 3}, [10, 11, 12]),
        (range(13), {"keep_last": 1, "keep_every": 5}, [0, 5, 10, 12]),
        (range(13), {"keep_last": 2, "keep": (4, 7, 99)}, [4, 7, 11, 12]),
        (range(13), {"keep_last": 50}, [*range(13)]),
        (range(9000, 10001, 100), {"keep_last": 10}, [*range(9100, 10001, 100)]),
    ],
)
def test_rules(tmp_path: Path, first: range, options: dict[str, Any], left: list[int]) -> None:
    make_run(tmp_path, *first)
    assert all(path.stat().st_size > 1000 for path in tmp_path.glob("*.pt"))
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("*.pt")}
    plan = prune(tmp_path, **options)
    assert steps(tmp_path) == left
    assert plan.frees == sum(sizes.values()) - sum(p.stat().st_size for p in tmp_path.glob("*.pt"))


def test_time_does_not_matter(tmp_path: Path) -> None:
    make_run(tmp_path, 1, 2, 3)
    for path, time in zip(sorted(tmp_path.glob("*.pt")), (9_000, 5, 0), strict=True):
        os.utime(path, (time, time))
    prune(tmp_path, 1)
    assert steps(tmp_path) == [3]


@pytest.mark.parametrize("damage", [flip, cut])
def test_damaged_files_neither_count_nor_go(tmp_path: Path, damage: Any) -> None:
    make_run(tmp_path, 1, 2, 3, 4, 5, 6)
    for step in (2, 5, 6):
        damage(tmp_path / f"step_{step:012d}.pt")
    write_pointer(tmp_path, 4)
    plan = prune(tmp_path, 1)
    assert steps(tmp_path) == [2, 4, 5, 6]
    assert [judged.file.step for judged in plan.passed_over] == [2, 5, 6]


def test_the_pointers_target_stays(tmp_path: Path) -> None:
    make_run(tmp_path, 1, 2, 3, 4, pointer=2)
    prune(tmp_path, 1)
    assert steps(tmp_path) == [2, 4]


def test_both_that_a_contradictory_pointer_may_mean(tmp_path: Path) -> None:
    make_run(tmp_path, 1, 2, 3, 4)
    write_pointer(tmp_path, 1, "step_000000000002.pt")
    prune(tmp_path, 1)
    assert steps(tmp_path) == [1, 2, 4]


def test_no_valid_step(tmp_path: Path) -> None:
    make_run(tmp_path, 1, 2)
    for path in tmp_path.glob("*.pt"):
        cut(path)
    plan = prune(tmp_path, 1)
    assert plan.newest_valid is None
    assert plan.deletions == []
    assert steps(tmp_path) == [1, 2]


def test_everything_else_stays(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 1, 2, 3)
    outside = write_step(tmp_path / "outside", 0)
    (run / outside.name).symlink_to(outside)
    (run / "step_000000000004.pt").symlink_to("step_000000000001.pt")
    (run / "step_000000000005.pt").mkdir()
    for name in (".step_000000000001.pt.tmp-1", "step_1.pt.bak", "notes", "._step_1.pt"):
        (run / name).write_bytes(b"x")
    (run / "down").mkdir()
    write_step(run / "down", 1)
    before = set(names(run))
    prune(run, 1)
    assert before - set(names(run)) == {"step_000000000001.pt", "step_000000000002.pt"}
    assert names(run / "down") == ["step_000000000001.pt"]
    assert outside.exists()


def test_paths_to_the_same_directory(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("run")
    for path in ("run/", "link", "run/../run", "link/"):
        make_run(tmp_path / "run", 1, 2, 3)
        prune(f"{tmp_path}/{path}", 1)
        assert steps(tmp_path / "run") == [3]


def test_what_happens_between_plan_and_deletion(tmp_path: Path) -> None:
    make_run(tmp_path, 1, 2, 3, 4, 5)
    plan = plan_prune(os.fspath(tmp_path), keep_last=1)
    (tmp_path / "step_000000000001.pt").unlink()
    write_step(tmp_path, 2, inside=222_222)
    os.utime(tmp_path / "step_000000000002.pt", ns=(7, 7))
    write_pointer(tmp_path, 3)
    carry_out(plan)
    outcomes = [action.outcome for action in plan.deletions]
    assert outcomes == ["gone", "changed", "pointed-at", "deleted"]
    assert steps(tmp_path) == [2, 3, 5]


def test_two_at_once(tmp_path: Path) -> None:
    """One waits for the other, or is refused by name where that takes long, as on a busy disk."""
    make_run(tmp_path, *range(30))
    command = [sys.executable, "-m", "ckpttool", "prune", str(tmp_path), "--keep-last", "2", "-y"]
    running = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for _ in range(2)
    ]
    ends = [(process.communicate(timeout=600)[0], process.returncode) for process in running]
    refused = [said for said, code in ends if code == 4]
    assert sorted(code for _, code in ends) in ([0, 0], [0, 4]), ends
    assert all(b"a writer is at work here: pid " in said for said in refused), ends
    assert steps(tmp_path) == [28, 29]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_an_unreadable_pointer_may_name_any_file(tmp_path: Path) -> None:
    make_run(tmp_path, 1, 2, 3)
    (tmp_path / "latest.json").chmod(0)
    with pytest.raises(UnreadableError):
        prune(tmp_path, 1)
    assert steps(tmp_path) == [1, 2, 3]


def test_order_is_oldest_first(tmp_path: Path) -> None:
    make_run(tmp_path, 100, 20, 3, 4000)
    plan = plan_prune(os.fspath(tmp_path), keep_last=1)
    assert [action.file.step for action in plan.deletions] == [3, 20, 100]


@pytest.mark.parametrize("options", [{"keep_last": 0}, {"keep_last": 1, "keep_every": 0}])
def test_wrong_rules(tmp_path: Path, options: dict[str, Any]) -> None:
    make_run(tmp_path, 1, 2)
    with pytest.raises(ValueError, match="at least 1"):
        prune(tmp_path, **options)
