"""`make demo` shows what it says: a run that dies, is mended, and goes on to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_demo_ends_well(tmp_path: Path) -> None:
    run = tmp_path / "demo-run"
    home = Path(sys.executable).parent.parent
    done = subprocess.run(
        [ROOT / "scripts" / "demo.sh"],
        env={**os.environ, "DEMO_DIR": str(run), "VENV": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((run / "latest.json").read_text(encoding="utf-8"))["step"] == 100
    assert "[exit 137]" in done.stdout
