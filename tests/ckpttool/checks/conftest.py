"""A healthy directory for each test of the checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ckpttool.checks.builders import point, put, step_bytes


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A healthy directory: steps 2, 4 and 6, the pointer at 6, modes fixed whatever the umask."""
    directory = tmp_path / "a run"
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)
    for step in (2, 4, 6):
        put(directory, step, step_bytes(step))
    point(directory, 6)
    return directory
