"""What the tests of `repair` share: a healthy directory, and the pid of a process that has ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ckpttool.checks.builders import point, put, step_bytes


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A healthy directory: steps 2, 4 and 6, the pointer at 6."""
    directory = tmp_path / "run"
    directory.mkdir(mode=0o755)
    for step in (2, 4, 6):
        put(directory, step, step_bytes(step))
    point(directory, 6)
    (directory / "latest.json").chmod(0o644)
    return directory


@pytest.fixture(scope="module")
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid
