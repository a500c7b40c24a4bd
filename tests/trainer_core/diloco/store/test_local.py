"""What only a directory has: links, temporaries, and other processes on the same machine."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from trainer_core.diloco.errors import PermanentError
from trainer_core.diloco.store import Entry, Store

CREATE = """
import sys, time
from pathlib import Path
from trainer_core.diloco.store import Store

store, me = Store.open(sys.argv[1]), sys.argv[2]
Path(sys.argv[1], me).touch()
while not all(Path(sys.argv[1], name).exists() for name in ("p0", "p1")):
    time.sleep(0.001)
print([store.create(f"race/{number}", me.encode()) for number in range(50)])
"""


def test_links_that_lead_out_are_refused(tmp_path: Path) -> None:
    root, outside = tmp_path / "hub", tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    store = Store.open(root)
    store.write("n/own", b"own")
    (root / "out").symlink_to(outside)
    (root / "n" / "secret").symlink_to(outside / "secret")
    (root / "n" / "inside").symlink_to(root / "n" / "own")
    (root / "n" / "nothing").symlink_to(outside / "nothing")
    (root / "n" / "loop").symlink_to("loop")
    os.mkfifo(root / "n" / "pipe")
    calls = [
        lambda: store.read("n/secret"),
        lambda: store.size("n/secret"),
        lambda: store.fetch("out/secret", tmp_path / "got"),
        lambda: store.write("out/new", b""),
        lambda: store.create("out/new", b""),
        lambda: store.remove("out/secret"),
        lambda: store.entries("out"),
        lambda: store.read("n/nothing"),
        lambda: store.read("n/loop"),
        lambda: store.read("n/pipe"),
    ]
    for call in calls:
        with pytest.raises(PermanentError):
            call()
    assert store.read("n/inside") == b"own"
    assert store.entries("n") == [Entry("inside", 3), Entry("own", 3)]
    assert store.folders("") == ["n"]
    # A link as the last part is replaced, its target left alone.
    store.write("n/secret", b"mine")
    assert (outside / "secret").read_bytes() == b"secret"
    assert os.listdir(outside) == ["secret"]
    assert store.read("n/secret") == b"mine"


def test_a_root_that_is_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "hub").symlink_to(tmp_path / "real")
    store = Store.open(tmp_path / "hub")
    store.write("n/a", b"1")
    assert (tmp_path / "real" / "n" / "a").read_bytes() == store.read("n/a") == b"1"


def test_two_processes_create(tmp_path: Path) -> None:
    root = tmp_path / "hub"
    root.mkdir()
    commands = [[sys.executable, "-c", CREATE, str(root), name] for name in ("p0", "p1")]
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths}
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for command in commands
    ]
    try:
        won = [eval(process.communicate(timeout=600)[0]) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert [first + second for first, second in zip(*won, strict=True)] == [1] * 50
    for number, first in enumerate(won[0]):
        assert (root / "race" / str(number)).read_bytes() == (b"p0" if first else b"p1")
    assert len(os.listdir(root / "race")) == 50  # no temporaries are left


def test_created_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """exFAT and the like: the name is opened exclusively, so that still just one of many wins."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    won: list[int] = []
    barrier = threading.Barrier(8)

    def race(who: int) -> None:
        store = Store.open(tmp_path / "hub")
        for number in range(20):
            barrier.wait(60)
            if store.create(f"race/{number}", b"%d" % who * 100):
                won.append(number)

    threads = [threading.Thread(target=race, args=(who,)) for who in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == list(range(20))
    store = Store.open(tmp_path / "hub")
    for number in range(20):
        content = store.read(f"race/{number}")
        assert content == content[:1] * 100
    assert len(os.listdir(tmp_path / "hub" / "race")) == 20


def test_leftovers_of_killed_writers_go(tmp_path: Path) -> None:
    """Those of a day ago, when the folder is first written to; younger ones may be at work."""
    folder = tmp_path / "hub" / "n"
    folder.mkdir(parents=True)
    for name in (".a.tmp-1", ".b.tmp-77-0f", ".c.tmp-2"):
        (folder / name).write_bytes(b"half")
    for name in (".a.tmp-1", ".b.tmp-77-0f"):
        os.utime(folder / name, (0, 0))
    store = Store.open(tmp_path / "hub")
    assert store.entries("n") == []
    store.write("n/a", b"whole")
    assert sorted(os.listdir(folder)) == [".c.tmp-2", "a"]
