"""What each verb says of a path that is a part of a sharded step, or a lone directory of shards."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from ckpttool.cli.main import main

FOUR = "step_000000000004"


@pytest.fixture
def run(fixtures: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(fixtures / "sharded", tmp_path / "run"))


def call(*arguments: object, code: int = 0) -> str:
    """The output as one line: messages are wrapped to the terminal."""
    done = CliRunner().invoke(main, [str(one) for one in arguments], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return " ".join(done.output.split())


OPTIONS = {
    "export": ("-o", "out.safetensors"),
    "mend": ("-o", "out.pt"),
    "slim": ("-o", "out.pt"),
    "harden": ("-o", "out.pt"),
    "rollback": ("--to", "2"),
    "prune": ("--keep-last", "1"),
}


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize(
    ("verb", "says"),
    [
        *((verb, f"{verb} {{step}}") for verb in ("latest", "export")),
        *((verb, "verify {step}") for verb in ("mend", "slim", "harden")),
        *((verb, f"{verb} {{run}}") for verb in ("repair", "rollback", "prune", "fix-pointer")),
    ],
)
def test_a_part_of_a_step_leads_to_the_step(run: Path, name: str, verb: str, says: str) -> None:
    step = run / FOUR
    told = call(verb, step / name, *OPTIONS.get(verb, ()), code=2)
    command = says.format(step=step, run=run)
    assert f"{step / name} is a part of the sharded step {step}: ckpttool {command}" in told


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("verb", ["verify", "inspect"])
def test_what_a_part_is_is_shown_and_of_which_step(run: Path, name: str, verb: str) -> None:
    step = run / FOUR
    told = call(verb, step / name, code=1)
    assert "FIL106" in told
    assert f"it is a part of the sharded step {step} mend: ckpttool verify {step} " in told
    alone = shutil.copy(step / name, run / name)  # astray among steps
    assert "sharded step" not in call(verb, alone, code=1)


def test_a_part_is_no_source_of_a_copy(run: Path, tmp_path: Path) -> None:
    told = call("copy", run / FOUR / ".metadata", tmp_path / "out", code=2)
    assert f"ckpttool copy {run / FOUR}" in told
    assert not (tmp_path / "out").exists()


def test_other_files_of_these_names_are_themselves(run: Path, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"mine")
    assert "sharded step" not in call("verify", tmp_path / ".metadata", code=1)
    call("verify", run / FOUR / "trainer.pt")
    call("inspect", run / FOUR / "rank_00000.pt")
    call("verify", run / FOUR / "__7_0.distcp", code=3)


def test_a_copy_to_a_folder_that_is_not_there_says_so(run: Path, tmp_path: Path) -> None:
    told = call("copy", run, tmp_path / "a" / "b", code=3)
    assert f"{tmp_path / 'a'}: does not exist: make it first" in told
    (tmp_path / "a").write_bytes(b"")
    assert f"{tmp_path / 'a'}: is not a directory" in call("copy", run, tmp_path / "a/b", code=3)


RUN_VERBS = ["repair", "fix-pointer", "prune", "rollback", "undo", "history", "purge"]


@pytest.mark.parametrize("verb", RUN_VERBS)
def test_verbs_of_a_run_say_so_of_one_checkpoint(run: Path, fixtures: Path, verb: str) -> None:
    told = call(verb, f"{run / FOUR}/", *OPTIONS.get(verb, ()), code=2)
    assert f"{verb} takes a run's directory: ckpttool {verb} {run}" in told
    plain = fixtures / "corpus" / "torch-2.13.0" / "dcp_single"
    told = call(verb, plain, *OPTIONS.get(verb, ()), code=2)
    assert "one checkpoint, a directory of torch.distributed.checkpoint" in told
    assert f"ckpttool verify {plain} says whether it is whole" in told


def test_other_verbs_on_a_directory_of_shards_under_any_name(
    fixtures: Path, tmp_path: Path
) -> None:
    plain = Path(shutil.copytree(fixtures / "corpus/torch-2.13.0/dcp_single", tmp_path / "mine"))
    assert "1 intact" in call("verify", plain)
    assert "torch.distributed.checkpoint.load" in call("inspect", plain)
    call("export", plain, "-o", tmp_path / "out.safetensors")
    for verb in ("latest", "copy"):
        more = [tmp_path / "out"] if verb == "copy" else []
        told = call(verb, plain, *more, code=2)
        assert f"{verb} takes steps, which are named step_<12 digits>" in told
    (plain / "__0_0.distcp").unlink()
    for verb in ("verify", "inspect"):
        told = call(verb, plain, code=1)
        assert "SHD103" in told
        assert "mend: copy it again from its source: nothing mends it here" in told


def test_a_shard_astray_does_not_make_a_step_of_a_run(run: Path) -> None:
    (run / "__5_0.distcp").write_bytes(b"")
    told = call("verify", run)
    assert "newest valid step: 4" in told and "__5_0.distcp" in told
    call("history", run)
