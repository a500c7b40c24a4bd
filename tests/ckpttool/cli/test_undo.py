"""`rollback`, `undo`, `history` and `purge` on the command line, and verbs beside a live writer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpttool.io.lock import LOCK_NAME, WriterLock
from tests.ckpttool.cli.support import (
    ROOT,
    asked_on_a_terminal,
    ckpttool,
    ckpttool_json,
    flip,
    make_run,
    names,
    pointer_of,
)

STEPS = [f"step_{step:012d}.pt" for step in (2, 4, 6)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", 2, 4, 6)


def only_id(run: Path) -> str:
    (name,) = os.listdir(run / ".quarantine")
    return name


def everything(run: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_rollback_and_undo(run: Path) -> None:
    before = everything(run)
    dry = ckpttool("rollback", run, "--to", "2", "--dry-run")
    assert dry.returncode == 0
    assert everything(run) == before
    done = ckpttool("rollback", run, "--to", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"latest.json names step 6, {STEPS[2]}",
        "plan:",
        f"  set {STEPS[1]} aside: later than step 2",
        f"  write latest.json: step 2, {STEPS[0]}",
        f"  set {STEPS[2]} aside: later than step 2",
        "done",
        f"step 2 is the latest; `ckpttool undo {run}` takes that back",
    ]
    assert dry.stdout.splitlines() == [
        *done.stdout.splitlines()[:5],
        "dry run: nothing was changed",
    ]
    assert names(run) == [".quarantine", "latest.json", STEPS[0]]
    assert ckpttool("verify", run).returncode == 0
    again = ckpttool("rollback", run, "--to", "2")
    assert again.stdout.splitlines()[-1] == "right already: step 2 is the latest"
    dry = ckpttool("undo", run, "--dry-run")
    assert dry.returncode == 0
    assert names(run) == [".quarantine", "latest.json", STEPS[0]]
    assert ckpttool("undo", run).returncode == 0
    assert {k: v for k, v in everything(run).items() if ".quarantine" not in k} == before
    nothing = ckpttool("undo", run)
    assert nothing.returncode == 3
    assert "there is no operation to take back" in nothing.stderr


def test_rollback_json(run: Path) -> None:
    document = ckpttool_json("rollback", run, "--to", "4")
    assert (document["step"], document["done"], document["right_already"]) == (4, True, False)
    assert document["operation"] == only_id(run)
    assert [action["action"] for action in document["plan"]] == ["move-pointer", "set-aside"]
    assert document["plan"][1]["size"] > 0
    assert ckpttool_json("rollback", run, "--to", "4")["right_already"] is True
    undone = ckpttool_json("undo", run)
    assert (undone["done"], undone["operation"]["state"]) == (True, "undone")


def test_rollback_to_what_is_no_step(run: Path) -> None:
    flip(run / STEPS[0])
    before = everything(run)
    for step, code in (("2", 4), ("3", 3)):
        done = ckpttool("rollback", run, "--to", step)
        assert done.returncode == code
        assert done.stderr.count("\n") == 1
        ckpttool_json("rollback", run, "--to", step, code=code)
    assert ckpttool("rollback", run).returncode == 2
    assert ckpttool("rollback", run / STEPS[1], "--to", "4").returncode == 3
    assert everything(run) == before


def test_undo_that_is_refused_says_all_and_changes_nothing(run: Path) -> None:
    ckpttool("rollback", run, "--to", "2")
    make_run(run, 4)
    before = everything(run)
    for more in ([], ["--dry-run"]):
        done = ckpttool("undo", run, *more)
        assert done.returncode == 4
        assert f"{STEPS[1]}: another file has this name by now" in done.stderr
        assert "latest.json: names something else by now" in done.stderr
        assert done.stderr.count("\n") == 1
    assert everything(run) == before


def test_undo_of_one_that_is_named(run: Path) -> None:
    ckpttool("rollback", run, "--to", "4")
    first = only_id(run)
    ckpttool("rollback", run, "--to", "2")
    done = ckpttool("undo", run, first)
    assert done.returncode == 4
    assert "latest.json: names something else by now" in done.stderr
    assert ckpttool("undo", run).returncode == 0
    here = ckpttool("undo", first, cwd=run, env={"PYTHONPATH": os.getcwd()})
    assert here.returncode == 0, here.stderr
    assert names(run) == [".quarantine", "latest.json", *STEPS]
    assert ckpttool("undo", run, "20200101T000000Z").returncode == 3
    assert ckpttool("undo", run, first).returncode == 4


def test_history(run: Path) -> None:
    assert ckpttool("history", run).stdout == "no operations\n"
    assert ckpttool_json("history", run)["operations"] == []
    ckpttool("rollback", run, "--to", "4")
    ckpttool("undo", run)
    ckpttool("rollback", run, "--to", "2")
    lines = ckpttool("history", run).stdout.splitlines()
    assert lines[2].split()[1:3] == ["rollback", "undone"]
    assert lines[3].split()[1:3] == ["rollback", "finished"]
    assert lines[3].endswith("back to step 2")
    operations = ckpttool_json("history", run)["operations"]
    assert [one["state"] for one in operations] == ["undone", "finished"]
    assert operations[1]["set_aside"]["names"] == ["latest.json", STEPS[1], STEPS[2]]
    assert ckpttool("history", run / "missing").returncode == 3


def test_an_operation_that_was_left_half_way(run: Path) -> None:
    ckpttool("rollback", run, "--to", "2")
    journal = run / ".quarantine" / only_id(run) / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:-2]))  # as if it was killed before the last line after
    assert "left half-way" in ckpttool("history", run).stdout
    for verb in (["fix-pointer"], ["prune", "--keep-last", "1", "--yes"]):
        done = ckpttool(verb[0], run, *verb[1:])
        assert done.returncode == 4
        assert f"`ckpttool undo {run} {only_id(run)}` takes it back" in done.stderr
        dry = ckpttool(verb[0], run, *verb[1:], "--dry-run")
        assert dry.returncode == 0
        assert f"{verb[0]} would be refused: " in dry.stderr
    assert ckpttool("purge", run, "--yes").stdout.splitlines()[0].startswith("stays  ")
    assert ckpttool("purge", run, only_id(run), "--yes").returncode == 4
    again = ckpttool("rollback", run, "--to", "2")
    assert again.returncode == 0
    first = again.stdout.splitlines()[0]
    assert first == f"rollback {only_id(run)} had been interrupted, and is finished now"
    assert ckpttool("fix-pointer", run).returncode == 0


# purge


def test_purge_needs_a_yes(run: Path) -> None:
    ckpttool("rollback", run, "--to", "2")
    before = everything(run)
    dry = ckpttool("purge", run, "--dry-run")
    assert dry.returncode == 0
    assert "1 operation to delete, which frees " in dry.stdout
    done = ckpttool("purge", run)
    assert done.returncode == 4
    assert "--yes" in done.stderr
    assert everything(run) == before
    document = ckpttool_json("purge", run, "--dry-run")
    assert document["delete"][0]["files"] == ["latest.json", STEPS[1], STEPS[2]]
    assert document["done"] is False
    assert ckpttool("purge", run, "--yes").returncode == 0
    assert names(run) == ["latest.json", STEPS[0]]
    assert ckpttool("purge", run, "--yes").stdout == "nothing to delete\n"


def test_purge_of_some(run: Path) -> None:
    ckpttool("rollback", run, "--to", "4")
    first = only_id(run)
    old = run / ".quarantine" / "20200101T000000Z"
    shutil.copytree(run / ".quarantine" / first, old)
    (old / "a directory").mkdir()
    (old / "a directory" / "inside").write_bytes(b"x")
    (old / "out").symlink_to(run)
    assert ckpttool("purge", run, "20190101T000000Z", "--yes").returncode == 3
    assert ckpttool("purge", run, first, "--older-than", "1", "--yes").returncode == 0
    assert len(os.listdir(run / ".quarantine")) == 2
    assert ckpttool("purge", run, "--older-than", "365", "--yes").returncode == 0
    assert os.listdir(run / ".quarantine") == [first]
    assert names(run) == [".quarantine", "latest.json", STEPS[0], STEPS[1]]
    assert (
        ckpttool("purge", first, "--yes", cwd=run, env={"PYTHONPATH": os.getcwd()}).returncode == 0
    )
    assert names(run) == ["latest.json", STEPS[0], STEPS[1]]


def test_purge_leaves_what_nobody_can_read(run: Path) -> None:
    folder = run / ".quarantine" / "20200101T000000Z"
    folder.mkdir(parents=True)
    (folder / STEPS[1]).write_bytes(b"somebody's only copy")
    done = ckpttool("purge", run, "--yes")
    assert done.returncode == 0
    assert "has no journal that can be read" in done.stdout
    assert (folder / STEPS[1]).exists()
    shown = ckpttool("history", run).stdout
    assert f"{folder.name} has no journal that can be read (it has no journal): it left" in shown
    assert "deletes that for good" not in shown
    assert "DIR115" in ckpttool("verify", run).stdout
    assert ckpttool("verify", run, "--strict").returncode == 1
    done = ckpttool("undo", run)
    assert done.returncode == 4
    assert f"mv -n -- {folder}/{STEPS[1]} {run}/" in done.stderr
    assert ckpttool("purge", run, folder.name).returncode == 4
    assert ckpttool("purge", run, folder.name, "--yes").returncode == 0
    assert ".quarantine" not in names(run)


@pytest.mark.parametrize("closed", [".quarantine", "."])
def test_what_may_not_be_looked_into_is_not_empty(run: Path, closed: str) -> None:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv")
    ckpttool("rollback", run, "--to", "2")
    for path in (run, *run.rglob("*")):
        os.chown(path, 65534, 65534)
    for parent in run.parents:
        if parent.stat().st_uid == 0 and parent.is_relative_to("/tmp"):
            parent.chmod(parent.stat().st_mode | 0o005)
    (run / closed).chmod(0)
    drop = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    probe = subprocess.run([*drop, sys.executable, "-c", "import ckpttool"], cwd=ROOT, check=False)
    if probe.returncode != 0:
        pytest.skip("an ordinary user cannot start this Python")
    verbs = [["verify"], ["history"], ["undo"], ["purge", "--yes"], ["repair", "--apply"]]
    for verb, *options in verbs:
        words = [*drop, sys.executable, "-m", "ckpttool", verb, str(run), *options]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 3, (verb, done)
        assert "Permission denied" in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


def test_a_purge_that_was_killed_can_only_be_purged(run: Path) -> None:
    ckpttool("rollback", run, "--to", "2")
    folder = run / ".quarantine" / only_id(run)
    with (folder / "journal.jsonl").open("a") as journal:
        journal.write('{"event": "purging"}\n')
    (folder / STEPS[1]).unlink()
    assert ckpttool("undo", run).returncode == 3
    done = ckpttool("undo", run, folder.name)
    assert done.returncode == 4
    assert "its files are being deleted" in done.stderr
    assert ckpttool("purge", run, "--yes").returncode == 0
    assert names(run) == ["latest.json", STEPS[0]]


@pytest.mark.parametrize(("answer", "code"), [(b"y\n", 0), (b"\n", 4)])
def test_purge_asks_on_a_terminal(run: Path, answer: bytes, code: int) -> None:
    ckpttool("rollback", run, "--to", "2")
    process, master = asked_on_a_terminal("purge", run, until=b"delete 1 operation for good? [y/N]")
    os.write(master, answer)
    while True:
        try:
            os.read(master, 1000)
        except OSError:  # the other side is closed
            break
    assert process.wait(30) == code
    os.close(master)
    assert (run / ".quarantine").exists() == (code == 4)
    assert LOCK_NAME not in names(run)


# beside a live writer


@pytest.fixture
def locked(run: Path) -> Iterator[Path]:
    ckpttool("rollback", run, "--to", "4")
    (run / "latest.json").write_text(json.dumps({"step": 2, "file": STEPS[0]}))
    with WriterLock.acquire(run, program="trainer_core"):
        yield run


VERBS = [
    ["rollback", "--to", "2"],
    ["undo"],
    ["purge", "--yes"],
    ["fix-pointer"],
    ["prune", "--keep-last", "1", "--yes"],
]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])
def test_a_live_writers_directory_is_left_alone(locked: Path, verb: list[str]) -> None:
    before = everything(locked)
    done = ckpttool(verb[0], locked, *verb[1:])
    assert done.returncode == 4
    assert f"a writer is at work here: pid {os.getpid()} on {os.uname().nodename}" in done.stderr
    assert "(trainer_core), since 20" in done.stderr
    assert done.stderr.count("\n") == 1
    document = ckpttool_json(verb[0], locked, *verb[1:], code=4)
    assert document["error"]["kind"] == "LockedError"
    assert everything(locked) == before


@pytest.mark.parametrize("verb", VERBS[3:], ids=lambda verb: verb[0])
def test_a_dry_run_beside_a_live_writer_only_says_so(locked: Path, verb: list[str]) -> None:
    done = ckpttool(verb[0], locked, *verb[1:], "--dry-run")
    assert done.returncode == 0
    assert f"{verb[0]} would be refused: " in done.stderr


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])
def test_a_dead_writers_lock_stops_nobody(locked: Path, verb: list[str]) -> None:
    path = locked / LOCK_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "started": 1}))
    if verb[0] == "undo":
        (locked / "latest.json").write_text(
            json.dumps({"step": 4, "file": STEPS[1]}, indent=2) + "\n"
        )
    done = ckpttool(verb[0], locked, *verb[1:])
    assert done.returncode == 0, done.stderr
    if verb[0] in ("rollback", "undo", "purge"):
        assert f"took over the lock of pid {os.getpid()} on " in done.stderr
        assert LOCK_NAME not in names(locked)


def test_the_lock_is_held_while_something_is_changed(run: Path) -> None:
    ckpttool("rollback", run, "--to", "2")
    process, master = asked_on_a_terminal("purge", run, until=b"[y/N]")
    facts = json.loads((run / LOCK_NAME).read_text())
    assert (facts["pid"], facts["program"]) == (process.pid, "ckpttool purge")
    process.kill()
    process.wait()
    os.close(master)
    assert (run / LOCK_NAME).exists()
    assert ckpttool("undo", run).returncode == 0
    assert names(run) == [".quarantine", "latest.json", *STEPS]
    assert pointer_of(run)["step"] == 6


def test_quarantine_is_ignored_by_the_other_verbs(run: Path, tmp_path: Path) -> None:
    ckpttool("rollback", run, "--to", "4")
    assert ckpttool("latest", run).stdout.strip() == str(run / STEPS[1])
    assert ckpttool("fix-pointer", run).returncode == 0
    assert pointer_of(run)["step"] == 4
    assert ckpttool("prune", run, "--keep-last", "1", "--yes").returncode == 0
    assert names(run) == [".quarantine", "latest.json", STEPS[1]]
    assert len(os.listdir(run / ".quarantine" / only_id(run))) == 4
    ckpttool("copy", run, f"{tmp_path}/to/", "--with-pointer")
    assert names(tmp_path / "to") == ["latest.json", STEPS[1]]
    assert ckpttool("verify", run).stdout.splitlines()[-1].startswith("newest valid step: 4")
    assert ckpttool("undo", run).returncode == 0
    assert names(run) == [".quarantine", "latest.json", STEPS[1], STEPS[2]]
