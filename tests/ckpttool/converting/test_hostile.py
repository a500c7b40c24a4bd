"""Hostile files: nothing of theirs is run, and nothing that could run goes over into a new file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ckpttool.converting.export import plan_export
from ckpttool.converting.harden import plan_harden
from ckpttool.converting.slim import plan_slim
from ckpttool.errors import CkptToolError, RefusedError
from ckpttool.model.checkpoint import open_checkpoint
from tests.ckpttool.converting.conftest import Job

HOSTILE = Path(__file__).parents[3] / "fixtures" / "hostile-files"
FILES = sorted(HOSTILE.glob("*.pt"))
# Sound as archives, with plain content beside what is hostile.
LEAVES_SOMETHING = {
    "cyclic.pt", "doubling.pt", "escape-names.pt", "getattr-chain.pt", "inst-opcode.pt", "newobj-opcode.pt",
    "obj-opcode.pt", "outside-names.pt", "pickle-in-pickle.pt", "reduce-eval.pt", "reduce-os-system.pt",
    "reduce-posix-system.pt", "second-pickle.pt", "stack-global.pt", "unreferenced-record.pt", "build-opcode.pt",
}  # fmt: skip


def test_only_plain_content_goes_over(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    complaints: Callable[[list[Job]], dict[str, list[str]]],
) -> None:
    monkeypatch.chdir(tmp_path)
    jobs: list[Job] = []
    for path in FILES:
        out = tmp_path / f"new-{path.name}"
        try:
            with plan_harden(str(path)) as plan:
                if plan.refused:
                    with pytest.raises(RefusedError):
                        plan.write(str(out))
                plan.write(str(out), allow_loss=True)
        except CkptToolError:
            assert not out.exists()
            continue
        jobs.append({"kind": "harden", "old": path.name, "new": str(out), "only": True})
        with open_checkpoint(str(out)) as checkpoint:
            assert checkpoint.trust.value == "torch-safe"
            assert not [one for one in checkpoint.anomalies if "pickle" in one.code]
    assert {job["old"] for job in jobs} == LEAVES_SOMETHING
    assert complaints(jobs) == {}
    assert not (tmp_path / "hostile-fixture-ran.txt").exists()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.stem))
def test_slim_and_export_write_nothing_that_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("slim", "export"):
        out = tmp_path / name
        try:
            with plan_slim(str(path)) if name == "slim" else plan_export(str(path)) as plan:
                plan.write(str(out))
        except CkptToolError:
            assert not out.exists()
            continue
        with open_checkpoint(str(out)) as checkpoint:
            assert checkpoint.trust.value != "dangerous"
            assert not [one for one in checkpoint.anomalies if "pickle" in one.code]
    assert not (tmp_path / "hostile-fixture-ran.txt").exists()
