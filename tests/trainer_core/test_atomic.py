"""What a save does to the disk, in which order, and what it leaves when it cannot be finished."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.errors import WriteError
from trainer_core import atomic_json_dump, atomic_torch_save

OLD = {"old": torch.arange(10)}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A file that is there already."""
    path = tmp_path / "step_000000000004.pt"
    torch.save(OLD, path)
    return path


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


linux_only = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")


class Recorder:
    """Writes down what happens to files below `root`, by the names that they have then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.root = root
        self.events: list[tuple[str, ...]] = []
        self.sizes: dict[str, int] = {}
        self.real = os.fsync, os.replace
        monkeypatch.setattr(os, "fsync", self.fsync)
        monkeypatch.setattr(os, "replace", self.replace)

    def short(self, path: Any) -> str:
        return os.path.relpath(os.path.abspath(os.fspath(path)), self.root)

    def fsync(self, descriptor: int) -> None:
        name = self.short(os.readlink(f"/proc/self/fd/{descriptor}"))
        self.events.append(("fsync", name))
        self.sizes[name] = os.fstat(descriptor).st_size
        self.real[0](descriptor)

    def replace(self, source: Any, target: Any) -> None:
        assert os.path.getsize(source) == self.sizes[self.short(source)], "changed after its fsync"
        self.events.append(("replace", self.short(source), self.short(target)))
        self.real[1](source, target)


@linux_only
def test_write_fsync_replace_fsync_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch, tmp_path)
    atomic_torch_save(OLD, tmp_path / "a.pt")
    atomic_json_dump({"step": 1}, tmp_path / "b.json")
    first, second = f".a.pt.tmp-{os.getpid()}", f".b.json.tmp-{os.getpid()}"
    assert recorder.events == [
        ("fsync", first),
        ("replace", first, "a.pt"),
        ("fsync", "."),
        ("fsync", second),
        ("replace", second, "b.json"),
        ("fsync", "."),
    ]
    assert names(tmp_path) == ["a.pt", "b.json"]


@linux_only
def test_new_directories_are_durable_before_the_file_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch, tmp_path)
    atomic_json_dump(1, tmp_path / "runs" / "a" / "x.json")
    assert recorder.events[:2] == [("fsync", "."), ("fsync", "runs")]
    assert recorder.events[-1] == ("fsync", "runs/a")


def test_a_directory_that_seems_to_exist_twice_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.makedirs

    def makedirs(*arguments: Any, **more: Any) -> None:
        real(*arguments, **more)
        raise FileExistsError(errno.EEXIST, "File exists")  # seen on distributed file systems

    monkeypatch.setattr(os, "makedirs", makedirs)
    atomic_json_dump(1, tmp_path / "runs" / "x.json")
    assert json.loads((tmp_path / "runs" / "x.json").read_text()) == 1


def test_a_parent_that_is_a_file_is_a_write_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(WriteError):
        atomic_torch_save(OLD, tmp_path / "file" / "a.pt")


@pytest.mark.parametrize(("umask", "mode"), [(0o007, 0o660), (0o022, 0o644), (0o077, 0o600)])
def test_modes_follow_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        atomic_torch_save(OLD, tmp_path / "a.pt")
        atomic_json_dump({}, tmp_path / "latest.json")
    finally:
        os.umask(before)
    for name in ("a.pt", "latest.json"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode


def test_the_archives_root_folder_is_not_named_after_the_temporary(tmp_path: Path) -> None:
    atomic_torch_save(OLD, tmp_path / "step_000000000004.pt")
    with zipfile.ZipFile(tmp_path / "step_000000000004.pt") as archive:
        assert {name.split("/")[0] for name in archive.namelist()} == {"archive"}
        assert archive.testzip() is None


@pytest.mark.parametrize("name", ["тест_каталог", "a [1] *?", "🙂 é", "new\nline", "-rf", "a'b\"c"])
def test_any_directory_name_will_do(tmp_path: Path, name: str) -> None:
    atomic_torch_save(OLD, tmp_path / name / "a.pt")
    atomic_json_dump({"a": name}, tmp_path / name / "latest.json")
    assert names(tmp_path / name) == ["a.pt", "latest.json"]
    assert torch.load(tmp_path / name / "a.pt", weights_only=True)["old"].tolist() == list(
        range(10)
    )
    assert json.loads((tmp_path / name / "latest.json").read_bytes()) == {"a": name}


def test_a_relative_path_is_written_where_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    atomic_json_dump([1], "x.json")
    atomic_torch_save(OLD, "x.pt")
    assert names(tmp_path) == ["x.json", "x.pt"]


def test_a_link_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep")
    (tmp_path / "a.json").symlink_to("precious")
    atomic_json_dump(1, tmp_path / "a.json")
    assert (tmp_path / "precious").read_text() == "keep"
    assert not (tmp_path / "a.json").is_symlink()


def test_tensors_mapped_from_the_old_file_stay_good(old: Path) -> None:
    mapped = torch.load(old, mmap=True, weights_only=True)["old"]
    atomic_torch_save({"old": torch.zeros(10, dtype=torch.int64)}, old)
    assert mapped.tolist() == list(range(10))


def test_no_second_copy_is_made_in_memory(tmp_path: Path) -> None:
    state = {"w": torch.ones(16 << 20)}  # 64 MiB
    tracemalloc.start()
    atomic_torch_save(state, tmp_path / "a.pt")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 << 20


# ------------------------------------------------------------------------------ what goes wrong


class RaisesWhenPickled:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


class InterruptsWhenPickled:
    def __reduce__(self) -> Any:
        signal.raise_signal(signal.SIGINT)
        return int, (3,)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (lambda: 1, (AttributeError, Exception)),
        (open, Exception),
        (RaisesWhenPickled(RuntimeError("genuine")), RuntimeError),
        (RaisesWhenPickled(OSError(errno.EIO, "bad")), OSError),
        (RaisesWhenPickled(KeyboardInterrupt()), KeyboardInterrupt),
        (RaisesWhenPickled(SystemExit(3)), SystemExit),
        (InterruptsWhenPickled(), KeyboardInterrupt),
    ],
)
def test_a_state_that_cannot_be_saved_leaves_the_old_file(
    old: Path, bad: Any, error: type[BaseException]
) -> None:
    before = old.read_bytes()
    if bad is open:
        bad = old.open("rb")  # an open file cannot be pickled
    with pytest.raises(error):
        atomic_torch_save({"a": torch.ones(100_000), "z": [1, {"bad": bad}]}, old)
    if hasattr(bad, "close"):
        bad.close()
    assert old.read_bytes() == before
    assert names(old.parent) == [old.name]


def test_an_error_of_its_own_is_not_mistaken_for_one_that_is_being_handled(tmp_path: Path) -> None:
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises(RuntimeError, match="genuine"):
            atomic_torch_save(RaisesWhenPickled(RuntimeError("genuine")), tmp_path / "a.pt")


@pytest.mark.parametrize("value", [{1, 2}, object(), {"a": b"x"}, {("a",): 1}])
def test_a_value_that_is_no_json_leaves_the_old_file(tmp_path: Path, value: Any) -> None:
    atomic_json_dump({"step": 4}, tmp_path / "latest.json")
    with pytest.raises(TypeError):
        atomic_json_dump(value, tmp_path / "latest.json")
    assert (tmp_path / "latest.json").read_text() == '{\n  "step": 4\n}\n'
    assert names(tmp_path) == ["latest.json"]


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A disk that takes the bytes and finds at fsync that it has no room for them."""

    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    yield


@pytest.mark.usefixtures("full_disk")
def test_no_room_at_fsync(old: Path) -> None:
    before = old.read_bytes()
    with pytest.raises(WriteError, match=r"No space left.*bytes free") as caught:
        atomic_torch_save({"new": 1}, old)
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="No space left"):
        atomic_json_dump({"new": 1}, old)
    assert old.read_bytes() == before
    assert names(old.parent) == [old.name]


SAVE_UNDER_A_LIMIT = textwrap.dedent(
    """
    import errno, os, resource, sys, torch
    from trainer_core import atomic_torch_save
    torch.manual_seed(0)
    state = {"a": torch.randn(200_000), "b": [torch.randn(3) for _ in range(50)]}
    path = sys.argv[1]
    before = open(path, "rb").read()
    atomic_torch_save(state, path + ".whole")
    size = os.path.getsize(path + ".whole")
    os.unlink(path + ".whole")
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    limits = [0, 1, 63, 64, 1000, 4096, 8192, 100_000, size // 2, size - 20_000, size - 1]
    for limit in limits:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            atomic_torch_save(state, path)
        except OSError as error:
            assert error.errno == errno.EFBIG, error
        else:
            raise AssertionError(limit)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]
        assert open(path, "rb").read() == before
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    atomic_torch_save(state, path)
    print(len(limits), os.path.getsize(path) == size)
    """
)


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")
def test_writing_that_fails_anywhere_ends_in_an_error_and_not_the_process(old: Path) -> None:
    command = [sys.executable, "-c", SAVE_UNDER_A_LIMIT, str(old)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "11 True\n"), done.stderr


KILL_AT_RANDOM = textwrap.dedent(
    """
    import os, random, signal, sys, time, torch
    from trainer_core import atomic_torch_save
    torch.set_num_threads(1)
    path = sys.argv[1]
    random.seed(1)
    states = [{"n": n, "w": torch.full((500_000,), float(n))} for n in range(2)]
    atomic_torch_save(states[0], path)
    leftovers = 0
    for _ in range(20):
        pid = os.fork()
        if pid == 0:
            while True:
                for state in states:
                    atomic_torch_save(state, path)
        time.sleep(random.uniform(0.002, 0.03))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        loaded = torch.load(path, weights_only=True)
        assert loaded["w"].unique().tolist() == [loaded["n"]]
        others = set(os.listdir(os.path.dirname(path))) - {os.path.basename(path)}
        leftovers += len(others)
        for name in others:
            assert name == f".{os.path.basename(path)}.tmp-{pid}", name
            os.unlink(os.path.join(os.path.dirname(path), name))
    print(leftovers > 0)
    """
)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kill_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILL_AT_RANDOM, str(tmp_path / "a.pt")]
    done = subprocess.run(command, capture_output=True, text=True)
    # At least one of twenty was killed while it was writing, or this would prove nothing.
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
