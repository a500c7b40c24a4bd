"""The commit log: one commit for each outer step, and nothing believed that others wrote."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.trainer_core.diloco.nodes import memory
from trainer_core.diloco import PassingError, Store
from trainer_core.diloco.commit import (
    Applied,
    Commit,
    File,
    LogError,
    Refused,
    commit_name,
    tensor_name,
)
from trainer_core.diloco.commits import POINTER, CommitLog

SHA = "ab" * 32


def commit(step: int, fence: int = 1, master: str = "m", before: Commit | None = None) -> Commit:
    file = File(tensor_name("model", step, SHA), 5, SHA)
    applied = (Applied("w", step, 0, f"nodes/w/delta_{step}.safetensors", SHA, 1.0),)
    previous = None if before is None else before.sha256
    marks = {"w": step}
    return Commit(step, fence, master, "f" * 32, file, None, applied, (), marks, 0.7, 0.9, previous)


def test_what_is_read_is_what_was_committed() -> None:
    store = Store.open(memory())
    log = CommitLog(store)
    assert log.latest() is None
    assert log.pointer() is None
    refused = (Refused("w", 9, "has values that are not finite"),)
    one = replace(commit(4), refused=refused, watermarks={"w": 9, "m": 0})
    assert log.append(one)
    assert log.read(4) == one
    assert log.latest() == one, "also without a pointer: the log is the truth"
    log.point_to(one)
    pointer = log.pointer()
    assert pointer is not None
    assert pointer == (4, one.model.name)


def test_of_two_masters_one_commits_and_a_lower_fence_does_not_stand() -> None:
    store = Store.open(memory())
    log, other = CommitLog(store), CommitLog(store)
    first = commit(0)
    assert log.append(first)
    assert not other.append(commit(0, master="x"))
    assert log.append(first), "found again after a try whose outcome was not known"
    second = commit(1, fence=5, before=first)
    assert other.append(second)
    late = commit(2, fence=4, master="x", before=second)
    assert CommitLog(store).append(late)  # a master that woke up, and has read nothing
    assert CommitLog(store).latest() == second
    assert log.accepted(1) == second
    with pytest.raises(LogError, match="fencing number 4, after 5: it is refused"):
        log.accepted(2)
    right = commit(2, fence=5, before=second)
    other.latest()
    assert other.append(right), "what does not stand gives way"
    assert CommitLog(store).latest() == right


def test_neither_pointer_nor_listing_needs_to_be_new() -> None:
    store = Store.open(memory())
    log, before = CommitLog(store), None
    for step in range(5):
        before = commit(step, before=before)
        log.append(before)
    log.point_to(log.read(1))
    log.steps = lambda: [0, 1, 2]  # type: ignore[method-assign]
    assert log.latest() == before


def test_a_log_that_does_not_follow_is_told() -> None:
    store = Store.open(memory())
    log = CommitLog(store)
    log.append(commit(0))
    log.append(commit(1, before=commit(0, master="other")))
    with pytest.raises(LogError, match="does not follow from the commit before it"):
        log.latest()


def test_cleaning_keeps_what_the_newest_need_and_removes_the_rest_and_orphans() -> None:
    store = Store.open(memory())
    log, before = CommitLog(store), None
    for step in range(6):
        before = commit(step, before=before)
        store.write(before.model.name, b"model")
        store.write(f"nodes/w/delta_{step}.safetensors", b"delta")
        log.append(before)
    store.write("global/model-000000000004-0123456789abcdef.safetensors", b"never committed")
    store.write("global/model-000000000006-0123456789abcdef.safetensors", b"the next one's")
    store.write("global/notes.txt", b"not ours")
    assert before is not None
    log.clean(before, 2)
    names = [entry.name for entry in store.entries("global")]
    kept = [tensor_name("model", step, SHA).removeprefix("global/") for step in (4, 5)]
    other = ["model-000000000006-0123456789abcdef.safetensors", "notes.txt"]
    assert names == sorted([*kept, *other])
    assert log.steps() == [4, 5]
    deltas = [entry.name for entry in store.entries("nodes/w")]
    assert deltas == ["delta_4.safetensors", "delta_5.safetensors"]


HOSTILE: list[Any] = [
    *("../../etc/passwd", "/etc/passwd", "global\\x.safetensors", "global/latest.safetensors"),
    *("nodes/w/delta_2.safetensors", "global/model-000000000001-0123.safetensors", "", None, 7),
    tensor_name("momentum", 1, SHA),
    tensor_name("model", 2, SHA),
    tensor_name("model", 1, SHA) + "\n",
    "global/../" + tensor_name("model", 1, SHA),
]


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_from_the_store_leads_elsewhere(name: Any) -> None:
    store = Store.open(memory())
    log = CommitLog(store)
    pointer = {"outer_step": 1, "model_file": name, "commit": commit_name(1)}
    store.write(POINTER, json.dumps(pointer).encode())
    with pytest.raises(LogError):
        log.pointer()
    document = json.loads(commit(1).as_bytes())
    document["model"]["name"] = name
    store.write(commit_name(1), json.dumps(document).encode())
    with pytest.raises(LogError):
        log.read(1)


def test_whatever_lies_there_instead_is_an_error_of_ours() -> None:
    store = Store.open(memory())
    log = CommitLog(store)
    good = json.loads(commit(1).as_bytes())
    bad: list[Any] = [[], 3, None, {}, {**good, "format": 2}, {**good, "outer_step": True}]
    bad += [{**good, key: value} for key in good for value in ("../x", -1, [[]], {"../x": 1})]
    for key in ("fingerprint", "session"):
        bad.remove({**good, key: "../x"})  # it is compared, and leads nowhere
    for document in bad:
        store.write(commit_name(1), json.dumps(document).encode())
        with pytest.raises(LogError):
            log.read(1)
    for raw in (b"", b"{", b"\xff\xfe", b"[" * 100_000):
        store.write(commit_name(1), raw)
        with pytest.raises(PassingError):
            log.read(1)
        store.write(POINTER, raw)
        assert log.pointer() is None  # the commits themselves say it all
    old = {"outer_step": 3, "updated_at": "now", "model_file": "global/latest.safetensors"}
    store.write(POINTER, json.dumps(old).encode())
    with pytest.raises(LogError, match="names no commit: it is of another program"):
        log.pointer()


def test_a_damaged_old_commit_hinders_no_cleaning() -> None:
    store = Store.open(memory())
    log, before = CommitLog(store), None
    for step in range(6):
        before = commit(step, before=before)
        log.append(before)
    for step, content in ((0, b""), (1, b"{}"), (3, b"{")):
        store.write(commit_name(step), content)
    assert before is not None
    assert log.named(before, 3) == {
        *(name for step in (4, 5) for name in (tensor_name("model", step, SHA),)),
        *(f"nodes/w/delta_{step}.safetensors" for step in (4, 5)),
    }
    log.clean(before, 3)
    assert log.steps() == [3, 4, 5]
    log.clean(before, 2)
    assert log.steps() == [4, 5] and log.latest() == before


def test_what_cannot_be_removed_keeps_nothing_else(tmp_path: Path) -> None:
    store = Store.open(tmp_path, attempts=1)
    log, before = CommitLog(store), None
    for step in range(4):
        before = commit(step, before=before)
        store.write(before.model.name, b"model")
        log.append(before)
    (tmp_path / "nodes/w/delta_0.safetensors/x").mkdir(parents=True)
    assert before is not None
    log.clean(before, 1)
    assert log.steps() == [3]
    assert [entry.name for entry in store.entries("global")] == [before.model.name[7:]]
