"""Sharded steps under the verbs that change a directory: treated as steps like any other."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
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


def test_nothing_is_copied_into_a_checkpoint(fixtures: Path, run: Path, tmp_path: Path) -> None:
    """A directory of shards under any name is what a copy replaces, never a place for steps."""
    best = tmp_path / "best"
    call("copy", run / FOUR, best)
    for arguments in (
        (run / FOUR, best),
        (run / FOUR, f"{best}/", "--force"),
        (fixtures / "healthy", best, "--force"),
        (run, best, "--with-pointer"),
    ):
        call("copy", *arguments, code=3 if "--with-pointer" in arguments else 4)
    assert content(best) == content(run / FOUR)
    call("copy", run / TWO, best, "--force")
    assert content(best) == content(run / TWO)
    assert sorted(os.listdir(tmp_path)) == ["best", "run"]


@pytest.mark.parametrize("kind", ["file", "link", "pipe", "empty"])
def test_whatever_has_the_name_is_replaced_only_by_force(
    run: Path, tmp_path: Path, kind: str
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine").write_text("mine")
    target = tmp_path / "backup" / FOUR
    target.parent.mkdir()
    make = {"file": target.touch, "pipe": lambda: os.mkfifo(target), "empty": target.mkdir}
    make.get(kind, lambda: target.symlink_to(other))()
    call("copy", run, target.parent, code=4)
    call("copy", run, target.parent, "--force")
    assert content(target) == content(run / FOUR)
    assert not target.is_symlink()
    assert os.listdir(target.parent) == [FOUR]
    assert os.listdir(other) == ["mine"]


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
    assert f"put __1_0.distcp of {FOUR} in place" in shown
    assert content(damaged) == before
    call("repair", damaged, "--apply")
    assert states(damaged) == {TWO: "valid", FOUR: "valid"}
    metadata = (damaged / FOUR / ".metadata").read_bytes()
    assert pointer(damaged) == {
        "step": 4,
        "file": FOUR,
        "size": len(metadata),
        "sha256": hashlib.sha256(metadata).hexdigest(),
    }
    assert not verify(damaged).findings
    call("history", damaged)
    call("undo", damaged)
    assert content(damaged) == before
    call("repair", damaged, "--apply")
    call("purge", damaged, "--yes")
    assert sorted(os.listdir(damaged)) == ["latest.json", TWO, FOUR]


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


def _says(run: Path, name: str) -> None:
    """Every verb, and the training core's reading side, takes this one for step 4."""
    from trainer_core.resuming.stored_steps import StoredSteps

    before = (run / "latest.json").read_bytes() if (run / "latest.json").exists() else None
    assert call("latest", run).stdout == f"{run / name}\n"
    report = verify(run)
    assert report.newest_valid_path == str(run / name)
    (two,) = (finding for finding in report.findings if finding.id == "DIR106")
    assert two.facts["taken"] == name
    assert f"{name} is taken" in two.words
    shown = json.loads(call("fix-pointer", run, "--dry-run", "--json").stdout)
    assert os.path.basename(shown["file"]) == name, shown
    shown = json.loads(call("copy", run, f"{run}-copy/", "--dry-run", "--step", 4, "--json").stdout)
    assert shown["file"] == str(run / name)
    steps = StoredSteps(run, lambda _: None)
    assert steps.newest_valid().found.file.name == name  # type: ignore[union-attr]  # fails if None
    _, selected = steps.select()
    assert selected == run / name
    planned = json.loads(call("repair", run, "--json", code=1).stdout)
    (aside,) = (deed for deed in planned["plan"] if deed["action"] == "set-aside")
    assert os.path.basename(aside["path"]) == ({FOUR, f"{FOUR}.pt"} - {name}).pop()
    after = (run / "latest.json").read_bytes() if (run / "latest.json").exists() else None
    assert before == after


def _manifest(run: Path, *names: str) -> None:
    lines = []
    for name in names:
        content = (run / name / ".metadata" if name == FOUR else run / name).read_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        entry = {"step": 4, "file": name, "size": len(content), "sha256": sha256, "run_id": "r"}
        lines.append(json.dumps({**entry, "parent": None, "saved": "2026-11-29T19:40:42Z"}))
    (run / "manifest.jsonl").write_text("".join(f"{line}\n" for line in lines))


def test_of_a_file_and_a_directory_the_recorded_one_is_taken(fixtures: Path, run: Path) -> None:
    shutil.copy(fixtures / "healthy" / f"{FOUR}.pt", run)
    _says(run, FOUR)  # which the pointer names
    call("rollback", run, "--to", 4, "--dry-run")
    call("prune", run, "--keep-last", 1, "--yes")
    assert list(states(run)) == [FOUR, f"{FOUR}.pt"]
    (run / "latest.json").unlink()
    _says(run, FOUR)  # as nothing is recorded
    _manifest(run, FOUR, f"{FOUR}.pt", FOUR)
    _says(run, FOUR)
    _manifest(run, f"{FOUR}.pt", FOUR, f"{FOUR}.pt")
    _says(run, f"{FOUR}.pt")
    (run / "latest.json").write_text(json.dumps({"step": 4, "file": FOUR}))
    _says(run, FOUR)  # the pointer comes before the manifest
    # The recorded one is no good: then the other is taken.
    (run / FOUR / "__1_0.distcp").unlink()
    assert call("latest", run).stdout == f"{run / FOUR}.pt\n"
    call("copy", run, f"{run}-copy/", "--step", 4)
    call("repair", run, "--apply")
    assert states(run) == {f"{FOUR}.pt": "valid"}
    assert pointer(run)["file"] == f"{FOUR}.pt"


def test_one_that_could_not_be_checked_is_not_passed_over(fixtures: Path, run: Path) -> None:
    """The pointer names it, so that a file of the same step beside it is not what was meant."""
    import pickle

    path = run / FOUR / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for place in metadata.storage_data.values():
        place.transform_descriptors = ["zstd"]
    path.write_bytes(pickle.dumps(metadata, 4))
    (run / "latest.json").write_text(json.dumps({"step": 4, "file": FOUR}))
    shutil.copy(fixtures / "healthy" / f"{FOUR}.pt", run)
    before = content(run)
    call("latest", run, code=3)
    call("fix-pointer", run, "--step", 4, code=3)
    call("repair", run, "--apply", code=3)
    assert content(run) == before
    (run / f"{FOUR}.pt").unlink()
    remedies = {finding.remedy for finding in verify(run).findings if finding.id == "PTR107"}
    assert remedies == {f"make {FOUR} readable, or do without it: ckpttool rollback {run} --to 2"}
    call("rollback", run, "--to", 2)
    assert not verify(run).findings


def _swap(run: Path) -> None:
    shutil.copy(run / TWO / "__0_0.distcp", run / FOUR / "__0_0.distcp")


BAD = {
    "metadata too large": lambda run: os.truncate(run / FOUR / ".metadata", 600 << 20),
    "a pipe": lambda run: (
        (run / FOUR / ".metadata").unlink(),
        os.mkfifo(run / FOUR / ".metadata"),
    ),
    "another step's shard": _swap,
    "a shard cut": lambda run: os.truncate(run / FOUR / "__1_0.distcp", 9),
    "another name": lambda run: (run / FOUR).rename(run / SIX),
    "a rank gone": lambda run: (run / FOUR / "rank_00000.pt").unlink(),
}


@pytest.mark.parametrize("name", list(BAD))
def test_the_named_command_mends_or_none_is_named(run: Path, name: str) -> None:
    BAD[name](run)
    findings = verify(run).findings
    errors = [finding for finding in findings if finding.severity.value == "error"]
    assert {finding.remedy for finding in errors} == {f"ckpttool repair {run}"}
    lone = Path(shutil.copytree(run, f"{run}-lone", ignore=lambda *_: [TWO, ".metadata"]))
    call("repair", run, "--apply")
    assert not verify(run).findings
    # Nothing else is left to go back to, and no shard is mended.
    remedies = {finding.remedy for finding in verify(lone).findings}
    assert not [remedy for remedy in remedies if remedy and remedy.startswith("ckpttool")]
    call("repair", lone, "--apply", code=1)


def test_metadata_that_may_not_be_read_is_not_called_missing(run: Path) -> None:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv")
    (run / FOUR / ".metadata").chmod(0)
    for parent in run.parents:
        if parent.stat().st_uid == os.geteuid() and parent.is_relative_to("/tmp"):
            parent.chmod(parent.stat().st_mode | 0o005)
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"]
    command = [*user, sys.executable, "-m", "ckpttool", "verify", str(run), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
    if not done.stdout:
        pytest.skip("an ordinary user cannot start this Python")
    assert done.returncode == 3
    found = json.loads(done.stdout)
    assert [file["state"] for file in found["files"]] == ["valid", "unreadable"]
    (one,) = (finding for finding in found["findings"] if finding["id"] == "FIL101")
    assert one["place"]["path"] == str(run / FOUR / ".metadata")
    assert "SHD101" not in done.stdout
    assert "PTR109" not in done.stdout  # its size is not known, a folder's is another thing


def test_names_that_are_nearly_a_steps_are_said_of_files_and_directories(
    fixtures: Path, run: Path
) -> None:
    (run / TWO).rename(run / "step_2")
    (run / FOUR).rename(run / "Step_000000000004")
    (run / "step_abc").mkdir()
    (run / "step_7").mkdir()  # holds no shards: anybody's
    shutil.copy(fixtures / "healthy" / f"{SIX}.pt", run / "STEP_6.pt")
    report = verify(run)
    odd = {f.place.path: f.remedy for f in report.findings if f.id == "DIR103"}
    assert set(odd) == {str(run / name) for name in ("step_2", "Step_000000000004", "STEP_6.pt")}
    (others,) = (f.facts["names"] for f in report.findings if f.id == "DIR102")
    assert others == ["step_7", "step_abc"]
    for remedy in odd.values():
        subprocess.run(["sh", "-c", str(remedy)], check=True)
    assert states(run) == {TWO: "valid", FOUR: "valid", f"{SIX}.pt": "valid"}


@pytest.mark.parametrize("verb", ["mend", "slim", "harden"])
def test_a_verb_for_files_says_which_verb_takes_a_directory(run: Path, verb: str) -> None:
    shown = call(verb, f"{run / FOUR}/", "-o", run / "out.pt", code=2).output
    words = " ".join(shown.replace("\n", " ").split())
    assert f"is a sharded step (a directory of torch.distributed.checkpoint), and {verb}" in words
    other = f"ckpttool repair {run}" if verb == "mend" else f"ckpttool export {run / FOUR} -o"
    assert other in words


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
        left = {TWO: "valid", FOUR: "valid"} if verb == "repair" else {TWO: "valid"}
        assert states(place) == left
        assert pointer(place)["file"] == max(left)


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
