"""The command that a finding about the pointer names, carried out: nothing is wrong afterwards."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from ckpttool.checks.verify import verify
from ckpttool.cli.main import main
from ckpttool.findings import Finding
from tests.corrupt import append, corrupt, cut_end, flip_bit, zero_range

DEAD = "tmp-7000001"


class Run(NamedTuple):
    """A healthy run of step files, or of sharded steps; `steps` ascend, the pointer names the last.

    `recorded` is the file of the last step that records are of, `data` one that holds tensors.
    """

    path: Path
    steps: list[Path]

    @property
    def last(self) -> Path:
        return self.steps[-1]

    @property
    def recorded(self) -> Path:
        return self.last if self.last.suffix else self.last / ".metadata"

    def data(self, place: int = -1) -> Path:
        step = self.steps[place]
        return step if step.suffix else step / "__0_0.distcp"

    def point(self, step: int, file: str, **record: object) -> None:
        content = {"step": step, "file": file, **record}
        (self.path / "latest.json").write_text(json.dumps(content))


@pytest.fixture(params=["healthy", "sharded"])
def run(fixtures: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Run:
    path = Path(shutil.copytree(fixtures / request.param, tmp_path / "run"))
    return Run(path, sorted(path.glob("step_*")))


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _linked(run: Run) -> None:
    away = run.path.parent / "away"
    run.last.rename(away)
    run.last.symlink_to(away)


def _other_kind(run: Run) -> None:
    is_file = run.last.is_file()
    remove(run.last)
    run.last.mkdir() if is_file else run.last.touch()


def _whole_leftover_of_a_newer_step(run: Run) -> None:
    run.last.rename(run.path / f".{run.last.name}.{DEAD}")
    run.point(2, run.steps[0].name)


def _lost(run: Run, place: int) -> None:
    corrupt(run.data(place), zero_range, 2000, 3000)


def _older_lost(run: Run) -> None:
    _lost(run, 0)
    (run.path / "latest.json").unlink()


def _digest_of_another(run: Run) -> None:
    size = run.recorded.stat().st_size
    run.point(int(run.last.stem[5:]), run.last.name, size=size, sha256="0" * 64)


def _replaced_pointer(run: Run) -> None:
    (run.path / "latest.json").unlink()
    (run.path / "latest.json").mkdir()


# What was done to a run, and what its pointer's findings are then.
DAMAGE: dict[str, tuple[Callable[[Run], object], set[str]]] = {
    "no pointer": (lambda run: (run.path / "latest.json").unlink(), {"PTR101"}),
    "no pointer, an older step lost": (_older_lost, {"PTR101"}),
    "malformed": (lambda run: (run.path / "latest.json").write_text("{"), {"PTR102"}),
    "leads out": (lambda run: run.point(4, "../x.pt"), {"PTR103"}),
    "target is a link": (_linked, {"PTR103"}),
    "target is of the other kind": (_other_kind, {"PTR103"}),
    "behind": (lambda run: run.point(2, run.steps[0].name), {"PTR104"}),
    "target missing": (lambda run: remove(run.last), {"PTR105"}),
    "target has another name": (
        lambda run: run.last.rename(run.last.with_stem("step_000000000008")),
        {"PTR105"},
    ),
    "target missing, its leftover whole": (
        lambda run: run.last.rename(run.path / f".{run.last.name}.{DEAD}"),
        {"PTR105"},
    ),
    "contradicts itself": (lambda run: run.point(1, run.last.name), {"PTR106"}),
    "a bit of the target": (lambda run: corrupt(run.data(), flip_bit, 3000, 3), {"PTR107"}),
    "the target lost": (lambda run: _lost(run, -1), {"PTR107"}),
    "the target cut": (lambda run: corrupt(run.data(), cut_end, 900), {"PTR107"}),
    "a directory": (_replaced_pointer, {"PTR108"}),
    "another size": (lambda run: run.point(6, run.last.name, size=3), {"PTR109"}),
    "another digest": (_digest_of_another, {"PTR109"}),
    "a size that is none": (lambda run: run.point(6, run.last.name, size="3"), {"PTR109"}),
}


def told(run: Run) -> list[Finding]:
    return [one for one in verify(run.path).findings if one.id.startswith("PTR")]


def carry_out(remedy: str) -> None:
    program, verb, *rest = shlex.split(remedy)
    assert program == "ckpttool"
    more = ["--apply"] if verb == "repair" else []
    done = CliRunner().invoke(main, [verb, *rest, *more], catch_exceptions=False)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("name", list(DAMAGE))
def test_the_command_that_is_named_leaves_nothing_wrong(
    run: Run, name: str, tmp_path: Path
) -> None:
    damage, expected = DAMAGE[name]
    damage(run)
    findings = told(run)
    assert expected <= {one.id for one in findings}
    original = Path(shutil.copytree(run.path, tmp_path / "original", symlinks=True))
    for finding in findings:
        shutil.rmtree(run.path)
        shutil.copytree(original, run.path, symlinks=True)
        carry_out(str(finding.remedy))
        report = verify(run.path)
        wrong = [one for one in report.findings if one.severity.value != "info"]
        assert (wrong, report.could_not_check) == ([], False), finding.id


def test_the_newest_state_comes_back_where_a_leftover_has_it(run: Run) -> None:
    newest = int(run.last.stem[5:])
    _whole_leftover_of_a_newer_step(run)
    for at in ("malformed", "leads out", "no pointer", "contradicts itself"):
        DAMAGE[at][0](run)
        remedies = {one.remedy for one in told(run)}
        assert remedies == {f"ckpttool repair {run.path}"}, at
        run.point(2, run.steps[0].name)
    DAMAGE["malformed"][0](run)
    shown = CliRunner().invoke(main, ["inspect", str(run.path)]).output
    assert f"mend: ckpttool repair {run.path}" in shown
    carry_out(f"ckpttool repair {run.path}")
    assert verify(run.path).newest_valid == newest


def test_a_record_is_held_against_a_file_that_is_there_alone(run: Run) -> None:
    """Of metadata that is gone nothing can be compared: it is missing, and that is said."""
    run.point(6, run.last.name, size=5176, sha256="0" * 64)
    run.recorded.unlink()
    assert {one.id for one in told(run)} <= {"PTR105", "PTR106", "PTR107"}


@pytest.mark.parametrize("place", ["pointer behind", "no pointer"])
def test_no_verb_moves_past_a_step_that_nobody_can_check(run: Run, place: str) -> None:
    if run.last.suffix:
        pytest.skip("what is too large to be read is known to be no step file")
    os.truncate(run.recorded, 600 << 20)
    run.point(2, run.steps[0].name) if place == "pointer behind" else None
    if place == "no pointer":
        (run.path / "latest.json").unlink()
    name = run.last.name
    remedy = f"make {name} readable, or do without it: ckpttool rollback {run.path} --to 2"
    assert [one.remedy for one in told(run)] == ([] if place == "pointer behind" else [remedy])


def test_the_only_step_comes_back_where_it_can(run: Run) -> None:
    for step in run.steps[:-1]:
        remove(step)
    if run.last.suffix:
        corrupt(run.data(), append, bytes(64 << 10))  # which is left over when it is mended
        corrupt(run.data(), zero_range, run.data().stat().st_size - (65 << 10), 65 << 10)
        (finding,) = told(run)
        assert finding.remedy == f"ckpttool repair {run.path}"
        carry_out(str(finding.remedy))
        assert verify(run.path).newest_valid == 6
    else:
        corrupt(run.data(), zero_range, 2000, 3000)
        (finding,) = told(run)
        assert finding.remedy == "no step here is valid, so there is nothing to point at"
