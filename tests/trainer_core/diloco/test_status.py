"""`python -m trainer_core.diloco status URL`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer_core.diloco.nodes import Node, new_model, replay, run
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
    (tmp_path / "hub/global" / f"model-{'0' * 11}2-{'a' * 16}.safetensors").write_bytes(b"1234567")
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
    assert document["stray"] == {"files": 1, "bytes": 7} and document["problems"] == []
    assert "\nstray          1 files, 7 B, that no commit names" in shown


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


def a_hub(path: Path) -> Node:
    """Of a master alone; commits 0, 1 and 2, the checkpoint is of the end."""
    store = Store.open(path)
    node = Node("m", "master", lambda: store, steps=4)
    run([node])
    assert [entry.name[:12] for entry in store.entries("global/commits")][-1] == f"{2:012d}"
    return node


DAMAGE = {
    "model missing": "the global model of outer step 2, NAME, is missing",
    "model cut": "the global model of outer step 2, NAME, has 9 bytes where SIZE were committed",
    "model rubbish": "the global model of outer step 2, NAME, can't be read: says that its header",
    "model pipe": "the global model of outer step 2, NAME, can't be read, and has to be removed",
    "momentum missing": "the outer momentum of outer step 2, NAME, is missing",
    "old commit": "global/commits/000000000001.json is no JSON, or not wholly written yet; it is",
    "half a commit": "global/commits/000000000003.json is half a commit: nobody takes it for one",
    "gap": "the log in global/commits lacks outer step 1: what was applied there can't be looked up",
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_said_with_what_mends_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    hub = tmp_path / "hub"
    node = a_hub(hub)
    kind = how.partition(" ")[0]
    file = next((hub / "global").glob(f"{kind}-{2:012d}-*"), hub)
    size = file.stat().st_size
    if how.endswith(("missing", "pipe")):
        file.unlink()
        if how.endswith("pipe"):
            os.mkfifo(file)
    elif kind == "model":
        file.write_bytes(b"\xff" * (9 if how == "model cut" else size))
    elif how == "gap":
        (hub / "global/commits" / f"{1:012d}.json").unlink()
    else:
        (hub / "global/commits" / f"{1 if kind == 'old' else 3:012d}.json").write_text('{"form')
    assert main(["status", str(hub)]) == 1
    shown = capsys.readouterr().out
    words = DAMAGE[how].replace("NAME", f"global/{file.name}").replace("SIZE", str(size))
    assert f"\nproblem        {words}" in shown
    assert main(["status", str(hub), "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["problems"]) == (2 if kind[:2] == "mo" else 1)
    if how == "model pipe":
        file.unlink()  # as it says
    if kind in ("model", "momentum"):
        assert (
            "one that is resumed from its own checkpoint of that outer step writes these" in shown
        )
        assert main(["serve", str(hub), "--once"]) == 3
        assert capsys.readouterr().err.startswith("error: ")
        # As it says: the master's checkpoint has that outer state, and puts the file back.
        node.steps += 1
        run([node])
        assert main(["status", str(hub)]) == 0
        replay(Store.open(hub), new_model().state_dict())


def test_a_pointer_to_a_commit_that_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_hub(tmp_path)
    (tmp_path / "global/commits" / f"{2:012d}.json").unlink()
    assert main(["status", str(tmp_path)]) == 3
    assert "names an outer step whose commit is not in global/commits" in capsys.readouterr().err


def test_the_command_itself_has_help_with_an_example(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainer_core.diloco", "status"]
    helped = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    assert "python -m trainer_core.diloco status /mnt/shared/run7" in helped.stdout
    failed = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True)
    assert failed.returncode == 3
    assert "nothing of an outer loop is at" in failed.stderr
    assert "Traceback" not in failed.stderr
