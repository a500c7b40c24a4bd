"""DIR110 to DIR115: the manifest, the lock and half-done operations, against what is there."""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ckpttool.actions.journal.moves import SetAside
from ckpttool.actions.journal.operations import carry_out
from ckpttool.checks.verify import verify
from ckpttool.findings import Finding, Severity
from ckpttool.io.lock import LOCK_NAME, WriterLock
from tests.ckpttool.checks.builders import name, put, step_bytes


def ids(run: Path, **options: Any) -> list[str]:
    return [finding.id for finding in verify(run, **options).findings]


def the_finding(run: Path, id: str) -> Finding:
    (finding,) = (item for item in verify(run).findings if item.id == id)
    return finding


def record(number: int, **facts: Any) -> dict[str, Any]:
    data = step_bytes(number)
    return {
        "step": number,
        "file": name(number),
        "size": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        **facts,
    }


def manifest(run: Path, *lines: dict[str, Any]) -> None:
    (run / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_dir110_a_true_manifest_is_silent(run: Path) -> None:
    manifest(run, *(record(step) for step in (2, 4, 6, 8)))
    report = verify(run)
    assert [finding.id for finding in report.findings] == []
    assert [file.sha256 for file in report.files] == [record(s)["sha256"] for s in (2, 4, 6)]
    assert {file.sha256 for file in verify(run, quick=True).files} == {None}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"sha256": "0" * 64}, "the manifest records another SHA-256 than it has"),
        ({"size": 7}, "the manifest records 7 bytes, it has "),
        ({"step": 5}, "the manifest records it as step 5"),
    ],
)
def test_dir110_a_record_that_differs(run: Path, facts: dict[str, Any], words: str) -> None:
    manifest(run, record(2), record(4, **facts), record(6))
    finding = the_finding(run, "DIR110")
    assert finding.severity is Severity.ERROR
    assert finding.place.path == str(run / name(4))
    assert finding.words.startswith(words)
    (key,) = facts
    assert finding.facts["recorded"] == facts[key]
    assert finding.facts["actual"] == record(4)[key]
    assert ids(run, quick=True) == ([] if key == "sha256" else ["DIR110"])


def test_dir110_says_nothing_of_a_damaged_file_or_one_that_is_gone(run: Path) -> None:
    manifest(run, record(2), record(4), record(8))
    put(run, 4, step_bytes(4)[:-50])
    assert "DIR110" not in ids(run)


def test_dir110_finds_a_bit_that_no_checksum_covers(run: Path) -> None:
    manifest(run, record(4))
    data = bytearray(step_bytes(4))
    at = data.index(b"FB") + 10  # in the padding in front of a record
    assert data[at : at + 8] == b"Z" * 8
    data[at] ^= 1
    put(run, 4, bytes(data))
    report = verify(run)
    assert report.files[1].state == "not-as-recorded"
    assert the_finding(run, "DIR110").words == "the manifest records another SHA-256 than it has"


def test_a_sha256_is_taken_only_where_there_is_something_to_compare(run: Path) -> None:
    manifest(run, record(2, sha256=None), record(4, sha256="x"), record(6, size=1))
    assert [file.sha256 for file in verify(run).files] == [None, None, None]
    pointer = {"step": 6, "file": name(6), "sha256": record(6)["sha256"]}
    (run / "latest.json").write_text(json.dumps(pointer))
    assert [file.sha256 for file in verify(run).files] == [None, None, record(6)["sha256"]]


@pytest.mark.parametrize("jobs", [1, 2, 3])
def test_large_files_are_hashed_beside_the_checksums(
    run: Path, jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small ones, as if they were large: in processes, in threads, and one after another."""
    from ckpttool.checks import hashing

    monkeypatch.setattr(hashing, "_WORTH_STARTING", 1)
    monkeypatch.setattr(hashing, "_CHUNK_BYTES", 1000)
    monkeypatch.setattr(hashing, "_TOLD_BYTES", 5000)
    wanted = [record(step)["sha256"] for step in (2, 4, 6)]
    manifest(run, *(record(step) for step in (2, 4, 6)))
    told: list[tuple[int, int, str]] = []
    report = verify(run, jobs=jobs, progress=lambda *seen: told.append(seen))
    assert [file.sha256 for file in report.files] == wanted
    assert max(done for done, _, _ in told) <= told[0][1]
    assert told[0][1] == 2 * sum(len(step_bytes(step)) for step in (2, 4, 6))
    monkeypatch.setattr(hashing.threading, "active_count", lambda: 2)
    assert [file.sha256 for file in verify(run, jobs=jobs).files] == wanted
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        pass  # none is left


def test_a_hashing_child_that_is_killed_is_made_up_for(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckpttool.checks import hashing

    monkeypatch.setattr(hashing, "_WORTH_STARTING", 1)
    monkeypatch.setattr(hashing, "_tell", lambda *_: os.kill(os.getpid(), 9))
    manifest(run, record(4))
    assert verify(run, jobs=2).files[1].sha256 == record(4)["sha256"]


def test_an_interrupt_ends_the_hashing_children(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpttool.checks import hashing
    from ckpttool.checks import verify as verify_module

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(hashing, "_WORTH_STARTING", 1)
    monkeypatch.setattr(hashing, "_tell", lambda *_: time.sleep(60))
    monkeypatch.setattr(verify_module, "_examine_step", interrupt)
    manifest(run, record(2))
    before = children()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        verify(run, jobs=2)
    assert time.monotonic() - started < 30
    assert children() <= before


def children() -> set[str]:
    """The pids of this process's children; other tests may have started some."""
    found: set[str] = set()
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread may end meanwhile
            found.update((task / "children").read_text().split())
    return found


def test_dir111_a_writer_at_work(run: Path) -> None:
    with WriterLock.acquire(run, program="trainer_core", run_id="r1"):
        finding = the_finding(run, "DIR111")
        assert finding.severity is Severity.INFO
        assert finding.place.path == str(run / LOCK_NAME)
        assert f"held by pid {os.getpid()} on " in finding.words
        assert finding.facts == {
            "pid": os.getpid(),
            "host": os.uname().nodename,
            "run_id": "r1",
        }
        assert ids(run) == ["DIR111"]
    assert ids(run) == []


@pytest.mark.parametrize(
    ("facts", "age", "ended"),
    [
        ({"started": 1}, 0, "which has ended"),
        ({"host": "node7"}, 400, "which has given no sign of life for long"),
    ],
)
def test_dir112_a_lock_that_was_left(
    run: Path, facts: dict[str, Any], age: float, ended: str
) -> None:
    lock = WriterLock.acquire(run, program="trainer_core")
    path = run / LOCK_NAME
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **facts}))
    os.utime(path, (time.time() - age,) * 2)
    finding = the_finding(run, "DIR112")
    assert finding.severity is Severity.WARNING
    assert finding.words.endswith(ended)
    assert ids(run) == ["DIR112"]
    path.write_text(json.dumps(content))
    lock.release()


def half_done(run: Path, count: int = 2) -> str:
    operation = carry_out(run, "rollback", [SetAside(run, name(6), "")])
    journal = Path(operation.folder, "journal.jsonl")
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:count]))
    return operation.id


def test_dir113_an_operation_that_was_left_half_way(run: Path) -> None:
    id = half_done(run)
    finding = the_finding(run, "DIR113")
    assert finding.severity is Severity.ERROR
    assert finding.words == f"rollback {id} was only partly carried out"
    assert finding.remedy == f"ckpttool undo '{run}' {id}"
    journal = run / ".quarantine" / id / "journal.jsonl"
    with journal.open("a") as file:
        file.write('{"event": "taking-back"}\n')
    assert the_finding(run, "DIR113").words.endswith("was only partly taken back")
    with WriterLock.acquire(run, program="ckpttool undo"):
        assert "DIR113" not in ids(run)  # it may be under way


def test_dir113_is_silent_about_what_was_finished(run: Path) -> None:
    carry_out(run, "rollback", [SetAside(run, "latest.json", "")])
    assert "DIR113" not in ids(run)


def test_dir115_a_journal_that_cannot_be_read(run: Path) -> None:
    folder = run / ".quarantine" / "20200101T000000Z"
    folder.mkdir(parents=True)
    assert "DIR115" not in ids(run)  # it never got as far as a journal
    (folder / name(2)).write_bytes(b"")
    for content in (b"", b"\x00\xff", b'{"schema": 99}\n'):
        (folder / "journal.jsonl").write_bytes(content)
        finding = the_finding(run, "DIR115")
        assert finding.severity is Severity.WARNING
        assert finding.place.path == str(folder)
        assert str(finding.remedy).startswith("move back by hand what is needed; then: ckpttool p")


def test_dir115_a_quarantine_that_is_no_folder(run: Path) -> None:
    path = run / ".quarantine"
    path.write_bytes(b"")
    finding = the_finding(run, "DIR115")
    assert finding.words == "is not a folder, so nothing can be set aside"
    assert str(finding.remedy).startswith("mv -n -- ")
    path.unlink()
    path.symlink_to(run.parent)
    assert the_finding(run, "DIR115").words.startswith("is a link, not a folder")


def test_dir114_lines_that_cannot_be_read(run: Path) -> None:
    manifest(run, record(2))
    with (run / "manifest.jsonl").open("a") as file:
        file.write("{\n")
    finding = the_finding(run, "DIR114")
    assert finding.severity is Severity.WARNING
    assert finding.words == "1 problem with it: line 2: is not JSON"
    (run / "manifest.jsonl").unlink()
    (run / "manifest.jsonl").symlink_to("nowhere")
    assert the_finding(run, "DIR114").words.endswith("it is a link")
