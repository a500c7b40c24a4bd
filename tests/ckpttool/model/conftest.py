"""What torch finds in the corpus and in files of its own, asked once in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


class Said(dict[str, dict[str, Any]]):
    """torch's answers by the path of each file; those that it wrote itself lie in `folder`."""

    folder: Path

    def new(self, name: str) -> tuple[Path, dict[str, Any]]:
        """A file that torch has written for the tests, and what it finds in it."""
        path = self.folder / name
        return path, self[str(path)]


@pytest.fixture(scope="session")
def torch_says(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Said:
    """See `torch_says.py`."""
    home = tmp_path_factory.mktemp("torch says")
    files = [str(path) for path in sorted(corpus.rglob("*")) if path.is_file()]
    script = str(Path(__file__).with_name("torch_says.py"))
    command = [sys.executable, script, str(home / "answers.json"), str(home), *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = Said(json.loads((home / "answers.json").read_text(encoding="utf-8")))
    said.folder = home
    return said
