"""Runs of several ranks, by torchrun, on gloo: exact, agreed, and of any size afterwards.

Each launch does many things, since starting torch in three processes is what costs.
"""

from __future__ import annotations

import json
import os
import shutil
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
WORKER = HERE / "worker.py"
pytestmark = pytest.mark.filterwarnings("ignore::trainer_core.ResumeWarning")

Found = dict[str, dict[str, Any]]


def launch(size: int, scenarios: list[str], directory: Path) -> list[Found]:
    """What each rank found."""
    command = [sys.executable, "-W", "ignore"]
    if size > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    command += [str(WORKER), ",".join(scenarios), str(directory)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-5000:]
    return found_by(size, directory)


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
            return launch_two(root)
    return found_by(2, root)


def launch_two(root: Path) -> list[Found]:
    names = ["interrupted", "asynchronous", "signalled", "refused"]
    scenarios = [f"{name}:{kind}" for kind in ("ddp", "fsdp") for name in names]
    return launch(2, [*scenarios, "clocks:ddp", "locked:fsdp"], root)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks(root: Path, two: list[Found], kind: str) -> None:
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


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_what_one_rank_is_refused_all_raise(two: list[Found], kind: str) -> None:
    first, second = (found[f"refused:{kind}"] for found in two)
    assert first == second
    assert first["pointer"][0] == "WriteError" and "Is a directory" in first["pointer"][1]
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


def test_other_numbers_of_ranks(root: Path, two: list[Found]) -> None:
    three = launch(3, ["other_size:ddp", "other_size:fsdp", "again:fsdp"], root)
    (one,) = launch(1, ["other_size:plain", "again:fsdp"], root)
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


KILLS = {"ddp": "dry,0:9,0:20:all", "fsdp": "dry,0:34,1:9,0:60:all,0:70"}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_killed_in_the_midst_of_a_save(tmp_path: Path, kind: str) -> None:
    check_kills(kind, tmp_path, KILLS[kind])


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, 1])
def test_killed_at_each_operation_of_a_sharded_save(tmp_path: Path, half: int) -> None:
    points = [f"0:{number}" for number in range(30 + half, 86, 4)]
    check_kills("fsdp", tmp_path, ",".join(["dry", *points]))


def check_kills(kind: str, directory: Path, points: str) -> None:
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(HERE / "killed.py"),
        kind,
        str(directory),
        points,
    ]
    devnull = subprocess.DEVNULL
    subprocess.run(command, check=True, timeout=300, stdin=devnull, stdout=devnull, stderr=devnull)
    found = json.loads((directory / f"killed-{kind}.json").read_text())
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


def test_two_processes_delete_the_same_steps(tmp_path: Path) -> None:
    """Neither minds what the other was faster with, and nothing is left."""
    for step in range(40):
        sharded = tmp_path / f"step_{step:012d}"
        sharded.mkdir()
        for name in ("__0_0.distcp", "__1_0.distcp", "trainer.pt", ".metadata"):
            (sharded / name).write_bytes(b"some bytes")
        (tmp_path / f"step_{step + 100:012d}.pt").write_bytes(b"some bytes")
    program = (
        "import sys; from pathlib import Path; from trainer_core.saving.retention import delete\n"
        "paths = sorted(Path(sys.argv[1]).glob('step_*'))\n"
        "print(len(paths), flush=True); sys.stdin.readline(); print(len(delete(paths)))"
    )
    pipe = subprocess.PIPE
    both = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)], stdin=pipe, stdout=pipe, text=True
        )
        for _ in range(2)
    ]
    try:
        for one in both:
            assert one.stdout is not None and one.stdout.readline() == "80\n"
        for one in both:
            assert one.stdin is not None
            one.stdin.write("go\n")
            one.stdin.flush()
        deleted = [int(one.communicate(timeout=120)[0]) for one in both]
    finally:
        for one in both:
            one.kill()
    assert [one.returncode for one in both] == [0, 0]
    assert sum(deleted) == 80 and os.listdir(tmp_path) == []


def test_the_memory_of_a_plain_run_stays_plain() -> None:
    """Without torchrun nothing of several ranks is in a checkpoint, and nothing of them imported."""
    one = runs.trainer("plain", None)
    one.fit(2)
    assert {"ranks", "sharded", "buffers"}.isdisjoint(one.state_dict())
    program = (
        "import sys, trainer_core; print([name for name in sys.modules if name.startswith("
        "('torch.distributed.checkpoint', 'torch.distributed.tensor', 'torch.distributed.fsdp'))])"
    )
    import_alone = [sys.executable, "-c", "import sys, torch; " + program.split("; ", 1)[1]]
    with_core, bare = (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for command in ([sys.executable, "-c", program], import_alone)
    )
    assert with_core == bare
    assert torch.distributed.is_initialized() is False
