"""A master without training and without model code."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import safetensors.torch

from tests.trainer_core.diloco.nodes import Node, memory, new_model, replay, run
from tests.trainer_core.diloco.test_overlaps import put
from trainer_core.diloco import Store
from trainer_core.diloco.__main__ import main
from trainer_core.diloco.commits import CommitLog
from trainer_core.diloco.lease import LeaseError, newest_claim
from trainer_core.diloco.serving import Service, Until, settings_of


def left_behind(tmp_path: Path) -> Store:
    """A master that ended before its workers: two deltas of w wait."""
    store = Store.open(tmp_path)
    leave_behind(store)
    return store


def leave_behind(store: Store) -> None:
    run([Node("m", "master", lambda: store, steps=2, outer_lr=0.5, outer_momentum=0.8)])
    run([Node("w", "worker", lambda: store, steps=4)])


def test_what_was_left_behind_is_applied_as_a_master_that_trains_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = left_behind(tmp_path)
    put(store, 6, 4, float("nan"))
    command = ["serve", str(tmp_path), "--once", "--keep-commits", "0", "--node-id", "server"]
    assert main(command) == 0
    assert capsys.readouterr().out == (
        "outer step 2: 2 deltas of 1 nodes, 1 refused\n1 outer steps\n"
    )
    commit = CommitLog(store).latest()
    assert commit is not None
    assert (commit.master, commit.fence, commit.outer_lr, commit.outer_momentum) == (
        *("server", 2),
        *(0.5, 0.8),
    )
    assert replay(store, new_model().state_dict()) == [("m", 2), ("w", 2), ("w", 4)]
    # Its place is free at once, and a node with a model goes on from what it made.
    claim = newest_claim(store)
    assert claim is not None and claim.is_released
    late = Node("m", "master", lambda: store, steps=4)
    next(late.life())
    assert late.coordinator is not None and late.coordinator.is_master
    weights = safetensors.torch.load(store.read(commit.model.name))
    baseline = late.coordinator.state_dict()
    assert baseline is not None
    assert all((baseline["baseline"][name] == weights[name]).all() for name in weights)


def test_what_it_cannot_serve_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub = tmp_path / "hub"
    hub.mkdir()
    assert main(["serve", str(hub), "--once"]) == 3
    assert "no global model yet" in capsys.readouterr().err
    store = Store.open(hub)
    master = Node("m", "master", lambda: store, steps=9, lease_seconds=0.4)
    life = master.life()
    next(life)
    assert main(["serve", str(hub), "--once", "--lease-seconds", "60"]) == 3
    assert "m (fencing number 1) is the master and alive" in capsys.readouterr().err
    assert master.coordinator is not None
    master.coordinator.stop()
    assert main(["serve", str(hub), "--rounds", "1", "--until-idle", "0"]) == 0


USAGE = {
    "--rounds 0": "must be a whole number of at least 1, and at most 1,000,000,000, not '0'",
    "--rounds 1.5": "must be a whole number of at least 1, and at most 1,000,000,000, not '1.5'",
    "--until-idle -1": "must be a number of at least 0, and at most 1,000,000,000, not '-1'",
    "--node-id A/B": "'A/B': not a node id",
    "--outer-lr 0": "must be above 0, not 0.0",
    "--outer-lr x": "must be a finite number, not 'x'",
    "--outer-momentum 1": "must be in [0, 1), not 1.0",
    "--quorum 0": "must be at least 1, not 0",
    "--quorum 9999999999": "must be at most 1,000,000,000, not 9999999999",
    "--quorum-seconds 0": "must be None or above 0, not 0.0",
    "--weighting size": "invalid choice: 'size'",
    "--max-staleness -1": "must be None or at least 0, not -1",
    "--max-norm inf": "must be a finite number, not 'inf'",
    "--keep-commits -1": "must be a whole number of at least 0, and at most",
    "--lease-seconds nan": "must be a number of at least 0.1, and at most",
    "--poll-seconds 0": "must be a number of at least 0.01, and at most",
    "--timeout 0": "must be a number above 0, and at most 1,000,000,000, not '0'",
    "--timeout inf": "must be a number above 0, and at most 1,000,000,000, not 'inf'",
    "--attempts 0": "must be a whole number of at least 1, and at most",
}


@pytest.mark.parametrize("option", USAGE)
def test_an_option_out_of_range_is_wrong_usage_in_one_line(
    capsys: pytest.CaptureFixture[str], option: str
) -> None:
    name = option.split()[0]
    verbs = ["serve"] + (["status"] if name in ("--timeout", "--attempts") else [])
    for verb in verbs:
        with pytest.raises(SystemExit) as ended:
            main([verb, "nowhere", *option.split()])
        assert ended.value.code == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1
        assert said.err.startswith(f"error: argument {name}: {USAGE[option]}")


def test_every_option_with_a_value_has_its_range_tried(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    named = set(re.findall(r"^  (--[a-z-]+) [A-Z{]", capsys.readouterr().out, re.M))
    assert named == {option.split()[0] for option in USAGE}


def test_a_signal_ends_it_and_the_lease_is_given_back(tmp_path: Path) -> None:
    store = left_behind(tmp_path)
    command = [sys.executable, "-m", "trainer_core.diloco", "serve", str(tmp_path)]
    command += ["--poll-seconds", "0.05"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "outer step 2: 2 deltas of 1 nodes, 0 refused\n"
            process.send_signal(signal.SIGTERM)
            assert process.communicate(timeout=600)[0] == "1 outer steps\n"
            assert process.returncode == 0
        finally:
            process.kill()
    claim = newest_claim(store)
    assert claim is not None and claim.is_released
    assert json.loads(store.read("global/step_count.json"))["outer_step"] == 2


def started(url: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trainer_core.diloco", "serve", str(url), *options]
    command += ["--poll-seconds", "0.05", "--lease-seconds", "6", "--keep-commits", "0"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_standby_takes_the_place_of_a_master_that_is_killed(tmp_path: Path) -> None:
    """Two processes with the ids that the command gives them: neither is taken for the other."""
    store = left_behind(tmp_path)
    line = "outer step {}: {} deltas of 1 nodes, 0 refused\n"
    with started(tmp_path) as primary, ExitStack() as stack:
        stack.callback(primary.kill)
        assert primary.stdout is not None
        assert primary.stdout.readline() == line.format(2, 2)
        standby = stack.enter_context(started(tmp_path, "--standby", "--rounds", "1"))
        stack.callback(standby.kill)
        put(store, 6, 4)
        assert primary.stdout.readline() == line.format(3, 1)
        primary.kill()
        put(store, 8, 6)
        said, _ = standby.communicate(timeout=600)
        assert (said, standby.returncode) == (line.format(4, 1) + "1 outer steps\n", 0)
    taken_once(store, [1, 1, 2, 2, 3])


def taken_once(store: Store, fences: list[int]) -> None:
    """By masters with these fencing numbers: each delta once, and the ledger gives the bits."""
    applied = replay(store, new_model().state_dict())
    assert applied == [("m", 2), ("w", 2), ("w", 4), ("w", 6), ("w", 8)]
    log = CommitLog(store)
    commits = [log.read(step) for step in log.steps()]
    assert [commit.fence for commit in commits] == fences
    assert len({commit.master for commit in commits}) == 3


def test_a_standby_in_memory_by_its_own_clock() -> None:
    store = Store.open(memory())
    leave_behind(store)
    options = {"keep_commits": None, "poll_seconds": 0.0, "lease_seconds": 1000.0}
    primary = Service(store, "a", settings_of(store, **options))
    standby = Service(store, "b", settings_of(store, standby=True, **options))
    now = [0.0]
    standby._lease._clock = lambda: now[0]
    told: list[int] = []
    two, one = Until(rounds=2), Until(rounds=1)

    def look(service: Service, until: Until) -> int:
        return service.run(until, lambda commit: told.append(commit.outer_step))

    primary.__enter__()
    with standby:
        assert look(primary, one) == 1
        put(store, 6, 4)
        for _ in range(3):  # the counter moves, so it waits
            now[0] += 900.0
            assert look(standby, Until(idle=0.0, is_stopped=looks(2))) == 0
            primary._lease.beat()
        assert look(primary, one) == 1
        put(store, 8, 6)
        assert look(standby, Until(is_stopped=looks(2))) == 0
        now[0] += 1000.1  # and now the primary is gone
        assert look(standby, one) == 1
        with pytest.raises(LeaseError, match=r"no longer the master: b \(fencing number 3\)"):
            look(primary, two)
    assert primary._keeper is not None
    primary._keeper.stop()
    assert told == [2, 3, 4]
    taken_once(store, [1, 1, 2, 2, 3])


def looks(times: int) -> Callable[[], bool]:
    """Ends a service after so many looks."""
    left = iter([False] * times)
    return lambda: next(left, True)
