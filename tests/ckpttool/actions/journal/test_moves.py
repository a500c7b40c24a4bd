"""Each undoable action, from every state in which a kill can leave it, by what is on disk."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpttool.actions.journal.arrange_files import ArrangeFiles, Move, Spot
from ckpttool.actions.journal.moves import (
    ChangeMode,
    InstallMended,
    MovePointer,
    PublishTemporary,
    SetAside,
)
from ckpttool.actions.journal.operations import KINDS
from ckpttool.actions.journal.undoable import UndoableAction
from ckpttool.errors import FormatError, RefusedError, UnreadableError

STEP = "step_000000000008.pt"
SHARDED = "step_000000000008"
TEMPORARY = ".step_000000000008.pt.tmp-77"
OLD, NEW = b'{"step": 8}', b'{"step": 4}'


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A directory with a step file, a pointer, and an operation's folder."""
    (tmp_path / STEP).write_bytes(b"original")
    (tmp_path / STEP).chmod(0o640)
    os.utime(tmp_path / STEP, ns=(5, 1_234_567_890_123_456_789))
    (tmp_path / "latest.json").write_bytes(OLD)
    folder(tmp_path).mkdir(parents=True)
    return tmp_path


def folder(run: Path) -> Path:
    return run / ".quarantine" / "20261129T194042Z"


def prepared(run: Path, action: UndoableAction) -> UndoableAction:
    """The action as it comes out of a journal."""
    action.prepare(str(folder(run)), set())
    record = json.loads(json.dumps(action.to_record()))
    again = KINDS[record["kind"]].from_record(str(run), str(folder(run)), record)
    assert again.to_record() == record
    assert again.describe() == action.describe()
    return again


Seen = dict[str, tuple[int, int, bytes, int]]


def disk(run: Path) -> Seen:
    """Every file by its name: inode, mode, content, modification time."""
    found = {}
    for path in run.rglob("*"):
        if path.is_file() and not path.is_symlink():
            status = path.stat()
            facts = status.st_ino, stat.S_IMODE(status.st_mode), path.read_bytes()
            found[str(path.relative_to(run))] = (*facts, status.st_mtime_ns)
    return found


ASIDE = str(Path(".quarantine") / "20261129T194042Z")


def make_set_aside(run: Path) -> UndoableAction:
    return SetAside(run, STEP, "damaged")


def make_publish(run: Path) -> UndoableAction:
    (run / STEP).rename(run / TEMPORARY)
    return PublishTemporary(run, TEMPORARY, STEP, "whole")


def make_install(run: Path) -> UndoableAction:
    (folder(run) / "mended.pt").write_bytes(b"mended!!!")
    (folder(run) / "mended.pt").chmod(0o640)  # as it gets the original's
    return InstallMended(run, STEP, folder(run) / "mended.pt", "damaged")


def make_install_new(run: Path) -> UndoableAction:
    (run / STEP).unlink()
    return make_install(run)


def make_mode(run: Path) -> UndoableAction:
    return ChangeMode(run, STEP, 0o640, 0o600, "too open")


def make_pointer(run: Path) -> UndoableAction:
    return MovePointer(run, OLD, NEW)


def make_new_pointer(run: Path) -> UndoableAction:
    (run / "latest.json").unlink()
    return MovePointer(run, None, NEW)


def _in_step(run: Path, **files: bytes) -> Path:
    """A sharded step with files that no size and no time tells apart."""
    step = run / SHARDED
    step.mkdir()
    for name, data in files.items():
        (step / name).write_bytes(data)
        os.utime(step / name, (1_700_000_000, 1_700_000_000))
    return step


def make_exchange(run: Path) -> UndoableAction:
    step = _in_step(run, a=b"the b", b=b"the a")
    ends = {"a": Spot(SHARDED, "b"), "b": Spot(SHARDED, "a")}
    moves = [Move.of((step / n).lstat(), Spot(SHARDED, n), end) for n, end in ends.items()]
    return ArrangeFiles(run, moves, "exchanged")


def make_replace(run: Path) -> UndoableAction:
    """What lies in the place goes, and another step has what belongs there."""
    step, other = _in_step(run, a=b"wrong"), run / f"{SHARDED}9"
    other.mkdir()
    (other / "x").write_bytes(b"right")
    moves = [
        Move.of((other / "x").lstat(), Spot(other.name, "x"), Spot(SHARDED, "a")),
        Move.of((step / "a").lstat(), Spot(SHARDED, "a"), None),
    ]
    return ArrangeFiles(run, moves, "the other is the recorded one")


MAKERS = [
    make_exchange,
    make_replace,
    make_set_aside,
    make_publish,
    make_install,
    make_install_new,
    make_mode,
    make_pointer,
    make_new_pointer,
]
Maker = Callable[[Path], UndoableAction]
every = pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__[5:])

CALLS = ("rename", "link", "unlink", "chmod", "fchmod", "fsync", "write", "open")


class Killed(BaseException):
    pass


def killing(monkeypatch: pytest.MonkeyPatch, at: int) -> Callable[[], int]:
    """Before call `at` of those that change the disk, everything ends. Gives how many there were.

    No handler in the code under test may see it: later calls end as well.
    """
    count = 0

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            changes = name != "open" or arguments[1] & os.O_CREAT
            if changes and count >= at:
                raise Killed
            count += bool(changes)
            return real(*arguments, **options)

        monkeypatch.setattr(os, name, call)

    for name in CALLS:
        wrap(name)
    return lambda: count


def kills(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> Iterator[None]:
    """Calls `change`, killed before its first call, its second, and so on; yields after each."""
    for at in range(50):
        with monkeypatch.context() as patch:
            killing(patch, at)
            try:
                change()
            except Killed:
                pass
            else:
                return
        yield
    raise AssertionError("it never ended")


@every
def test_there_and_back(run: Path, make: Maker) -> None:
    action = prepared(run, make(run))
    before = disk(run)
    assert action.state() == "before"
    action.revert()
    assert disk(run) == before
    action.apply()
    after = disk(run)
    assert after != before
    assert action.state() == "after"
    action.apply()
    assert disk(run) == after
    action.revert()
    assert action.state() == "before"
    now = disk(run)
    left = {name for name in now if name not in before}
    assert {name: now.get(name) for name in before} == before
    # A pointer that was not there before is kept aside rather than deleted.
    assert [path for path in left if not path.endswith("latest.json.new")] == []


@every
def test_killed_on_the_way_there_it_can_be_finished(
    run: Path,
    make: Maker,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    _from_every_kill(run, make, monkeypatch, start="before", then="apply")


@every
def test_killed_on_the_way_there_it_can_be_taken_back(
    run: Path, make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    _from_every_kill(run, make, monkeypatch, start="before", then="revert")


@every
def test_killed_on_the_way_back_it_can_be_taken_back(
    run: Path, make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    _from_every_kill(run, make, monkeypatch, start="after", then="revert")


@every
def test_killed_on_the_way_back_it_can_be_finished(
    run: Path, make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    _from_every_kill(run, make, monkeypatch, start="after", then="apply")


def _from_every_kill(
    run: Path, make: Maker, monkeypatch: pytest.MonkeyPatch, start: str, then: str
) -> None:
    action = prepared(run, make(run))
    before = disk(run)
    action.apply()
    after = contents(run)
    if start == "before":
        action.revert()
    change = action.apply if start == "before" else action.revert
    count = 0
    for _ in kills(monkeypatch, change):
        count += 1
        assert action.state() in ("before", "between", "after")
        getattr(action, then)()
        wanted = "after" if then == "apply" else "before"
        assert action.state() == wanted
        if then == "apply":
            assert contents(run) == after
        else:
            now = disk(run)
            assert {name: now.get(name) for name in before} == before
        getattr(action, "revert" if start == "before" else "apply")()
    assert count >= 2


def contents(run: Path) -> dict[str, bytes]:
    return {name: facts[2] for name, facts in disk(run).items()}


@every
def test_without_hard_links(run: Path, make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", link)
    action = prepared(run, make(run))
    before = contents(run)
    action.apply()
    assert action.state() == "after"
    action.revert()
    assert action.state() == "before"
    now = contents(run)
    assert {name: now.get(name) for name in before} == before


# what each of them does


def test_files_that_have_each_others_places_get_their_own(run: Path) -> None:
    prepared(run, make_exchange(run)).apply()
    assert (run / SHARDED / "a").read_bytes() == b"the a"
    assert (run / SHARDED / "b").read_bytes() == b"the b"
    assert os.listdir(folder(run)) == []


def test_what_is_in_the_way_lies_in_the_folder(run: Path) -> None:
    prepared(run, make_replace(run)).apply()
    assert (run / SHARDED / "a").read_bytes() == b"right"
    assert os.listdir(folder(run)) == [f"{SHARDED}-a"]
    assert (folder(run) / f"{SHARDED}-a").read_bytes() == b"wrong"


def test_nothing_is_arranged_where_a_file_is_not_the_one_that_was_seen(run: Path) -> None:
    action = make_exchange(run)
    (run / SHARDED / "a").write_bytes(b"newer")
    with pytest.raises(RefusedError, match="run it again"):
        prepared(run, action)
    action = prepared(run, make_replace_again(run))
    action.apply()
    (run / SHARDED / "a").unlink()
    before = contents(run)
    assert action.state() == "foreign"
    with pytest.raises(RefusedError, match="is gone"):
        action.revert()
    assert contents(run) == before


def make_replace_again(run: Path) -> UndoableAction:
    shutil.rmtree(run / SHARDED)
    return make_replace(run)


@pytest.mark.parametrize(
    "change",
    [
        {"moves": []},
        {"moves": None},
        {"moves": ["a"]},
        {"start": ["..", "a"]},
        {"start": ["", "a"]},
        {"end": [SHARDED, "../a"]},
        {"end": [".quarantine", "a"]},
        {"end": [f"{SHARDED}/x", "a"]},
        {"end": [SHARDED]},
        {"rest": [SHARDED, "a"]},
        {"identity": None},
    ],
)
def test_no_journal_leads_files_elsewhere(run: Path, change: dict[str, Any]) -> None:
    action = make_exchange(run)
    action.prepare(str(folder(run)), set())
    record = json.loads(json.dumps(action.to_record()))
    target = record if "moves" in change else record["moves"][1]
    target.update(change)
    with pytest.raises(FormatError):
        ArrangeFiles.from_record(str(run), str(folder(run)), record)


def test_set_aside_keeps_the_very_file(run: Path) -> None:
    before = disk(run)[STEP]
    prepared(run, SetAside(run, STEP, "damaged")).apply()
    assert set(disk(run)) == {"latest.json", f"{ASIDE}/{STEP}"}
    assert disk(run)[f"{ASIDE}/{STEP}"] == before


@pytest.mark.parametrize("kind", ["link", "directory", "pipe"])
def test_set_aside_moves_any_kind_and_follows_nothing(run: Path, kind: str) -> None:
    path = run / "step_000000000009.pt"
    if kind == "link":
        path.symlink_to(STEP)
    elif kind == "directory":
        path.mkdir()
        (path / "inside").write_bytes(b"x")
    else:
        os.mkfifo(path)
    before = path.lstat()
    action = prepared(run, SetAside(run, path.name, "no file"))
    action.apply()
    assert not os.path.lexists(path)
    assert (folder(run) / path.name).lstat().st_ino == before.st_ino
    assert (run / STEP).read_bytes() == b"original"
    action.revert()
    now = path.lstat()
    assert (now.st_ino, now.st_mode) == (before.st_ino, before.st_mode)


def test_two_names_that_are_the_same_in_the_folder(run: Path) -> None:
    (run / "journal.jsonl").write_bytes(b"a step file's namesake")
    taken: set[str] = set()
    first, second = SetAside(run, STEP, ""), SetAside(run, "journal.jsonl", "")
    for action in (first, second):
        action.prepare(str(folder(run)), taken)
        action.apply()
    assert sorted(os.listdir(folder(run))) == ["journal.jsonl~2", STEP]


def test_set_aside_of_what_is_gone_or_has_changed(run: Path) -> None:
    with pytest.raises(UnreadableError, match="gone"):
        prepared(run, SetAside(run, "nothing.pt", ""))
    seen = (run / STEP).stat()
    action = prepared(run, SetAside(run, STEP, "", seen))
    (run / STEP).unlink()
    (run / STEP).write_bytes(b"a new file, by the trainer")
    assert action.state() == "foreign"
    with pytest.raises(RefusedError, match="no longer"):
        action.apply()
    with pytest.raises(RefusedError, match="run it again"):
        prepared(run, SetAside(run, STEP, "", seen))
    assert (run / STEP).read_bytes() == b"a new file, by the trainer"


def test_nothing_is_brought_back_over_a_new_file(run: Path) -> None:
    action = prepared(run, SetAside(run, STEP, ""))
    action.apply()
    (run / STEP).write_bytes(b"new")
    assert action.state() == "after"
    with pytest.raises(RefusedError, match="another file has this name"):
        action.revert()
    assert (run / STEP).read_bytes() == b"new"
    assert (folder(run) / STEP).read_bytes() == b"original"


def test_what_was_changed_where_it_lay_is_not_brought_back(run: Path) -> None:
    action = prepared(run, SetAside(run, STEP, ""))
    action.apply()
    (folder(run) / STEP).write_bytes(b"somebody mended it by hand")
    with pytest.raises(RefusedError, match="has changed since it was set aside"):
        action.revert()


def test_publishing_never_replaces(run: Path) -> None:
    (run / TEMPORARY).write_bytes(b"whole")
    action = prepared(run, PublishTemporary(run, TEMPORARY, STEP))
    with pytest.raises(FileExistsError):
        action.apply()
    assert contents(run) == {STEP: b"original", TEMPORARY: b"whole", "latest.json": OLD}
    (run / STEP).unlink()
    inode = (run / TEMPORARY).stat().st_ino
    action.apply()
    assert (run / STEP).stat().st_ino == inode
    assert not (run / TEMPORARY).exists()
    (run / STEP).write_bytes(b"saved anew, by the trainer")
    os.utime(run / STEP, (1, 1))
    with pytest.raises(RefusedError):
        action.revert()


def test_a_link_is_not_published(run: Path) -> None:
    (run / TEMPORARY).symlink_to("/etc/hostname")
    with pytest.raises(RefusedError, match="not a regular file"):
        prepared(run, PublishTemporary(run, TEMPORARY, "step_000000000009.pt"))


def test_a_step_is_never_missing_while_its_mended_file_is_put_there(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    action = prepared(run, make_install(run))
    for change in (action.apply, action.revert):
        seen = set()
        for _ in kills(monkeypatch, change):
            seen.add((run / STEP).read_bytes())
        change()
        assert seen == {b"original", b"mended!!!"}


def test_a_mended_file_gets_the_originals_mode(run: Path) -> None:
    action = prepared(run, make_install(run))
    (folder(run) / "mended.pt").chmod(0o666)
    inode = (folder(run) / "mended.pt").stat().st_ino
    original = disk(run)[STEP]
    action.apply()
    status = (run / STEP).stat()
    assert (status.st_ino, stat.S_IMODE(status.st_mode)) == (inode, 0o640)
    assert disk(run)[f"{ASIDE}/{STEP}"] == original


def test_a_mended_file_does_not_replace_a_new_one(run: Path) -> None:
    action = prepared(run, make_install(run))
    (run / STEP).unlink()
    (run / STEP).write_bytes(b"saved anew, by the trainer")
    with pytest.raises(RefusedError):
        action.apply()
    assert (run / STEP).read_bytes() == b"saved anew, by the trainer"


def test_a_mode_is_never_changed_through_a_link(run: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"x")
    victim.chmod(0o640)
    action = prepared(run, make_mode(run))
    (run / STEP).unlink()
    (run / STEP).symlink_to(victim)
    assert action.state() == "foreign"
    with pytest.raises(RefusedError):
        action.apply()
    assert stat.S_IMODE(victim.stat().st_mode) == 0o640


def test_a_mode_that_lets_nobody_read(run: Path) -> None:
    (run / STEP).chmod(0)
    action = prepared(run, ChangeMode(run, STEP, 0, 0o600))
    action.apply()
    assert stat.S_IMODE((run / STEP).stat().st_mode) == 0o600
    action.revert()
    assert stat.S_IMODE((run / STEP).stat().st_mode) == 0


@pytest.mark.parametrize(("old", "new"), [(0o640, 0o4755), (-1, 0o600), (0o640, 0o1000)])
def test_only_permissions(run: Path, old: int, new: int) -> None:
    with pytest.raises(FormatError):
        ChangeMode(run, STEP, old, new)


def test_the_pointer_is_never_missing_while_it_moves(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    action = prepared(run, make_pointer(run))
    for change in (action.apply, action.revert):
        seen = set()
        for _ in kills(monkeypatch, change):
            seen.add((run / "latest.json").read_bytes())
        change()
        assert seen == {OLD, NEW}


def test_the_pointers_own_file_comes_back(run: Path) -> None:
    (run / "latest.json").chmod(0o604)
    before = disk(run)["latest.json"]
    action = prepared(run, make_pointer(run))
    action.apply()
    assert disk(run)["latest.json"][1:3] == (0o604, NEW)
    assert disk(run)[f"{ASIDE}/latest.json"] == before
    action.revert()
    assert disk(run)["latest.json"] == before


def test_a_pointer_that_was_moved_on_stays(run: Path) -> None:
    action = prepared(run, make_pointer(run))
    action.apply()
    (run / "latest.json").write_bytes(b'{"step": 12}')
    for change in (action.apply, action.revert):
        with pytest.raises(RefusedError, match="has changed"):
            change()
    assert (run / "latest.json").read_bytes() == b'{"step": 12}'


# what a journal may not say


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/passwd", "", ".", "..", "a/b", "a\0b", ".quarantine", ".writer.lock", 4, None],
)
@pytest.mark.parametrize(
    ("make", "key"),
    [
        (make_set_aside, "name"),
        (make_set_aside, "aside"),
        (make_publish, "name"),
        (make_publish, "target"),
        (make_install, "name"),
        (make_install, "made"),
        (make_install, "aside"),
        (make_mode, "name"),
        (make_pointer, "aside"),
    ],
)
def test_no_record_leads_elsewhere(run: Path, make: Maker, key: str, name: Any) -> None:
    if key in ("aside", "made") and name in (".quarantine", ".writer.lock"):
        return  # inside the operation's own folder these are names like any other
    action = make(run)
    action.prepare(str(folder(run)), set())
    record = {**action.to_record(), key: name}
    with pytest.raises(FormatError):
        KINDS[action.kind].from_record(str(run), str(folder(run)), record)


@every
def test_no_malformed_record_ends_in_another_error(run: Path, make: Maker) -> None:
    action = make(run)
    action.prepare(str(folder(run)), set())
    whole = action.to_record()
    for key in whole:
        for value in (None, 1.5, [], {}, "x", -1, {"kind": "file", "ino": "7"}):
            try:
                KINDS[action.kind].from_record(str(run), str(folder(run)), {**whole, key: value})
            except FormatError:
                pass


def test_a_quarantine_that_is_a_link_is_not_entered(run: Path, tmp_path: Path) -> None:
    action = prepared(run, make_set_aside(run))
    (run / ".quarantine").rename(tmp_path / "elsewhere")
    (run / ".quarantine").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotADirectoryError):
        action.apply()
    assert (run / STEP).exists()
