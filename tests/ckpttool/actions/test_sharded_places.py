"""Files of sharded steps under wrong names: known by what is recorded of them, and moved back."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from ckpttool.actions.journal.operations import history
from ckpttool.actions.repair.deeds import Options
from ckpttool.actions.repair.run import Repair
from ckpttool.checks.verify import verify
from ckpttool.cli.main import main
from ckpttool.errors import RefusedError
from ckpttool.findings import Finding
from tests.corrupt import corrupt, flip_bit
from tests.crash import CrashRig
from tests.power_cut import PRESETS, State, look_at_states, snapshot

TWO, FOUR = (f"step_{step:012d}" for step in (2, 4))
LEFTOVER = f".{FOUR}.tmp-7000001-5f0e"
ONE, OTHER = "__0_0.distcp", "__1_0.distcp"


@pytest.fixture
def run(fixtures: Path, tmp_path: Path) -> Path:
    """Two healthy sharded steps, the pointer at the second, with the digest of its metadata."""
    return Path(shutil.copytree(fixtures / "sharded", tmp_path / "run"))


@pytest.fixture(scope="module")
def rig() -> Iterator[CrashRig]:
    with CrashRig("ckpttool.cli.main:main") as opened:
        yield opened


def call(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(main, [str(one) for one in arguments], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.output


def content(path: Path) -> dict[str, bytes]:
    """Every file below a directory, but for what operations have noted."""
    return {
        str(one.relative_to(path)): one.read_bytes()
        for one in sorted(path.rglob("*"))
        if one.is_file() and ".quarantine" not in one.parts and ".writer.lock" not in one.name
    }


def found(run: Path) -> list[Finding]:
    return [finding for finding in verify(run).findings if finding.id == "SHD114"]


def exchange(one: Path, other: Path) -> None:
    away = one.with_name("away")
    one.rename(away)
    other.rename(one)
    away.rename(other)


def _three(run: Path) -> None:
    """`.metadata` and both shards, each under the name of the next."""
    names = (".metadata", ONE, OTHER)
    for name in names:
        (run / FOUR / name).rename(run / FOUR / f"{name}.away")
    for name, own in zip(names, (*names[1:], names[0]), strict=True):
        (run / FOUR / f"{own}.away").rename(run / FOUR / name)


def _damaged_beside_backup(run: Path) -> None:
    shutil.copy2(run / FOUR / ".metadata", run / FOUR / ".metadata.bak")
    corrupt(run / FOUR / ".metadata", flip_bit, 900, 3)


def _hostile_beside_backup(run: Path) -> None:
    shutil.copy2(run / FOUR / ".metadata", run / FOUR / ".metadata.bak")
    (run / FOUR / ".metadata").write_bytes(b"\x80\x02cposix\nsystem\nX\x01\0\0\0:\x85R.")


def _shard_in_leftover(run: Path) -> None:
    (run / LEFTOVER).mkdir()
    for name in (ONE, OTHER):
        (run / FOUR / name).rename(run / LEFTOVER / name)


def _linked(run: Path) -> None:
    (run / FOUR / OTHER).rename(run / FOUR / "kept")
    (run / FOUR / OTHER).symlink_to("kept")


def _same_times(run: Path) -> None:
    """As an archive without fractions of seconds brings them: no time tells one from another."""
    exchange(run / FOUR / ONE, run / TWO / ONE)
    for step in (TWO, FOUR):
        os.utime(run / step / ONE, (1_700_000_000, 1_700_000_000))


Damage = Callable[[Path], object]
METADATA = f"{FOUR}/.metadata"
SAME = "by the size and SHA-256 that are recorded of it"
CASES: dict[str, tuple[Damage, dict[str, str]]] = {
    "two shards exchanged": (
        lambda run: exchange(run / FOUR / ONE, run / FOUR / OTHER),
        {
            f"{FOUR}/{ONE}": f"{ONE} and {OTHER} are exchanged: each is, by size and SHA-256, the other"
        },
    ),
    "three files have each other's names": (
        _three,
        {
            METADATA: "3 files have each other's names, by size and SHA-256: .metadata,"
            f" {ONE}, {OTHER}"
        },
    ),
    "metadata as a writer leaves it": (
        lambda run: (run / METADATA).rename(run / f"{METADATA}.tmp"),
        {METADATA: f"it lies here as .metadata.tmp, {SAME}"},
    ),
    "metadata damaged, a copy beside it": (
        _damaged_beside_backup,
        {METADATA: f"it lies here as .metadata.bak, {SAME}"},
    ),
    "metadata hostile, a copy beside it": (
        _hostile_beside_backup,
        {METADATA: f"it lies here as .metadata.bak, {SAME}"},
    ),
    "a link in a shard's place": (_linked, {f"{FOUR}/{OTHER}": f"it lies here as kept, {SAME}"}),
    "both shards in a leftover": (
        _shard_in_leftover,
        {FOUR: f"2 files of the step lie in {LEFTOVER}, by size and SHA-256: {ONE}, {OTHER}"},
    ),
    "shards of two steps exchanged": (
        _same_times,
        {
            f"{FOUR}/{ONE}": f"it lies in {TWO}, {SAME}",
            f"{TWO}/{ONE}": f"it lies in {FOUR}, {SAME}",
        },
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_repair_moves_files_back_that_are_proven_and_undo_takes_it_back(
    run: Path, name: str
) -> None:
    damage, words = CASES[name]
    whole = content(run)
    damage(run)
    damaged = content(run)
    told = found(run)
    assert {str(Path(one.place.path).relative_to(run)): one.words for one in told} == words
    assert {one.remedy for one in told} == {f"ckpttool repair {run}"}
    call("repair", run, code=1)
    assert content(run) == damaged
    call("repair", run, "--apply")
    assert content(run) == whole
    assert not verify(run).findings
    call("undo", run)
    assert content(run) == damaged


def test_findings_say_the_same_of_the_step_by_itself(run: Path) -> None:
    exchange(run / FOUR / ONE, run / FOUR / OTHER)
    for path in (run / FOUR, f"{run / FOUR}/"):
        report = verify(path)
        (one,) = report.findings
        assert (one.id, one.remedy) == ("SHD114", f"ckpttool repair {run}")
        assert [file.state for file in report.files] == ["damaged"]
    assert f"{run / TWO}\n" in call("latest", run)


def _other_bytes(run: Path) -> None:
    (run / METADATA).rename(run / f"{METADATA}.bak")
    corrupt(run / f"{METADATA}.bak", flip_bit, 900, 3)


def _nothing_recorded(run: Path) -> None:
    (run / METADATA).rename(run / f"{METADATA}.bak")
    (run / "latest.json").write_text(json.dumps({"step": 4, "file": FOUR}))


@pytest.mark.parametrize("damage", [_other_bytes, _nothing_recorded])
def test_nothing_is_moved_that_no_record_proves(run: Path, damage: Damage) -> None:
    damage(run)
    assert not found(run)
    call("repair", run, "--apply")
    assert [file.name for file in verify(run).files] == [TWO]


def test_nothing_is_taken_from_where_it_may_belong(run: Path) -> None:
    """Two steps may have the same shard, as of weights that do not change."""
    shutil.copy(run / FOUR / ONE, run / TWO / ONE)
    (run / TWO / "rank_00000.pt").unlink()  # which would tell whether it is that of step 2
    (run / FOUR / ONE).unlink()
    assert not found(run)
    (run / TWO / ONE).rename(run / LEFTOVER.replace(FOUR, TWO))
    assert not found(run)


def test_what_is_found_is_said_also_where_more_is_lost(run: Path) -> None:
    exchange(run / FOUR / ONE, run / FOUR / OTHER)
    (run / FOUR / "rank_00001.pt").unlink()
    before = content(run)
    report = verify(run)
    # Of shard 1 nothing is recorded any more: only shard 0 is known for what it is.
    told = {one.id: one.remedy for one in report.findings if one.severity.value == "error"}
    assert {"SHD110", "SHD114"} <= set(told) and set(told.values()) == {f"ckpttool repair {run}"}
    call("repair", run, "--apply")
    assert [file.name for file in verify(run).files] == [TWO]
    call("undo", run)
    assert content(run) == before


def test_only_shards_leaves_all_else_alone(run: Path) -> None:
    exchange(run / FOUR / ONE, run / FOUR / OTHER)
    whole = content(run / TWO)
    (run / TWO / "trainer.pt").unlink()
    call("repair", run, "--apply", "--only", "shards", code=1)
    assert {file.name: file.state for file in verify(run).files} == {
        TWO: "incomplete",
        FOUR: "valid",
    }
    assert content(run / TWO).keys() == whole.keys() - {"trainer.pt"}
    call("undo", run)
    call("repair", run, "--apply", "--only", "set-aside,pointer", code=1)
    assert found(run)


@pytest.mark.parametrize("name", ["two shards exchanged", "both shards in a leftover"])
def test_killed_at_any_moment_it_is_finished_or_taken_back(
    rig: CrashRig, run: Path, tmp_path: Path, name: str
) -> None:
    whole = content(run)
    CASES[name][0](run)
    original = Path(shutil.copytree(run, tmp_path / "original"))
    damaged = content(run)
    arguments = ["repair", str(run), "--apply"]
    operations = rig.run(arguments)
    assert operations.code == 0
    for at in range(0, len(operations.ops), 2):
        shutil.rmtree(run)
        shutil.copytree(original, run)
        assert rig.run(arguments, kill_at=at).killed
        if at % 4 and rig.run(["undo", str(run)]).code == 0:
            assert content(run) == damaged, at
        else:
            assert rig.run(arguments).code == 0, at
            assert content(run) == whole, at


def test_a_killed_undo_is_finished(rig: CrashRig, run: Path, tmp_path: Path) -> None:
    exchange(run / FOUR / ONE, run / FOUR / OTHER)
    damaged = content(run)
    original = Path(shutil.copytree(run, tmp_path / "original"))
    call("repair", run, "--apply")
    operations = rig.run(["undo", str(run)])
    assert operations.code == 0
    for at in range(1, len(operations.ops), 3):
        shutil.rmtree(run)
        shutil.copytree(original, run)
        call("repair", run, "--apply")
        assert rig.run(["undo", str(run)], kill_at=at).killed
        rig.run(["undo", str(run)])  # nothing is left to do where it was through
        assert content(run) == damaged, at


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", ["two shards exchanged", "metadata damaged, a copy beside it"])
def test_a_power_cut_loses_nothing(
    rig: CrashRig, run: Path, tmp_path: Path, name: str, preset: str
) -> None:
    whole = content(run)
    CASES[name][0](run)
    damaged = content(run)
    before = snapshot(run)
    done = rig.run(["repair", str(run), "--apply"], record=True)
    assert done.code == 0

    def look(cut: Path, state: State) -> list[str]:
        twice = tmp_path / "twice"
        state.put(twice)  # again, as a copy would make two files of one with two names
        call("repair", cut, "--apply")
        found = [] if content(cut) == whole else [f"cut {state.cut}: not mended"]
        begun = [one.state for one in history(twice) if one.state in ("finished", "unfinished")]
        if begun:
            call("undo", twice)
            found += [] if content(twice) == damaged else [f"cut {state.cut}: not taken back"]
        shutil.rmtree(twice)
        return found

    counted = look_at_states(done.ops, run, preset, look, every=3, before=before)
    assert counted.faults == []
    assert counted.looked_at > 2


def test_a_file_that_was_changed_meanwhile_stands_in_the_way_of_undo(run: Path) -> None:
    (run / METADATA).rename(run / f"{METADATA}.tmp")
    call("repair", run, "--apply")
    (run / f"{METADATA}.tmp").write_bytes(b"mine")
    shown = call("undo", run, code=4)
    assert f"another file is at {FOUR}/.metadata.tmp by now" in " ".join(shown.split())
    assert (run / f"{METADATA}.tmp").read_bytes() == b"mine"


def test_nothing_is_moved_that_was_written_over_since_it_was_looked_at(run: Path) -> None:
    exchange(run / FOUR / ONE, run / FOUR / OTHER)
    work = Repair(str(run), Options())
    assert work.make_plan().deeds
    corrupt(run / FOUR / ONE, flip_bit, 3000, 3)
    damaged = content(run)
    with pytest.raises(RefusedError, match="changed since it was looked at"):
        work.carry_out()
    assert content(run) == damaged


def _step_of_many_shards(fixtures: Path, folder: Path, count: int) -> Path:
    """A sharded step of as many ranks, each with a shard of its own of one tensor."""
    import torch
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    step = folder / FOUR
    step.mkdir(parents=True)
    healthy = fixtures / "sharded" / FOUR
    trainer = torch.load(healthy / "trainer.pt", weights_only=True)
    own = torch.load(healthy / "rank_00000.pt", weights_only=True)
    chunks, places = [], {}
    for rank in range(count):
        name, offset = f"__{rank}_0.distcp", torch.Size((2 * rank,))
        torch.save(torch.full((2,), float(rank)), step / name)
        data = (step / name).read_bytes()
        chunks.append(dcp.ChunkStorageMetadata(offset, torch.Size((2,))))
        places[dcp.MetadataIndex("model.t", offset, rank)] = _StorageInfo(name, 0, len(data))
        digest = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        own |= {"rank": rank, "world_size": count, "shards": {name: digest}}
        torch.save(own, step / f"rank_{rank:05d}.pt")
    properties = dcp.TensorProperties(dtype=torch.float32)
    tensor = dcp.TensorStorageMetadata(properties, torch.Size((2 * count,)), chunks)
    names = {"model.t": ("model", "t")}
    content = dcp.Metadata({"model.t": tensor}, names, places, dcp.StorageMeta(FOUR), None)
    (step / ".metadata").write_bytes(pickle.dumps(content, 4))
    trainer["sharded"] = {"world_size": count, "files": ["trainer.pt"]}
    torch.save(trainer, step / "trainer.pt")
    return step


def test_more_shards_than_findings_name_come_back(fixtures: Path, tmp_path: Path) -> None:
    """Of one kind of finding not more than fifty are listed. Names as they are sorted as text."""
    step = _step_of_many_shards(fixtures, tmp_path / "run", 70)
    assert [file.state for file in verify(step).files] == ["valid"]
    whole = content(step)
    names = sorted(name for name in whole if name.startswith("__"))
    for name in names:
        (step / name).rename(step / f"{name}.away")
    for name, other in zip(names, [*names[1:], names[0]], strict=True):
        (step / f"{other}.away").rename(step / name)
    (one,) = (one for one in verify(step).findings if one.severity.value == "error")
    words = "70 files have each other's names, by size and SHA-256"
    assert one.words == f"{words}: {', '.join(names[:3])} and 67 more"
    call("repair", step.parent, "--apply")
    assert content(step) == whole
