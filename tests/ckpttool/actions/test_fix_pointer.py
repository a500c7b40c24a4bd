"""fix-pointer: from whatever state the pointer is in to the newest valid step."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from ckpttool.actions.fix_pointer import plan_fix_pointer
from ckpttool.errors import RefusedError, UnreadableError
from tests.ckpttool.cli.support import cut, flip, make_run, names, pointer_of, write_step


def fix(path: Path, step: int | None = None) -> bool:
    """Whether something was written."""
    found = plan_fix_pointer(os.fspath(path), step=step)
    found.plan.apply()
    return bool(found.plan.actions)


def test_behind(tmp_path: Path) -> None:
    make_run(tmp_path, 2, 4, 6, pointer=4)
    assert fix(tmp_path)
    assert pointer_of(tmp_path) == {"step": 6, "file": "step_000000000006.pt"}
    assert len(names(tmp_path)) == 4
    assert not fix(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"step": 6, "fi',
        b"null",
        b"6",
        b"[]",
        b"{}",
        b'{"file": ""}',
        b'{"file": "."}',
        b"\xff\xfe",
        b"\0" * 48,
        b'{"step": 999, "file": "step_000000000006.pt"}',
        b'{"step": 9, "file": "step_000000000009.pt"}',
        b'{"step": 6, "file": "../elsewhere/step_000000000006.pt"}',
        b'{"step": 6, "file": "/etc/passwd"}',
        b"[" * 100_000,
        b" " * 1_000_000,
    ],
)
def test_any_broken_pointer(tmp_path: Path, content: bytes) -> None:
    make_run(tmp_path, 2, 4, 6)
    (tmp_path / "latest.json").write_bytes(content)
    assert fix(tmp_path)
    assert pointer_of(tmp_path) == {"step": 6, "file": "step_000000000006.pt"}


def test_missing_pointer(tmp_path: Path) -> None:
    write_step(tmp_path, 2)
    assert fix(tmp_path)
    assert pointer_of(tmp_path)["step"] == 2


@pytest.mark.parametrize("damage", [flip, cut])
def test_newest_is_damaged(tmp_path: Path, damage: object) -> None:
    make_run(tmp_path, 2, 4, 6)
    assert callable(damage)
    damage(tmp_path / "step_000000000006.pt")
    found = plan_fix_pointer(os.fspath(tmp_path))
    assert [judged.file.step for judged in found.newest.passed_over] == [6]
    found.plan.apply()
    assert pointer_of(tmp_path)["step"] == 4
    assert len(names(tmp_path)) == 4


def test_no_valid_step(tmp_path: Path) -> None:
    make_run(tmp_path, 2)
    cut(tmp_path / "step_000000000002.pt")
    before = (tmp_path / "latest.json").read_bytes()
    found = plan_fix_pointer(os.fspath(tmp_path))
    assert found.target is None
    assert found.plan.actions == []
    assert (tmp_path / "latest.json").read_bytes() == before


def test_a_step_that_is_asked_for(tmp_path: Path) -> None:
    make_run(tmp_path, 2, 4, 6)
    assert fix(tmp_path, 2)
    assert pointer_of(tmp_path)["step"] == 2
    cut(tmp_path / "step_000000000004.pt")
    for step in (4, 5):
        with pytest.raises(RefusedError, match=f"step {step}"):
            fix(tmp_path, step)
    assert pointer_of(tmp_path)["step"] == 2


def test_order_is_by_number(tmp_path: Path) -> None:
    for name in ("step_20000.pt", "step_100000.pt", "step_9.pt"):
        write_step(tmp_path, int(name[5:-3]), name=name)
    assert fix(tmp_path)
    assert pointer_of(tmp_path) == {"step": 100_000, "file": "step_100000.pt"}


def test_the_usual_name_wins(tmp_path: Path) -> None:
    write_step(tmp_path, 4)
    write_step(tmp_path, 4, name="step_4.pt")
    write_step(tmp_path, 4, name="step_04.pt")
    assert fix(tmp_path)
    assert pointer_of(tmp_path)["file"] == "step_000000000004.pt"


def test_a_renamed_file_is_not_valid(tmp_path: Path) -> None:
    make_run(tmp_path, 2)
    write_step(tmp_path, 8, inside=2)
    assert not fix(tmp_path)


def test_mode_is_kept_and_layout_is_the_trainers(tmp_path: Path) -> None:
    make_run(tmp_path, 2, 4, pointer=2)
    (tmp_path / "latest.json").chmod(0o640)
    fix(tmp_path)
    pointer = tmp_path / "latest.json"
    assert stat.S_IMODE(pointer.stat().st_mode) == 0o640
    assert pointer.read_bytes() == b'{\n  "step": 4,\n  "file": "step_000000000004.pt"\n}'


def test_other_keys_go_with_the_old_pointer(tmp_path: Path) -> None:
    make_run(tmp_path, 2, 4)
    pointer = {"step": 2, "file": "step_000000000002.pt", "size": 1}
    (tmp_path / "latest.json").write_text(json.dumps(pointer))
    fix(tmp_path)
    assert pointer_of(tmp_path) == {"step": 4, "file": "step_000000000004.pt"}


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 2)
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_bytes(b"keep")
    (run / "latest.json").unlink()
    (run / "latest.json").symlink_to(elsewhere)
    assert fix(run)
    assert not (run / "latest.json").is_symlink()
    assert pointer_of(run)["step"] == 2
    assert elsewhere.read_bytes() == b"keep"


def test_a_directory_in_its_place_is_refused(tmp_path: Path) -> None:
    write_step(tmp_path, 2)
    (tmp_path / "latest.json").mkdir()
    with pytest.raises(RefusedError, match="is a directory"):
        fix(tmp_path)


def test_linked_step_files_are_not_followed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 2)
    outside = write_step(tmp_path, 8)
    (run / outside.name).symlink_to(outside)
    (run / "step_000000000009.pt").mkdir()
    assert not fix(run)


def test_paths_to_the_same_directory(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 2, 4, pointer=2)
    (tmp_path / "link").symlink_to("run")
    for path in (f"{run}/", f"{tmp_path}/link", f"{run}/../run", f"{run}/latest.json"):
        make_run(run, 2, 4, pointer=2)
        plan_fix_pointer(path).plan.apply()
        assert pointer_of(run)["step"] == 4
    plan_fix_pointer(f"{run}/step_000000000002.pt").plan.apply()
    assert pointer_of(run)["step"] == 2


def test_a_plan_that_has_become_stale(tmp_path: Path) -> None:
    make_run(tmp_path, 2, 4, pointer=2)
    plan = plan_fix_pointer(os.fspath(tmp_path)).plan
    make_run(tmp_path, 6)  # a trainer saves meanwhile
    with pytest.raises(RefusedError, match="run it again"):
        plan.apply()
    assert pointer_of(tmp_path)["step"] == 6
    make_run(tmp_path, 2, 4, pointer=2)
    (tmp_path / "step_000000000006.pt").unlink()
    plan = plan_fix_pointer(os.fspath(tmp_path)).plan
    (tmp_path / "step_000000000004.pt").unlink()
    with pytest.raises(UnreadableError, match="deleted"):
        plan.apply()
    assert pointer_of(tmp_path)["step"] == 2


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError):
        fix(tmp_path / "missing")
