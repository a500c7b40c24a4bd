"""`python -m trainer_core.diloco status URL`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer_core.diloco.nodes import Node, run
from trainer_core.diloco import Store
from trainer_core.diloco.__main__ import main


def test_it_shows_what_a_person_wants_to_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = str(tmp_path / "hub")
    run(
        [
            Node(n, r, lambda: Store.open(hub), steps=5)
            for n, r in (("m", "master"), ("w", "worker"))
        ]
    )
    bad = tmp_path / "hub/nodes/w/delta_8.safetensors"
    bad.write_bytes(b"\xff" * 50)
    assert main(["status", hub]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert lines[0].split() == ["Hub", hub]
    assert "by m:" in lines[1]
    assert any(line.startswith("master         m, fencing number 1, has stopped") for line in lines)
    assert "\nw: the header of its newest delta can't be read: says that its header" in shown
    assert main(["status", hub, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["outer_step"] == document["pointer"]["outer_step"] == 3
    by_name = {node["node_id"]: node for node in document["nodes"]}
    assert (by_name["m"]["last_step"], by_name["m"]["dealt_with"]) == (5, 5)
    assert (by_name["m"]["base_outer_step"], by_name["m"]["lag"]) == (2, 1)
    assert by_name["w"]["last_step"] == 8
    assert by_name["w"]["problem"]
    sizes = [path.stat().st_size for path in (tmp_path / "hub/nodes").rglob("*.safetensors")]
    assert document["node_bytes"] == sum(sizes)


def test_what_cannot_be_read_is_one_line_and_code_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "log/global").mkdir(parents=True)
    (tmp_path / "log/global/step_count.json").write_text('{"outer_step": 1, "model_file": "../x"}')
    for url in ("nowhere", "file", "log", "gopher://x"):
        place = url if "://" in url else str(tmp_path / url)
        assert main(["status", place, "--attempts", "1"]) == 3
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("error: ")
        assert said.err.count("\n") == 1


def test_the_command_itself_has_help_with_an_example(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainer_core.diloco", "status"]
    helped = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    assert "python -m trainer_core.diloco status /mnt/shared/run7" in helped.stdout
    failed = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True)
    assert failed.returncode == 3
    assert "nothing of an outer loop is at" in failed.stderr
    assert "Traceback" not in failed.stderr
