"""What a repair decides, before anything is touched: which file of a step stays, and what goes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpttool.actions.newest import find_newest_valid
from ckpttool.actions.repair.deeds import KINDS, Options
from ckpttool.actions.repair.look import look
from ckpttool.actions.repair.modes import usual_mode
from ckpttool.actions.repair.plan import Mender, RepairPlan, decide
from ckpttool.model.directory import scan
from tests import corrupt
from tests.ckpttool.checks.builders import name, point, put, saved, step_bytes, training_state

# An integer of 2,000 bytes: a limit on bytes, which an honest file may pass, too.
UNCHECKED = b"\x80\x02\x8b\xd0\x07\0\0" + bytes(1999) + b"\x01."
NO_MENDING = Options(only=frozenset(KINDS) - {"mend"})


@pytest.fixture
def living_pid() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process.pid
    process.communicate()


def plan_of(run: Path, options: Options = NO_MENDING) -> RepairPlan:
    before = sorted((p.name, p.lstat().st_mtime_ns) for p in run.iterdir())
    seen = look(str(run))
    plan = decide(seen, options, Mender(seen, options))
    assert sorted((p.name, p.lstat().st_mtime_ns) for p in run.iterdir()) == before
    json.dumps(plan.as_dict())
    return plan


def deeds(plan: RepairPlan) -> list[tuple[str, str]]:
    return [(deed.verb, os.path.basename(deed.path)) for deed in plan.deeds]


def leftover(run: Path, step: int, pid: int, data: bytes) -> Path:
    path = run / f".{name(step)}.tmp-{pid}"
    path.write_bytes(data)
    path.chmod(0o644)
    return path


POINT = ("point", "latest.json")


def test_nothing_is_wrong(run: Path) -> None:
    plan = plan_of(run)
    assert (plan.deeds, plan.left, plan.unaddressed()) == ([], [], [])
    assert plan.newest is not None
    assert plan.newest.step == 6


# ---- temporaries


def test_a_whole_temporary_takes_the_place_of_a_missing_step(run: Path, dead_pid: int) -> None:
    left = leftover(run, 8, dead_pid, step_bytes(8))
    plan = plan_of(run)
    assert deeds(plan) == [("publish", left.name), POINT]
    assert plan.deeds[0].target == name(8)
    assert plan.aim is not None
    assert (plan.aim.step, plan.aim.file) == (8, name(8))


def test_a_whole_temporary_takes_the_place_of_a_damaged_step(run: Path, dead_pid: int) -> None:
    """The pointer names that step already, and may stay."""
    left = leftover(run, 6, dead_pid, step_bytes(6))
    put(run, 6, corrupt.cut_end(step_bytes(6), 3000))
    plan = plan_of(run)
    assert deeds(plan) == [("set-aside", name(6)), ("publish", left.name)]
    assert {deed.kind for deed in plan.deeds} == {"temporaries"}


def test_a_temporary_that_nobody_needs_goes_aside(run: Path, dead_pid: int) -> None:
    whole = leftover(run, 6, dead_pid, step_bytes(6))
    torn = leftover(run, 8, dead_pid, corrupt.keep_first(step_bytes(8), 500))
    pointer = run / f".latest.json.tmp-{dead_pid}"
    pointer.write_text('{"step": 8}')
    plan = plan_of(run)
    assert sorted(deeds(plan)) == sorted(
        ("set-aside", path.name) for path in (whole, torn, pointer)
    )


def test_a_living_writers_temporary_is_left_alone(run: Path, living_pid: int) -> None:
    left = leftover(run, 8, living_pid, step_bytes(8))
    plan = plan_of(run)
    assert plan.deeds == []
    assert [one.path for one in plan.left] == [str(left)]
    assert f"process {living_pid}, which is alive" in plan.left[0].words


def test_a_temporary_that_holds_another_step_is_not_published(run: Path, dead_pid: int) -> None:
    left = leftover(run, 8, dead_pid, step_bytes(6))
    plan = plan_of(run)
    assert deeds(plan) == [("set-aside", left.name)]
    assert "SCH102" in plan.deeds[0].why[0]


def test_of_two_whole_temporaries_the_one_written_last_is_published(
    run: Path, dead_pid: int
) -> None:
    first = leftover(run, 8, dead_pid, step_bytes(8))
    os.utime(first, ns=(10**18, 10**18))
    second = run / f"{first.name}-1"
    second.write_bytes(step_bytes(8))
    assert deeds(plan_of(run)) == [("set-aside", first.name), ("publish", second.name), POINT]


# ---- step files


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(4096),
        b"<!doctype html><title>404</title>",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 3\n",
        b"\x1f\x8b\x08\x00" + bytes(20),
    ],
    ids=["empty", "zeros", "html", "lfs", "gzip"],
)
def test_what_is_no_checkpoint_goes_aside(data: bytes, run: Path) -> None:
    put(run, 6, data)
    plan = plan_of(run)
    assert deeds(plan) == [("set-aside", name(6)), POINT]
    assert plan.aim is not None
    assert plan.aim.step == 4


def test_a_file_of_another_step_goes_aside(run: Path) -> None:
    put(run, 8, step_bytes(4))
    plan = plan_of(run)
    assert deeds(plan) == [("set-aside", name(8))]
    assert plan.deeds[0].why[0].startswith("SCH102")


def test_a_dangerous_file_goes_aside(run: Path, fixtures: Path) -> None:
    evil = next((fixtures / "hostile").glob("step_*.pt"), None) or next(
        (fixtures / "hostile-files").glob("*os_system*")
    )
    put(run, 8, evil.read_bytes())
    assert deeds(plan_of(run)) == [("set-aside", name(8))]


def test_links_and_directories_go_aside_and_are_not_followed(run: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.pt"
    outside.write_bytes(step_bytes(8))
    (run / name(8)).symlink_to(outside)
    (run / name(9)).mkdir()
    (run / name(9) / "file").write_text("x")
    plan = plan_of(run)
    assert deeds(plan) == [("set-aside", name(8)), ("set-aside", name(9))]
    assert "a link to" in plan.deeds[0].why[0]


def test_of_two_valid_files_the_full_name_stays(run: Path) -> None:
    (run / "step_6.pt").write_bytes(step_bytes(6))
    (run / "step_6.pt").chmod(0o644)
    plan = plan_of(run)
    assert deeds(plan) == [("set-aside", "step_6.pt")]
    assert plan.deeds[0].why[0].startswith("DIR106")


def test_of_two_files_the_valid_one_stays_whatever_its_name(run: Path) -> None:
    (run / "step_6.pt").write_bytes(step_bytes(6))
    (run / "step_6.pt").chmod(0o644)
    put(run, 6, b"")
    plan = plan_of(run)
    assert deeds(plan) == [("set-aside", name(6)), POINT]
    assert plan.aim is not None
    assert plan.aim.file == "step_6.pt"


def test_what_could_not_be_checked_is_not_touched(run: Path) -> None:
    put(run, 8, corrupt.replace_record(step_bytes(8), "data.pkl", UNCHECKED))
    put(run, 4, b"")
    plan = plan_of(run)
    assert deeds(plan) == [("set-aside", name(4))]
    assert [(left.path, left.unchecked) for left in plan.left] == [(str(run / name(8)), True)]


def test_a_pointer_stays_while_a_newer_step_could_not_be_checked(run: Path) -> None:
    put(run, 8, corrupt.replace_record(step_bytes(8), "data.pkl", UNCHECKED))
    point(run, 4)
    plan = plan_of(run)
    assert plan.deeds == []
    assert [left.path for left in plan.left] == [str(run / name(8)), str(run / "latest.json")]


def test_a_temporary_that_could_not_be_checked_is_not_touched(run: Path, dead_pid: int) -> None:
    """The damaged file of its step is still moved out of the way."""
    left = leftover(run, 6, dead_pid, corrupt.replace_record(step_bytes(6), "data.pkl", UNCHECKED))
    put(run, 6, b"")
    plan = plan_of(run)
    assert deeds(plan) == [("set-aside", name(6)), POINT]
    assert [(one.path, one.unchecked) for one in plan.left] == [(str(left), True)]


def test_content_that_no_checkpoint_has_goes_aside(run: Path, fixtures: Path) -> None:
    """A limit on the make of the content, not on its amount, says that it cannot be used."""
    put(run, 6, (fixtures / "hostile-files" / "nested.pt").read_bytes())
    plan = plan_of(run)
    assert deeds(plan) == [("set-aside", name(6)), POINT]
    assert plan.deeds[0].why[0].startswith("FIL124: reading stopped at a limit: ")
    assert (plan.left, plan.look.report.could_not_check) == ([], False)
    assert plan.look.report.newest_valid == 4


def test_the_last_files_stay_where_they_are(run: Path, dead_pid: int) -> None:
    """A directory without step files would look as if training had not begun."""
    for step in (2, 4, 6):
        put(run, step, b"")
    leftover(run, 6, dead_pid, b"torn")
    plan = plan_of(run)
    assert plan.deeds == []
    assert len(plan.left) == 4
    assert all("no step here would be valid" in left.words for left in plan.left)


# ---- files with the name of another step


def move(run: Path, old: int, new: int) -> None:
    (run / name(old)).rename(run / name(new))


def renames(plan: RepairPlan) -> list[tuple[str, str | None]]:
    return [(os.path.basename(d.path), d.target) for d in plan.deeds if d.verb == "rename"]


def test_a_whole_file_gets_the_name_of_its_step(run: Path) -> None:
    """Its pointer is right then, and nothing goes back."""
    move(run, 6, 8)
    plan = plan_of(run)
    assert deeds(plan) == [("rename", name(8))]
    assert plan.deeds[0].target == name(6)
    assert plan.newest is not None
    assert (plan.newest.step, plan.goes_back_from, plan.left) == (6, None, [])


def test_a_name_that_a_rename_frees_is_taken_after_it(run: Path) -> None:
    move(run, 6, 7)
    move(run, 2, 6)
    plan = plan_of(run)
    assert renames(plan) == [(name(6), name(2)), (name(7), name(6))]
    assert len(plan.deeds) == 2


def test_a_damaged_file_gives_its_name_to_the_right_one(run: Path) -> None:
    put(run, 8, step_bytes(6))
    put(run, 6, b"")
    plan = plan_of(run)
    assert deeds(plan) == [("set-aside", name(6)), ("rename", name(8))]


def test_of_two_files_with_each_others_names_one_goes_aside(run: Path) -> None:
    """A ring cannot be undone by renames alone; the newest step is what matters."""
    put(run, 2, step_bytes(6))
    put(run, 6, step_bytes(2))
    plan = plan_of(run)
    assert deeds(plan) == [("set-aside", name(6)), ("rename", name(2))]


@pytest.mark.parametrize("why", ["valid", "unknown", "recorded"])
def test_a_name_that_is_not_free_is_not_given(why: str, run: Path) -> None:
    put(run, 8, step_bytes(6))
    if why == "unknown":
        put(run, 6, corrupt.replace_record(step_bytes(6), "data.pkl", UNCHECKED))
    elif why == "recorded":
        (run / name(6)).unlink()
        (run / "manifest.jsonl").write_text(json.dumps(record_of(step_bytes(6) + b"!")) + "\n")
    plan = plan_of(run)
    assert renames(plan) == []
    assert deeds(plan)[0] == ("set-aside", name(8))


def test_how_far_training_goes_back_is_said(run: Path) -> None:
    assert plan_of(run).goes_back_from is None
    put(run, 6, b"")
    assert plan_of(run).goes_back_from == 6
    put(run, 8, corrupt.replace_record(step_bytes(8), "data.pkl", UNCHECKED))
    assert plan_of(run).goes_back_from is None


# ---- modes


def test_a_file_gets_the_mode_of_most(run: Path) -> None:
    (run / name(6)).chmod(0o600)
    plan = plan_of(run)
    assert deeds(plan) == [("chmod", name(6))]
    assert plan.deeds[0].mode == 0o644


def test_nobody_gets_to_write_by_it(run: Path) -> None:
    for step in (2, 4):
        (run / name(step)).chmod(0o664)
    plan = plan_of(run)
    assert plan.deeds == []


def test_writing_for_everybody_is_taken_away(run: Path) -> None:
    (run / name(2)).chmod(0o666)
    (run / "latest.json").chmod(0o646)
    run.chmod(0o777)
    plan = plan_of(run)
    found = {os.path.basename(deed.path): deed.mode for deed in plan.deeds}
    assert found == {name(2): 0o644, "latest.json": 0o644}
    assert [left.path for left in plan.left] == [str(run)]
    assert "chmod o-w" in plan.left[0].words


@pytest.mark.parametrize(
    ("modes", "usual"),
    [([], None), ([0o644], 0o644), ([0o644, 0o600], None), ([0o600, 0o644, 0o600], 0o600)],
)
def test_the_usual_mode_is_that_of_more_than_half(modes: list[int], usual: int | None) -> None:
    assert usual_mode(modes) == usual


# ---- the pointer


def test_a_pointer_that_is_behind_is_moved(run: Path) -> None:
    point(run, 4)
    assert deeds(plan_of(run)) == [POINT]


@pytest.mark.parametrize("content", [b"", b"null", b'{"step": 6', b"[1]", b"\xff\xfe"])
def test_a_malformed_pointer_is_kept_as_evidence(content: bytes, run: Path) -> None:
    (run / "latest.json").write_bytes(content)
    assert deeds(plan_of(run)) == [("set-aside", "latest.json"), POINT]


def test_a_link_in_the_pointers_place_goes_aside(run: Path) -> None:
    (run / "latest.json").unlink()
    (run / "latest.json").symlink_to("elsewhere.json")
    assert deeds(plan_of(run)) == [("set-aside", "latest.json"), POINT]


def test_a_directory_in_the_pointers_place_goes_aside(run: Path) -> None:
    (run / "latest.json").unlink()
    (run / "latest.json").mkdir()
    assert deeds(plan_of(run)) == [("set-aside", "latest.json"), POINT]


def test_a_missing_pointer_is_written(run: Path) -> None:
    (run / "latest.json").unlink()
    assert deeds(plan_of(run)) == [POINT]


def record_of(data: bytes, step: int = 6) -> dict[str, object]:
    """What the pointer or the manifest records of a file with this content."""
    sha256 = hashlib.sha256(data).hexdigest()
    return {"step": step, "file": name(step), "size": len(data), "sha256": sha256}


@pytest.mark.parametrize("where", ["latest.json", "manifest.jsonl"])
@pytest.mark.parametrize("as_large", [True, False])
def test_a_file_that_its_record_contradicts_goes_aside(
    where: str, as_large: bool, run: Path
) -> None:
    """However whole it is: somebody has put it in the place of the one that was saved."""
    recorded = step_bytes(6) if as_large else step_bytes(6) + b"more"
    weights = len(corrupt.content_range(step_bytes(6), "data/0"))
    swapped = corrupt.replace_record(step_bytes(6), "data/0", bytes(weights))
    recorded += b"!" * (len(swapped) - len(step_bytes(6))) * as_large
    (run / where).write_text(json.dumps(record_of(recorded)) + "\n")
    (run / where).chmod(0o644)
    put(run, 6, swapped)
    plan = plan_of(run)
    assert deeds(plan) == [("set-aside", name(6)), POINT]
    assert plan.deeds[0].why[0][:6] == {"l": "PTR109", "m": "DIR110"}[where[0]]
    assert plan.look.report.newest_valid == 4
    newest = find_newest_valid(scan(str(run)))
    assert newest.sure is not None
    assert newest.sure.file.step == 4
    assert newest.passed_over[0].why().startswith("not the file that was saved: it has ")


@pytest.mark.parametrize("line", [0, 1])
def test_a_record_that_holds_proves_the_file_and_the_pointer_is_out_of_date(
    line: int, run: Path
) -> None:
    content = {"step": 6, "file": name(6), "size": 3, "sha256": "0" * 64}
    (run / "latest.json").write_text(json.dumps(content))
    lines = [record_of(step_bytes(6)), record_of(b"another")]
    text = "".join(json.dumps(one) + "\n" for one in (lines if line == 0 else lines[::-1]))
    (run / "manifest.jsonl").write_text(text)
    plan = plan_of(run)
    assert deeds(plan) == [POINT]
    assert plan.deeds[0].why[0].startswith("PTR109")
    assert plan.aim is not None
    assert plan.aim.record


def test_a_pointer_at_the_file_that_a_temporary_becomes_may_stay(run: Path, dead_pid: int) -> None:
    """The writer died between moving the pointer and … nobody knows; the pointer is right."""
    (run / name(6)).unlink()
    leftover(run, 6, dead_pid, step_bytes(6))
    plan = plan_of(run)
    assert [deed.verb for deed in plan.deeds] == ["publish"]


# ---- what is chosen


def test_only_what_was_asked_for(run: Path, dead_pid: int) -> None:
    leftover(run, 8, dead_pid, step_bytes(8))
    put(run, 4, b"")
    point(run, 2)
    for kind, verb in [
        ("temporaries", "publish"),
        ("set-aside", "set-aside"),
        ("pointer", "point"),
    ]:
        plan = plan_of(run, Options(only=frozenset({kind})))
        assert [deed.verb for deed in plan.deeds] == [verb]
    # Without the temporary, which is not to be published, 6 is the newest.
    assert plan.aim is not None
    assert plan.aim.step == 6


def test_what_no_deed_mends_is_said(run: Path) -> None:
    state = training_state(6)
    state["rng"] = {"python": "garbage"}
    put(run, 6, saved(state))
    plan = plan_of(run)
    assert plan.deeds == []
    assert {finding.id for finding in plan.unaddressed()} == {"SCH107"}
