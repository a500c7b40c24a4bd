"""`kill -9` before every single file operation of repair, undo and rollback: no file is lost.

A directory with one of each trouble is put back for every boundary, the command is killed there,
and then: every content that was in the directory is still in it, in place or in quarantine;
`repair --apply` ends with everything mended; `undo` ends with the very same tree as in the beginning,
names, bytes, modes and times. A disk that is full from some operation on is treated alike.

Every boundary is tried, of writes also the torn half; of a disk that is read-only or fails once,
every third. What is killed is the command itself; what mends after it is the same code, called.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckpttool
from ckpttool.actions.journal.operations import history, undo
from ckpttool.actions.repair.deeds import Options
from ckpttool.actions.repair.run import Repair
from tests import corrupt
from tests.ckpttool.checks.builders import name, point, put, step_bytes
from tests.crash import CrashRig, Outcome, boundaries
from tests.test_crash import traced

pytestmark = pytest.mark.slow

# Larger than any process id that Linux gives (PID_MAX_LIMIT is 2 ** 22).
DEAD = 2**22 + 1
# The tool's own: operations, the lock, and the temporary of whoever died while taking the lock.
BOOKS = (".quarantine", ".writer.lock", "..writer.lock")

Tree = dict[str, tuple[str, str, int, int]]


@pytest.fixture(scope="module")
def rig() -> Iterator[CrashRig]:
    preload = [f"ckpttool.cli.{verb}" for verb in ("repair", "undo", "rollback", "verify")] + [
        "ckpttool.actions.repair.run",
        "hashlib",
        "numpy",
    ]
    with CrashRig("ckpttool.cli.main:main", preload=preload) as made:
        yield made


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one of each trouble. Read-only: `fresh` copies it."""
    return make_troubled(tmp_path_factory.mktemp("troubled") / "run")


def make_troubled(run: Path) -> Path:
    """Makes that directory."""
    run.mkdir(mode=0o755)
    for step in (2, 4, 6, 10):
        put(run, step, step_bytes(step))
    place = corrupt.content_range(step_bytes(4), "data/0")
    put(run, 4, corrupt.flip_bit(step_bytes(4), place.start + 5, 3))
    put(run, 6, corrupt.cut_end(step_bytes(6), len(step_bytes(6)) // 2))
    put(run, 8, bytes(4000))
    whole = run / f".{name(8)}.tmp-{DEAD}"
    whole.write_bytes(step_bytes(8))
    (run / f".latest.json.tmp-{DEAD}").write_text('{"step": 8}')
    (run / name(9)).symlink_to("elsewhere.pt")
    (run / "notes.txt").write_text("not a step")
    point(run, 2)
    for path in run.iterdir():
        if not path.is_symlink():
            path.chmod(0o644)
    (run / name(10)).chmod(0o600)
    for number, path in enumerate(sorted(run.iterdir())):
        time = (1_700_000_000 + number) * 10**9 + 123_456_789
        os.utime(path, ns=(time, time), follow_symlinks=False)
    return run


def fresh(troubled: Path, where: Path) -> Path:
    """The directory once more, times and modes kept."""
    if where.exists():
        shutil.rmtree(where)
    return Path(shutil.copytree(troubled, where, symlinks=True))


def tree_of(run: Path) -> Tree:
    """What is in a directory, without the tool's own books: kind, content, mode, time."""
    return {
        path.name: _facts(path) for path in run.iterdir() if not path.name.startswith(BOOKS)
    } | {".": ("directory", "", stat.S_IMODE(run.stat().st_mode), 0)}


def _facts(path: Path) -> tuple[str, str, int, int]:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return "link", os.readlink(path), 0, status.st_mtime_ns
    content = sha256(path) if path.is_file() else "directory"
    return "file", content, stat.S_IMODE(status.st_mode), status.st_mtime_ns


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def contents(run: Path) -> set[str]:
    """The content of every file and link, wherever it lies below the directory."""
    found = set()
    for folder, _, files in os.walk(run):
        for file in files:
            path = Path(folder, file)
            found.add(os.readlink(path) if path.is_symlink() else sha256(path))
    return found


def assert_nothing_lost(run: Path, troubled: Path, when: str) -> None:
    assert contents(troubled) <= contents(run), when


_mended: set[str] = set()


def assert_mended(run: Path, when: str) -> None:
    """`verify` looks at each different state once: names, contents, modes, links and operations."""
    tree = {name: facts[:3] for name, facts in tree_of(run).items()}
    state = repr((sorted(tree.items()), [one.state for one in history(run)]))
    if state not in _mended:
        _look_whether_mended(run, when)
        _mended.add(state)


def _look_whether_mended(run: Path, when: str) -> None:
    report = ckpttool.verify(run)
    assert report.newest_valid == 10, when
    assert [f.id for f in report.findings if f.severity.value == "error"] == [], when
    assert [file.step for file in report.files] == [2, 4, 8, 10], when
    assert (run / name(4)).read_bytes() == step_bytes(4), when
    assert (run / name(8)).read_bytes() == step_bytes(8), when


def repair(run: Path) -> None:
    """`ckpttool repair --apply`."""
    work = Repair(str(run), Options())
    work.finish_earlier()
    if work.make_plan().deeds:
        work.carry_out()


def undo_all(run: Path) -> None:
    """`ckpttool undo` until there is nothing left to take back."""
    for _ in range(5):
        if not any(one.state in ("finished", "unfinished", "taking-back") for one in history(run)):
            return
        undo(run)
    raise AssertionError(f"undo has no end: {history(run)}")


def done(outcome: Outcome, *codes: int) -> None:
    assert outcome.code in codes, outcome.output
    assert "Traceback" not in outcome.output, outcome.output


def test_the_repair_is_right_when_nobody_kills_it(
    rig: CrashRig, troubled: Path, tmp_path: Path
) -> None:
    run = fresh(troubled, tmp_path / "run")
    done(rig.run(["repair", str(run), "--apply"]), 0)
    assert_mended(run, "whole")
    assert_nothing_lost(run, troubled, "whole")
    done(rig.run(["undo", str(run)]), 0)
    assert tree_of(run) == tree_of(troubled)
    nothing = rig.run(["undo", str(run)])
    done(nothing, 3)
    assert "there is no operation to take back" in nothing.output


@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace here to compare with")
def test_no_operation_of_a_repair_is_missed(rig: CrashRig, troubled: Path, tmp_path: Path) -> None:
    """What is counted, and killed at, is what strace sees."""
    run = fresh(troubled, tmp_path / "run")
    counted = [op.kind for op in rig.run(["repair", str(run), "--apply"]).ops]
    traced_run = fresh(troubled, tmp_path / "traced")
    command = [sys.executable, "-B", "-m", "ckpttool", "repair", str(traced_run), "--apply"]
    assert traced(command, traced_run) == counted


def test_a_killed_repair_is_finished_by_the_next(
    rig: CrashRig, troubled: Path, tmp_path: Path
) -> None:
    command = ["repair", str(tmp_path / "run"), "--apply"]
    fresh(troubled, tmp_path / "run")
    whole = rig.run(command)
    for at, torn in boundaries(whole.ops):
        run = fresh(troubled, tmp_path / "run")
        when = f"killed before operation {at}, {whole.ops[at]}, torn: {torn}"
        assert rig.run(command, kill_at=at, torn=torn).killed, when
        assert_nothing_lost(run, troubled, when)
        repair(run)
        assert_nothing_lost(run, troubled, when)
        assert_mended(run, when)
        undo_all(run)
        assert tree_of(run) == tree_of(troubled), when


def test_a_killed_repair_is_taken_back_by_undo(
    rig: CrashRig, troubled: Path, tmp_path: Path
) -> None:
    command = ["repair", str(tmp_path / "run"), "--apply"]
    fresh(troubled, tmp_path / "run")
    whole = rig.run(command)
    for at, torn in boundaries(whole.ops):
        run = fresh(troubled, tmp_path / "run")
        when = f"killed before operation {at}, {whole.ops[at]}, torn: {torn}"
        assert rig.run(command, kill_at=at, torn=torn).killed, when
        undo_all(run)
        assert tree_of(run) == tree_of(troubled), when


def test_a_killed_undo_is_finished(rig: CrashRig, troubled: Path, tmp_path: Path) -> None:
    """By a second `undo`; and `repair` takes the rest back, then repairs."""
    where = tmp_path / "run"
    fresh(troubled, where)
    done(rig.run(["repair", str(where), "--apply"]), 0)
    repaired = fresh(where, tmp_path / "repaired")
    whole = rig.run(["undo", str(where)])
    for number, (at, torn) in enumerate(boundaries(whole.ops)):
        run = fresh(repaired, where)
        when = f"killed before operation {at}, {whole.ops[at]}, torn: {torn}"
        assert rig.run(["undo", str(run)], kill_at=at, torn=torn).killed, when
        assert_nothing_lost(run, troubled, when)
        if number % 2:
            repair(run)
            assert_mended(run, when)
        undo_all(run)
        assert tree_of(run) == tree_of(troubled), when


def test_a_killed_rollback_is_finished_or_taken_back(
    rig: CrashRig, troubled: Path, tmp_path: Path
) -> None:
    healthy = fresh(troubled, tmp_path / "healthy")
    done(rig.run(["repair", str(healthy), "--apply"]), 0)
    shutil.rmtree(healthy / ".quarantine")
    where = fresh(healthy, tmp_path / "run")
    command = ["rollback", str(where), "--to", "4"]
    whole = rig.run(command)
    done(whole, 0)
    assert ckpttool.verify(where).newest_valid == 4
    for number, (at, torn) in enumerate(boundaries(whole.ops)):
        run = fresh(healthy, where)
        when = f"killed before operation {at}, {whole.ops[at]}, torn: {torn}"
        assert rig.run(command, kill_at=at, torn=torn).killed, when
        assert_nothing_lost(run, healthy, when)
        if number % 2:
            repair(run)
            assert ckpttool.verify(run).newest_valid in (4, 10), when
        undo_all(run)
        assert tree_of(run) == tree_of(healthy), when


@pytest.mark.parametrize(("error", "every"), [(errno.ENOSPC, 1), (errno.EROFS, 3), (errno.EIO, 3)])
def test_a_disk_that_fails_from_any_operation_on(
    error: int, every: int, rig: CrashRig, troubled: Path, tmp_path: Path
) -> None:
    """One error that says why, and nothing is lost; a full disk leaves all as it was."""
    command = ["repair", str(tmp_path / "run"), "--apply"]
    fresh(troubled, tmp_path / "run")
    whole = rig.run(command)
    for at, op in list(enumerate(whole.ops))[::every]:
        run = fresh(troubled, tmp_path / "run")
        when = f"{os.strerror(error)} from operation {at} on, {op}"
        failed = rig.run(command, fail_at=at, errno=error)
        done(failed, 0, 3)
        if failed.code == 3:
            assert failed.output.count("ckpttool: ") == 1, when
        assert_nothing_lost(run, troubled, when)
        if error == errno.ENOSPC and failed.code == 3:
            assert tree_of(run) == tree_of(troubled), when
        repair(run)
        assert_mended(run, when)
