"""A save that dies, or fails, at any of its file operations: nothing acknowledged is lost."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ckpttool
from tests.crash import CrashRig, Outcome, boundaries
from tests.trainer_core.saving.crash_saving import RUN, acknowledged, state_at
from trainer_core import CheckpointManager

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture(scope="module")
def rig() -> Iterator[CrashRig]:
    with CrashRig(
        "tests.trainer_core.saving.crash_saving:main", preload=["ckpttool.checks.verify"]
    ) as rig:
        yield rig


def check(directory: Path, acks: Path, where: object) -> None:
    """What must hold after a crash at any moment."""
    told = acknowledged(str(acks))
    safe = max((int(re.sub("[a-z]", "", words)) for words in told), default=0)
    names = sorted(directory.glob("*.pt"))
    if not names and not safe:
        return
    report = ckpttool.verify(directory)
    # Whatever has a step's name is whole.
    assert [(Path(file.path).name, file.state) for file in report.files] == [
        (path.name, "valid") for path in names
    ], where
    if not safe:
        return
    assert report.newest_valid is not None and report.newest_valid >= safe, where
    state = CheckpointManager(directory).load_latest()
    assert state is not None and state["step"] >= safe, where
    assert state["model"]["w"].unique().tolist() == [state["step"]], where
    if "6again" in told:
        assert state["config"]["note"] == "again"
    records_are_true(directory, where)


def records_are_true(directory: Path, where: object) -> None:
    """Neither pointer nor manifest says anything of a file that is not so."""
    lines = directory / "manifest.jsonl"
    entries = {}
    for line in lines.read_bytes().splitlines() if lines.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # it died while it was writing this one
        entries[entry["file"]] = entry
    for entry in [*entries.values(), json.loads((directory / "latest.json").read_bytes())]:
        path = directory / entry["file"]
        if path.exists() and "sha256" in entry:
            content = path.read_bytes()
            found = (len(content), hashlib.sha256(content).hexdigest())
            assert (entry["size"], entry["sha256"]) == found, where


def goes_on(directory: Path, where: object) -> None:
    """The next run of the same program saves, and sweeps up what the dead one has left."""
    with CheckpointManager(directory, keep_last=2, run_id=RUN) as manager:
        manager.save(8, state_at(8))
    left = [name for name in os.listdir(directory) if ".tmp-" in name or "lock" in name]
    assert left == [], where
    state = CheckpointManager(directory).load_latest()
    assert state is not None and state["step"] == 8, where
    records_are_true(directory, where)


def run(rig: CrashRig, root: Path, how: str, **boundary: object) -> tuple[Outcome, Path, Path]:
    directory, acks = root / "run", root / "acks"
    outcome = rig.run(directory, acks, how, **boundary)  # type: ignore[arg-type]
    return outcome, directory, acks


def test_the_program_does_what_it_is_here_for(rig: CrashRig, tmp_path: Path) -> None:
    whole, directory, acks = run(rig, tmp_path, "sync")
    assert whole.code == 0, whole.output
    assert acknowledged(str(acks)) == ["2", "4", "6", "6again"]
    kinds = {op.kind for op in whole.ops}
    assert {"open", "write", "fsync", "rename", "unlink", "mkdir", "link"} <= kinds
    assert len(whole.ops) > 60
    check(directory, acks, "whole")
    assert sorted(path.name for path in directory.glob("*.pt")) == [
        f"step_{step:012d}.pt" for step in (4, 6)
    ]


@pytest.mark.parametrize("how", ["sync", pytest.param("async", marks=pytest.mark.slow)])
@pytest.mark.parametrize("torn", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_killed_before_any_operation(rig: CrashRig, tmp_path: Path, how: str, torn: bool) -> None:
    whole, _, _ = run(rig, tmp_path / "whole", how)
    for at in [at for at, half in boundaries(whole.ops) if half == torn]:
        op = whole.ops[at]
        root = tmp_path / str(at)
        root.mkdir()
        outcome, directory, acks = run(rig, root, how, kill_at=at, torn=torn)
        assert outcome.killed, (at, op, outcome.output)
        check(directory, acks, (at, op))
        goes_on(directory, (at, op))
        shutil.rmtree(root)


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, pytest.param(errno.EROFS, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("how", ["goes on", pytest.param("sync", marks=pytest.mark.slow)])
def test_a_disk_that_fails_from_any_operation_on(
    rig: CrashRig, tmp_path: Path, how: str, number: int
) -> None:
    """Full: from each. Read-only: from every third."""
    whole, _, _ = run(rig, tmp_path / "whole", how)
    for at, op in list(enumerate(whole.ops))[:: 3 if number == errno.EROFS else 1]:
        root = tmp_path / str(at)
        root.mkdir()
        if op.target.endswith("acks"):
            continue
        outcome, directory, acks = run(rig, root, how, fail_at=at, errno=number)
        where = (at, op, outcome.output)
        assert (
            "Traceback" not in outcome.output
            or "OSError" in outcome.output
            or ("WriteError" in outcome.output)
        ), where
        check(directory, acks, where)
        if number == errno.ENOSPC:
            goes_on(directory, where)


def test_what_the_crashes_would_lose_without_the_order(tmp_path: Path) -> None:
    """That the checks above can fail: a pointer that is written before its file."""
    directory = tmp_path / "run"
    manager = CheckpointManager(directory, run_id=RUN)
    manager.save(2, state_at(2))
    manager.close()
    (directory / "latest.json").write_text('{"step": 4, "file": "step_000000000004.pt"}')
    torch.save(state_at(4), directory / "step_000000000004.pt")
    path = directory / "step_000000000004.pt"
    path.write_bytes(path.read_bytes()[:-4000])
    (tmp_path / "acks").write_text("2\n4\n")
    with pytest.raises(AssertionError):
        check(directory, tmp_path / "acks", "torn")
