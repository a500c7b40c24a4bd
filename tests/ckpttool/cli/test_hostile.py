"""Hostile files: every verb names them, none runs them, none takes them for a good step."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.ckpttool.cli.support import ckpttool, ckpttool_json, make_run, names, write_pointer


class Touch:
    """Unpickled, it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = make_run(tmp_path / "run", 2)
    content = {"step": 4, "model": {}, "evil\x1b[2J": Touch(tmp_path / "ran")}
    with zipfile.ZipFile(run / "step_000000000004.pt", "w") as archive:
        archive.writestr("a/data.pkl", pickle.dumps(content, 2))
        archive.writestr("a/version", "3\n")
    write_pointer(run, 4)
    return run


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["inspect", "run"], 1),
        (["inspect", "run/step_000000000004.pt"], 1),
        (["inspect", "run/step_000000000004.pt", "--tree"], 1),
        (["inspect", "run/step_000000000004.pt", "--globals"], 1),
        (["inspect", "run/step_000000000004.pt", "--json"], 1),
        (["verify", "run"], 1),
        (["verify", "run/step_000000000004.pt"], 1),
        (["latest", "run"], 0),
        (["fix-pointer", "run", "--step", "4"], 4),
        (["copy", "run", "b.pt", "--step", "4"], 4),
        (["prune", "run", "--keep-last", "1", "--yes"], 0),
    ],
)
def test_nothing_is_run(tmp_path: Path, run: Path, arguments: list[str], code: int) -> None:
    done = ckpttool(*arguments, cwd=tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert names(tmp_path) == ["run"]
    assert len(list(run.glob("*.pt"))) == 2


def test_it_is_called_dangerous(run: Path) -> None:
    shown = ckpttool("inspect", run / "step_000000000004.pt").stdout
    assert "dangerous" in shown
    assert "weights_only=False runs code that the file chooses" in shown
    document = ckpttool_json("inspect", run, code=1)
    assert [step["state"] for step in document["steps"]] == ["valid", "dangerous"]


def test_the_run_is_mended(run: Path) -> None:
    assert ckpttool("fix-pointer", run).returncode == 0
    assert ckpttool("latest", run).stdout.endswith("step_000000000002.pt\n")
