"""A master without training and without model code."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch

from tests.trainer_core.diloco.nodes import Node, new_model, replay, run
from tests.trainer_core.diloco.test_overlaps import put
from trainer_core.diloco import Store
from trainer_core.diloco.__main__ import main
from trainer_core.diloco.commits import CommitLog
from trainer_core.diloco.lease import newest_claim


def left_behind(tmp_path: Path) -> Store:
    """A master that ended before its workers: two deltas of w wait."""
    store = Store.open(tmp_path)
    run([Node("m", "master", lambda: store, steps=2, outer_lr=0.5, outer_momentum=0.8)])
    run([Node("w", "worker", lambda: store, steps=4)])
    return store


def test_what_was_left_behind_is_applied_as_a_master_that_trains_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = left_behind(tmp_path)
    put(store, 6, 4, float("nan"))
    assert main(["serve", str(tmp_path), "--once", "--keep-commits", "0"]) == 0
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
    for option, words in (
        (["--node-id", "A/B"], "'A/B'"),
        (["--quorum", "0"], "quorum must be at least 1"),
        (["--lease-seconds", "60"], "m (fencing number 1) is the master and alive"),
    ):
        assert main(["serve", str(hub), "--once", *option]) == 3
        assert words in capsys.readouterr().err
    assert master.coordinator is not None
    master.coordinator.stop()
    assert main(["serve", str(hub), "--rounds", "1", "--until-idle", "0"]) == 0


def test_a_signal_ends_it_and_the_lease_is_given_back(tmp_path: Path) -> None:
    store = left_behind(tmp_path)
    command = [sys.executable, "-m", "trainer_core.diloco", "serve", str(tmp_path)]
    command += ["--poll-seconds", "0.05"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "outer step 2: 2 deltas of 1 nodes, 0 refused\n"
            process.send_signal(signal.SIGTERM)
            assert process.communicate(timeout=120)[0] == "1 outer steps\n"
            assert process.returncode == 0
        finally:
            process.kill()
    claim = newest_claim(store)
    assert claim is not None and claim.is_released
    assert json.loads(store.read("global/step_count.json"))["outer_step"] == 2
