"""The model of a power cut: what may be left after a handful of operations, worked out by hand."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash import CrashRig
from tests.power_cut import ORDERED, PRESETS, STRICT, Counted, after_power_cuts, snapshot

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

PAGE = 4096


def program(folder: str, acks: str, what: str) -> int:
    """A few operations below `folder`; `what` names them."""
    PROGRAMS[what](folder, acks)
    return 0


def _write(path: str, data: bytes, sync: bool) -> None:
    with open(path, "wb", buffering=0) as file:
        file.write(data)
        if sync:
            os.fsync(file.fileno())


def _sync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(descriptor)
    os.close(descriptor)


def _replace(folder: str, acks: str) -> None:
    _write(folder + "/t", b"new", sync=True)
    os.rename(folder + "/t", folder + "/a")
    _sync(folder)
    _write(acks, b"told\n", sync=False)


def _replace_unsynced(folder: str, acks: str) -> None:
    _write(folder + "/t", b"new", sync=False)
    os.rename(folder + "/t", folder + "/a")
    _sync(folder)
    _write(acks, b"told\n", sync=False)


def _grow(folder: str, acks: str) -> None:
    descriptor = os.open(folder + "/a", os.O_WRONLY | os.O_APPEND)
    os.write(descriptor, b"x" * (PAGE - 3) + b"y" * PAGE)
    os.close(descriptor)


def _aside(folder: str, acks: str) -> None:
    os.mkdir(folder + "/q")
    os.rename(folder + "/a", folder + "/q/a")
    _sync(folder)


def _link_and_unlink(folder: str, acks: str) -> None:
    os.link(folder + "/a", folder + "/b")
    os.unlink(folder + "/a")


PROGRAMS = {
    function.__name__: function
    for function in (_replace, _replace_unsynced, _grow, _aside, _link_and_unlink)
}


@pytest.fixture(scope="module")
def rig() -> Iterator[CrashRig]:
    with CrashRig("tests.test_power_cut:program") as made:
        yield made


Found = set[tuple[tuple[tuple[str, bytes], ...], tuple[str, ...]]]


def left(rig: CrashRig, tmp_path: Path, what: str, preset: str, counted: Counted) -> Found:
    """What may be left, as files with contents, and what had been told before."""
    run, acks = tmp_path / "run", tmp_path / "acks"
    run.mkdir()
    (run / "a").write_bytes(b"old")
    before = snapshot(run)
    done = rig.run(run, acks, what, record=True)
    assert done.code == 0, done.output
    states = after_power_cuts(done.ops, run, preset, before=before, acks=acks, counted=counted)
    return {
        (
            tuple(
                sorted((p, e.content.data) for p, e in state.entries.items() if e.kind == "file")
            ),
            state.marks,
        )
        for state in states
    }


OLD, NEW, TEMPORARY = ("a", b"old"), ("a", b"new"), ("t", b"new")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_replacement_in_the_right_order_is_old_or_new(
    rig: CrashRig, tmp_path: Path, preset: str
) -> None:
    found = left(rig, tmp_path, "_replace", preset, Counted())
    assert {files for files, marks in found if marks} == {(NEW,)}
    untold = {files for files, marks in found if not marks}
    assert {(OLD,), (OLD, TEMPORARY), (NEW,)} <= untold
    assert all(files[0] in (OLD, NEW) for files in untold)


def test_without_an_fsync_of_the_file_its_bytes_may_be_missing(
    rig: CrashRig, tmp_path: Path
) -> None:
    found = left(rig, tmp_path, "_replace_unsynced", STRICT, Counted())
    told = {files for files, marks in found if marks}
    assert {(("a", data),) for data in (b"", b"n", b"ne", b"\0\0\0", b"new")} <= told
    assert all(dict(files)["a"] != b"old" for files in told)


def test_a_journal_never_shows_zeros_but_may_show_nothing(rig: CrashRig, tmp_path: Path) -> None:
    found = left(rig, tmp_path, "_replace_unsynced", ORDERED, Counted())
    assert {files for files, marks in found if marks} == {(("a", b""),), (NEW,)}


def test_what_is_appended_may_be_torn_at_pages(rig: CrashRig, tmp_path: Path) -> None:
    counted = Counted()
    found = left(rig, tmp_path, "_grow", STRICT, counted)
    contents = {dict(files)["a"] for files, _ in found}
    first, second = b"old" + b"x" * (PAGE - 3), b"y" * PAGE
    assert {b"old", first, first + second, first + bytes(PAGE)} <= contents
    assert b"old" + bytes(PAGE - 3) + second in contents
    assert all(content.startswith(b"old") for content in contents)  # what was safe stays
    assert counted.operations == 1
    assert counted.cuts == 2
    assert counted.distinct == len(contents)


@pytest.mark.parametrize("preset", PRESETS)
def test_only_a_journal_keeps_a_folder_that_was_not_synced(
    rig: CrashRig, tmp_path: Path, preset: str
) -> None:
    """A rename into it may leave both names; and none, while the folder's own name is not safe."""
    found = {files for files, _ in left(rig, tmp_path, "_aside", preset, Counted())}
    there = (("q/a", b"old"),)
    weak = {(), (OLD, *there)} if preset == STRICT else set()
    assert found == {(OLD,), there} | weak


def test_a_name_may_go_before_the_other_comes(rig: CrashRig, tmp_path: Path) -> None:
    both, new = (OLD, ("b", b"old")), (("b", b"old"),)
    found = {files for files, _ in left(rig, tmp_path, "_link_and_unlink", STRICT, Counted())}
    assert found == {(OLD,), both, new, ()}


def test_in_a_journal_it_never_does(rig: CrashRig, tmp_path: Path) -> None:
    both, new = (OLD, ("b", b"old")), (("b", b"old"),)
    found = {files for files, _ in left(rig, tmp_path, "_link_and_unlink", ORDERED, Counted())}
    assert found == {(OLD,), both, new}


def test_a_state_can_be_put_on_disk_again(rig: CrashRig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "a").write_bytes(b"old")
    os.link(run / "a", run / "b")
    (run / "inner").mkdir()
    (run / "inner" / "c").symlink_to("nowhere")
    os.chmod(run / "a", 0o600)
    os.utime(run / "a", ns=(1, 2))
    before = snapshot(run)
    (state,) = after_power_cuts([], run, STRICT, before=before)
    state.put(tmp_path / "again")
    again = snapshot(tmp_path / "again")
    shape = {
        path: (e.kind, e.content.data, e.text, e.attributes if e.kind == "file" else None)
        for path, e in before.items()
    }
    assert shape == {
        path: (e.kind, e.content.data, e.text, e.attributes if e.kind == "file" else None)
        for path, e in again.items()
    }
    assert again["a"].node == again["b"].node
