"""Which file is saved, chosen, verified, loaded, and deleted."""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
import subprocess
import sys
import textwrap
import threading
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_core import (
    CheckpointError,
    CheckpointManager,
    CheckpointWarning,
    PrecisionPlan,
    build_checkpoint,
    restore_rng_state,
)

FP32 = PrecisionPlan("fp32", autocast_enabled=False, use_scaler=False)


def state_at(step: int) -> dict[str, Any]:
    """A training checkpoint whose weights are its step, so that one tells which was loaded."""
    model = torch.nn.Linear(40, 40)
    torch.nn.init.constant_(model.weight, float(step))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return build_checkpoint(
        model=model.state_dict(),
        optimizer=optimizer.state_dict(),
        step=step,
        samples=2 * step,
        tokens=4 * step,
        precision=FP32,
    )


def saved(directory: Path, *steps: int, **options: Any) -> CheckpointManager:
    manager = CheckpointManager(directory, **{"keep_last": None, **options})
    for step in steps:
        manager.save(step, state_at(step))
    return manager


def step_of(state: dict[Any, Any] | None) -> int:
    assert state is not None
    assert state["model"]["weight"].unique().tolist() == [state["step"]]
    return int(state["step"])


def names(directory: Path) -> list[str]:
    """All that is there but what tells of the writer and of the steps that are kept."""
    return sorted(set(os.listdir(directory)) - {".writer.lock", "manifest.jsonl"})


def steps(directory: Path) -> list[int]:
    return sorted(int(name[5:-3]) for name in names(directory) if name.startswith("step_"))


def name_of(step: int) -> str:
    return f"step_{step:012d}.pt"


def flip_a_weight(path: Path) -> None:
    """One bit of one stored tensor; the archive stays readable in every other way."""
    with zipfile.ZipFile(path) as archive:
        storages = [info for info in archive.infolist() if "/data/" in info.filename]
        largest = max(storages, key=lambda info: info.file_size)
        content = archive.read(largest)
    data = bytearray(path.read_bytes())
    data[data.index(content) + len(content) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 6 // 10])


def in_a_process(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


# ------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("every", [0, -1])
def test_the_interval_is_positive_even_if_disabled(
    tmp_path: Path, every: int, enabled: bool
) -> None:
    with pytest.raises(ValueError, match="every_steps"):
        CheckpointManager(tmp_path, every_steps=every, enabled=enabled)


@pytest.mark.parametrize("value", [2.5, True, "3", [4], float("nan"), -1])
@pytest.mark.parametrize(
    "name", ["every_steps", "keep_last", "min_free", "save_every_seconds", "lock_patience"]
)
def test_a_number_that_is_none_is_refused_by_its_name(
    tmp_path: Path, name: str, value: Any
) -> None:
    if name in ("save_every_seconds", "lock_patience") and value == 2.5:
        value = None if name == "lock_patience" else "2.5"
    with pytest.raises((TypeError, ValueError), match=f"^{name} must be a ") as caught:
        CheckpointManager(tmp_path, **{name: value})
    assert str(caught.value).endswith(f", not {value!r}")


@pytest.mark.parametrize("step", [2.0, "2", True])
def test_a_step_that_is_no_number_is_refused_by_that_name(tmp_path: Path, step: Any) -> None:
    manager = CheckpointManager(tmp_path)
    for call in (manager.path_for, manager.point_to, lambda step: manager.save(step, {})):
        with pytest.raises((TypeError, ValueError), match="^step must be a whole number"):
            call(step)
    assert names(tmp_path) == []


@pytest.mark.parametrize("keep", [0, -1])
def test_nothing_keeps_less_than_one(tmp_path: Path, keep: int) -> None:
    with pytest.raises(ValueError, match="keep_last"):
        CheckpointManager(tmp_path, keep_last=keep)


def test_defaults_and_a_directory_that_waits_for_the_first_save(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "runs" / "a")
    assert (manager.every_steps, manager.keep_last, manager.enabled) == (500, 3, True)
    assert manager.latest_path() is None
    assert manager.latest_valid_path() is None
    assert manager.load_latest() is None
    assert manager.load_latest(fallback=True) is None
    assert manager.prune() == []
    assert not (tmp_path / "runs").exists()
    manager.save(1, state_at(1))
    assert step_of(manager.load_latest()) == 1


def test_should_save_on_positive_multiples() -> None:
    manager = CheckpointManager("x", every_steps=3)
    assert [step for step in range(-6, 10) if manager.should_save(step)] == [3, 6, 9]
    manager = CheckpointManager("x", every_steps=3, enabled=False)
    assert not any(manager.should_save(step) for step in range(-6, 10))


def test_path_for() -> None:
    manager = CheckpointManager("runs/a")
    assert manager.path_for(4) == Path("runs/a/step_000000000004.pt")
    assert manager.path_for(10**12).name == "step_1000000000000.pt"
    with pytest.raises(ValueError, match="negative"):
        manager.path_for(-1)


# -------------------------------------------------------------------------------------- saving


def test_the_layout_and_the_pointer(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, every_steps=2, keep_last=2)
    for step in (2, 4, 6):
        assert manager.save(step, state_at(step)) == tmp_path / name_of(step)
    assert names(tmp_path) == ["latest.json", name_of(4), name_of(6)]
    pointer = json.loads((tmp_path / "latest.json").read_text())
    assert (pointer["step"], pointer["file"]) == (6, name_of(6))
    manager.close()
    assert sorted(os.listdir(tmp_path)) == [
        *("latest.json", "manifest.jsonl", name_of(4), name_of(6))
    ]


def test_a_disabled_manager_saves_when_it_is_told_to(tmp_path: Path) -> None:
    saved(tmp_path, 3, enabled=False)
    assert steps(tmp_path) == [3]


def test_torch_alone_loads_what_was_saved(tmp_path: Path) -> None:
    saved(tmp_path, 4)
    program = """
        import sys, torch
        s = torch.load(sys.argv[1], weights_only=True)
        print(s["step"], s["samples"], s["model"]["weight"].sum().item(), sorted(s["rng"]))
    """
    done = in_a_process(program, tmp_path / name_of(4))
    assert done.stdout == "4 8 6400.0 ['numpy', 'python', 'torch']\n", done.stderr


def test_a_finished_save_has_fsynced_the_file_before_the_pointer_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(tmp_path, keep_last=None)
    manager.claim()
    events: list[tuple[str, ...]] = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        events.append(("fsync", name.split(".tmp-")[0].lstrip(".")))
        fsync(descriptor)

    def recorded_replace(source: Any, target: Any) -> None:
        events.append(("replace", os.path.basename(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    manager.save(4, state_at(4))
    assert events == [
        ("fsync", name_of(4)),
        ("replace", name_of(4)),
        ("fsync", tmp_path.name),
        ("fsync", "manifest.jsonl"),
        ("fsync", tmp_path.name),
        ("fsync", "latest.json"),
        ("replace", "latest.json"),
        ("fsync", tmp_path.name),
    ]


def test_saving_a_state_as_another_step_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    manager = saved(tmp_path, 4)
    with pytest.raises(CheckpointError, match="holds step 4, but is to be saved as 6"):
        manager.save(6, state_at(4))
    assert names(tmp_path) == ["latest.json", name_of(4)]


@pytest.mark.parametrize("inside", [6.0, "6", "8", None, True, [6], torch.tensor(6), 8])
def test_a_step_that_is_not_the_integer_saved_as_is_refused(tmp_path: Path, inside: Any) -> None:
    manager = saved(tmp_path, 4)
    with pytest.raises(CheckpointError, match=r"holds step .*, but is to be saved as 6"):
        manager.save(6, {**state_at(6), "step": inside})
    with pytest.raises(CheckpointError, match="to be saved as 1"):
        manager.save(1, {"step": True})
    assert names(tmp_path) == ["latest.json", name_of(4)]
    assert manager.save(6, {"weights": 1}).exists()  # without a step it is nobody's


def test_a_state_that_cannot_be_pickled_leaves_everything_as_it_was(tmp_path: Path) -> None:
    manager = saved(tmp_path, 2, 4, keep_last=2)
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    for step in (4, 6):
        with pytest.raises((AttributeError, TypeError)):
            manager.save(step, {**state_at(step), "bad": lambda: 1})
        manager.prune()
        assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == before


def test_a_full_disk_while_the_pointer_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = saved(tmp_path, 2, 4)
    fsync = os.fsync

    def full_at_the_pointer(descriptor: int) -> None:
        if "latest.json" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full_at_the_pointer)
    with pytest.raises(OSError, match="No space left on device"):
        manager.save(6, state_at(6))
    monkeypatch.undo()
    assert names(tmp_path) == ["latest.json", name_of(2), name_of(4), name_of(6)]
    assert step_of(manager.load_latest()) == 4
    assert manager.latest_valid_path() == tmp_path / name_of(6)


KILLED = """
    import os, signal, sys
    from tests.trainer_core.test_checkpoint import CheckpointManager, state_at

    class Dies(CheckpointManager):
        def point_to(self, step):
            os.kill(os.getpid(), signal.SIGKILL)

    CheckpointManager(sys.argv[1], run_id="a").save(2, state_at(2))
    Dies(sys.argv[1], run_id="a").save(4, state_at(4))
"""


def test_a_kill_between_file_and_pointer_leaves_the_pointer_behind(
    tmp_path: Path, repository: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=repository)
    assert done.returncode == -9, done.stderr
    assert names(tmp_path) == ["latest.json", name_of(2), name_of(4)]
    manager = CheckpointManager(tmp_path)
    assert manager.latest_path() == tmp_path / name_of(2)  # the pointer is trusted
    assert manager.latest_valid_path() == tmp_path / name_of(4)
    with caplog.at_level(logging.WARNING):
        assert step_of(manager.load_latest()) == 2
    assert "there is a file for step 4" in caplog.text
    assert "ckpttool fix-pointer" in caplog.text


def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_leftovers_of_dead_writers_are_swept_and_others_are_not(tmp_path: Path) -> None:
    dead, alive = dead_pid(), os.getppid()
    gone = [
        f".{name_of(2)}.tmp-{dead}",
        f".{name_of(4)}.tmp-{dead}-1",
        f".latest.json.tmp-{dead}",
        f".{name_of(2)}.tmp-{os.getpid()}",  # an earlier process of the same number
    ]
    stay = [
        f".{name_of(6)}.tmp-{dead}",  # a later step: it may be all that is left of it
        f".{name_of(2)}.tmp-{alive}",
        f".notes.txt.tmp-{dead}",
        f"{name_of(2)}.tmp-{dead}",
        f".{name_of(2)}.tmp-x",
    ]
    for name in gone + stay:
        (tmp_path / name).write_text("x")
    (tmp_path / f".{name_of(3)}.tmp-{dead}").mkdir()
    os.symlink("elsewhere", tmp_path / f".{name_of(1)}.tmp-{dead}")
    stay += [f".{name_of(3)}.tmp-{dead}", f".{name_of(1)}.tmp-{dead}"]
    saved(tmp_path, 4)
    assert names(tmp_path) == sorted([*stay, "latest.json", name_of(4)])


def test_a_failed_save_sweeps_nothing(tmp_path: Path) -> None:
    leftover = tmp_path / f".{name_of(2)}.tmp-{dead_pid()}"
    leftover.write_text("x")
    with pytest.raises(TypeError):
        CheckpointManager(tmp_path).save(4, {"step": 4, "bad": (n for n in "x")})
    assert leftover.exists()


# ------------------------------------------------------------------------------------ choosing


def test_without_a_pointer_the_highest_number_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = saved(tmp_path, 2, 10, 9)
    (tmp_path / "latest.json").unlink()
    (tmp_path / "step_020000.pt").write_bytes(b"x")
    (tmp_path / "step_0100000.pt").write_bytes(b"x")
    assert manager.latest_path() == tmp_path / "step_0100000.pt"
    assert not caplog.records  # nothing is wrong with having none


def test_times_never_matter(tmp_path: Path) -> None:
    manager = saved(tmp_path, 2, 4, 6)
    (tmp_path / "latest.json").unlink()
    for position, step in enumerate((6, 4, 2)):
        os.utime(tmp_path / name_of(step), (position, position))
    assert manager.latest_path() == tmp_path / name_of(6)
    manager.keep_last = 1
    manager.prune()
    assert steps(tmp_path) == [6]


STRANGE_NAMES = (
    *("backup", "step_000000000099-hf.pt", ".DS_Store", "._step_000000000099.pt", "Thumbs.db"),
    *("step_.pt", "step_99.pt.bak", "step_000000000099.PT", "xstep_99.pt", "step_\uff19\uff19.pt"),
    *("step_-99.pt", "step_9 9.pt", "step_99.pt\n"),
)


def test_strange_names_are_neither_chosen_nor_deleted(tmp_path: Path) -> None:
    manager = saved(tmp_path, 2, 4)
    (tmp_path / "latest.json").unlink()
    for name in STRANGE_NAMES:
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "step_000000000099.pt").mkdir()
    os.symlink(tmp_path / name_of(2), tmp_path / "step_000000000098.pt")
    manager.keep_last = 1
    assert manager.latest_path() == tmp_path / name_of(4)
    assert manager.latest_valid_path() == tmp_path / name_of(4)
    assert manager.prune() == [tmp_path / name_of(2)]
    left = [*STRANGE_NAMES, "step_000000000099.pt", "step_000000000098.pt", name_of(4)]
    assert names(tmp_path) == sorted(left)


def test_of_two_names_for_one_step_the_usual_one_is_chosen(tmp_path: Path) -> None:
    manager = saved(tmp_path, 4)
    (tmp_path / "latest.json").unlink()
    for name in ("step_4.pt", "step_0000000000004.pt"):
        shutil.copy(tmp_path / name_of(4), tmp_path / name)
    assert manager.latest_path() == tmp_path / name_of(4)


MALFORMED = [
    *(b"", b" \n", b"null", b"4", b"[]", b'"x"', b"{", b'{"step": 4, "file": "step_0000000'),
    *(b"{}", b'{"step": 4}', b'{"file": null}', b'{"file": 4}', b"\xff\xfe", b"\0" * 60),
    *(b'{"file": ""}', b'{"file": "."}', b'{"file": "step_000000000099.pt"}'),
    *(b'{"file": "latest.json"}', b'{"file": "folder"}', b"[" * 100_000),
]


@pytest.mark.parametrize("content", MALFORMED)
def test_a_pointer_that_is_none_is_said_and_not_followed(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    manager = saved(tmp_path, 2, 4)
    (tmp_path / "folder").mkdir()
    (tmp_path / "latest.json").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert manager.latest_path() == tmp_path / name_of(4)
    assert "latest.json is not followed" in caplog.text
    assert step_of(manager.load_latest()) == 4
    manager.save(6, state_at(6))
    assert json.loads((tmp_path / "latest.json").read_bytes())["step"] == 6


def test_a_directory_for_a_pointer_is_not_followed(tmp_path: Path) -> None:
    manager = saved(tmp_path, 4)
    (tmp_path / "latest.json").unlink()
    (tmp_path / "latest.json").mkdir()
    assert step_of(manager.load_latest()) == 4


def escapes(root: Path, outside: Path) -> list[str]:
    os.symlink(outside, root / "step_000000000050.pt")
    (root / "step_000000000051.pt").mkdir()
    (root / "sub").mkdir()
    shutil.copy(outside, root / "sub" / name_of(9))
    return [
        str(outside),
        f"../{outside.parent.name}/{outside.name}",
        f"./{name_of(2)}",
        f"sub/{name_of(9)}",
        "step_000000000050.pt",
        "step_000000000051.pt",
    ]


def test_a_pointer_that_names_anything_but_a_plain_file_here_is_not_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    manager = saved(root, 2, 4)
    saved(outside, 9)
    for file in escapes(root, outside / name_of(9)):
        caplog.clear()
        (root / "latest.json").write_text(json.dumps({"step": 9, "file": file}))
        assert manager.latest_path() == root / name_of(4), file
        assert "is not followed" in caplog.text
        assert step_of(manager.load_latest()) == 4
    manager.keep_last = 1
    manager.prune()
    assert (outside / name_of(9)).exists()


def test_a_directory_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    manager = CheckpointManager(tmp_path / "file")
    for ask in (manager.latest_path, manager.latest_valid_path, manager.load_latest, manager.prune):
        with pytest.raises(CheckpointError, match="cannot be read"):
            ask()


# ------------------------------------------------------------------------------------- loading


DAMAGES: dict[str, Callable[[Path], object]] = {
    "one bit": flip_a_weight,
    "cut short": cut,
    "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(5000)),
    "zeros at the end": lambda path: path.write_bytes(path.read_bytes()[:-2000] + bytes(2000)),
    "a web page": lambda path: path.write_text("<!doctype html><title>404</title>"),
    "a pointer to large storage": lambda path: path.write_text(
        "version https://git-lfs.github.com/spec/v1\n" + f"oid sha256:{'0' * 64}\nsize 5\n"
    ),
    "another step": lambda path: torch.save(state_at(5), path),
    "no dictionary": lambda path: torch.save([1, 2], path),
    "a bare tensor": lambda path: torch.save(torch.ones(2), path),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_newest_file_is_an_error_that_names_the_way_out(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    manager = saved(tmp_path, 2, 4, 6)
    damage(tmp_path / name_of(6))
    assert manager.latest_path() == tmp_path / name_of(6)
    assert manager.latest_valid_path() == tmp_path / name_of(4)
    with pytest.raises(CheckpointError) as caught:
        manager.load_latest()
    words = str(caught.value)
    assert name_of(6) in words
    assert f"newest valid step is 4 ({name_of(4)})" in words
    assert f"`ckpttool fix-pointer {tmp_path}`" in words
    with pytest.warns(CheckpointWarning, match=rf"{name_of(6)}.*{name_of(4)}"):
        assert step_of(manager.load_latest(fallback=True)) == 4


def test_a_few_bytes_behind_the_archive_do_no_harm(tmp_path: Path) -> None:
    manager = saved(tmp_path, 2, 4)
    path = tmp_path / name_of(4)
    path.write_bytes(path.read_bytes() + b"appended" * 100)
    assert step_of(manager.load_latest()) == 4


def test_a_file_that_only_torch_refuses_is_passed_over_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever verification thinks: what cannot be loaded is no way to go on."""
    manager = saved(tmp_path, 2, 4, 6)
    load = torch.load

    def refuse(path: str, **options: Any) -> Any:
        if path.endswith(name_of(6)):
            raise RuntimeError("\x1b[1mPytorchStreamReader failed\nfor a reason")
        return load(path, **options)

    monkeypatch.setattr(torch, "load", refuse)
    with pytest.raises(CheckpointError, match=r"torch cannot load it.*newest valid step is 4"):
        manager.load_latest()
    with pytest.warns(CheckpointWarning, match=name_of(4)):
        assert step_of(manager.load_latest(fallback=True)) == 4


def test_one_flipped_bit_is_what_torch_does_not_see(tmp_path: Path) -> None:
    saved(tmp_path, 4)
    flip_a_weight(tmp_path / name_of(4))
    weight = torch.load(tmp_path / name_of(4), weights_only=True)["model"]["weight"]
    assert (weight != 4).sum() == 1


def test_the_command_in_the_error_mends_the_directory(tmp_path: Path) -> None:
    directory = tmp_path / "a run's [1] каталог"
    manager = saved(directory, 2, 4)
    manager.close()
    cut(directory / name_of(4))
    with pytest.raises(CheckpointError) as caught:
        manager.load_latest()
    command = str(caught.value).split("`")[1]
    assert command.startswith("ckpttool fix-pointer ")
    shell = f'ckpttool() {{ "{sys.executable}" -m ckpttool "$@"; }}; {command}'
    done = subprocess.run(["/bin/sh", "-c", shell], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert step_of(manager.load_latest()) == 2


def test_the_command_names_the_step_where_a_newer_one_could_not_be_checked(tmp_path: Path) -> None:
    """A pickle that is nested beyond every limit is neither good nor proven bad."""
    manager = saved(tmp_path, 2, 4, 6)
    manager.close()
    with zipfile.ZipFile(tmp_path / name_of(6), "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02\x8b\xd0\x07\0\0" + bytes(1999) + b"\x01.")
        archive.writestr("archive/version", "3\n")
    with pytest.raises(CheckpointError) as caught:
        manager.load_latest()
    command = str(caught.value).split("`")[1]
    assert command == f"ckpttool fix-pointer {tmp_path} --step 4"
    arguments = [sys.executable, "-m", *command.split()]
    subprocess.run(arguments, check=True, capture_output=True)
    assert step_of(manager.load_latest()) == 4


@pytest.mark.parametrize("spelling", [".", "", "./.", "../{0}"])
def test_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    monkeypatch.chdir(tmp_path)
    manager = saved(Path(spelling.format(tmp_path.name)), 2, 4)
    assert step_of(manager.load_latest()) == 4
    cut(tmp_path / name_of(4))
    with pytest.raises(CheckpointError, match="newest valid step is 2"):
        manager.load_latest()
    with pytest.warns(CheckpointWarning):
        assert step_of(manager.load_latest(fallback=True)) == 2


def test_a_temporary_that_another_thread_is_writing_is_left_alone(tmp_path: Path) -> None:
    """One process, one directory, two managers: the slower save of an earlier step survives."""
    reached, go_on = threading.Event(), threading.Event()

    class Slow:
        def __reduce__(self) -> Any:
            reached.set()
            assert go_on.wait(60)
            return OrderedDict, ()

    slow = threading.Thread(
        target=CheckpointManager(tmp_path, keep_last=None).save, args=(2, {"step": 2, "x": Slow()})
    )
    slow.start()
    assert reached.wait(60)
    saved(tmp_path, 4)
    go_on.set()
    slow.join()
    assert names(tmp_path) == ["latest.json", name_of(2), name_of(4)]
    assert torch.load(tmp_path / name_of(2), weights_only=True) == {"step": 2, "x": {}}


def test_a_sound_newest_file_needs_no_fallback(tmp_path: Path) -> None:
    manager = saved(tmp_path, 2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert step_of(manager.load_latest(fallback=True)) == 4


def test_no_valid_step_at_all(tmp_path: Path) -> None:
    manager = saved(tmp_path, 2, 4)
    for step in (2, 4):
        cut(tmp_path / name_of(step))
    assert manager.latest_valid_path() is None
    for fallback in (False, True):
        with pytest.raises(CheckpointError, match=r"No valid step is left.*ckpttool verify"):
            manager.load_latest(fallback=fallback)


def test_the_search_stops_at_the_first_valid_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = saved(tmp_path, 2, 4, 6)
    for step in (2, 6):
        cut(tmp_path / name_of(step))
    with caplog.at_level(logging.WARNING):
        assert manager.latest_valid_path() == tmp_path / name_of(4)
    assert [name_of(step) in caplog.text for step in (2, 4, 6)] == [False, False, True]


def test_a_pointer_whose_step_is_not_its_files(tmp_path: Path) -> None:
    manager = saved(tmp_path, 2, 4)
    (tmp_path / "latest.json").write_text(json.dumps({"step": 999, "file": name_of(2)}))
    assert manager.latest_path() == tmp_path / name_of(2)
    with pytest.raises(CheckpointError, match=r"says step 999.*newest valid step is 4"):
        manager.load_latest()
    with pytest.warns(CheckpointWarning, match="says step 999"):
        assert step_of(manager.load_latest(fallback=True)) == 4
    (tmp_path / "latest.json").write_text(json.dumps({"step": 999, "file": name_of(4)}))
    with pytest.warns(CheckpointWarning, match="says step 999"):
        assert step_of(manager.load_latest(fallback=True)) == 4


def test_a_file_renamed_to_another_step(tmp_path: Path) -> None:
    manager = saved(tmp_path, 2, 4)
    (tmp_path / name_of(4)).rename(tmp_path / name_of(9))
    (tmp_path / "latest.json").unlink()
    with pytest.raises(CheckpointError, match=r"step_000000000009\.pt: .*newest valid step is 2"):
        manager.load_latest()


def test_tensors_come_to_the_cpu_and_nothing_is_lost(tmp_path: Path) -> None:
    manager = saved(tmp_path, 4)
    loaded = manager.load_latest()
    assert loaded is not None
    assert_same(loaded, torch.load(tmp_path / name_of(4), weights_only=False))
    assert restore_rng_state(loaded["rng"]) == {}


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    elif isinstance(one, torch.Tensor):
        assert one.device.type == "cpu"
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif hasattr(one, "dtype"):
        assert one.dtype == other.dtype
        assert one.tolist() == other.tolist()
    else:
        assert one == other


@pytest.mark.parametrize("run", ["plain", "master", "worker", "pending"])
def test_checkpoints_of_the_original_system_load_safely(
    tmp_path: Path, corpus: Path, run: str
) -> None:
    """They hold numpy's state as an array, which torch alone refuses."""
    shutil.copytree(corpus / "seed-runs" / run, tmp_path / run)
    manager = CheckpointManager(tmp_path / run, keep_last=None)
    path = manager.latest_path()
    assert path is not None
    assert path == manager.latest_valid_path()
    loaded = manager.load_latest()
    assert_same(loaded, torch.load(path, weights_only=False))
    assert loaded is not None
    assert restore_rng_state(loaded["rng"]) == {}


def test_a_dictionary_without_a_step_is_given_back(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(4, {"weights": torch.ones(3)})
    loaded = manager.load_latest()
    assert loaded is not None
    assert loaded["weights"].tolist() == [1, 1, 1]
    assert manager.latest_valid_path() is None  # but it is no training checkpoint


def test_the_legacy_stream_loads(tmp_path: Path) -> None:
    path = tmp_path / name_of(4)
    torch.save(state_at(4), path, _use_new_zipfile_serialization=False)
    assert step_of(CheckpointManager(tmp_path).load_latest()) == 4


# ------------------------------------------------------------------------------------- pruning


@pytest.mark.parametrize("junk", [True, False], ids=["contents do not matter", "real files"])
def test_the_newest_stay_by_number(tmp_path: Path, junk: bool) -> None:
    wanted = range(9000, 10001, 100)
    if junk:
        for step in wanted:
            (tmp_path / name_of(step)).write_bytes(b"x")
    else:
        saved(tmp_path, *wanted)
        (tmp_path / "latest.json").unlink()
    deleted = CheckpointManager(tmp_path, keep_last=10).prune()
    assert deleted == [tmp_path / name_of(9000)]
    assert steps(tmp_path) == list(wanted)[1:]


def test_numbers_without_padding(tmp_path: Path) -> None:
    for step in range(13):
        torch.save(state_at(step), tmp_path / f"step_{step}.pt")
    deleted = CheckpointManager(tmp_path, keep_last=3).prune()
    assert deleted == [tmp_path / f"step_{step}.pt" for step in range(10)]  # the oldest first
    assert steps(tmp_path) == [10, 11, 12]


@pytest.mark.parametrize("form", ["{0}/", "{0}/../{1}", "{0}/.", "{2}"])
def test_however_the_directory_is_spelled(tmp_path: Path, form: str) -> None:
    root = tmp_path / "out"
    root.mkdir()
    os.symlink(root, tmp_path / "link")
    manager = CheckpointManager(form.format(root, root.name, tmp_path / "link"), keep_last=1)
    for step in (1, 2, 3):
        manager.save(step, state_at(step))
    assert names(root) == ["latest.json", name_of(3)]
    assert step_of(manager.load_latest()) == 3


def test_none_keeps_all(tmp_path: Path) -> None:
    manager = saved(tmp_path, *range(1, 8), keep_last=None)
    assert manager.prune() == []
    assert steps(tmp_path) == list(range(1, 8))


def test_the_pointers_target_stays_however_old(tmp_path: Path) -> None:
    manager = saved(tmp_path, 2, 4, 6, 8)
    manager.point_to(2)
    manager.keep_last = 1
    assert manager.prune() == [tmp_path / name_of(4), tmp_path / name_of(6)]
    assert steps(tmp_path) == [2, 8]


def test_going_on_from_an_older_step_never_deletes_what_was_just_saved(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4, 6, 8)
    manager = CheckpointManager(tmp_path, keep_last=2)
    manager.load_latest()
    manager.save(3, state_at(3))
    assert steps(tmp_path) == [3, 6, 8]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_damaged_files_do_not_push_out_good_ones(tmp_path: Path, keep: int) -> None:
    saved(tmp_path, 2, 4, 6, 8, 10)
    for step in (6, 10):
        cut(tmp_path / name_of(step))
    (tmp_path / "latest.json").unlink()
    CheckpointManager(tmp_path, keep_last=keep).prune()
    assert steps(tmp_path) == {1: [8, 10], 2: [4, 6, 8, 10], 3: [2, 4, 6, 8, 10]}[keep]


def test_a_failed_save_costs_no_good_file(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4, 6)
    manager = CheckpointManager(tmp_path, keep_last=3)  # a new process: it knows none of them
    manager.load_latest()
    with pytest.raises(TypeError):
        manager.save(8, {"step": 8, "bad": (n for n in "x")})
    assert manager.prune() == []
    (tmp_path / name_of(8)).write_bytes(b"what another tool left of a save that failed")
    assert manager.prune() == []
    assert steps(tmp_path) == [2, 4, 6, 8]
    manager.save(10, state_at(10))
    assert steps(tmp_path) == [4, 6, 8, 10]


def test_a_file_that_changed_after_it_was_looked_at_is_looked_at_again(tmp_path: Path) -> None:
    manager = saved(tmp_path, 2, 4, 6, keep_last=3)
    cut(tmp_path / name_of(6))
    manager.keep_last = 1
    assert manager.prune() == [tmp_path / name_of(2)]
    assert steps(tmp_path) == [4, 6]


def test_a_pointer_elsewhere_deletes_nothing_there(tmp_path: Path) -> None:
    old = saved(tmp_path / "old", 1, 2, 3).directory
    new = saved(tmp_path / "new", 1, 2, 3)
    (new.directory / "latest.json").write_text(
        json.dumps({"step": 1, "file": str(old / name_of(1))})
    )
    new.keep_last = 1
    new.prune()
    assert steps(tmp_path / "new") == [3]
    assert steps(tmp_path / "old") == [1, 2, 3]


def test_two_processes_prune_at_once(tmp_path: Path) -> None:
    for step in range(1, 301):
        (tmp_path / name_of(step)).write_bytes(b"x")
    program = """
        import sys
        from trainer_core import CheckpointManager
        sys.stdin.read(1)
        CheckpointManager(sys.argv[1], keep_last=2).prune()
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) for _ in "ab"
    ]
    for child in children:
        assert child.stdin is not None
        child.stdin.write(b"x")
        child.stdin.flush()
    for child in children:
        _, stderr = child.communicate()
        assert (child.returncode, stderr) == (0, b"")
    assert steps(tmp_path) == [299, 300]


def test_what_cannot_be_deleted_is_raised_by_prune_and_logged_by_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = saved(tmp_path, 1, 2, 3, 4)
    unlink = Path.unlink

    def stubborn(path: Path, missing_ok: bool = False) -> None:
        if path.name == name_of(1):
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", stubborn)
    manager.keep_last = 2
    with pytest.raises(PermissionError):
        manager.prune()
    assert steps(tmp_path) == [1, 3, 4]  # the others went nevertheless
    with caplog.at_level(logging.WARNING):
        assert manager.save(5, state_at(5)) == tmp_path / name_of(5)
    assert "could not tidy up" in caplog.text
    assert steps(tmp_path) == [1, 4, 5]
    assert step_of(manager.load_latest()) == 5


# ------------------------------------------------------------------------------------- copying


def test_copies_what_latest_path_selects_bit_for_bit(tmp_path: Path) -> None:
    manager = saved(tmp_path / "run", 2, 4)
    source = tmp_path / "run" / name_of(4)
    source.chmod(0o640)
    os.utime(source, ns=(10**18, 10**18 + 5))
    (tmp_path / "folder").mkdir()
    for target in ("new/deep/copy.pt", "copy.pt"):
        assert manager.copy_to(tmp_path / target) == tmp_path / target
    assert manager.copy_to(str(tmp_path / "folder")) == tmp_path / "folder" / name_of(4)
    for target in ("new/deep/copy.pt", "copy.pt", f"folder/{name_of(4)}"):
        copy = tmp_path / target
        assert copy.read_bytes() == source.read_bytes()
        assert stat.S_IMODE(copy.stat().st_mode) == 0o640
        assert copy.stat().st_mtime_ns == 10**18 + 5
    assert names(tmp_path / "folder") == [name_of(4)]


def test_a_copy_replaces_what_is_there(tmp_path: Path) -> None:
    manager = saved(tmp_path / "run", 2)
    (tmp_path / "copy.pt").write_text("old")
    manager.copy_to(tmp_path / "copy.pt")
    assert (tmp_path / "copy.pt").read_bytes() == (tmp_path / "run" / name_of(2)).read_bytes()


def test_nothing_to_copy(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        CheckpointManager(tmp_path).copy_to(tmp_path / "x.pt")
    assert names(tmp_path) == []
