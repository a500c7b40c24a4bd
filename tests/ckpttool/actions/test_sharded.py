"""Sharded steps under the verbs that change a directory: treated as steps like any other."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ckpttool.checks.verify import verify
from ckpttool.cli.main import main
from tests.crash import CrashRig

TWO, FOUR, SIX = (f"step_{step:012d}" for step in (2, 4, 6))
LEFTOVER = f".{FOUR}.tmp-7000001-5f0e"


@pytest.fixture
def run(fixtures: Path, tmp_path: Path) -> Path:
    """Two healthy sharded steps, the pointer at the second."""
    return Path(shutil.copytree(fixtures / "sharded", tmp_path / "run"))


@pytest.fixture
def damaged(fixtures: Path, tmp_path: Path) -> Path:
    """Step 2 is whole; 4 lacks a shard, which is in a leftover; 6 lacks its metadata."""
    return Path(shutil.copytree(fixtures / "sharded-damaged", tmp_path / "damaged"))


@pytest.fixture(scope="module")
def rig() -> Iterator[CrashRig]:
    with CrashRig("ckpttool.cli.main:main") as opened:
        yield opened


def call(*arguments: object, code: int = 0) -> Result:
    done = CliRunner().invoke(main, [str(one) for one in arguments], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done


def states(path: Path) -> dict[str, str]:
    return {file.name: file.state for file in verify(path).files}


def content(path: Path) -> dict[str, bytes]:
    """Every file below a directory, but for what operations have noted."""
    return {
        str(one.relative_to(path)): one.read_bytes()
        for one in sorted(path.rglob("*"))
        if one.is_file() and ".quarantine" not in one.parts and one.name != ".writer.lock"
    }


def pointer(path: Path) -> Any:
    return json.loads((path / "latest.json").read_text())


def again(original: Path, path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(original, path)


# ---- latest, fix-pointer


def test_latest_prints_the_directory(run: Path, damaged: Path) -> None:
    assert call("latest", run).stdout == f"{run / FOUR}\n"
    assert call("latest", run / TWO).stdout == f"{run / TWO}\n"
    done = call("latest", damaged)
    assert done.stdout == f"{damaged / TWO}\n"
    assert "SHD101" in done.stderr
    assert "SHD103" in done.stderr


def test_fix_pointer_names_the_directory(damaged: Path, run: Path) -> None:
    call("fix-pointer", damaged)
    assert pointer(damaged) == {"step": 2, "file": TWO}
    call("fix-pointer", run, "--step", 2)
    assert pointer(run) == {"step": 2, "file": TWO}
    call("fix-pointer", run / TWO, code=2)


# ---- copy


def test_a_copy_is_whole_and_nothing_is_overwritten(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "backup"
    call("copy", run, f"{target}/", "--with-pointer")
    assert content(target / FOUR) == content(run / FOUR)
    assert pointer(target) == {"step": 4, "file": FOUR}
    assert states(target) == {FOUR: "valid"}
    call("copy", run, target, code=4)
    (target / FOUR / "trainer.pt").unlink()
    (target / FOUR / "__9_0.distcp").write_bytes(b"stale")
    call("copy", run / FOUR, target, "--force")
    assert content(target / FOUR) == content(run / FOUR)
    assert sorted(os.listdir(target)) == ["latest.json", FOUR]
    call("copy", run, tmp_path / "best")
    assert content(tmp_path / "best") == content(run / FOUR)


@pytest.mark.parametrize("name", [SIX, f"{FOUR}.pt", "best.pt", f"run/{FOUR}/inside"])
def test_a_copy_under_a_misleading_name_is_refused(run: Path, tmp_path: Path, name: str) -> None:
    before = content(tmp_path)
    call("copy", run, tmp_path / name, code=4)
    assert content(tmp_path) == before


def test_a_file_does_not_get_the_name_of_a_sharded_step(fixtures: Path, tmp_path: Path) -> None:
    call("copy", fixtures / "healthy", tmp_path / SIX, code=4)


def test_a_bad_step_is_not_copied(damaged: Path, tmp_path: Path) -> None:
    call("copy", damaged, tmp_path / "out", "--step", 4, code=4)
    call("copy", damaged, tmp_path / "out")
    assert content(tmp_path / "out") == content(damaged / TWO)


def test_a_killed_copy_is_whole_or_not_there(rig: CrashRig, run: Path, tmp_path: Path) -> None:
    target = tmp_path / "backup"
    arguments = ["copy", str(run), f"{target}/", "--with-pointer", "--force"]
    whole = rig.run(arguments)
    assert (whole.code, len(whole.ops) > 20) == (0, True)
    for at in range(len(whole.ops)):
        shutil.rmtree(target, ignore_errors=True)
        assert rig.run(arguments, kill_at=at).killed
        if (target / FOUR).exists():
            assert content(target / FOUR) == content(run / FOUR)
        if (target / "latest.json").exists():
            assert (target / FOUR).exists()
        if at % 5 == 0:
            assert rig.run(arguments).code == 0
            assert content(target / FOUR) == content(run / FOUR)


# ---- prune


def test_prune_deletes_whole_directories(run: Path) -> None:
    call("prune", run, "--keep-last", 1, "--yes")
    assert sorted(os.listdir(run)) == ["latest.json", FOUR]
    assert states(run) == {FOUR: "valid"}


def test_prune_keeps_what_the_pointer_names_and_what_is_not_valid(run: Path, damaged: Path) -> None:
    call("fix-pointer", run, "--step", 2)
    call("prune", run, "--keep-last", 1, "--yes")
    assert set(states(run)) == {TWO, FOUR}
    before = content(damaged)
    call("prune", damaged, "--keep-last", 1, "--yes")
    assert content(damaged) == before


def test_a_killed_prune_leaves_no_half_of_a_step_under_its_name(
    rig: CrashRig, run: Path, tmp_path: Path
) -> None:
    original = Path(shutil.copytree(run, tmp_path / "original"))
    arguments = ["prune", str(run), "--keep-last", "1", "--yes"]
    whole = rig.run(arguments)
    assert whole.code == 0
    for at in range(len(whole.ops)):
        again(original, run)
        assert rig.run(arguments, kill_at=at).killed
        assert set(states(run).values()) == {"valid"}
        assert (run / FOUR).exists()
        assert rig.run(arguments).code == 0
        assert set(states(run)) == {FOUR}


# ---- rollback, repair, undo


def test_rollback_and_undo_bring_back_every_byte(run: Path) -> None:
    before = content(run)
    call("rollback", run, "--to", 2)
    assert states(run) == {TWO: "valid"}
    assert pointer(run)["file"] == TWO
    call("undo", run)
    assert content(run) == before
    assert states(run) == {TWO: "valid", FOUR: "valid"}


def test_repair_goes_back_to_what_is_proven_and_undo_takes_it_back(damaged: Path) -> None:
    before = content(damaged)
    shown = call("repair", damaged, code=1).output
    assert f"it holds __1_0.distcp, which {FOUR} lacks" in shown
    assert content(damaged) == before
    call("repair", damaged, "--apply")
    assert states(damaged) == {TWO: "valid"}
    metadata = (damaged / TWO / ".metadata").read_bytes()
    assert pointer(damaged) == {
        "step": 2,
        "file": TWO,
        "size": len(metadata),
        "sha256": hashlib.sha256(metadata).hexdigest(),
    }
    assert not verify(damaged).findings
    listed = json.loads(call("history", damaged, "--json").stdout)
    assert "133" in call("history", damaged).output, listed  # KiB: with what the folders hold
    call("undo", damaged)
    assert content(damaged) == before
    call("repair", damaged, "--apply")
    call("purge", damaged, "--yes")
    assert sorted(os.listdir(damaged)) == ["latest.json", TWO]


def test_repair_publishes_a_whole_leftover(run: Path) -> None:
    """The writer died before the rename: the step is there but for its name."""
    before = content(run / FOUR)
    (run / FOUR).rename(run / LEFTOVER)
    assert "looks whole" in " ".join(finding.words for finding in verify(run).findings)
    call("repair", run, "--apply")
    assert content(run / FOUR) == before
    assert states(run) == {TWO: "valid", FOUR: "valid"}
    assert not verify(run).findings
    call("undo", run)
    assert content(run / LEFTOVER) == before


def test_repair_renames_a_step_that_has_the_name_of_another(run: Path) -> None:
    (run / FOUR).rename(run / SIX)
    call("repair", run, "--apply")
    assert states(run) == {TWO: "valid", FOUR: "valid"}
    assert pointer(run)["file"] == FOUR


def test_repair_keeps_one_of_a_file_and_a_directory(fixtures: Path, run: Path) -> None:
    shutil.copy(fixtures / "healthy" / f"{FOUR}.pt", run)
    call("repair", run, "--apply")
    assert list(states(run).values()) == ["valid", "valid"]
    assert not {finding.id for finding in verify(run).findings} & {"DIR106", "PTR107"}


@pytest.mark.parametrize("verb", ["repair", "rollback"])
def test_a_killed_operation_is_finished_by_the_next(
    rig: CrashRig, run: Path, damaged: Path, tmp_path: Path, verb: str
) -> None:
    place = damaged if verb == "repair" else run
    original = Path(shutil.copytree(place, tmp_path / "original"))
    arguments = [verb, str(place), *(["--apply"] if verb == "repair" else ["--to", "2"])]
    whole = rig.run(arguments)
    assert whole.code == 0
    for at in range(0, len(whole.ops), 3):
        again(original, place)
        assert rig.run(arguments, kill_at=at).killed
        assert states(place)[TWO] == "valid"
        assert rig.run(arguments).code == 0
        assert states(place) == {TWO: "valid"}
        assert pointer(place)["file"] == TWO


def test_inspect_shows_steps_of_both_kinds(fixtures: Path, run: Path) -> None:
    shutil.copy(fixtures / "healthy" / f"{SIX}.pt", run)
    (run / "latest.json").unlink()
    call("fix-pointer", run)
    document = json.loads(call("inspect", run, "--json").stdout)
    rows = {row["name"]: row for row in document["steps"]}
    assert list(rows) == [TWO, FOUR, f"{SIX}.pt"]
    assert [row["state"] for row in rows.values()] == ["valid"] * 3
    assert rows[FOUR]["sections"]["model"] == {"type": "sharded", "tensors": 4, "nbytes": 808}
    assert (rows[FOUR]["samples"], rows[FOUR]["load_need"]) == (16, "distributed")
    page = call("inspect", run / FOUR).output
    assert "10 tensors in 19 pieces" in page
    assert "files of 2 of 2" in page
    assert "step 4, 16 samples, 256 tokens" in page
    lists = call("inspect", run / FOUR, "--tensors", "model.s*", "--records", "--globals").output
    assert "model.steps  int64" in lists
    assert "__1_0.distcp" in lists
    assert "model.embed" not in lists.split("name ")[-1]
    one = json.loads(call("inspect", run / FOUR, "--json", "--records").stdout)
    embed = next(tensor for tensor in one["tensors"] if tensor["name"] == "model.embed.weight")
    assert [piece["offsets"] for piece in embed["pieces"]] == [[0, 0], [8, 0]]
    assert one["ranks"] == [0, 1]
