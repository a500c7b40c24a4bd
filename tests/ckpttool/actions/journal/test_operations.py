"""Operations under a journal: what is written, finished, taken back, refused, and left behind."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from ckpttool.actions.journal.moves import (
    ChangeMode,
    InstallMended,
    MovePointer,
    PublishTemporary,
    SetAside,
)
from ckpttool.actions.journal.operations import (
    Operation,
    carry_out,
    finish,
    history,
    obstacles,
    open_operation,
    refuse_if_unfinished,
    undo,
    unfinished,
)
from ckpttool.actions.journal.undoable import UndoableAction
from ckpttool.errors import RefusedError, UnreadableError, WriteError
from ckpttool.model.operations import is_id, what_is_set_aside

OLD, NEW = b'{"step": 8, "file": "step_8.pt"}', b'{"step": 4, "file": "step_4.pt"}'


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (2, 4, 6, 8):
        (tmp_path / f"step_{step}.pt").write_bytes(b"step %d" % step)
    (tmp_path / ".step_9.pt.tmp-77").write_bytes(b"step 9, whole")
    (tmp_path / "latest.json").write_bytes(OLD)
    return tmp_path


def plan(run: Path) -> list[UndoableAction]:
    """One of each kind; some names are touched more than once."""
    return [
        SetAside(run, "step_8.pt", "damaged"),
        PublishTemporary(run, ".step_9.pt.tmp-77", "step_8.pt", "whole"),
        ChangeMode(run, "step_6.pt", mode(run / "step_6.pt"), 0o600, "too open"),
        SetAside(run, "step_6.pt", "later"),
        MovePointer(run, OLD, NEW),
    ]


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def outside(run: Path) -> dict[str, tuple[int, int, bytes, int]]:
    """The directory's own files: inode, mode, content, time."""
    found = {}
    for path in run.iterdir():
        if path.is_file():
            status = path.stat()
            facts = status.st_ino, mode(path), path.read_bytes(), status.st_mtime_ns
            found[path.name] = facts
    return found


def lines(operation: Operation) -> list[dict[str, Any]]:
    text = Path(operation.folder, "journal.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def events(operation: Operation) -> list[tuple[Any, ...]]:
    return [(line["event"], line.get("action")) for line in lines(operation)[1:]]


def test_what_is_written(run: Path) -> None:
    operation = carry_out(run, "repair", plan(run), why="as asked")
    assert (operation.state, operation.verb) == ("finished", "repair")
    assert is_id(operation.id)
    assert operation.folder == str(run / ".quarantine" / operation.id)
    head = lines(operation)[0]
    assert (head["schema"], head["verb"], head["why"]) == (1, "repair", "as asked")
    assert re.fullmatch(r"ckpttool \d+\.\d+\S*", head["tool"])
    assert head["directory"] == {
        "path": str(run),
        "dev": run.stat().st_dev,
        "ino": run.stat().st_ino,
    }
    kinds = [record["kind"] for record in head["actions"]]
    assert kinds == [
        "set-aside",
        "publish-temporary",
        "change-mode",
        "set-aside",
        "move-pointer",
    ]
    numbered = [(event, n) for n in range(5) for event in ("begin", "done")]
    assert events(operation) == [*numbered, ("finished", None)]
    assert {name: facts[2] for name, facts in outside(run).items()} == {
        "step_2.pt": b"step 2",
        "step_4.pt": b"step 4",
        "step_8.pt": b"step 9, whole",
        "latest.json": NEW,
    }
    aside = what_is_set_aside(operation.recorded)
    assert aside.names == ["latest.json", "step_6.pt", "step_8.pt"]
    assert aside.nbytes == len(OLD) + 6 + 6


def test_the_note_tells_a_person_all(run: Path) -> None:
    os.utime(run / "step_8.pt", ns=(1, 1_500_000_000_000_000_000))
    operation = carry_out(run, "repair", plan(run), why="as asked")
    note = json.loads(Path(operation.folder, "note.json").read_text())
    assert note["take_back"] == f"ckpttool undo '{run}' {operation.id}" or (
        note["take_back"] == f"ckpttool undo {run} {operation.id}"
    )
    first = note["actions"][0]
    assert first == {
        "action": "set step_8.pt aside: damaged",
        "name": "step_8.pt",
        "why": "damaged",
        "from": str(run / "step_8.pt"),
        "lies_in": "step_8.pt",
        "size": 6,
        "mode": f"{mode(Path(operation.folder) / 'step_8.pt'):04o}",
        "mtime_ns": 1_500_000_000_000_000_000,
    }


def test_the_note_has_the_sha256_where_the_manifest_does(run: Path) -> None:
    line = {"file": "step_8.pt", "step": 8, "sha256": "AB" * 32}
    (run / "manifest.jsonl").write_text(json.dumps(line) + "\n")
    operation = carry_out(run, "rollback", [SetAside(run, "step_8.pt", "")])
    note = json.loads(Path(operation.folder, "note.json").read_text())
    assert note["actions"][0]["sha256"] == "ab" * 32


def test_undo_restores_the_very_files(run: Path) -> None:
    before = outside(run)
    operation = carry_out(run, "repair", plan(run))
    assert outside(run) != before
    undone = undo(run)
    assert (undone.id, undone.state) == (operation.id, "undone")
    assert outside(run) == before
    back = [("back", n) for n in (4, 3, 2, 1, 0)]
    assert events(undone)[11:] == [("taking-back", None), *back, ("undone", None)]
    assert what_is_set_aside(undone.recorded).names == []
    with pytest.raises(UnreadableError, match="no operation to take back"):
        undo(run)
    with pytest.raises(RefusedError, match="taken back already"):
        undo(run, operation.id)


def test_undo_takes_the_newest_first_or_the_one_that_is_named(run: Path) -> None:
    first = carry_out(run, "a", [SetAside(run, "step_2.pt", "")])
    second = carry_out(run, "b", [SetAside(run, "step_4.pt", "")])
    third = carry_out(run, "c", [SetAside(run, "step_6.pt", "")])
    assert [one.id for one in history(run)] == [first.id, second.id, third.id]
    assert undo(run, second.id).state == "undone"
    assert (run / "step_4.pt").exists()
    assert undo(run).id == third.id
    assert undo(run).id == first.id
    assert [one.state for one in history(run)] == ["undone"] * 3
    with pytest.raises(UnreadableError, match="no operation 20200101T000000Z"):
        undo(run, "20200101T000000Z")


def test_ids_ascend_within_a_second_and_when_the_clock_goes_back(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case E03: folders that are named by the second never collide."""
    moments = [1_800_000_000] * 11 + [1_700_000_000, 1_800_000_001]
    ids = []
    for moment in moments:
        real = time.gmtime
        with monkeypatch.context() as patch:
            patch.setattr(time, "gmtime", lambda real=real, moment=moment: real(moment))
            ids.append(open_operation(run, "x").id)
    stem = "20270115T080000Z"
    numbered = [stem, *(f"{stem}-{number}" for number in range(2, 13))]
    assert ids == [*numbered, "20270115T080001Z"]
    assert [one.id for one in history(run)] == ids
    assert {one.state for one in history(run)} == {"prepared"}


def test_undo_refuses_all_at_once_and_changes_nothing(run: Path) -> None:
    operation = carry_out(run, "rollback", plan(run))
    (run / "step_6.pt").write_bytes(b"trained anew")
    (run / "latest.json").write_bytes(b'{"step": 6}')
    before, journal = outside(run), lines(operation)
    with pytest.raises(RefusedError) as caught:
        undo(run)
    assert str(caught.value).startswith(f"{operation.id} cannot be taken back: ")
    assert "step_6.pt: another file has this name by now" in str(caught.value)
    assert "latest.json: names something else by now" in str(caught.value)
    assert outside(run) == before
    assert lines(operation) == journal
    assert len(obstacles(history(run)[0])) == 2
    (run / "step_6.pt").unlink()
    (run / "latest.json").write_bytes(NEW)
    assert undo(run).state == "undone"


def test_undo_does_not_take_back_a_published_file_that_was_replaced(run: Path) -> None:
    carry_out(run, "repair", plan(run)[:2])
    (run / "step_8.pt").unlink()
    (run / "step_8.pt").write_bytes(b"saved anew, by the trainer")
    with pytest.raises(RefusedError, match=r"step_8\.pt has been replaced since"):
        undo(run)
    assert (run / "step_8.pt").read_bytes() == b"saved anew, by the trainer"


def mend(run: Path) -> Operation:
    operation = open_operation(run, "repair")
    made = Path(operation.folder, "step_4.pt.mended")
    made.write_bytes(b"STEP 4")
    actions = [InstallMended(run, "step_4.pt", made)]
    return carry_out(run, "repair", actions, operation=operation)


def test_undo_refuses_a_mended_file_that_was_written_over_in_place(run: Path) -> None:
    """Same inode, same size: `cp` onto it. What is new would land in a folder that purge deletes."""
    mend(run)
    time.sleep(0.02)
    (run / "step_4.pt").write_bytes(b"saved!")
    with pytest.raises(RefusedError, match=r"step_4\.pt: another file has .* written over"):
        undo(run)
    assert (run / "step_4.pt").read_bytes() == b"saved!"


def test_undo_of_an_earlier_operation_names_the_later_one_in_its_way(run: Path) -> None:
    first = mend(run)
    second = carry_out(run, "rollback", [SetAside(run, "step_4.pt", "later")])
    with pytest.raises(RefusedError) as caught:
        undo(run, first.id)
    assert "the mended file is not there any more" in str(caught.value)
    assert f"take back what came later first: ckpttool undo {run} {second.id}" in str(caught.value)
    undo(run, second.id)
    assert undo(run, first.id).state == "undone"
    assert (run / "step_4.pt").read_bytes() == b"step 4"


def test_a_time_that_is_kept_less_exactly_is_the_same(run: Path) -> None:
    """As after the run was moved to a file system that keeps whole seconds."""
    path = run / "step_8.pt"
    os.utime(path, ns=(1_700_000_000_123_456_789,) * 2)
    operation = carry_out(run, "rollback", [SetAside(run, "step_8.pt", "later")])
    kept = Path(operation.folder, "step_8.pt")
    os.utime(kept, ns=(1_700_000_000_500_000_000,) * 2)
    with pytest.raises(RefusedError, match="has changed since it was set aside; by hand: mv -n"):
        undo(run)
    os.utime(kept, ns=(1_700_000_000_000_000_000,) * 2)
    assert undo(run).state == "undone"
    assert path.read_bytes() == b"step 8"


def test_a_pointer_that_moves_while_the_new_one_is_synced_stays(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckpttool.io.folder import Folder

    theirs, real = b'{"step": 10, "file": "step_10.pt"}', Folder.write_new

    def write_new(self: Folder, name: str, *rest: Any) -> None:
        real(self, name, *rest)
        if name == "latest.json.new":
            (run / "latest.json").unlink()
            (run / "latest.json").write_bytes(theirs)

    monkeypatch.setattr(Folder, "write_new", write_new)
    with pytest.raises(RefusedError, match="has changed since it was read"):
        carry_out(run, "rollback", [MovePointer(run, OLD, NEW)])
    assert (run / "latest.json").read_bytes() == theirs


# killed on the way


class Killed(BaseException):
    pass


def stop_at_line(monkeypatch: pytest.MonkeyPatch, count: int, *, torn: bool = False) -> None:
    """The process ends when it is about to write line `count` of the journal, or half of it."""
    from ckpttool.actions.journal import file as journal_file

    seen = 0
    real = journal_file.write_all

    def write_all(descriptor: int, content: bytes) -> None:
        nonlocal seen
        if seen >= count:
            if torn and seen == count:
                seen += 1
                real(descriptor, content[: len(content) // 2])
            raise Killed
        seen += 1
        real(descriptor, content)

    monkeypatch.setattr(journal_file, "write_all", write_all)
    # Nothing is tidied up by a process that was killed.
    monkeypatch.setattr(journal_file, "remove_if_bare", lambda *_: None)
    monkeypatch.setattr("ckpttool.actions.journal.operations._take_back_quietly", lambda *_: None)


def killed_at(run: Path, monkeypatch: pytest.MonkeyPatch, count: int, *, torn: bool) -> None:
    with monkeypatch.context() as patch:
        stop_at_line(patch, count, torn=torn)
        with pytest.raises(Killed):
            carry_out(run, "repair", plan(run))


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("count", range(1, 12))
def test_killed_at_any_line_it_can_be_finished(
    run: Path, monkeypatch: pytest.MonkeyPatch, count: int, torn: bool
) -> None:
    killed_at(run, monkeypatch, count, torn=torn)
    (operation,) = unfinished(run)
    assert operation.state == "unfinished"
    with pytest.raises(RefusedError, match=r"was not finished: `ckpttool undo .*` takes it back"):
        refuse_if_unfinished(run)
    with pytest.raises(RefusedError, match="was not finished"):
        carry_out(run, "rollback", [SetAside(run, "step_2.pt", "")])
    assert finish(operation).state == "finished"
    assert unfinished(run) == []
    assert {name: facts[2] for name, facts in outside(run).items()} == {
        "step_2.pt": b"step 2",
        "step_4.pt": b"step 4",
        "step_8.pt": b"step 9, whole",
        "latest.json": NEW,
    }
    assert mode(Path(operation.folder) / "step_6.pt") == 0o600


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("count", range(1, 12))
def test_killed_at_any_line_it_can_be_taken_back(
    run: Path, monkeypatch: pytest.MonkeyPatch, count: int, torn: bool
) -> None:
    before = outside(run)
    killed_at(run, monkeypatch, count, torn=torn)
    assert undo(run).state == "undone"
    assert outside(run) == before


@pytest.mark.parametrize("torn", [False, True])
def test_killed_before_the_plan_was_whole_nothing_was_done(
    run: Path, monkeypatch: pytest.MonkeyPatch, torn: bool
) -> None:
    before = outside(run)
    killed_at(run, monkeypatch, 0, torn=torn)
    assert outside(run) == before
    assert [one.state for one in history(run)] == ["prepared"]
    assert unfinished(run) == []
    assert carry_out(run, "repair", plan(run)).state == "finished"


@pytest.mark.parametrize("go_on", ["undo", "finish"])
@pytest.mark.parametrize("count", range(7))
def test_killed_while_it_is_taken_back(
    run: Path, monkeypatch: pytest.MonkeyPatch, count: int, go_on: str
) -> None:
    """Whoever finishes it goes on in the direction in which it was going."""
    before = outside(run)
    carry_out(run, "repair", plan(run))
    with monkeypatch.context() as patch:
        stop_at_line(patch, count)
        with pytest.raises(Killed):
            undo(run)
    if count == 0:
        assert unfinished(run) == []
        undo(run)
    elif go_on == "undo":
        undo(run)
    else:
        (operation,) = unfinished(run)
        assert operation.state == "taking-back"
        assert finish(operation).state == "undone"
    assert outside(run) == before


def test_what_cannot_be_finished_can_be_taken_back(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before it set step 6 aside, which somebody then deletes."""
    before = outside(run)
    killed_at(run, monkeypatch, 7, torn=False)
    (run / "step_6.pt").unlink()
    (operation,) = unfinished(run)
    with pytest.raises(RefusedError, match="no longer the file"):
        finish(operation)
    assert [one.state for one in history(run)] == ["unfinished"]
    assert undo(run).state == "undone"
    del before["step_6.pt"]
    assert outside(run) == before


# what goes wrong


@pytest.mark.parametrize("bad", range(5))
def test_an_action_that_fails_takes_everything_back(
    run: Path, bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = outside(run)
    actions = plan(run)

    def apply(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(type(actions[bad]), "apply", apply)
    with pytest.raises(WriteError, match="cannot write: Input/output error"):
        carry_out(run, "repair", actions)
    assert outside(run) == before
    assert [one.state for one in history(run)] == ["undone"]


def test_an_interrupt_takes_everything_back(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = outside(run)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(MovePointer, "apply", interrupt)
    with pytest.raises(KeyboardInterrupt):
        carry_out(run, "repair", plan(run))
    assert outside(run) == before
    assert [one.state for one in history(run)] == ["undone"]


@pytest.mark.parametrize("count", range(12))
def test_a_disk_that_is_full_from_some_line_on(
    run: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """One clear error, everything as it was, and where nothing else can be written, no trace."""
    from ckpttool.actions.journal import file as journal_file

    before = outside(run)
    seen = 0
    real = journal_file.write_all

    def write_all(descriptor: int, content: bytes) -> None:
        nonlocal seen
        if seen >= count:
            real(descriptor, content[:5])
            raise OSError(errno.ENOSPC, "No space left on device")
        seen += 1
        real(descriptor, content)

    with monkeypatch.context() as patch:
        patch.setattr(journal_file, "write_all", write_all)
        with pytest.raises(WriteError, match="No space left on device") as caught:
            carry_out(run, "repair", plan(run))
    assert "journal.jsonl" in str(caught.value)
    assert outside(run) == before
    assert unfinished(run) == []
    assert not (run / ".quarantine").exists()


@pytest.mark.parametrize("count", range(7))
def test_a_disk_that_fills_while_something_is_taken_back(
    run: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Either nothing was changed, or all was taken back: moving files needs no space."""
    from ckpttool.actions.journal import file as journal_file

    before = outside(run)
    carry_out(run, "repair", plan(run))
    after = outside(run)
    seen = 0
    real = journal_file.write_all

    def write_all(descriptor: int, content: bytes) -> None:
        nonlocal seen
        seen += 1
        if seen > count:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor, content)

    with monkeypatch.context() as patch:
        patch.setattr(journal_file, "write_all", write_all)
        with pytest.raises(WriteError, match="No space left on device"):
            undo(run)
    assert outside(run) == (after if count == 0 else before)
    assert undo(run).state == "undone"
    assert outside(run) == before


def test_a_file_that_is_gone_before_anything_begins(run: Path) -> None:
    before = outside(run)
    actions = [*plan(run), SetAside(run, "step_99.pt", "")]
    with pytest.raises(UnreadableError, match=r"step_99\.pt: is gone"):
        carry_out(run, "repair", actions)
    assert outside(run) == before
    assert not (run / ".quarantine").exists()


def test_a_directory_that_cannot_be_written(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mkdir(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    before = outside(run)
    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(WriteError, match=r"\.quarantine: cannot write: Read-only file system"):
        carry_out(run, "repair", plan(run))
    assert outside(run) == before


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_quarantine_that_is_none(run: Path, tmp_path_factory: Any, kind: str) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    if kind == "link":
        (run / ".quarantine").symlink_to(elsewhere)
    else:
        (run / ".quarantine").write_bytes(b"")
    with pytest.raises(RefusedError, match=r"\.quarantine: .*move it away: mv -n -- "):
        carry_out(run, "repair", plan(run))
    assert list(elsewhere.iterdir()) == []
    assert history(run) == []


# opened beforehand


def test_a_file_made_in_an_operation_that_was_opened_before(run: Path) -> None:
    before = outside(run)
    operation = open_operation(run, "repair", "as asked")
    assert operation.state == "prepared"
    made = Path(operation.folder, "mended.pt")
    made.write_bytes(b"step 8, mended")
    actions = [InstallMended(run, "step_8.pt", str(made), "damaged")]
    done = carry_out(run, "repair", actions, operation=operation)
    assert (done.id, done.state, done.recorded.why) == (operation.id, "finished", "as asked")
    assert lines(done)[0]["actions"] is None
    assert events(done)[0] == ("plan", None)
    assert (run / "step_8.pt").read_bytes() == b"step 8, mended"
    assert len(history(run)) == 1
    undo(run)
    assert outside(run) == before
    assert made.read_bytes() == b"step 8, mended"


def test_an_operation_that_was_opened_and_never_carried_out(run: Path) -> None:
    operation = open_operation(run, "repair")
    assert unfinished(run) == []
    with pytest.raises(UnreadableError):
        undo(run)
    with pytest.raises(RefusedError, match="changed nothing"):
        undo(run, operation.id)


# hostile and damaged journals


def journal_of(run: Path, text: str | bytes) -> Path:
    folder = run / ".quarantine" / "20260101T000000Z"
    folder.mkdir(parents=True)
    (folder / "file.pt").write_bytes(b"x")
    path = folder / "journal.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def head(*records: dict[str, Any]) -> str:
    return json.dumps({"schema": 1, "verb": "repair", "actions": list(records)}) + "\n"


FILE = {"kind": "file", "ino": 1, "size": 1, "mtime_ns": 1}
BEGUN = '{"event": "begin", "action": 0}\n'


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\n",
        b"\0\0\0\n",
        b"[]\n",
        b"{}\n",
        b'{"schema": 2}\n',
        b'{"schema": 1, "actions": 4}\n',
        b'{"schema": 1, "actions": [4]}\n',
        b"[" * 100_000 + b"\n",
        head({"kind": "run-command", "name": "x"}),
        head({"kind": "set-aside", "name": "../../victim", "aside": "x", "why": "", "file": FILE}),
        head({"kind": "set-aside", "name": "x", "aside": "../victim", "why": "", "file": FILE}),
        head({"kind": "set-aside", "name": "x", "aside": "x", "why": "", "file": {}}),
        head({"kind": "publish-temporary", "name": "x", "target": "/v", "why": "", "file": FILE}),
        head({"kind": "change-mode", "name": "x", "old": 2, "new": 0o4777, "why": ""}),
        head({"kind": "move-pointer", "name": "x", "old": "!", "new": "", "aside": "x", "why": ""}),
        head() + "not json\n",
    ],
)
def test_a_journal_that_cannot_be_used_is_said_to_be_damaged(run: Path, text: str | bytes) -> None:
    journal_of(run, text)
    (operation,) = history(run)
    assert operation.state == "damaged"
    assert operation.recorded.problem
    assert unfinished(run) == []  # none of them has begun anything, as far as can be read
    with pytest.raises(RefusedError, match="no journal that can be read"):
        undo(run, operation.id)
    with pytest.raises(RefusedError, match="move back by hand"):
        undo(run)


def test_what_stands_half_way_and_cannot_be_told_stops_everything_else(run: Path) -> None:
    """Nobody knows what its actions have done: nothing may be built on that."""
    record = {"kind": "set-aside", "name": "../x", "why": "", "aside": "x"}
    head = {"schema": 1, "verb": "repair", "actions": [record]}
    journal_of(run, json.dumps(head) + '\n{"event": "begin", "action": 0}\n')
    with pytest.raises(RefusedError, match="was left half-way, and has no journal that can be re"):
        unfinished(run)
    with pytest.raises(RefusedError, match="ckpttool purge"):
        carry_out(run, "repair", plan(run))


def test_a_quarantine_that_may_not_be_looked_into_is_not_empty(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    carry_out(run, "repair", plan(run))
    real = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if path == ".quarantine":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    for look in (history, unfinished, undo):
        with pytest.raises(UnreadableError, match=r"\.quarantine: Permission denied"):
            look(run)


def test_a_journal_about_files_that_are_not_there_changes_nothing(run: Path) -> None:
    """As it was copied here from another directory, or was made up."""
    before = outside(run)
    record = {"kind": "set-aside", "name": "step_8.pt", "aside": "file.pt", "why": "", "file": FILE}
    journal_of(run, head(record) + BEGUN)
    (operation,) = unfinished(run)
    with pytest.raises(RefusedError):
        finish(operation)
    assert undo(run).state == "undone"
    assert outside(run) == before
    done = BEGUN.replace("begin", "done")
    path = Path(operation.folder, "journal.jsonl")
    path.write_text(head(record) + BEGUN + done)
    with pytest.raises(RefusedError):
        undo(run)
    assert outside(run) == before


def test_a_journal_that_is_a_link_is_not_read(run: Path, tmp_path: Path) -> None:
    path = journal_of(run, b"")
    (tmp_path / "journal").write_text(head())
    path.unlink()
    path.symlink_to(tmp_path / "journal")
    (operation,) = history(run)
    assert operation.state == "damaged"


def test_other_names_in_the_quarantine_are_nobodys(run: Path) -> None:
    for name in ("notes", "20260101", "20260101T000000Z-x"):
        (run / ".quarantine" / name).mkdir(parents=True)
    (run / ".quarantine" / "20260101T000000Z").write_bytes(b"a file")
    assert history(run) == []
    assert carry_out(run, "x", [SetAside(run, "step_2.pt", "")]).state == "finished"
