"""`ckpttool repair` as a person meets it: the plan, the options, the exit codes, the refusals."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpttool.io.lock import WriterLock
from tests.ckpttool.cli.support import (
    ROOT,
    ckpttool,
    ckpttool_json,
    cut,
    make_run,
    names,
    pointer_of,
    write_pointer,
    write_step,
    write_unchecked,
)

STEPS = ["step_000000000002.pt", "step_000000000004.pt", "step_000000000006.pt"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = make_run(tmp_path / "run", 2, 4, 6)
    for path in directory.iterdir():
        path.chmod(0o644)
    return directory


def snapshot(directory: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in directory.iterdir()}


# ---- what is shown, and what is done


def test_nothing_to_repair(run: Path) -> None:
    before = snapshot(run)
    for arguments in ([run], [run, "--apply"]):
        done = ckpttool("repair", *arguments)
        assert (done.returncode, done.stdout, done.stderr) == (0, "nothing to repair\n", "")
    assert snapshot(run) == before


def test_a_plan_is_shown_and_nothing_is_done(run: Path) -> None:
    (run / STEPS[2]).write_bytes(b"")
    before = snapshot(run)
    done = ckpttool("repair", run)
    assert done.returncode == 1
    assert snapshot(run) == before
    for words in (
        f"1. set {STEPS[2]} aside",
        "FIL102: the file is empty",
        "2. write latest.json: step 4",
        "PTR107",
        "loses: nothing",
        "afterwards: newest valid step 4",
        f"nothing was changed; to do it: ckpttool repair {run} --apply",
    ):
        assert words in done.stdout


def test_with_apply_it_is_done_and_looked_at_again(run: Path) -> None:
    (run / STEPS[2]).write_bytes(b"")
    done = ckpttool("repair", run, "--apply")
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 files checked: 2 valid\n" in done.stdout
    assert "newest valid step: 4" in done.stdout.splitlines()[-1]
    assert names(run) == [".quarantine", "latest.json", *STEPS[:2]]
    assert pointer_of(run) == {"step": 4, "file": STEPS[1]}
    (folder,) = (run / ".quarantine").iterdir()
    assert (folder / STEPS[2]).read_bytes() == b""
    assert f"ckpttool undo {run} {folder.name}" in done.stdout


def test_only_warnings_are_mended_too(run: Path) -> None:
    """They end in 0 before and after, as with verify."""
    (run / STEPS[0]).chmod(0o600)
    assert ckpttool("repair", run).returncode == 0
    assert ckpttool("repair", run, "--apply").returncode == 0
    assert (run / STEPS[0]).stat().st_mode & 0o777 == 0o644


def test_what_is_not_mended_is_said_and_ends_in_1(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 2)
    (run / STEPS[0]).write_bytes(b"")
    before = snapshot(run)
    for arguments in ([run], [run, "--apply"]):
        done = ckpttool("repair", *arguments)
        assert done.returncode == 1
        assert "left alone:" in done.stdout
        assert "nothing that can be repaired here" in done.stdout
    assert snapshot(run) == before


def test_a_file_that_could_not_be_checked_stays_and_ends_in_3(run: Path) -> None:
    path = write_unchecked(run, 8)
    before = path.read_bytes()
    for arguments in ([run], [run, "--apply"]):
        done = ckpttool("repair", *arguments)
        assert done.returncode == 3
        assert "could not be checked, so it stays" in done.stdout
    assert path.read_bytes() == before


def test_json_is_one_document(run: Path) -> None:
    (run / STEPS[2]).write_bytes(b"")
    plan = ckpttool_json("repair", run, code=1)
    assert [(deed["action"], Path(deed["path"]).name) for deed in plan["plan"]] == [
        ("set-aside", STEPS[2]),
        ("point", "latest.json"),
    ]
    assert (plan["applied"], plan["id"], plan["after"]) == (False, None, None)
    assert (plan["newest_valid_after"], plan["pointer_after"]["step"]) == (4, 4)
    assert plan["before"]["newest_valid"] == 4
    done = ckpttool_json("repair", run, "--apply")
    assert done["applied"] is True
    assert (run / ".quarantine" / done["id"]).is_dir()
    assert {f["severity"] for f in done["after"]["findings"]} == {"warning"}


def test_only_some_kinds(run: Path) -> None:
    (run / STEPS[2]).write_bytes(b"")
    plan = ckpttool_json("repair", run, "--only", "pointer", code=1)
    assert [deed["kind"] for deed in plan["plan"]] == ["pointer"]
    plan = ckpttool_json("repair", run, "--only", "set-aside, pointer", code=1)
    assert [deed["kind"] for deed in plan["plan"]] == ["set-aside", "pointer"]


def test_the_current_directory_is_the_default(run: Path) -> None:
    write_pointer(run, 2)
    done = ckpttool("repair", "--apply", cwd=run)
    assert done.returncode == 0
    assert pointer_of(run)["step"] == 6


def test_names_are_escaped(run: Path) -> None:
    evil = run / "step_000000000008.pt"
    evil.symlink_to("\x1b[2J\nelsewhere")
    done = ckpttool("repair", run)
    assert "\x1b" not in done.stdout
    assert r"\x1b[2J\nelsewhere" in done.stdout


# ---- wrong usage, said before anything is looked at


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--only", "everything"], "'--only'"),
        (["--only", ""], "'--only'"),
        (["--only", "mend,"], "'--only'"),
        (["--missing", "zeros"], "--allow-loss"),
        (["--from", "4"], "--allow-loss"),
        (["--allow-loss", "--missing", "zeros", "--from", "4"], "choose one"),
        (["--allow-loss", "--only", "pointer"], "leaves mending out"),
        (["--bit-odds", "2"], "--bit-odds"),
        (["--bit-odds", "nan"], "--bit-odds"),
        (["--allow-loss", "--missing", "guess"], "--missing"),
    ],
)
def test_options_that_conflict(options: list[str], words: str, run: Path) -> None:
    (run / STEPS[2]).write_bytes(b"")
    before = snapshot(run)
    done = ckpttool("repair", run, *options, "--apply")
    assert done.returncode == 2
    assert words in done.stderr
    assert snapshot(run) == before


def test_a_file_is_mended_by_mend(run: Path) -> None:
    done = ckpttool("repair", run / STEPS[2])
    assert done.returncode == 2
    assert "ckpttool mend FILE -o OUT" in done.stderr


def test_paths_that_are_none(tmp_path: Path) -> None:
    done = ckpttool("repair", tmp_path / "nowhere")
    assert (done.returncode, done.stderr) == (
        3,
        f"ckpttool: {tmp_path / 'nowhere'}: does not exist\n",
    )
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    done = ckpttool("repair", fifo)
    assert (done.returncode, done.stderr) == (3, f"ckpttool: {fifo}: is not a directory\n")


def test_a_directory_without_steps(tmp_path: Path) -> None:
    for arguments in ([tmp_path], [tmp_path, "--apply"]):
        done = ckpttool("repair", *arguments)
        assert done.returncode == 1
        assert "DIR107" in done.stdout
        assert "nothing that can be repaired here" in done.stdout
    assert names(tmp_path) == []


def test_a_step_that_is_not_there_gives_nothing(run: Path) -> None:
    from tests import corrupt
    from tests.ckpttool.checks.builders import put, step_bytes

    for step in (2, 4, 6):
        put(run, step, corrupt.keep_first(step_bytes(step), 8000))
    options = ["--allow-loss", "--from", "5", "--apply"]
    done = ckpttool("repair", run, *options)
    assert done.returncode == 4
    assert "there is no step file for step 5" in done.stderr


# ---- other writers


@pytest.fixture
def trainer(run: Path) -> Iterator[subprocess.Popen[str]]:
    """A living process that holds the lock of the directory."""
    script = (
        "import sys; from ckpttool.io.lock import WriterLock;"
        "lock = WriterLock.acquire(sys.argv[1], program='trainer_core'); print('ready', flush=True);"
        "input(); lock.release()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(run)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()
    assert process.stdin is not None
    process.stdin.close()


def test_a_live_writers_directory_is_refused(run: Path, trainer: subprocess.Popen[str]) -> None:
    (run / STEPS[2]).write_bytes(b"")
    before = snapshot(run)
    for arguments in ([run], [run, "--apply"]):
        done = ckpttool("repair", *arguments)
        assert done.returncode == 4
        assert f"pid {trainer.pid}" in done.stderr
        assert "trainer_core" in done.stderr
    assert snapshot(run) == before


def test_a_dead_writers_lock_does_not_matter(run: Path, trainer: subprocess.Popen[str]) -> None:
    (run / STEPS[2]).write_bytes(b"")
    trainer.kill()
    trainer.wait()
    assert (run / ".writer.lock").exists()
    assert ckpttool("repair", run, "--apply").returncode == 0
    assert names(run) == [".quarantine", "latest.json", *STEPS[:2]]


def test_the_lock_is_given_back(run: Path) -> None:
    write_pointer(run, 2)
    assert ckpttool("repair", run, "--apply").returncode == 0
    WriterLock.acquire(run, program="test").release()


# ---- where nothing can be written


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written(run: Path) -> None:
    (run / STEPS[2]).write_bytes(b"")
    run.chmod(0o555)
    try:
        assert ckpttool("repair", run).returncode == 1
        done = ckpttool("repair", run, "--apply")
    finally:
        run.chmod(0o755)
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert names(run) == ["latest.json", *STEPS]


def test_an_ordinary_user_in_a_read_only_directory(run: Path) -> None:
    """The same as root, through a process that has given its rights up."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv")
    (run / STEPS[2]).write_bytes(b"")
    run.chmod(0o555)
    for parent in run.parents:
        if parent.stat().st_uid == os.geteuid() and parent.is_relative_to("/tmp"):
            parent.chmod(parent.stat().st_mode | 0o005)
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"]
    probe = subprocess.run(
        [*user, sys.executable, "-c", "import ckpttool"], capture_output=True, cwd="/", check=False
    )
    if probe.returncode != 0:
        pytest.skip("an ordinary user cannot start this Python")
    done = subprocess.run(
        [*user, sys.executable, "-m", "ckpttool", "repair", str(run), "--apply"],
        capture_output=True,
        text=True,
        cwd="/",
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("ckpttool: ") == 1
    assert names(run) == ["latest.json", *STEPS]


# ---- earlier operations


def test_an_operation_that_was_killed_is_named_and_finished(run: Path) -> None:
    """Its journal says what was to be done; nothing of it had been done yet."""
    (run / STEPS[2]).write_bytes(b"")
    done = ckpttool_json("repair", run, "--apply")
    journal = run / ".quarantine" / done["id"] / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    (run / ".quarantine" / done["id"] / STEPS[2]).rename(run / STEPS[2])
    begun = next(number for number, line in enumerate(lines) if json.loads(line).get("event"))
    journal.write_text("".join(lines[: begun + 1]))
    write_pointer(run, 6)
    pointer = next((run / ".quarantine" / done["id"]).glob("latest.json*"), None)
    if pointer is not None:
        pointer.replace(run / "latest.json")
    shown = ckpttool("repair", run)
    assert shown.returncode == 1
    assert f"repair {done['id']} was not finished: --apply finishes it first" in shown.stdout
    assert ckpttool("repair", run, "--apply").returncode == 0
    assert names(run) == [".quarantine", "latest.json", *STEPS[:2]]
    assert pointer_of(run)["step"] == 4


def test_help_shows_every_kind() -> None:
    shown = "".join(ckpttool("repair", "--help").stdout.split())
    for kind in ("temporaries", "mend", "set-aside", "modes", "pointer"):
        assert kind in shown


def test_two_files_of_one_step(run: Path) -> None:
    write_step(run, 6, name="step_6.pt").chmod(0o644)
    assert ckpttool("repair", run, "--apply").returncode == 0
    assert names(run) == [".quarantine", "latest.json", *STEPS]


def test_a_loss_that_is_not_allowed_is_shown_and_refused(tmp_path: Path) -> None:
    from tests import corrupt
    from tests.ckpttool.checks.builders import put, step_bytes

    put(tmp_path, 2, corrupt.keep_first(step_bytes(2), 8000))
    before = snapshot(tmp_path)
    plan = ckpttool_json("repair", tmp_path, code=1)
    assert (plan["loses_data"], plan["needs_allow_loss"]) == (True, True)
    refused = ckpttool_json("repair", tmp_path, "--apply", code=4)
    assert refused["plan"] == plan["plan"]
    assert refused["applied"] is False
    done = ckpttool("repair", tmp_path, "--apply")
    assert done.returncode == 4
    assert "loses: optimizer.state" in done.stdout
    assert "--allow-loss" in done.stderr
    assert snapshot(tmp_path) == before
    assert ckpttool("repair", tmp_path, "--apply", "--allow-loss").returncode in (0, 1)
    assert names(tmp_path) == [".quarantine", "latest.json", STEPS[0]]


def test_how_to_get_at_the_rest_of_a_file_that_is_set_aside(tmp_path: Path) -> None:
    from tests import corrupt
    from tests.ckpttool.checks.builders import put, step_bytes

    run = tmp_path / "run"
    run.mkdir()
    for step in (2, 4):
        put(run, step, step_bytes(step))
    put(run, 4, corrupt.keep_first(step_bytes(4), 8000))
    command = "ckpttool mend {} -o OUT.pt --allow-loss"
    shown = ckpttool("repair", run).stdout
    assert "tensors damaged: optimizer.state" in shown
    assert "or:    get what is left of it: " + command.format(run / STEPS[1]) in shown
    done = ckpttool("repair", run, "--apply").stdout
    (folder,) = (run / ".quarantine").iterdir()
    assert "to get the rest of it: " + command.format(folder / STEPS[1]) in done
    assert (folder / STEPS[1]).exists()
    mended = ckpttool("mend", folder / STEPS[1], "-o", tmp_path / "out.pt", "--allow-loss")
    assert mended.returncode in (0, 1)
    assert (tmp_path / "out.pt").exists()


# ---- what a plan costs, and what is left of others


def test_how_far_training_goes_back_is_said_once_at_the_end(run: Path) -> None:
    cut(run / STEPS[2])
    done = ckpttool("repair", run)
    assert done.stdout.count("training goes back from step 6 to step 4\n") == 1
    lines = done.stdout.splitlines()
    assert lines[-2] == "training goes back from step 6 to step 4"
    assert ckpttool_json("repair", run, code=1)["goes_back_from"] == 6


def test_a_misnamed_file_is_renamed_and_comes_back(run: Path) -> None:
    (run / STEPS[2]).rename(run / "step_000000000007.pt")
    (run / STEPS[0]).rename(run / STEPS[2])
    before = snapshot(run)
    done = ckpttool("repair", run, "--apply")
    assert (done.returncode, done.stderr) == (0, "")
    assert "2. rename step_000000000007.pt to step_000000000006.pt" in done.stdout
    assert names(run) == [".quarantine", "latest.json", *STEPS]
    assert "newest valid step: 6" in done.stdout
    assert ckpttool("undo", run).returncode == 0
    shutil.rmtree(run / ".quarantine")
    assert snapshot(run) == before


def test_a_temporary_that_could_not_be_checked_ends_in_3(run: Path) -> None:
    path = write_unchecked(run, 8)
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    path.rename(run / f".{path.name}.tmp-{process.pid}")
    for arguments in ([run], [run, "--apply"]):
        done = ckpttool("repair", *arguments)
        assert done.returncode == 3
        assert "could not be checked, so it stays" in done.stdout
        assert "nothing to repair" not in done.stdout


def test_a_dead_writers_lock_is_cleared_though_nothing_else_is_wrong(run: Path) -> None:
    script = "import sys; from ckpttool.io.lock import WriterLock as W; "
    script += "W.acquire(sys.argv[1], program='trainer'); import os; os._exit(1)"
    subprocess.run([sys.executable, "-c", script, str(run)], cwd=ROOT)
    assert (run / ".writer.lock").exists()
    done = ckpttool("repair", run)
    assert f"nothing was changed; to do it: ckpttool repair {run} --apply" in done.stdout
    assert (run / ".writer.lock").exists()
    done = ckpttool("repair", run, "--apply")
    assert (done.returncode, "cleared the dead writer's lock" in done.stdout) == (0, True)
    assert names(run) == ["latest.json", *STEPS]
    assert "DIR112" not in ckpttool("verify", run).stdout


def test_the_source_of_losses_may_be_gone_where_nothing_is_lost(run: Path) -> None:
    done = ckpttool("repair", run, "--allow-loss", "--from", "3", "--apply")
    assert (done.returncode, done.stdout) == (0, "nothing to repair\n")


def test_a_swapped_file_is_not_blessed(run: Path) -> None:
    """It is whole, but the pointer's record says that another file was saved."""
    pointer = {"step": 6, "file": STEPS[2], "size": (run / STEPS[2]).stat().st_size}
    (run / "latest.json").write_text(json.dumps({**pointer, "sha256": "0" * 64}))
    assert ckpttool("latest", run).stdout == f"{run}/{STEPS[1]}\n"
    assert ckpttool("verify", run).returncode == 1
    done = ckpttool("repair", run, "--apply")
    assert done.returncode == 0
    assert pointer_of(run)["step"] == 4
    assert names(run) == [".quarantine", "latest.json", *STEPS[:2]]
