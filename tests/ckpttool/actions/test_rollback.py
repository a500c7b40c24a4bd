"""rollback: what is set aside in which order, what the pointer says, and every way to die."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpttool.actions.journal.operations import carry_out, history, undo
from ckpttool.actions.rollback import RollbackPlan, plan_rollback
from ckpttool.errors import RefusedError, UnreadableError
from ckpttool.model.directory import scan
from ckpttool.model.pointer import read_pointer
from tests.ckpttool.cli.support import (
    cut,
    flip,
    make_run,
    names,
    pointer_of,
    write_step,
    write_unchecked,
)
from tests.crash import CrashRig


def step(number: int) -> str:
    return f"step_{number:012d}.pt"


def roll_back(run: Path, to: int) -> RollbackPlan:
    plan = plan_rollback(str(run), to)
    if plan.actions:
        carry_out(run, "rollback", plan.actions, why=plan.why)
    return plan


def described(plan: RollbackPlan) -> list[str]:
    return [action.describe().split(":")[0] for action in plan.actions]


def test_the_order(tmp_path: Path) -> None:
    run = make_run(tmp_path, 2, 4, 6, 8, 10, pointer=8)
    plan = roll_back(run, 4)
    assert described(plan) == [
        f"set {step(10)} aside",
        f"set {step(6)} aside",
        "write latest.json",
        f"set {step(8)} aside",
    ]
    assert names(run) == [".quarantine", "latest.json", step(2), step(4)]
    assert pointer_of(run) == {"step": 4, "file": step(4)}
    (operation,) = history(run)
    assert (operation.state, operation.verb, operation.recorded.why) == (
        "finished",
        "rollback",
        "back to step 4",
    )
    assert roll_back(run, 4).actions == []


def test_undo_restores_all(tmp_path: Path) -> None:
    run = make_run(tmp_path, 2, 4, 6, 8)
    (run / f".{step(10)}.tmp-999999999").write_bytes(b"half of step 10")
    before = {path.name: (path.stat().st_ino, path.read_bytes()) for path in run.iterdir()}
    roll_back(run, 2)
    assert names(run) == [".quarantine", "latest.json", step(2)]
    undo(run)
    after = {p.name: (p.stat().st_ino, p.read_bytes()) for p in run.iterdir() if p.is_file()}
    assert after == before


def test_steps_are_numbers_and_every_kind_of_entry_goes(tmp_path: Path) -> None:
    run = make_run(tmp_path, 9)
    for name in ("step_10.pt", "step_0000100.pt"):
        write_step(run, int(name[5:-3]), name=name)
    (run / "step_11.pt").symlink_to(step(9))
    (run / "step_12.pt").mkdir()
    (run / f".{step(9)}.tmp-999999999").write_bytes(b"of step 9, and stays")
    (run / ".latest.json.tmp-999999999").write_bytes(b"stays")
    (run / "notes.txt").write_bytes(b"stays")
    roll_back(run, 9)
    assert [file.name for file in scan(run).steps] == [step(9)]
    assert f".{step(9)}.tmp-999999999" in names(run)
    assert "notes.txt" in names(run)


def test_to_a_step_that_is_not_valid_or_not_there(tmp_path: Path) -> None:
    run = make_run(tmp_path, 2, 4, 6)
    flip(run / step(2))
    write_unchecked(run, 3)
    cut(run / step(6))
    with pytest.raises(RefusedError, match="step 2 is not valid"):
        roll_back(run, 2)
    with pytest.raises(UnreadableError, match="could not be checked"):
        roll_back(run, 3)
    with pytest.raises(UnreadableError, match="no step file for step 5"):
        roll_back(run, 5)
    assert ".quarantine" not in names(run)
    roll_back(run, 4)  # that step 6 is damaged does not matter
    assert pointer_of(run)["step"] == 4


@pytest.mark.parametrize(
    "content",
    [None, b"", b"{", b'{"step": 9, "file": "step_000000000009.pt"}', b"\xff", b"0" * 70_000],
)
def test_whatever_the_pointer_was(tmp_path: Path, content: bytes | None) -> None:
    run = make_run(tmp_path, 2, 4)
    if content is None:
        (run / "latest.json").unlink()
    else:
        (run / "latest.json").write_bytes(content)
    roll_back(run, 2)
    assert pointer_of(run) == {"step": 2, "file": step(2)}
    undo(run)
    assert (run / step(4)).exists()
    if content is None:
        assert not (run / "latest.json").exists()
    else:
        assert (run / "latest.json").read_bytes() == content


@pytest.mark.parametrize("kind", ["link", "directory"])
def test_what_is_in_the_pointers_place_is_set_aside(tmp_path: Path, kind: str) -> None:
    run = make_run(tmp_path, 2, 4)
    (run / "latest.json").unlink()
    if kind == "link":
        (run / "latest.json").symlink_to(step(4))
    else:
        (run / "latest.json").mkdir()
    roll_back(run, 2)
    assert pointer_of(run)["step"] == 2
    assert (run / step(2)).exists()
    undo(run)
    assert (run / "latest.json").is_symlink() == (kind == "link")
    assert (run / "latest.json").is_dir() == (kind == "directory")


def test_the_pointer_says_what_the_manifest_knows_if_it_is_true(tmp_path: Path) -> None:
    run = make_run(tmp_path, 2, 4, 6)
    lines = []
    for number in (2, 4):
        data = (run / step(number)).read_bytes()
        line = {
            "step": number,
            "file": step(number),
            "size": len(data),
            "sha256": hashlib.sha256(data).hexdigest().upper(),
            "run_id": "r1",
        }
        lines.append(json.dumps(line if number == 4 else {**line, "sha256": "0" * 64}))
    (run / "manifest.jsonl").write_text("\n".join(lines) + "\n")
    roll_back(run, 4)
    data = (run / step(4)).read_bytes()
    assert pointer_of(run) == {
        "step": 4,
        "file": step(4),
        "size": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "run_id": "r1",
    }
    with pytest.raises(RefusedError, match="another SHA-256 than the manifest records"):
        roll_back(run, 2)
    assert len((run / "manifest.jsonl").read_text().splitlines()) == 2


def test_a_trainer_that_keeps_no_lock_is_not_run_over(tmp_path: Path) -> None:
    run = make_run(tmp_path, 2, 4)
    living = os.getppid()
    temporary = run / f".{step(6)}.tmp-{living}"
    temporary.write_bytes(b"at work")
    with pytest.raises(RefusedError, match=f"process {living}, which is alive, may be writing it"):
        roll_back(run, 2)
    assert ".quarantine" not in names(run)


def test_undo_after_training_went_on_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, 2, 4, 6)
    roll_back(run, 2)
    make_run(run, 3)
    make_run(run, 4)
    with pytest.raises(RefusedError) as caught:
        undo(run)
    assert f"{step(4)}: another file has this name by now" in str(caught.value)
    assert "latest.json: names something else by now" in str(caught.value)
    assert pointer_of(run)["step"] == 4


# killed before each operation on a file


@pytest.fixture(scope="module")
def rig() -> Iterator[CrashRig]:
    with CrashRig("ckpttool.cli.main:main") as rig:
        yield rig


@pytest.fixture
def original(tmp_path: Path) -> Path:
    run = make_run(tmp_path / "original", 2, 4, 6, 8, pointer=6)
    (run / f".{step(10)}.tmp-999999999").write_bytes(b"half of step 10")
    return run


def contents(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}


def without_lock(run: Path) -> dict[str, bytes]:
    """What is there, but for what a writer that died in taking the lock has left of it."""
    lock = "..writer.lock.tmp-"
    return {name: data for name, data in contents(run).items() if not name.startswith(lock)}


def everything(run: Path) -> set[bytes]:
    return {path.read_bytes() for path in run.rglob("*") if path.is_file()}


def check_usable(run: Path, original: Path) -> None:
    """At every moment the pointer names a step that is there, and no file is lost."""
    pointer = read_pointer(run)
    assert pointer.state == "ok"
    assert pointer.step in (4, 6)
    assert everything(original) <= everything(run) | {(original / "latest.json").read_bytes()}


def killed(rig: CrashRig, original: Path, arguments: list[str]) -> Iterator[tuple[int, Path]]:
    """A copy of the directory after the command was killed before each of its operations."""
    whole = original.parent / "whole"
    shutil.copytree(original, whole, symlinks=True)
    count = len(rig.run([arguments[0], str(whole), *arguments[1:]]).ops)
    assert count > 10
    for at in range(count):
        run = original.parent / f"at-{at}"
        shutil.copytree(original, run, symlinks=True)
        for torn in (False, True):
            if torn:
                shutil.rmtree(run)
                shutil.copytree(original, run, symlinks=True)
            outcome = rig.run([arguments[0], str(run), *arguments[1:]], kill_at=at, torn=torn)
            assert outcome.killed
            yield at, run
        shutil.rmtree(run)


def run_verb(rig: CrashRig, *arguments: Any, code: int = 0) -> str:
    outcome = rig.run([str(argument) for argument in arguments])
    assert outcome.code == code, outcome.output
    return outcome.output


@pytest.mark.slow
def test_killed_anywhere_a_second_rollback_finishes(rig: CrashRig, original: Path) -> None:
    for _, run in killed(rig, original, ["rollback", "--to", "4"]):
        check_usable(run, original)
        run_verb(rig, "rollback", run, "--to", 4)
        assert sorted(without_lock(run)) == ["latest.json", step(2), step(4)]
        assert pointer_of(run) == {"step": 4, "file": step(4)}
        assert everything(original) <= everything(run)


@pytest.mark.slow
def test_killed_anywhere_undo_takes_it_back(rig: CrashRig, original: Path) -> None:
    before = contents(original)
    for _, run in killed(rig, original, ["rollback", "--to", "4"]):
        begun = any(one.state in ("unfinished", "finished") for one in history(run))
        run_verb(rig, "undo", run, code=0 if begun else 3)
        assert without_lock(run) == before


@pytest.mark.slow
def test_an_undo_that_is_killed_anywhere_can_be_done_again(rig: CrashRig, original: Path) -> None:
    before = contents(original)
    rolled = original.parent / "rolled"
    shutil.copytree(original, rolled)
    run_verb(rig, "rollback", rolled, "--to", 4)
    for _, run in killed(rig, rolled, ["undo"]):
        assert read_pointer(run).state == "ok"
        states = {one.state for one in history(run)}
        run_verb(rig, "undo", run, code=3 if states == {"undone"} else 0)
        assert without_lock(run) == before


def test_a_read_only_directory(rig: CrashRig, original: Path) -> None:
    for verb in (["rollback", str(original), "--to", "4"], ["undo", str(original)]):
        outcome = rig.run(verb, fail_at=0, errno=errno.EROFS)
        assert outcome.code == 3
        assert outcome.output.splitlines() == [
            f"ckpttool: {original}/.writer.lock: cannot write: Read-only file system"
        ]
    assert ".quarantine" not in names(original)


@pytest.mark.slow
def test_a_full_disk_at_any_operation_leaves_all_as_it_was(rig: CrashRig, original: Path) -> None:
    before = contents(original)
    whole = original.parent / "whole"
    shutil.copytree(original, whole)
    count = len(rig.run(["rollback", str(whole), "--to", "4"]).ops)
    for at in range(count):
        run = original.parent / "full"
        shutil.copytree(original, run)
        outcome = rig.run(["rollback", str(run), "--to", "4"], fail_at=at)
        left = without_lock(run)
        if outcome.code == 0:  # what failed were the lock's last words
            assert pointer_of(run)["step"] == 4
        else:
            assert outcome.code == 3
            assert outcome.output.splitlines()[-1].startswith("ckpttool: ")
            assert "No space left on device" in outcome.output
            assert "Traceback" not in outcome.output
            assert left == before, at
        shutil.rmtree(run)
