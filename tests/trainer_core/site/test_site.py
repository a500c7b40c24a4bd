"""Runs of several ranks, by torchrun, on gloo: exact, agreed, and of any size afterwards.

Each launch does many things, since starting torch in three processes is what costs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from ckpttool.checks.verify import verify
from tests.trainer_core.site import runs
from trainer_core import CheckpointError, CheckpointManager, CheckpointWarning

HERE = Path(__file__).parent
PATIENCE_S = 540
pytestmark = pytest.mark.filterwarnings("ignore::trainer_core.ResumeWarning")

Found = dict[str, dict[str, Any]]


def run(*command: str) -> None:
    """A program in a group of its own, of which nothing is left when it has ended or was given up."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    whole = [sys.executable, "-W", "ignore", *command]
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(
        whole,
        env=environment,
        stdin=nothing,
        stdout=nothing,
        stderr=pipe,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            errors = process.communicate(timeout=PATIENCE_S)[1]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors[-5000:]


def found_by(size: int, directory: Path) -> list[Found]:
    paths = [directory / f"found-{size}-{rank}.json" for rank in range(size)]
    return [json.loads(path.read_text()) for path in paths]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all processes of this test run, so that only one of them launches."""
    base = tmp_path_factory.getbasetemp()
    path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "site-runs"
    path.mkdir(exist_ok=True)
    return path


@pytest.fixture(scope="module")
def two(root: Path) -> list[Found]:
    with FileLock(f"{root}.lock"):
        if not (root / "found-2-0.json").exists():
            launch_two(root)
    return found_by(2, root)


def launch_two(root: Path) -> None:
    names = ["interrupted", "asynchronous", "signalled", "refused", "failing", "scaled"]
    scenarios = [f"{name}:{kind}" for kind in ("ddp", "fsdp") for name in names]
    scenarios += ["averaged:fsdp", "clocks:ddp", "locked:fsdp", "deleting:"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run(*torchrun, str(HERE / "worker.py"), str(root), ",".join(scenarios))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks(root: Path, two: list[Found], kind: str) -> None:
    """Cases B08, C19 and F05 among others: a signal to one rank stops both, after the same step."""
    for rank, found in enumerate(two):
        run = found[f"interrupted:{kind}"]
        for part in ("model", "optimizer"):
            assert run["by hand"][part] == run["whole"][part]
        # Also while rank 1 sees no file at all: the directory is rank 0's to judge.
        assert run["resumed"] == run["whole"], rank
        assert run["said"] == []
        # Global totals: two micro-batches of four samples on two ranks.
        assert run["whole"]["counts"] == [9, 9 * 2 * 4 * 2, 0]
        beside = found[f"asynchronous:{kind}"]
        parts = ("weights", "optimizer", "rng", "counts", *(("model",) if kind == "fsdp" else ()))
        for part in parts:
            assert beside["loaded"][part] == beside["saved"][part]
        signalled = {"steps": 4, "by": "signal SIGTERM", "code": 75}
        assert found[f"signalled:{kind}"] == signalled
    # Their own random numbers, by global rank.
    assert len({found[f"interrupted:{kind}"]["whole"]["rng"] for found in two}) == 2
    assert verify(root / kind).findings == []
    kept = sorted(path.name for path in (root / f"async-{kind}").glob("step_*"))
    assert [name[:17] for name in kept] == ["step_000000000004", "step_000000000006"]
    assert [path.name[:17] for path in (root / f"signal-{kind}").glob("step_*")] == [
        "step_000000000004"
    ]


def test_each_rank_records_its_shards(root: Path, two: list[Found]) -> None:
    """Saved on the caller's thread, and on the lane beside it."""
    for run in ("fsdp", "async-fsdp"):
        steps = sorted(path for path in (root / run).glob("step_*") if path.is_dir())
        assert steps
        for step in steps:
            for rank in range(2):
                saved = torch.load(step / f"rank_{rank:05d}.pt", weights_only=True)
                files = [path for path in step.glob("*.distcp") if path.name[2] == str(rank)]
                assert files
                assert saved["shards"] == {
                    path.name: {
                        "size": path.stat().st_size,
                        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                    }
                    for path in files
                }


@pytest.mark.parametrize("names", [["rank_00001.pt", "__1_0.distcp"], ["trainer.pt"]])
def test_a_step_mixed_of_two_runs_is_found(
    root: Path, two: list[Found], tmp_path: Path, names: list[str]
) -> None:
    """Of the same program, so that nothing else tells them apart."""
    mixed, step = tmp_path / "mixed", "step_000000000006"
    shutil.copytree(root / "fsdp" / step, mixed / step)
    assert verify(mixed).newest_valid == 6
    for name in names:
        shutil.copy(root / "async-fsdp" / step / name, mixed / step / name)
    report = verify(mixed)
    assert report.newest_valid is None
    assert "SHD110" in {finding.id for finding in report.findings}
    with pytest.raises(CheckpointError, match="SHD110|another save|not valid"):
        CheckpointManager(mixed).load_latest()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_what_one_rank_is_refused_all_raise(two: list[Found], kind: str) -> None:
    first, second = (found[f"refused:{kind}"] for found in two)
    assert first == second
    assert first["pointer"][0] == "WriteError" and "is a directory" in first["pointer"][1].lower()
    assert first["full 0"][0] == "WriteError" and "No space left" in first["full 0"][1]
    assert first["left 0"] == []
    if kind == "fsdp":  # replicated state is rank 0's to write
        assert first["full 1"][1].startswith("rank 1: ") and first["left 1"] == []


def test_the_clock_and_the_lock_are_those_of_rank_0(two: list[Found]) -> None:
    assert [found["clocks:ddp"]["saved"] for found in two] == [[3, 6], []]
    words = [found["locked:fsdp"]["words"] for found in two]
    assert words[0] == words[1]
    assert words[0][0] == "CheckpointError" and "a writer is at work here" in words[0][1]
    assert [found["locked:fsdp"]["left"] for found in two] == [[], []]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_callback_that_raises_on_one_rank_ends_the_others(two: list[Found], kind: str) -> None:
    for failed in (0, 1):
        found = [rank[f"failing:{kind}"][str(failed)] for rank in two]
        words = f"no words for rank {failed}"
        assert found[failed]["words"] == ["LookupError", words]
        other = found[1 - failed]
        line = f"rank {failed} failed after step 3: LookupError: {words}"
        assert other["words"] == ["RankError", line]
        assert found[0]["left"] == found[1]["left"] == []  # also of the step that was due
        # Progress is rank 0's to show; that nothing is saved is said where it failed, and beside.
        steps = [[line for line in rank["lines"] if line.startswith("step ")] for rank in found]
        assert len(steps[0]) == 3 and steps[1] == []
        assert "nothing is saved" in found[failed]["lines"][-1]
    for name, failed in (("every", 1), ("first", 0)):
        words = [rank[f"failing:{kind}"][name]["words"] for rank in two]
        assert words[failed] == ["LookupError", "no words"]
        assert words[1 - failed] == ["RankError", f"rank {failed}: LookupError: no words"]


FAILED = ("ddp:optimizer:1", "ddp:model:0", "fsdp:loader:1", "fsdp:on_save:0")
ENDED = ("fsdp:ends:0",)


def test_one_rank_fails_and_the_other_hears_of_it(tmp_path: Path) -> None:
    """While its process lives on; nothing but whole steps is on disk. C17: nobody makes a symlink."""
    run(str(HERE / "failed.py"), str(tmp_path), ",".join([*FAILED, *ENDED]))
    all_found = json.loads((tmp_path / "failed.json").read_text())
    for case, found in all_found.items():
        kind, part, number = case.split(":")
        failed = int(number)
        own, other = found[failed], found[1 - failed]
        assert not other["hung"], case
        if case in ENDED:  # all by agreement, after the same step
            assert [one["raised"] for one in found] == [None, None]
            assert [one["at"] for one in found] == [4, 4]
            assert all("ended after step 4" in one["log"] for one in found)
        else:
            kind, words = own["raised"]
            assert (kind, words.partition("\n")[0]) == ("LookupError", f"no {part} any more"), case
            line = f"rank {failed} failed after step 4: LookupError: no {part} any more"
            assert other["log"].splitlines()[0] == line, case
            # In the model's own exchange over gloo nothing can be raised: its process was ended.
            ended = part in ("model", "on_save")
            assert other.get("raised") == (None if ended else ["RankError", line]), case
        directory = tmp_path / case.replace(":", "-") / "run"
        names = {path.name for path in directory.iterdir()}
        steps = {name.partition(".")[0] for name in names if name.startswith("step_")}
        assert steps == {"step_000000000002", "step_000000000004"}, case
        assert names - {"latest.json", "manifest.jsonl", ".writer.lock"} == {
            name for name in names if name.startswith("step_")
        }, case
        report = verify(directory)
        assert report.newest_valid is not None and not report.findings, case


def test_sharded_averages(two: list[Found]) -> None:
    for found in (rank["averaged:fsdp"] for rank in two):
        assert found["resumed"] == found["whole"]
        assert found["within"] == found["average"] != found["model"] == found["after"]
        kind, words = found["not sharded"]
        assert kind == "ValueError" and "fully_shard on `ema.module`" in words


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_scaler_skips_on_all_ranks(two: list[Found], kind: str) -> None:
    found = [rank[f"scaled:{kind}"] for rank in two]
    # Three steps and the one that was skipped, of two micro-batches each.
    assert [one["calls"] for one in found] == [8, 8]
    assert found[0]["scales"] == found[1]["scales"] == [32768.0, 32768.0]  # torch's 65536, halved
    assert len({weights for one in found for weights in one["weights"]}) == 1


def test_two_processes_delete_the_same_steps(two: list[Found]) -> None:
    """Case D06: neither minds what the other was faster with, and nothing is left."""
    found = [rank["deleting:"] for rank in two]
    assert [one["known"] for one in found] == [80, 80]
    assert sum(one["deleted"] for one in found) == 80
    assert found[0]["left"] == []


def test_other_numbers_of_ranks(root: Path, two: list[Found]) -> None:
    """Cases F06 and, where fewer ranks save a step anew, D11."""
    of_three = "other_size:ddp,other_size:fsdp,again:fsdp"
    run(str(HERE / "worker.py"), str(root), f"3={of_three}", "1=other_size:plain,again:fsdp")
    three, (one,) = found_by(3, root), found_by(1, root)
    saved = {kind: two[0][f"interrupted:{kind}"]["whole"] for kind in ("ddp", "fsdp")}
    loaded = [found["other_size:" + kind] for found in three for kind in ("ddp", "fsdp")]
    for found in [*loaded, one["other_size:plain"]]:
        for kind, whole in saved.items():
            for part in ("model", "weights", "optimizer", "scheduler", "counts", "lr"):
                assert found[kind][part] == whole[part]
            assert found[kind]["goes on"] == 11
            assert len(found[kind]["said"]) == 1  # all in one warning
            assert "ranks: 2 saved, " in found[kind]["said"][0]
    # Who was there before goes on with its own random numbers, the new one has some of its own.
    numbers = [found["other_size:fsdp"]["fsdp"]["rng"] for found in three]
    assert numbers[:2] == [found["interrupted:fsdp"]["whole"]["rng"] for found in two]
    assert numbers[2] == three[2]["other_size:ddp"]["fsdp"]["rng"]
    assert len(set(numbers)) == 3
    assert one["other_size:plain"]["ddp"]["rng"] == numbers[0]
    assert "rank 2: new random numbers" in three[0]["other_size:ddp"]["ddp"]["said"][0]
    assert "random numbers of rank 1 are not gone on" in one["other_size:plain"]["ddp"]["said"][0]
    # Six batches of the pass were used on two ranks each.
    assert "batch 4 of the pass instead of 6" in three[0]["other_size:ddp"]["ddp"]["said"][0]
    assert "batch 12 of the pass instead of 6" in one["other_size:plain"]["ddp"]["said"][0]
    # A step that is saved anew by fewer ranks keeps no shard of those before.
    shards = [f"__{rank}_0.distcp" for rank in range(3)]
    ranks = [f"rank_{rank:05d}.pt" for rank in range(3)]
    files = three[0]["again:fsdp"]["files"]
    assert files == sorted([".metadata", *shards, *ranks, "trainer.pt"])
    files = one["again:fsdp"]["files"]
    assert files == [".metadata", shards[0], ranks[0], "trainer.pt"]
    for found in (three[0], one):
        assert found["again:fsdp"]["weights"] == saved["fsdp"]["weights"]
    assert verify(root / "again").findings == []


def damage(directory: Path, how: str) -> None:
    step = directory / "step_000000000009"
    shard = step / "__1_0.distcp"
    if how == "cut":
        os.truncate(shard, shard.stat().st_size - 100)
    elif how == "missing":
        shard.unlink()
    elif how == "flipped":
        data = bytearray(shard.read_bytes())
        at = data.index(b"data/0") + 200
        data[at] ^= 1
        shard.write_bytes(data)
    else:
        (step / how).unlink()


@pytest.mark.parametrize("how", ["cut", "missing", "flipped", ".metadata", "trainer.pt"])
def test_a_damaged_step_is_passed_over(
    root: Path, two: list[Found], tmp_path: Path, how: str
) -> None:
    """Cases C06 and D12."""
    shutil.copytree(root / "fsdp", tmp_path / "run")
    damage(tmp_path / "run", how)
    manager = CheckpointManager(tmp_path / "run", keep_last=1)
    with pytest.raises(CheckpointError, match=r"step_000000000009.*The newest valid step is 6"):
        manager.load_latest()
    with pytest.warns(CheckpointWarning, match="Loading step_000000000006 instead"):
        state = manager.load_latest(fallback=True)
    one = runs.trainer("plain", None)
    one.resume(state)  # type: ignore[arg-type]
    assert runs.weights(one) == two[0]["interrupted:fsdp"]["at the cut"]["weights"]
    # What does not open never pushes out what is good.
    manager.prune()
    assert (tmp_path / "run" / "step_000000000006").is_dir()


KILLS = {"ddp": "dry,0:9,0:20:all", "fsdp": "dry,1:9,0:60:all,0:70"}


def test_killed_in_the_midst_of_a_save(tmp_path: Path) -> None:
    """Cases D07 and D08: rank 0 alone gives the name, and what was being written is tidied up."""
    run(str(HERE / "killed.py"), str(tmp_path), *(f"{kind}={KILLS[kind]}" for kind in KILLS))
    for kind in KILLS:
        check_kills(tmp_path / f"killed-{kind}.json")


@pytest.mark.slow
def test_killed_at_operations_all_over_a_sharded_save(tmp_path: Path) -> None:
    points = [f"0:{number}" for number in range(30, 84, 11)]
    run(str(HERE / "killed.py"), str(tmp_path), ",".join(["fsdp=dry", *points]))
    check_kills(tmp_path / "killed-fsdp.json")


def check_kills(path: Path) -> None:
    found = json.loads(path.read_text())
    right = dict(line.split() for line in found["dry"]["acks"])
    assert list(right) == ["2", "4", "6"] and found["dry"]["ended"] == [0, 0]
    for point, one in found.items():
        if point == "dry":
            continue
        assert None not in one["ended"], f"{point}: a rank waits for one that is gone"
        assert 9 in one["ended"], f"{point}: nobody was killed"
        told = [int(line.split()[0]) for line in one["acks"]]
        if one["step"] is None:
            assert told == [], point
            continue
        # What was told to be safe is there; of what came after, all or nothing.
        assert one["step"] >= max(told, default=0), point
        assert one["bits"] == right[str(one["step"])], point
        strange = [name for name in one["then"] if name.startswith(".")]
        assert strange == [], f"{point}: left behind"


def test_the_memory_of_a_plain_run_stays_plain() -> None:
    """Without torchrun nothing of several ranks is in a checkpoint, and nothing of them imported."""
    one = runs.trainer("plain", None)
    one.fit(2)
    assert {"ranks", "sharded", "buffers"}.isdisjoint(one.state_dict())
    program = (
        "import sys, torch; before = set(sys.modules); import trainer_core; "
        "print([name for name in set(sys.modules) - before if name.startswith(("
        "'torch.distributed.checkpoint', 'torch.distributed.tensor', 'torch.distributed.fsdp'))])"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert done.stdout == "[]\n"
    assert torch.distributed.is_initialized() is False
