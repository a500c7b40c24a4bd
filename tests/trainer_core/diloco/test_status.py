"""`python -m trainer_core.diloco status URL`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.trainer_core.diloco.nodes import Node, new_model, replay, run
from trainer_core.diloco import Store
from trainer_core.diloco.__main__ import main
from trainer_core.diloco.commits import CommitLog


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
    (tmp_path / "hub/nodes/w/delta_07.safetensors").write_bytes(b"whose?")
    assert main(["status", hub]) == 1
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert lines[0].split() == ["Hub", hub]
    assert "by m:" in lines[1]
    assert any(line.startswith("master         m, fencing number 1, has stopped") for line in lines)
    words = "nodes/w/delta_8.safetensors says that its header has "
    assert f"\nproblem        {words}" in shown
    assert "\nforeign        1 names that nobody reads: nodes/w/delta_07.safetensors\n" in shown
    assert main(["status", hub, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["outer_step"] == document["pointer"]["outer_step"] == 3
    by_name = {node["node_id"]: node for node in document["nodes"]}
    assert (by_name["m"]["last_step"], by_name["m"]["dealt_with"]) == (5, 5)
    assert (by_name["m"]["base_outer_step"], by_name["m"]["lag"]) == (2, 1)
    assert by_name["w"]["last_step"] == 8
    assert by_name["w"]["problem"]
    sizes = [path.stat().st_size for path in (tmp_path / "hub/nodes").rglob("*_?.safetensors")]
    assert document["node_bytes"] == sum(sizes)
    assert document["stray"] == {"files": 1, "bytes": 7}
    (problem,) = document["problems"]
    assert problem.startswith(words)
    assert document["foreign"] == ["nodes/w/delta_07.safetensors"]
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
        said = capsys.readouterr().err
        assert said.startswith("error: ") and file.name in said and said.count("\n") == 1
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
    assert main(["status", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    words = "global/step_count.json names an outer step whose commit is not in global/commits. A "
    assert f"\nproblem        {words}" in shown
    assert "\nouter step     1, by m: " in shown


COMMITS, LEASE = "global/commits/0000000000", "global/lease/000000000001.json"
POINTER = "global/step_count.json"
WAITS, GONE = "nodes/w/delta_2.safetensors", "nodes/w/delta_4.safetensors"
RUBBISH, OTHER = b"\xff" * 40, b'{"a": 1}'
NO_START = "A master that is running goes on with the next outer step; none can start until it is"
HISTORY = "only history: nodes go on, and it is cleaned away with time"
NEEDS = "until it is removed no master can go on, and no node gets a newer global model"
LOST = "; the master refuses it with its next outer step; its steps are lost"

# What lies there instead (None: nothing, "": a directory), and the one sentence about it.
EVERYWHERE: list[tuple[str, bytes | str | None, str]] = [
    (f"{COMMITS}01.json", OTHER, f"is of the format None, not 1; it is {HISTORY}"),
    (f"{COMMITS}01.json", b"", f"is no JSON, or not wholly written yet; it is {HISTORY}"),
    (f"{COMMITS}02.json", OTHER, f"is of the format None, not 1. {NO_START} put back from a copy"),
    (f"{COMMITS}02.json", b"", f"was committed, as {POINTER} says, and is damaged since: put it"),
    (f"{COMMITS}03.json", "", "is no file: no master can commit that outer step, nor read it"),
    (LEASE, b"", "can't be read, so that nobody knows who is master: one that lives writes it"),
    (LEASE, RUBBISH, "can't be read, so that nobody knows who is master: one that lives writes"),
    (LEASE, b'{"holder": "m", "session": "s", "beat": "x"}', "can't be read, so that nobody"),
    ("global/lease/000000000002.json", "", "is no file: no master can take that number, nor get"),
    (POINTER, None, "is missing or no JSON: no node gets a newer global model until a master"),
    (POINTER, b"", "is missing or no JSON: no node gets a newer global model until a master"),
    (POINTER, RUBBISH, "is missing or no JSON: no node gets a newer global model until a master"),
    (POINTER, OTHER, f"has no outer step and model file; {NEEDS}"),
    (WAITS, b"", f"is shorter than a safetensors header{LOST}"),
    (WAITS, RUBBISH, f"says that its header has {int.from_bytes(RUBBISH[:8], 'little')} bytes, wh"),
    (WAITS, None, f"is missing, though {GONE} was sent after it: the master waits some rounds"),
    (WAITS, "", "is no file: the node can't deliver that step, nor the master read it until it is"),
    ("nodes/m/delta_4.safetensors", b"", "is shorter than a safetensors header; it was dealt with"),
    (
        "nodes/x",
        b"",
        "is a file where that node's folder would be: it can't deliver anything until",
    ),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Commits 0, 1 and 2; two deltas of w wait."""
    hub = tmp_path_factory.mktemp("whole") / "hub"
    a_hub(hub)
    run([Node("w", "worker", lambda: Store.open(hub), steps=4)])
    return hub


@pytest.mark.parametrize("place", EVERYWHERE, ids=lambda place: f"{place[0]} {str(place[1])[:9]}")
def test_damage_anywhere_is_said_in_words(
    whole: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    place: tuple[str, bytes | str | None, str],
) -> None:
    name, instead, words = place
    hub = tmp_path / "hub"
    shutil.copytree(whole, hub)
    assert main(["status", str(hub), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []
    (hub / name).unlink(missing_ok=True)
    if instead == "":
        (hub / name).mkdir()
    elif isinstance(instead, bytes):
        (hub / name).write_bytes(instead)
    assert main(["status", str(hub), "--json"]) == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    begun = [one for one in problems if one.startswith(f"{name} {words}")]
    # What a directory hides is missing as well, and hides what may be the newest commit.
    more = instead == "" and name in (WAITS, f"{COMMITS}03.json")
    assert len(begun) == 1 and len(problems) == 1 + more, problems


@pytest.mark.parametrize("how", ["bits", "other model", "renamed"])
def test_a_delta_that_waits_is_held_against_the_global_model(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    hub = tmp_path / "hub"
    shutil.copytree(whole, hub)
    file = hub / GONE
    raw = bytearray(file.read_bytes())
    if how == "bits":
        raw[-1] ^= 1
        file.write_bytes(raw)
    elif how == "renamed":
        file.rename(file.with_name("delta_5.safetensors"))
    else:
        metadata = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
        file.write_bytes(safetensors.torch.save({"other": torch.zeros(2)}, metadata))
    # Values are not looked at here: the master compares the SHA-256 of what it takes.
    assert main(["status", str(hub), "--json"]) == (0 if how == "bits" else 1)
    problems = json.loads(capsys.readouterr().out)["problems"]
    said = {
        "bits": [],
        "renamed": [
            "nodes/w/delta_5.safetensors says that it is of node 'w', step 4; it lies elsewhere"
        ],
        "other model": [f"{GONE} lacks 2 tensors of the model, bias for one"],
    }
    assert problems == [f"{words}{LOST}" for words in said[how]]


def test_older_files_and_lease_files_that_are_gone(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = tmp_path / "hub"
    shutil.copytree(whole, hub)
    old = next((hub / "global").glob(f"momentum-{1:012d}-*"))
    old.write_bytes(b"")
    (hub / LEASE).unlink()
    assert main(["status", str(hub), "--json"]) == 1
    older, lease = json.loads(capsys.readouterr().out)["problems"]
    words = f"1 files of older outer steps are missing or of another size: global/{old.name}; "
    assert older == f"{words}they are {HISTORY}"
    words = "global/lease lacks the lease with the fencing number 1 of the newest commit: "
    assert lease == f"{words}somebody removed it. The next master takes a number above it"


def test_a_delta_that_is_no_file_does_not_stop_the_other_nodes(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = tmp_path / "hub"
    shutil.copytree(whole, hub)
    (hub / WAITS).unlink()
    (hub / WAITS).mkdir()
    run([Node("v", "worker", lambda: Store.open(hub), steps=2)])
    command = ["serve", str(hub), "--poll-seconds", "0.01", "--attempts", "1", "--once"]
    assert main(command) == 0
    assert capsys.readouterr().out == (
        "outer step 3: 1 deltas of 1 nodes, 0 refused\n"
        "outer step 4: 1 deltas of 1 nodes, 1 refused\n2 outer steps\n"
    )
    log = CommitLog(Store.open(hub))
    assert [one.name for one in log.read(3).applied] == ["nodes/v/delta_2.safetensors"]
    assert [one.name for one in log.read(4).applied] == [GONE]
    (refused,) = log.read(4).refused
    assert (refused.node_id, refused.local_step) == ("w", 2)
    assert refused.reason.startswith("can't be read: size 'nodes/w/delta_2.safetensors' on ")


def test_a_damaged_commit_before_the_newest_hinders_nobody(whole: Path, tmp_path: Path) -> None:
    for number, instead in enumerate((b"{}", b"[", "")):
        hub = tmp_path / f"hub-{number}"
        shutil.copytree(whole, hub)
        file = hub / "global/commits" / f"{1:012d}.json"
        file.unlink()
        if isinstance(instead, bytes):
            file.write_bytes(instead)
        else:
            file.mkdir()
        assert main(["serve", str(hub), "--once"]) == 0
        commit = CommitLog(Store.open(hub)).latest()
        assert commit is not None and commit.outer_step == 3
        assert [(one.node_id, one.local_step) for one in commit.applied] == [("w", 2), ("w", 4)]


def test_the_command_itself_has_help_with_an_example(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainer_core.diloco", "status"]
    helped = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    assert "python -m trainer_core.diloco status /mnt/shared/run7" in helped.stdout
    failed = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True)
    assert failed.returncode == 3
    assert "nothing of an outer loop is at" in failed.stderr
    assert "Traceback" not in failed.stderr
