"""Repair from plan to second look, with files that come back and files that do not."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

import ckpttool
from ckpttool.actions.journal.operations import undo
from ckpttool.actions.repair.deeds import KINDS, Options
from ckpttool.actions.repair.run import Repair
from ckpttool.errors import RefusedError
from ckpttool.model.pointer import read_pointer
from tests import corrupt
from tests.ckpttool.checks.builders import name, point, put, saved, step_bytes, training_state


def repaired(run: Path, **options: object) -> Repair:
    """The repair, carried out."""
    repair = planned(run, **options)
    repair.carry_out()
    return repair


def planned(run: Path, **options: object) -> Repair:
    repair = Repair(str(run), Options(**options))  # type: ignore[arg-type]
    repair.make_plan()
    return repair


def flipped(step: int, record: str = "data/0", byte: int = 5, bit: int = 3) -> bytes:
    place = corrupt.content_range(step_bytes(step), record)
    return corrupt.flip_bit(step_bytes(step), place.start + byte, bit)


def two_flips(step: int, record: str) -> bytes:
    """Damage that no single bit explains, in a record that no other one equals."""
    data = flipped(step, record, 0, 0)
    return corrupt.flip_bit(data, corrupt.content_range(data, record).start + 9, 6)


def ids(run: Path) -> list[str]:
    return [f.id for f in ckpttool.verify(run).findings if f.severity.value == "error"]


# ---- files that come back


def test_a_flipped_bit_comes_back_byte_for_byte(run: Path) -> None:
    put(run, 6, flipped(6))
    repair = repaired(run)
    assert (run / name(6)).read_bytes() == step_bytes(6)
    assert repair.last_report.newest_valid == 6
    assert ids(run) == []
    assert repair.operation is not None
    kept = Path(repair.operation.folder) / name(6)
    assert kept.read_bytes() == flipped(6)


def test_the_mended_file_has_the_modes_of_the_damaged_one(run: Path) -> None:
    for step in (2, 4, 6):
        (run / name(step)).chmod(0o640)
    put(run, 6, flipped(6)).chmod(0o640)
    repaired(run)
    assert (run / name(6)).stat().st_mode & 0o777 == 0o640


def test_a_known_sha256_proves_the_bit_and_the_pointer_stays(run: Path) -> None:
    sha256 = hashlib.sha256(step_bytes(6)).hexdigest()
    content = {"step": 6, "file": name(6), "size": len(step_bytes(6)), "sha256": sha256}
    (run / "latest.json").write_text(json.dumps(content))
    put(run, 6, flipped(6))
    repair = repaired(run, bit_odds=0.0)
    assert [deed.verb for deed in repair.plan.deeds] == ["mend"]
    assert (run / name(6)).read_bytes() == step_bytes(6)
    assert json.loads((run / "latest.json").read_text()) == content
    assert ids(run) == []


def test_a_bit_above_the_odds_is_not_turned_back(run: Path) -> None:
    put(run, 6, flipped(6))
    repair = planned(run, bit_odds=0.0)
    assert [deed.verb for deed in repair.plan.deeds] == ["set-aside", "point"]
    assert any("--bit-odds" in note for note in repair.plan.deeds[0].notes)


@pytest.mark.parametrize("cut", ["end record", "directory"])
def test_structure_comes_back_from_its_twins(cut: str, run: Path) -> None:
    drop = corrupt.drop_end_record if cut == "end record" else corrupt.drop_directory
    put(run, 6, drop(step_bytes(6)))
    repaired(run)
    assert (run / name(6)).read_bytes() == step_bytes(6)


def test_a_donor_is_found_in_a_sibling(run: Path) -> None:
    """A frozen layer is the same in every step."""
    frozen = torch.arange(60, dtype=torch.float32)
    for step in (2, 4, 6):
        state = training_state(step)
        state["model"]["frozen"] = frozen
        put(run, step, saved(state))
    healthy = (run / name(6)).read_bytes()
    record = next(
        full.partition("/")[2]
        for full, content in corrupt.read_records(healthy)
        if content == frozen.numpy().tobytes()
    )
    put(run, 6, corrupt.zero_range(healthy, corrupt.content_range(healthy, record).start, 64))
    repair = repaired(run)
    assert (run / name(6)).read_bytes() == healthy
    assert name(4) in " ".join(repair.plan.deeds[0].notes)


def test_the_last_temporary_comes_back_where_its_step_is_lost(run: Path, dead_pid: int) -> None:
    """Killed after the last byte of the records and before the directory."""
    torn = run / f".{name(8)}.tmp-{dead_pid}"
    torn.write_bytes(corrupt.drop_directory(step_bytes(8)))
    repair = repaired(run)
    assert [deed.verb for deed in repair.plan.deeds] == ["set-aside", "mend", "point"]
    assert (run / name(8)).read_bytes() == step_bytes(8)
    assert read_pointer(run).step == 8
    assert not torn.exists()
    assert repair.operation is not None
    undo(run)
    assert torn.read_bytes() == corrupt.drop_directory(step_bytes(8))
    assert not (run / name(8)).exists()
    assert read_pointer(run).step == 6


def test_a_dangerous_file_is_not_made_harmless(run: Path, fixtures: Path) -> None:
    evil = sorted((fixtures / "hostile").glob("step_*.pt"))[-1]
    put(run, 8, evil.read_bytes())
    repair = repaired(run)
    assert [deed.verb for deed in repair.plan.deeds] == ["set-aside"]
    assert not (run / name(8)).exists()


def test_what_is_mended_must_be_what_its_name_says(run: Path) -> None:
    """A damaged file of another step: the plan is made anew when that comes out."""
    place = corrupt.content_range(step_bytes(4), "data/0")
    put(run, 6, corrupt.flip_bit(step_bytes(4), place.start + 5, 3))
    repair = repaired(run)
    assert [deed.verb for deed in repair.plan.deeds] == ["set-aside", "point"]
    assert ckpttool.verify(run).newest_valid == 4
    assert ids(run) == []
    assert repair.operation is not None
    assert sorted(os.listdir(repair.operation.folder)) == [
        "journal.jsonl",
        "latest.json",
        "note.json",
        name(6),
    ]


# ---- where something is lost


@pytest.fixture
def ruined(run: Path) -> Path:
    """No step comes back whole: each has damage that nothing explains."""
    for step in (2, 4, 6):
        put(run, step, two_flips(step, "data/0"))
    return run


def test_a_loss_has_to_be_allowed(ruined: Path) -> None:
    before = {path.name: path.read_bytes() for path in ruined.iterdir()}
    repair = planned(ruined)
    assert repair.needs_permission
    mend = next(deed for deed in repair.plan.deeds if deed.verb == "mend")
    assert mend.step == 6
    assert [loss.split()[0] for loss in mend.loses] == ["model.0.weight"]
    with pytest.raises(RefusedError, match="--allow-loss"):
        repair.carry_out()
    assert {path.name: path.read_bytes() for path in ruined.iterdir()} == before


@pytest.mark.parametrize("missing", ["drop", "zeros"])
def test_an_allowed_loss_gives_a_valid_step(missing: str, ruined: Path) -> None:
    repair = repaired(ruined, allow_loss=True, missing=missing)
    assert repair.last_report.newest_valid == 6
    assert sorted(path.name for path in ruined.glob("step_*")) == [name(6)]
    got = torch.load(ruined / name(6), weights_only=True)
    assert got["step"] == 6
    healthy = training_state(6)
    assert torch.equal(got["model"]["0.bias"], healthy["model"]["0.bias"])
    if missing == "drop":
        assert "0.weight" not in got["model"]
    else:
        assert not got["model"]["0.weight"].any()
    undo(ruined)
    assert (ruined / name(6)).read_bytes() == two_flips(6, "data/0")
    assert (ruined / name(2)).read_bytes() == two_flips(2, "data/0")


def test_what_is_lost_can_come_from_another_step(ruined: Path) -> None:
    put(ruined, 4, two_flips(4, "data/1"))
    repaired(ruined, allow_loss=True, missing="from", source_step=4)
    got = torch.load(ruined / name(6), weights_only=True)
    assert torch.equal(got["model"]["0.weight"], training_state(4)["model"]["0.weight"])


def test_where_a_step_is_valid_nothing_is_mended_with_loss(run: Path) -> None:
    put(run, 6, two_flips(6, "data/0"))
    repair = planned(run, allow_loss=True)
    assert [deed.verb for deed in repair.plan.deeds] == ["set-aside", "point"]
    assert not repair.plan.loses
    notes = " ".join(repair.plan.deeds[0].notes)
    assert "damaged: model.0.weight" in notes
    assert repair.plan.deeds[0].mending is not None


def test_without_mending_nothing_is_lost_either(ruined: Path) -> None:
    repair = planned(ruined, only=frozenset(KINDS) - {"mend"})
    assert repair.plan.deeds == []
    assert len(repair.plan.left) == 3


# ---- the pointer's record


def test_a_manifest_gives_the_pointer_its_record(run: Path) -> None:
    sha256 = hashlib.sha256(step_bytes(4)).hexdigest()
    line = {"step": 4, "file": name(4), "size": len(step_bytes(4)), "sha256": sha256}
    (run / "manifest.jsonl").write_text(json.dumps({**line, "run_id": "abc"}) + "\n")
    put(run, 6, b"")
    repaired(run)
    expected = {**line, "run_id": "abc"}
    assert json.loads((run / "latest.json").read_text()) == expected


def test_a_published_temporary_is_recorded_as_it_is(run: Path, dead_pid: int) -> None:
    content = {"step": 6, "file": name(6), "size": 1, "sha256": "0" * 64}
    (run / "latest.json").write_text(json.dumps(content))
    (run / f".{name(8)}.tmp-{dead_pid}").write_bytes(step_bytes(8))
    repaired(run)
    assert json.loads((run / "latest.json").read_text()) == {
        "step": 8,
        "file": name(8),
        "size": len(step_bytes(8)),
        "sha256": hashlib.sha256(step_bytes(8)).hexdigest(),
    }
    assert ids(run) == []


# ---- others at work


def test_what_changed_since_it_was_looked_at_is_not_touched(run: Path) -> None:
    put(run, 6, b"")
    repair = planned(run)
    put(run, 6, step_bytes(6))
    with pytest.raises(RefusedError, match="changed since it was looked at"):
        repair.carry_out()
    assert (run / name(6)).read_bytes() == step_bytes(6)
    assert sorted(os.listdir(run)) == ["latest.json", name(2), name(4), name(6)]


@pytest.mark.parametrize("change", ["new step", "gone", "pointer", "temporary"])
def test_a_directory_that_changed_is_looked_at_again_first(
    change: str, run: Path, dead_pid: int
) -> None:
    put(run, 6, b"")
    repair = planned(run)
    if change == "new step":
        put(run, 8, step_bytes(8))
    elif change == "gone":
        (run / name(2)).unlink()
    elif change == "pointer":
        point(run, 4)
    else:
        (run / f".{name(8)}.tmp-{dead_pid}").write_bytes(b"")
    with pytest.raises(RefusedError, match="run it again"):
        repair.carry_out()
    assert not (run / ".quarantine").exists()


def test_other_files_may_change_meanwhile(run: Path) -> None:
    put(run, 6, b"")
    repair = planned(run)
    (run / "train.log").write_text("a line more")
    repair.carry_out()
    assert ids(run) == []


@pytest.mark.parametrize("damaged", [False, True])
def test_a_misnamed_file_makes_room_for_a_leftover(
    damaged: bool, run: Path, dead_pid: int, tmp_path: Path
) -> None:
    """Step 4 has the name of step 6, and what was to become step 6 lies beside it."""
    put(run, 6, step_bytes(4))
    put(run, 4, b"")
    left = run / f".{name(6)}.tmp-{dead_pid}"
    left.write_bytes(flipped(6) if damaged else step_bytes(6))
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    repaired(run)
    for step in (2, 4, 6):
        assert (run / name(step)).read_bytes() == step_bytes(step)
    assert not left.exists()
    undo(run)
    shutil.rmtree(run / ".quarantine")
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


# ---- undo


def test_undo_brings_all_of_it_back(run: Path, dead_pid: int, tmp_path: Path) -> None:
    put(run, 2, two_flips(2, "data/0"))
    put(run, 4, flipped(4))
    put(run, 6, b"")
    (run / name(7)).symlink_to(tmp_path)
    (run / f".{name(8)}.tmp-{dead_pid}").write_bytes(step_bytes(8))
    (run / name(4)).chmod(0o600)
    (run / "latest.json").write_text("null")
    before = shutil.copytree(run, tmp_path / "before", symlinks=True)
    repaired(run)
    assert sorted(path.name for path in run.glob("step_*")) == [name(4), name(8)]
    undo(run)
    shutil.rmtree(run / ".quarantine")
    for path in before.iterdir():
        there = run / path.name
        assert there.lstat().st_mtime_ns == path.lstat().st_mtime_ns
        assert there.lstat().st_mode == path.lstat().st_mode
        assert there.is_symlink() or there.read_bytes() == path.read_bytes()
    assert sorted(os.listdir(run)) == sorted(os.listdir(before))
