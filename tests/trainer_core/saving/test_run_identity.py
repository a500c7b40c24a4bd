"""Whose checkpoints a directory holds, and that two runs do not mix by mistake."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer_core.test_checkpoint import name_of, state_at, steps
from trainer_core import CheckpointError, CheckpointManager
from trainer_core.saving.run_identity import new_run_id


def pointer(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "latest.json").read_text())
    return content


def inside(directory: Path, step: int) -> tuple[Any, Any]:
    state = torch.load(directory / name_of(step), weights_only=True)
    return state["run_id"], state["parent_step"]


def run_of(directory: Path, *steps: int, **options: Any) -> CheckpointManager:
    manager = CheckpointManager(directory, **{"keep_last": None, **options})
    for step in steps:
        manager.save(step, state_at(step))
    return manager


def test_ids_tell_the_time_and_are_all_different() -> None:
    ids = {new_run_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{8}", one) for one in ids)


def test_a_seed_does_not_make_two_runs_the_same() -> None:
    ids = []
    for _ in range(2):
        __import__("random").seed(1)
        torch.manual_seed(1)
        ids.append(CheckpointManager("x").run_id)
    assert ids[0] != ids[1]


def test_a_trainer_that_was_overtaken_writes_over_nothing(tmp_path: Path) -> None:
    """It stood still, say in a notebook, while another one resumed and trained on."""
    stale = run_of(tmp_path, 2, 4)
    stale.close()
    other = CheckpointManager(tmp_path, keep_last=None)
    assert other.load_latest() is not None
    for step in (6, 8):
        other.save(step, state_at(step))
    other.close()
    before = (tmp_path / name_of(6)).read_bytes()
    with pytest.raises(CheckpointError, match="step 8 was saved there since .* stands at step 4"):
        stale.save(6, state_at(6))
    assert (tmp_path / name_of(6)).read_bytes() == before
    assert pointer(tmp_path)["step"] == 8
    assert stale.load_latest() is not None  # and now it knows
    stale.save(10, state_at(10))
    assert pointer(tmp_path)["step"] == 10
    stale.close()


def test_a_state_that_was_loaded_before_others_saved_is_overtaken(tmp_path: Path) -> None:
    run_of(tmp_path, 2).close()
    late = CheckpointManager(tmp_path, keep_last=None)
    state = late.load_latest()
    assert state is not None
    other = CheckpointManager(tmp_path, keep_last=None)
    other.load_latest()
    other.save(4, state_at(4))
    other.close()
    late.resumed_from(state)  # as Trainer.resume does with it
    with pytest.raises(CheckpointError, match="step 4 was saved there since"):
        late.claim()


def test_an_older_step_that_is_chosen_on_purpose_may_be_gone_on_from(tmp_path: Path) -> None:
    run_of(tmp_path, 2, 4, 6).close()
    manager = CheckpointManager(tmp_path, keep_last=None)
    manager.resumed_from(torch.load(tmp_path / name_of(2), weights_only=True))
    manager.save(4, state_at(4))
    manager.close()
    manager.save(5, state_at(5))  # it claims again, and nobody was here meanwhile
    assert pointer(tmp_path)["step"] == 5
    manager.close()


def test_each_checkpoint_says_its_run_and_the_step_before(tmp_path: Path) -> None:
    manager = run_of(tmp_path, 2, 4, 6)
    run = manager.run_id
    assert [inside(tmp_path, step) for step in (2, 4, 6)] == [(run, None), (run, 2), (run, 4)]
    assert pointer(tmp_path)["run_id"] == run


def test_the_state_that_was_given_is_not_changed(tmp_path: Path) -> None:
    state = state_at(2)
    keys = list(state)
    CheckpointManager(tmp_path).save(2, state)
    assert list(state) == keys


def test_what_is_no_training_checkpoint_is_saved_as_it_is(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(4, {"step": 4, "weights": 1})
    assert torch.load(tmp_path / name_of(4), weights_only=True) == {"step": 4, "weights": 1}
    assert pointer(tmp_path)["run_id"] == manager.run_id


def test_a_new_run_in_a_used_directory_is_refused_before_it_writes_or_deletes(
    tmp_path: Path,
) -> None:
    old = run_of(tmp_path, 20, 40, 60)
    new = CheckpointManager(tmp_path, keep_last=1)
    before = sorted(os.listdir(tmp_path))
    for attempt in (lambda: new.save(2, state_at(2)), new.claim):
        with pytest.raises(CheckpointError) as caught:
            attempt()
        words = str(caught.value)
        assert old.run_id in words and new.run_id in words
        assert "step 60" in words and "load_latest" in words
        assert f"run_id={old.run_id!r}" in words
    assert sorted(os.listdir(tmp_path)) == before
    assert pointer(tmp_path)["step"] == 60


def test_so_is_one_that_started_at_the_same_time(tmp_path: Path) -> None:
    """In one process, which holds the lock for both: the first to save wins."""
    one, other = CheckpointManager(tmp_path), CheckpointManager(tmp_path)
    one.claim()
    other.claim()
    one.save(2, state_at(2))
    with pytest.raises(CheckpointError, match=one.run_id):
        other.save(4, state_at(4))
    assert steps(tmp_path) == [2]


def test_going_on_from_what_was_loaded_is_the_same_run(tmp_path: Path) -> None:
    old = run_of(tmp_path, 2, 4)
    new = CheckpointManager(tmp_path, keep_last=2)
    assert new.run_id != old.run_id
    new.load_latest()
    new.save(6, state_at(6))
    assert new.run_id == old.run_id
    assert inside(tmp_path, 6) == (old.run_id, 4)
    assert steps(tmp_path) == [4, 6]  # and what it deletes is its own


def test_so_is_going_on_from_what_somebody_else_loaded(tmp_path: Path) -> None:
    old = run_of(tmp_path, 2, 4)
    new = CheckpointManager(tmp_path)
    new.resumed_from(torch.load(tmp_path / name_of(2), weights_only=True))
    new.save(3, state_at(3))
    assert inside(tmp_path, 3) == (old.run_id, 2)  # a branch: its parent tells


def test_an_id_that_is_asked_for_writes_on(tmp_path: Path) -> None:
    run_of(tmp_path, 2, run_id="job-17")
    run_of(tmp_path, 4, run_id="job-17")
    assert inside(tmp_path, 4) == ("job-17", None)
    with pytest.raises(CheckpointError, match="job-17"):
        run_of(tmp_path, 6, run_id="job-18")


def test_resuming_a_run_elsewhere_is_a_new_run_there(tmp_path: Path) -> None:
    old = run_of(tmp_path / "a", 2)
    state = old.load_latest()
    assert state is not None
    new = CheckpointManager(tmp_path / "b")
    new.resumed_from(state)
    new.save(4, state_at(4))
    assert new.run_id != old.run_id
    assert inside(tmp_path / "b", 4) == (new.run_id, 2)


@pytest.mark.parametrize("lost", ["the pointer", "the pointer's id"])
def test_without_the_pointer_the_newest_file_tells_whose_it_is(tmp_path: Path, lost: str) -> None:
    old = run_of(tmp_path, 2, 4)
    (tmp_path / "latest.json").unlink()
    if lost == "the pointer's id":
        seed = {"step": 2, "file": name_of(2)}
        (tmp_path / "latest.json").write_text(json.dumps(seed))
    with pytest.raises(CheckpointError, match=old.run_id):
        CheckpointManager(tmp_path).save(6, state_at(6))


def test_checkpoints_without_an_id_belong_to_whoever_goes_on(tmp_path: Path) -> None:
    """As the training cores before this one wrote them."""
    torch.save(state_at(2), tmp_path / name_of(2))
    (tmp_path / "latest.json").write_text(json.dumps({"step": 2, "file": name_of(2)}))
    manager = CheckpointManager(tmp_path, keep_last=1)
    manager.load_latest()
    manager.save(4, state_at(4))
    assert inside(tmp_path, 4) == (manager.run_id, 2)
    assert steps(tmp_path) == [4]


def test_files_of_another_run_are_never_pruned(tmp_path: Path) -> None:
    old = run_of(tmp_path, 20, 40, run_id="old")
    new = CheckpointManager(tmp_path, keep_last=1, run_id="new")
    (tmp_path / "latest.json").unlink()  # say, by hand, together with the newest file
    (tmp_path / name_of(40)).unlink()
    torch.save(state_at(30), tmp_path / name_of(30))
    new.save(31, state_at(31))
    new.save(32, state_at(32))
    assert old.run_id not in (new.run_id, None)
    assert steps(tmp_path) == [20, 32]


def test_a_damaged_pointer_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / "latest.json").write_text('{"run_id": 7, "step": 1, "file": "x"}')
    run_of(tmp_path, 2)
    assert steps(tmp_path) == [2]


@pytest.mark.parametrize("bad", ["", 7, b"x"])
def test_an_id_is_text(bad: Any) -> None:
    with pytest.raises(ValueError, match="run_id"):
        CheckpointManager("x", run_id=bad)


# --------------------------------------------------------------------------------- one writer


HOLDER = textwrap.dedent(
    """
    import sys
    from tests.trainer_core.test_checkpoint import CheckpointManager, state_at
    manager = CheckpointManager(sys.argv[1], run_id="one")
    manager.save(2, state_at(2))
    print("held", flush=True)
    sys.stdin.read(1)
    if "die" in sys.argv:
        import os
        os.kill(os.getpid(), 9)
    """
)


def holder(directory: Path, repository: Path, *more: str) -> subprocess.Popen[str]:
    """Another process that holds the directory until it is given a character."""
    command = [sys.executable, "-c", HOLDER, str(directory), *more]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=repository)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_and_told_who_writes(tmp_path: Path, repository: Path) -> None:
    process = holder(tmp_path, repository)
    for attempt in (
        lambda: CheckpointManager(tmp_path, run_id="one").save(4, state_at(4)),
        lambda: CheckpointManager(tmp_path, run_id="one", on_error="warn").claim(),
    ):
        with pytest.raises(CheckpointError, match=rf"pid {process.pid} on .*trainer_core"):
            attempt()
    assert steps(tmp_path) == [2]
    process.communicate("x")
    CheckpointManager(tmp_path, run_id="one").save(4, state_at(4))  # it ended, and gave it back
    assert steps(tmp_path) == [2, 4]


def test_a_dead_holders_lock_is_taken_over_and_said(
    tmp_path: Path, repository: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = holder(tmp_path, repository, "die")
    process.communicate("x")
    assert (tmp_path / ".writer.lock").exists()
    CheckpointManager(tmp_path, run_id="one").save(4, state_at(4))
    assert "took over the lock of a writer that is gone" in caplog.text
    assert f"pid {process.pid}" in caplog.text


def test_the_lock_says_who_we_are_and_goes_with_close(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(2, state_at(2))
        lock = json.loads((tmp_path / ".writer.lock").read_text())
        assert (lock["pid"], lock["program"]) == (os.getpid(), "trainer_core")
        assert lock["run_id"] == manager.run_id
    assert not (tmp_path / ".writer.lock").exists()
    manager.save(4, state_at(4))  # closed is not dead
    assert (tmp_path / ".writer.lock").exists()
    manager.close()
    manager.close()
    assert not (tmp_path / ".writer.lock").exists()


def test_a_manager_that_is_dropped_gives_the_lock_back(tmp_path: Path) -> None:
    manager = run_of(tmp_path, 2)
    del manager
    __import__("gc").collect()
    assert not (tmp_path / ".writer.lock").exists()


def test_the_managers_of_one_process_share_it(tmp_path: Path) -> None:
    one, two = (CheckpointManager(tmp_path, run_id="a") for _ in range(2))
    one.claim()
    two.claim()
    one.close()
    assert (tmp_path / ".writer.lock").exists()
    two.close()
    assert not (tmp_path / ".writer.lock").exists()


def test_a_forked_child_holds_nothing(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import os, sys
        from trainer_core import CheckpointManager
        manager = CheckpointManager(sys.argv[1])
        manager.claim()
        if os.fork() == 0:
            manager.close()
            sys.exit()
        os.wait()
        print(os.listdir(sys.argv[1]))
        """
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "['.writer.lock']\n", done.stderr
    assert os.listdir(tmp_path) == []


def test_once_the_lock_is_lost_nothing_more_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else took it for dead: a machine that slept for longer than the lock lasts."""
    from trainer_core.saving import directory_lock

    monkeypatch.setattr(directory_lock, "REFRESH_SECONDS", 0.01)
    manager = run_of(tmp_path, 2)
    lock = json.loads((tmp_path / ".writer.lock").read_text())
    lock |= {"token": "0" * 32, "pid": 1, "host": "elsewhere"}
    theirs = tmp_path / "theirs"
    theirs.write_text(json.dumps(lock))
    theirs.replace(tmp_path / ".writer.lock")  # at once, as a taker does: the keeper reads along
    for _ in range(500):
        try:
            manager._saver.claim()
        except CheckpointError as error:
            assert "nothing is written" in str(error) and "taken over by pid 1 on elsewhere" in str(
                error
            )
            break
        __import__("time").sleep(0.01)
    with pytest.raises(CheckpointError, match="nothing is written"):
        manager.save(4, state_at(4))
    assert steps(tmp_path) == [2]
    manager.close()
    assert json.loads((tmp_path / ".writer.lock").read_text()) == lock  # theirs


def test_the_lock_is_refreshed_while_the_program_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer_core.saving import directory_lock

    monkeypatch.setattr(directory_lock, "REFRESH_SECONDS", 0.01)
    manager = run_of(tmp_path, 2)
    path = tmp_path / ".writer.lock"
    os.utime(path, (1, 1))
    for _ in range(500):
        if path.stat().st_mtime > 1:
            break
        __import__("time").sleep(0.01)
    assert path.stat().st_mtime > 1
    manager.close()
