"""Files that torch has written for these tests, and a way to ask torch what it loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent

Job = dict[str, Any]
Asking = Callable[[list[Job]], list[list[str]]]


def run(script: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what `torch_makes.py` makes."""
    home = tmp_path_factory.mktemp("torch made")
    run("torch_makes.py", str(home))
    return home


@pytest.fixture
def ask_torch(tmp_path: Path) -> Asking:
    """Runs the jobs of `torch_compares.py`; gives the complaints of each."""

    def ask(jobs: list[Job]) -> list[list[str]]:
        (tmp_path / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
        run("torch_compares.py", str(tmp_path / "jobs.json"), str(tmp_path / "answers.json"))
        answers = json.loads((tmp_path / "answers.json").read_text(encoding="utf-8"))
        assert len(answers) == len(jobs)
        return list(answers)

    return ask


@pytest.fixture
def complaints(ask_torch: Asking) -> Callable[[list[Job]], dict[str, list[str]]]:
    """The same, by the name of the new file, without the jobs of which torch has none."""

    def ask(jobs: list[Job]) -> dict[str, list[str]]:
        answers = zip(jobs, ask_torch(jobs), strict=True)
        return {f"{job['kind']} {job['old']}": said for job, said in answers if said}

    return ask
