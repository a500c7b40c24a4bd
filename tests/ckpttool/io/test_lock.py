"""One writer to a directory: who is refused, whose lock is taken over, and races for a dead one's."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ckpttool.errors import RefusedError, WriteError
from ckpttool.io.lock import LOCK_NAME, LockedError, WriterLock, read_holder, refuse_if_held

ROOT = Path(__file__).parents[3]
HOLD = """
import sys, time
from ckpttool.io.lock import WriterLock
WriterLock.acquire(sys.argv[1], program="trainer_core", run_id="r1")
print("held", flush=True)
time.sleep(60)
"""


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def content(directory: Path) -> Any:
    return json.loads((directory / LOCK_NAME).read_text())


def rewrite(directory: Path, *, age: float = 0.0, **facts: Any) -> None:
    """Changes what a lock says, and how long ago it was refreshed."""
    path = directory / LOCK_NAME
    path.write_text(json.dumps({**content(directory), **facts}))
    os.utime(path, (time.time() - age, time.time() - age))


@pytest.fixture
def held_elsewhere(tmp_path: Path) -> Any:
    """A process that holds the lock of `tmp_path`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert process.stdout
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def dead(tmp_path: Path) -> int:
    """The pid of a process that held the lock of `tmp_path` and was killed."""
    script = HOLD.replace("time.sleep(60)", "import os; os.kill(os.getpid(), 9)")
    done = subprocess.run([sys.executable, "-c", script, tmp_path], cwd=ROOT, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    return int(content(tmp_path)["pid"])


def test_what_the_file_says(tmp_path: Path) -> None:
    with WriterLock.acquire(tmp_path, program="trainer_core", run_id="abc") as lock:
        assert names(tmp_path) == [LOCK_NAME]
        found = content(tmp_path)
        stat_fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        assert re.fullmatch("[0-9a-f]{32}", found.pop("token"))
        times = found.pop("acquired"), found.pop("refreshed")
        assert times[0] == times[1]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", times[0])
        assert found == {
            "pid": os.getpid(),
            "host": os.uname().nodename,
            "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            "pid_namespace": os.readlink("/proc/self/ns/pid"),
            "started": int(stat_fields[19]),
            "program": "trainer_core",
            "run_id": "abc",
        }
        assert lock.taken_over is None
    assert names(tmp_path) == []
    assert read_holder(tmp_path) is None


def test_a_second_writer_is_refused_with_who_holds_it(
    tmp_path: Path, held_elsewhere: subprocess.Popen[bytes]
) -> None:
    with pytest.raises(LockedError) as caught:
        WriterLock.acquire(tmp_path, program="ckpttool repair")
    assert isinstance(caught.value, RefusedError)
    host = os.uname().nodename
    assert f"pid {held_elsewhere.pid} on {host} (trainer_core), since 20" in str(caught.value)
    holder = caught.value.holder
    assert holder is not None
    assert (holder.state, holder.pid, holder.run_id) == ("held", held_elsewhere.pid, "r1")
    with pytest.raises(LockedError):
        refuse_if_held(tmp_path)
    assert names(tmp_path) == [LOCK_NAME]
    assert content(tmp_path)["pid"] == held_elsewhere.pid


def test_a_killed_holder_is_known_to_be_dead_before_anybody_waits_for_it(
    tmp_path: Path, held_elsewhere: subprocess.Popen[bytes]
) -> None:
    """A zombie has a pid and still writes nothing."""
    os.kill(held_elsewhere.pid, signal.SIGKILL)
    stat = Path(f"/proc/{held_elsewhere.pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    holder = read_holder(tmp_path)
    assert holder is not None
    assert holder.state == "dead"


def test_the_same_process_is_refused_too(tmp_path: Path) -> None:
    first = WriterLock.acquire(tmp_path, program="a")
    with pytest.raises(LockedError, match="which is this process"):
        WriterLock.acquire(tmp_path, program="b")
    first.release()
    WriterLock.acquire(tmp_path, program="b").release()


def test_a_dead_holder_is_taken_over_and_named(tmp_path: Path, dead: int) -> None:
    refuse_if_held(tmp_path)
    holder = read_holder(tmp_path)
    assert holder is not None
    assert holder.state == "dead"
    with WriterLock.acquire(tmp_path, program="x") as lock:
        assert lock.taken_over is not None
        assert (lock.taken_over.pid, lock.taken_over.program) == (dead, "trainer_core")
        assert content(tmp_path)["pid"] == os.getpid()
        assert names(tmp_path) == [LOCK_NAME]


def test_a_pid_that_was_given_again_is_not_the_holder(tmp_path: Path, dead: int) -> None:
    rewrite(tmp_path, pid=os.getpid())  # alive, but it started at another time
    assert WriterLock.acquire(tmp_path, program="x").taken_over is not None


@pytest.mark.parametrize(
    "facts", [{"host": "node7"}, {"boot_id": "another"}, {"pid_namespace": "pid:[1]"}]
)
@pytest.mark.parametrize(("age", "state"), [(0, "held"), (290, "held"), (310, "stale")])
def test_of_another_machine_or_container_only_the_age_tells(
    tmp_path: Path, dead: int, facts: dict[str, str], age: float, state: str
) -> None:
    rewrite(tmp_path, age=age, **facts)
    holder = read_holder(tmp_path)
    assert holder is not None
    assert holder.state == state
    if state == "held":
        with pytest.raises(LockedError, match=rf"last sign of life {age}\d? s ago"):
            WriterLock.acquire(tmp_path, program="x")
    else:
        assert WriterLock.acquire(tmp_path, program="x").taken_over == holder._replace(
            age=pytest.approx(holder.age, abs=10)
        )


def test_the_clock_of_this_machine_does_not_count(
    tmp_path: Path, dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that is a day ahead must not make a lock on a file server look stale."""
    rewrite(tmp_path, host="node7", age=10)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 86400)
    with pytest.raises(LockedError):
        WriterLock.acquire(tmp_path, program="x")


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'{"pid": "4"}', b'{"pid": true}', b"\xff", b"[" * 60_000]
)
def test_a_lock_that_says_nothing_counts_while_it_is_young(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / LOCK_NAME
    path.write_bytes(data)
    with pytest.raises(LockedError, match="lock file cannot be read"):
        WriterLock.acquire(tmp_path, program="x")
    os.utime(path, (time.time() - 400, time.time() - 400))
    with WriterLock.acquire(tmp_path, program="x") as lock:
        assert lock.taken_over is not None
        assert lock.taken_over.state == "unreadable"


def test_a_refusal_says_when_it_lapses_and_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / LOCK_NAME
    path.write_bytes(b"")
    words = rf"may be at work.*lapses 300 s after that.*no writer is at work: rm -- {path}"
    with pytest.raises(LockedError, match=words):
        WriterLock.acquire(tmp_path, program="x")
    with pytest.raises(LockedError, match=words):
        refuse_if_held(tmp_path)


def test_a_lock_from_the_future_says_that_it_does_not_lapse(tmp_path: Path) -> None:
    WriterLock.acquire(tmp_path, program="trainer_core")
    rewrite(tmp_path, host="elsewhere", age=-1_000_000)
    with pytest.raises(LockedError, match=r"lies (1,000,000|999,99\d) s ahead.*: rm -- "):
        WriterLock.acquire(tmp_path, program="x")


def test_a_directory_in_its_place_is_refused_with_a_way_on(tmp_path: Path) -> None:
    path = tmp_path / LOCK_NAME
    path.mkdir()
    os.utime(path, (time.time() - 400, time.time() - 400))
    with pytest.raises(LockedError, match=rf"a directory lies .*: mv -n -- {path} {path}\.old"):
        WriterLock.acquire(tmp_path, program="x")
    assert names(tmp_path) == [LOCK_NAME]


def test_a_verb_waits_a_moment_for_another_but_not_for_a_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpttool.io.lock._FAMILY_PATIENCE_S", 300.0)
    lock = WriterLock.acquire(tmp_path, program="ckpttool undo")
    timer = threading.Timer(0.5, lock.release)
    timer.start()
    WriterLock.acquire_soon(tmp_path, program="ckpttool repair").release()
    timer.join()
    with WriterLock.acquire(tmp_path, program="trainer_core"):
        before = time.monotonic()
        with pytest.raises(LockedError):
            WriterLock.acquire_soon(tmp_path, program="ckpttool repair")
        assert time.monotonic() - before < 150


def test_a_lock_without_a_token_is_a_lock(tmp_path: Path, dead: int) -> None:
    rewrite(tmp_path, token=None)
    with WriterLock.acquire(tmp_path, program="x") as lock:
        assert lock.taken_over is not None
        assert lock.taken_over.pid == dead
    assert names(tmp_path) == []


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.write_text("precious")
    path = tmp_path / LOCK_NAME
    path.symlink_to(target)
    with pytest.raises(LockedError):
        WriterLock.acquire(tmp_path, program="x")
    os.utime(path, (1, 1), follow_symlinks=False)
    with WriterLock.acquire(tmp_path, program="x"):
        assert not path.is_symlink()
    assert target.read_text() == "precious"


def test_refreshing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = WriterLock.acquire(tmp_path, program="x")
    path = tmp_path / LOCK_NAME
    os.utime(path, (1, 1))
    before, inode = content(tmp_path), path.stat().st_ino
    lock.refresh_if_due()
    assert path.stat().st_mtime == 1
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + 61)
    seen: list[tuple[int, int, str]] = []
    lock.keeping(lambda *told: seen.append(told))(1, 2, "x")
    assert seen == [(1, 2, "x")]
    assert abs(path.stat().st_mtime - time.time()) < 60
    assert path.stat().st_ino == inode
    after = content(tmp_path)
    assert after.pop("refreshed") >= before.pop("refreshed")
    assert after == before


def test_a_lock_that_was_lost_is_noticed_and_not_removed(tmp_path: Path) -> None:
    lock = WriterLock.acquire(tmp_path, program="x")
    rewrite(tmp_path, host="node7", age=400)  # as if we had slept, on another machine
    other = WriterLock.acquire(tmp_path, program="y")
    with pytest.raises(LockedError, match=r"taken over by pid \d+ on .* \(y\)"):
        lock.refresh()
    lock.release()
    assert content(tmp_path)["program"] == "y"
    other.release()
    with pytest.raises(LockedError, match="was removed"):
        lock.refresh()


def test_a_forked_child_does_not_hold_it(tmp_path: Path) -> None:
    lock = WriterLock.acquire(tmp_path, program="x")
    child = os.fork()
    if child == 0:
        lock.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert names(tmp_path) == [LOCK_NAME]
    lock.release()
    lock.release()
    assert names(tmp_path) == []


def test_patience(tmp_path: Path, held_elsewhere: subprocess.Popen[bytes]) -> None:
    started = time.monotonic()
    with pytest.raises(LockedError):
        WriterLock.acquire(tmp_path, program="x", patience=0.3)
    assert time.monotonic() - started >= 0.3
    held_elsewhere.kill()
    WriterLock.acquire(tmp_path, program="x", patience=30).release()


def test_where_it_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="No such file or directory"):
        WriterLock.acquire(tmp_path / "missing", program="x")
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
        with pytest.raises(WriteError, match="Permission denied"):
            WriterLock.acquire(tmp_path, program="x")
        tmp_path.chmod(0o700)


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    script = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))\n"
        "from ckpttool.io.lock import WriterLock\n"
        f"WriterLock.acquire({str(tmp_path)!r}, program='x')"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert "WriteError" in done.stderr
    assert names(tmp_path) == []


def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", link)


def test_without_hard_links(tmp_path: Path, dead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    no_links(monkeypatch)
    with WriterLock.acquire(tmp_path, program="x") as lock:
        assert lock.taken_over is not None
        assert lock.taken_over.pid == dead
        with pytest.raises(LockedError):
            WriterLock.acquire(tmp_path, program="y")
        lock.refresh()
    assert names(tmp_path) == []


def test_a_link_whose_success_was_not_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NFS server repeats an answer that got lost, and then says that the name is taken."""
    real = os.link

    def link(*names: Any, **options: Any) -> None:
        real(*names, **options)
        raise FileExistsError

    monkeypatch.setattr(os, "link", link)
    with WriterLock.acquire(tmp_path, program="x") as lock:
        assert lock.taken_over is None
        lock.refresh()


DIE_TAKING_OVER = """
import os, sys
from ckpttool.io.lock import WriterLock
os.replace = lambda *names: os.kill(os.getpid(), 9)
WriterLock.acquire(sys.argv[1], program="dies")
"""


def test_claims_of_takers_that_died_are_taken_over_in_turn(tmp_path: Path, dead: int) -> None:
    """Each of three takers dies between its claim and the lock; each claim rests on the last."""
    before = content(tmp_path)
    for count in (1, 2, 3):
        done = subprocess.run([sys.executable, "-c", DIE_TAKING_OVER, tmp_path], cwd=ROOT)
        assert done.returncode == -signal.SIGKILL
        assert sum(".tmp-0-" in name for name in names(tmp_path)) == count
        assert content(tmp_path) == before
    with WriterLock.acquire(tmp_path, program="y") as lock:
        assert lock.taken_over is not None
        assert lock.taken_over.pid == dead
        assert content(tmp_path)["program"] == "y"
        assert names(tmp_path) == [LOCK_NAME]


def test_the_claim_of_a_living_taker_stands(tmp_path: Path, dead: int) -> None:
    token = content(tmp_path)["token"]
    with WriterLock.acquire(tmp_path, program="slow"):
        living = content(tmp_path)
    (tmp_path / f".{LOCK_NAME}.tmp-0-{token}").write_text(json.dumps(living))
    rewrite_to = {**living, "pid": dead, "started": 1, "token": token}
    (tmp_path / LOCK_NAME).write_text(json.dumps(rewrite_to))
    with pytest.raises(LockedError, match="slow"):
        WriterLock.acquire(tmp_path, program="y")
    assert content(tmp_path) == rewrite_to


RACE = """
import sys, time, os
from ckpttool.io.lock import WriterLock, LockedError
directory, start = sys.argv[1], float(sys.argv[2])
while time.time() < start:
    pass
try:
    lock = WriterLock.acquire(directory, program="racer")
except LockedError:
    print("refused")
else:
    print("won", lock.taken_over is not None, flush=True)
    time.sleep(1.5)
    lock.refresh()
    print("still")
"""


@pytest.mark.parametrize("prepare", [True, False], ids=["a dead holder's lock", "no lock"])
def test_of_many_takers_one_wins(tmp_path: Path, dead: int, prepare: bool) -> None:
    if not prepare:
        (tmp_path / LOCK_NAME).unlink()
    start = str(time.time() + 2.0)
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, tmp_path, start], cwd=ROOT, stdout=subprocess.PIPE
        )
        for _ in range(6)
    ]
    said = sorted(racer.communicate(timeout=600)[0] for racer in racers)
    assert said == [b"refused\n"] * 5 + [f"won {prepare}\nstill\n".encode()]


def test_a_slow_taker_does_not_replace_the_lock_of_a_faster_one(
    tmp_path: Path, dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has judged the old lock dead; before it makes its claim, another one is through."""
    real, calls = os.link, []

    def link(*arguments: Any, **options: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:  # the first was the try to take it outright
            monkeypatch.setattr(os, "link", real)
            WriterLock.acquire(tmp_path, program="faster")
        real(*arguments, **options)

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(LockedError, match="faster"):
        WriterLock.acquire(tmp_path, program="slow")
    assert names(tmp_path) == [LOCK_NAME]
    assert content(tmp_path)["program"] == "faster"


def test_a_lock_that_is_released_meanwhile_is_simply_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = WriterLock.acquire(tmp_path, program="first")
    real = os.open

    def open_(path: Any, *rest: Any, **options: Any) -> int:
        if str(path).endswith(LOCK_NAME):
            monkeypatch.setattr(os, "open", real)
            first.release()
        return real(path, *rest, **options)

    monkeypatch.setattr(os, "open", open_)
    assert WriterLock.acquire(tmp_path, program="second").taken_over is None
    assert content(tmp_path)["program"] == "second"
