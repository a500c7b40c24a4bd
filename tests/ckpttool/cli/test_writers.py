"""`fix-pointer`, `copy` and `prune` on the command line: plans, dry runs, questions, exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from tests.ckpttool.cli.support import (
    ROOT,
    asked_on_a_terminal,
    ckpttool,
    ckpttool_json,
    cut,
    flip,
    make_run,
    names,
    pointer_of,
    write_step,
    write_unchecked,
)

FIX = "fix-pointer"


def snapshot(directory: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


# fix-pointer


def test_fix_pointer_does_not_take_one_file_for_its_directory(tmp_path: Path) -> None:
    """Among that file alone it would be the newest, and the pointer would move back to it."""
    make_run(tmp_path, 2, 4, pointer=4)
    done = ckpttool(FIX, tmp_path / "step_000000000002.pt")
    assert done.returncode == 2
    assert "--step" in done.stderr
    assert pointer_of(tmp_path)["step"] == 4


def test_fix_pointer(tmp_path: Path) -> None:
    make_run(tmp_path, 2, 4, 6, 8, pointer=2)
    flip(tmp_path / "step_000000000008.pt")
    before = snapshot(tmp_path)
    dry = ckpttool(FIX, tmp_path, "--dry-run")
    assert dry.returncode == 0
    assert snapshot(tmp_path) == before
    done = ckpttool(FIX, tmp_path)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "latest.json names step 2, step_000000000002.pt"
    assert lines[1].startswith("step 8 passed over: step_000000000008.pt: FIL")
    assert lines[2:] == ["plan:", "  write latest.json: step 6, step_000000000006.pt", "done"]
    assert dry.stdout.splitlines() == [*lines[:-1], "dry run: nothing was changed"]
    assert pointer_of(tmp_path)["step"] == 6
    again = ckpttool(FIX, tmp_path)
    assert again.returncode == 0
    assert "right already" in again.stdout


def test_fix_pointer_without_a_valid_step(tmp_path: Path) -> None:
    make_run(tmp_path, 2)
    cut(tmp_path / "step_000000000002.pt")
    before = snapshot(tmp_path)
    done = ckpttool(FIX, tmp_path)
    assert done.returncode == 1
    assert "no valid step" in done.stderr
    assert snapshot(tmp_path) == before
    assert ckpttool_json(FIX, tmp_path, code=1)["step"] is None
    (tmp_path / "empty").mkdir()
    assert ckpttool(FIX, tmp_path / "empty").returncode == 1
    assert names(tmp_path / "empty") == []


def test_fix_pointer_to_a_step(tmp_path: Path) -> None:
    make_run(tmp_path, 2, 4, 6)
    cut(tmp_path / "step_000000000002.pt")
    assert ckpttool(FIX, tmp_path, "--step", "4").returncode == 0
    assert pointer_of(tmp_path)["step"] == 4
    for step in ("2", "3"):
        done = ckpttool(FIX, tmp_path, "--step", step)
        assert done.returncode == 4
        assert done.stderr.count("\n") == 1
    document = ckpttool_json(FIX, tmp_path, "--step", "2", code=4)
    assert document["error"]["kind"] == "RefusedError"
    assert pointer_of(tmp_path)["step"] == 4


def test_fix_pointer_json(tmp_path: Path) -> None:
    make_run(tmp_path, 2, 4, pointer=2)
    dry = ckpttool_json(FIX, tmp_path, "--dry-run")
    assert (dry["dry_run"], dry["done"], dry["step"]) == (True, False, 4)
    assert pointer_of(tmp_path)["step"] == 2
    document = ckpttool_json(FIX, tmp_path)
    assert (document["done"], document["right_already"]) == (True, False)
    assert document["plan"] == [
        {
            "action": "write-pointer",
            "path": f"{tmp_path}/latest.json",
            "step": 4,
            "file": "step_000000000004.pt",
        }
    ]
    assert ckpttool_json(FIX, tmp_path)["right_already"] is True


def test_fix_pointer_on_a_full_disk(tmp_path: Path) -> None:
    """A limit on file size stands for a full disk: the write fails half way."""
    make_run(tmp_path, 2, 4, pointer=2)
    before = snapshot(tmp_path)
    script = f"ulimit -f 0; exec {sys.executable} -m ckpttool fix-pointer {tmp_path}"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 3
    assert ".writer.lock: cannot write: File too large" in done.stderr
    assert done.stderr.count("\n") == 1
    assert snapshot(tmp_path) == before


def test_a_pointer_that_a_trainer_moved_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It moves between the plan and the write; then, while the new pointer is being synced."""
    from ckpttool.actions.fix_pointer import plan_fix_pointer
    from ckpttool.errors import RefusedError

    make_run(tmp_path, 2, 4, pointer=2)
    fix = plan_fix_pointer(str(tmp_path))
    real = os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        if pointer_of(tmp_path)["step"] == 2:
            make_run(tmp_path, 8)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(RefusedError, match="has changed since it was read"):
        fix.plan.apply()
    assert pointer_of(tmp_path)["step"] == 8
    assert not list(tmp_path.glob(".*tmp*"))


@pytest.mark.parametrize("verb", [[FIX], ["prune", "--keep-last", "1", "--yes"]])
def test_the_lock_is_taken_for_the_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: list[str]
) -> None:
    from ckpttool.cli.main import main
    from ckpttool.io import durable
    from ckpttool.io.lock import read_holder

    make_run(tmp_path, 2, 4, pointer=4 if verb[0] == "prune" else 2)
    holders = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        holders.append(read_holder(tmp_path))
        real(descriptor)

    monkeypatch.setattr(durable.os, "fsync", fsync)
    with pytest.raises(SystemExit) as ended:
        main([verb[0], str(tmp_path), *verb[1:]])
    assert ended.value.code == 0
    assert f"ckpttool {verb[0]}" in {holder.program for holder in holders if holder}
    assert read_holder(tmp_path) is None


# copy


def test_copy(tmp_path: Path) -> None:
    make_run(tmp_path / "run", 2, 4)
    done = ckpttool("copy", tmp_path / "run", f"{tmp_path}/new/", "--with-pointer", "--dry-run")
    assert done.returncode == 0
    assert names(tmp_path) == ["run"]
    done = ckpttool("copy", tmp_path / "run", f"{tmp_path}/new/", "--with-pointer")
    assert done.returncode == 0, done.stderr
    assert names(tmp_path / "new") == ["latest.json", "step_000000000004.pt"]
    assert ckpttool("verify", tmp_path / "new").returncode == 0
    done = ckpttool("copy", tmp_path / "run", f"{tmp_path}/new/")
    assert done.returncode == 4
    assert "--force" in done.stderr
    assert ckpttool("copy", tmp_path / "run", f"{tmp_path}/new/", "--force").returncode == 0


def test_copy_json(tmp_path: Path) -> None:
    make_run(tmp_path / "run", 2)
    document = ckpttool_json("copy", tmp_path / "run", tmp_path / "best.pt")
    assert document["done"] is True
    (action,) = document["plan"]
    assert action["action"] == "copy-file"
    assert action["size"] == (tmp_path / "best.pt").stat().st_size
    ckpttool_json("copy", tmp_path / "run", tmp_path / "best.pt", code=4)
    cut(tmp_path / "run" / "step_000000000002.pt")
    assert ckpttool_json("copy", tmp_path / "run", tmp_path / "b.pt", code=1)["file"] is None


def test_copy_to_a_full_disk(tmp_path: Path) -> None:
    make_run(tmp_path / "run", 2)
    script = f"ulimit -f 0; exec {sys.executable} -m ckpttool copy {tmp_path}/run {tmp_path}/b.pt"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 3
    assert "b.pt: cannot write: File too large" in done.stderr
    assert names(tmp_path) == ["run"]


def test_copy_that_is_terminated(tmp_path: Path) -> None:
    """SIGTERM in mid-copy, as a batch system sends it: no temporary is left behind."""
    run = make_run(tmp_path / "run", 2)
    with zipfile.ZipFile(run / "step_000000000002.pt", "a") as archive:
        archive.writestr("archive/data/0", bytes(64 << 20))
    process = subprocess.Popen(
        [sys.executable, "-m", "ckpttool", "copy", str(run), f"{tmp_path}/to/"], cwd=ROOT
    )
    temporary = tmp_path / "to" / f".step_000000000002.pt.tmp-{process.pid}"
    while process.poll() is None and not temporary.exists():
        time.sleep(0.001)
    process.terminate()
    code = process.wait(60)
    left = names(tmp_path / "to")
    assert (code, left) in [(130, []), (0, ["step_000000000002.pt"])]


# prune


def test_no_verb_lists_the_directory_once_for_each_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the time of a verb over thousands of steps hangs on, damaged ones too."""
    from ckpttool.actions.prune import plan_prune

    make_run(tmp_path, *range(1, 41))
    for step in range(1, 21):
        cut(tmp_path / f"step_{step:012d}.pt")
    looked_at = 0
    real = os.scandir

    class Counted:
        def __init__(self, path: str) -> None:
            self.entries = real(path)

        def __enter__(self) -> Counted:
            return self

        def __exit__(self, *_: object) -> None:
            self.entries.close()

        def __iter__(self) -> Counted:
            return self

        def __next__(self) -> os.DirEntry[str]:
            nonlocal looked_at
            looked_at += 1
            return next(self.entries)

    monkeypatch.setattr(os, "scandir", Counted)
    plan = plan_prune(str(tmp_path), keep_last=3)
    assert len(plan.deletions) == 17
    assert looked_at < 41 + 1 + 20 * 4


def test_prune_needs_a_yes(tmp_path: Path) -> None:
    make_run(tmp_path, 1, 2, 3)
    before = snapshot(tmp_path)
    dry = ckpttool("prune", tmp_path, "--keep-last", "1", "--dry-run")
    assert dry.returncode == 0
    assert "2 files to delete, which frees" in dry.stdout
    done = ckpttool("prune", tmp_path, "--keep-last", "1")
    assert done.returncode == 4
    assert "--yes" in done.stderr
    document = ckpttool_json("prune", tmp_path, "--keep-last", "1", code=4)
    assert document["error"]["kind"] == "RefusedError"
    assert snapshot(tmp_path) == before
    done = ckpttool("prune", tmp_path, "--keep-last", "1", "--yes")
    assert done.returncode == 0
    assert "done: 2 files deleted" in done.stdout
    assert names(tmp_path) == ["latest.json", "step_000000000003.pt"]
    done = ckpttool("prune", tmp_path, "--keep-last", "1")
    assert done.returncode == 0
    assert "nothing to delete" in done.stdout


def test_prune_shows_why_each_file_stays(tmp_path: Path) -> None:
    make_run(tmp_path, 1, 2, 3, 4, 5, 6, pointer=2)
    flip(tmp_path / "step_000000000006.pt")
    document = ckpttool_json(
        "prune", tmp_path, "--keep-last", "1", "--keep-every", "3", "--keep", "1", "--dry-run"
    )
    assert document["newest_valid"] == 5
    assert {item["step"]: item["reasons"] for item in document["keep"]} == {
        1: ["asked for"],
        2: ["the pointer names it"],
        3: ["multiple of 3"],
        5: ["newest valid step", "among the last 1"],
    }
    assert [item["step"] for item in document["delete"]] == [4]
    assert [item["step"] for item in document["passed_over"]] == [6]


def test_prune_without_a_valid_step(tmp_path: Path) -> None:
    make_run(tmp_path, 1, 2)
    for path in tmp_path.glob("*.pt"):
        cut(path)
    before = snapshot(tmp_path)
    done = ckpttool("prune", tmp_path, "--keep-last", "1", "--yes")
    assert done.returncode == 1
    assert "no step is valid, so nothing is deleted" in done.stderr
    assert snapshot(tmp_path) == before


def test_prune_wants_a_directory(tmp_path: Path) -> None:
    path = write_step(tmp_path, 2)
    assert ckpttool("prune", path, "--keep-last", "1", "--yes").returncode == 3
    assert path.exists()


@pytest.mark.parametrize(
    ("answer", "code", "left"), [(b"y\n", 0, 1), (b"\n", 4, 3), (b"\x04", 4, 3)]
)
def test_prune_asks_on_a_terminal(tmp_path: Path, answer: bytes, code: int, left: int) -> None:
    make_run(tmp_path, 1, 2, 3)
    prune = ("prune", tmp_path, "--keep-last", "1")
    process, master = asked_on_a_terminal(*prune, until=b"delete 2 files? [y/N]")
    os.write(master, answer)
    while True:
        try:
            os.read(master, 1000)
        except OSError:  # the other side is closed
            break
    assert process.wait(30) == code
    os.close(master)
    assert len(list(tmp_path.glob("*.pt"))) == left


# a step that could not be checked


def test_nothing_is_done_below_a_step_that_could_not_be_checked(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 2, 4, pointer=2)
    write_unchecked(run, 6)
    before = snapshot(tmp_path)
    verbs: list[list[str]] = [
        [FIX, f"{run}"],
        ["copy", f"{run}", f"{tmp_path}/to/"],
        ["prune", f"{run}", "--keep-last", "1", "--yes"],
    ]
    for verb in verbs:
        for more in ([], ["--dry-run"]):
            done = ckpttool(*verb, *more)
            assert done.returncode == 3, verb
            assert done.stderr.startswith("step 6 could not be checked: step_000000000006.pt: FIL")
        assert ("--step 4" in done.stderr) == (verb[0] != "prune")
        document = ckpttool_json(*verb, code=3)
        assert document["done"] is False
        assert [one["could_not_check"] for one in document["passed_over"]] == [True]
        assert document["delete" if verb[0] == "prune" else "plan"] == []
        assert snapshot(tmp_path) == before
    assert names(tmp_path) == ["run"]
    assert ckpttool(FIX, run, "--step", "4").returncode == 0
    assert pointer_of(run)["step"] == 4
    assert ckpttool("copy", run, f"{tmp_path}/to/", "--step", "4").returncode == 0
    assert names(tmp_path / "to") == ["step_000000000004.pt"]
    done = ckpttool("copy", run, f"{tmp_path}/to/", "--step", "6")
    assert done.returncode == 3


def test_prune_deletes_nothing_above_a_step_that_could_not_be_checked(tmp_path: Path) -> None:
    make_run(tmp_path, 4, 6, 8)
    write_unchecked(tmp_path, 2)
    document = ckpttool_json("prune", tmp_path, "--keep-last", "1", "--yes", code=3)
    assert document["newest_valid"] == 8
    assert [item["step"] for item in document["keep"]] == [4, 6, 8]
    assert len(names(tmp_path)) == 5


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_a_step_without_permission_could_not_be_checked(tmp_path: Path) -> None:
    make_run(tmp_path, 2, 4)
    write_step(tmp_path, 6).chmod(0)
    for verb in ("latest", FIX):
        assert ckpttool(verb, tmp_path).returncode == 3
    assert ckpttool("prune", tmp_path, "--keep-last", "1", "--yes").returncode == 3
    assert len(names(tmp_path)) == 4
