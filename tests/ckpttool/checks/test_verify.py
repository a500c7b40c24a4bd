"""`verify` as a whole: its report, its threads, and damage at thousands of places."""

from __future__ import annotations

import random
import threading
from functools import cache
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ckpttool.checks.base import command
from ckpttool.checks.measure import CancelledError, Meter, Workers
from ckpttool.checks.verify import Report, verify
from ckpttool.cli.main import main
from ckpttool.errors import UnreadableError
from ckpttool.findings import Severity
from tests import corrupt
from tests.ckpttool.checks.builders import name, put, saved, step_bytes, training_state


def test_a_report_is_plain_data(run: Path) -> None:
    report = verify(run)
    assert report.as_dict() == {
        "path": str(run),
        "quick": False,
        "newest_valid": 6,
        "newest_valid_path": str(run / name(6)),
        "files": [
            {
                "step": step,
                "name": name(step),
                "path": str(run / name(step)),
                "size": len(step_bytes(step)),
                "state": "valid",
                "checksums": "checked",
                "sha256": None,
            }
            for step in (2, 4, 6)
        ],
        "findings": [],
    }
    assert (report.worst, report.could_not_check) == (None, False)


@pytest.mark.parametrize("alone", [False, True])
def test_a_warning_of_a_valid_file_names_what_mends_it(run: Path, alone: bool) -> None:
    """`repair` leaves a valid step as it is. Byte 20 is of a size that torch does not read."""
    path = run / name(4)
    path.write_bytes(corrupt.flip_bit(step_bytes(4), 20, 0))
    report = verify(path if alone else run)
    (finding,) = report.findings
    assert (finding.id, finding.severity) == ("FIL113", Severity.WARNING)
    assert finding.remedy == f"{command('mend', str(path))} -o OUT"
    done = CliRunner().invoke(main, ["mend", str(path), "-o", str(run / "OUT")])
    assert done.exit_code == 0, done.output
    assert (run / "OUT").read_bytes() == step_bytes(4)


def test_findings_come_worst_first(run: Path) -> None:
    put(run, 2, corrupt.append(step_bytes(2), b"x"))
    put(run, 6, b"")
    (run / "notes").write_bytes(b"x")
    report = verify(run)
    ranks = [item.severity.rank for item in report.findings]
    assert ranks == sorted(ranks, reverse=True)
    assert report.worst is Severity.ERROR
    assert {2, 1, 0} == set(ranks)


def test_paths_that_are_not_there_raise(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="No such file"):
        verify(tmp_path / "none")
    with pytest.raises(UnreadableError):
        verify("a\0b")


def test_a_pipe_is_a_finding_and_nothing_waits(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / name(2))
    report = verify(tmp_path / name(2))
    assert [item.id for item in report.findings] == ["FIL101"]
    assert report.could_not_check
    ids = {item.id for item in verify(tmp_path).findings}
    assert ids >= {"DIR105", "DIR109"}


def test_paths_are_taken_as_they_are(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    assert verify(".").newest_valid_path == f"./{name(6)}"
    assert verify(name(6)).newest_valid_path == name(6)
    assert verify(Path(str(run) + "/")).newest_valid == 6


def test_a_directory_that_is_itself_a_link_is_followed(run: Path) -> None:
    link = run.parent / "current"
    link.symlink_to(run)
    assert verify(link).findings == []


@pytest.mark.parametrize("jobs", [1, 2, 7])
def test_any_number_of_threads_finds_the_same(run: Path, jobs: int) -> None:
    big = {f"t{index}": torch.full((1_000_000,), float(index)) for index in range(6)}
    data = saved({**training_state(6), "extra": big})
    hit = [corrupt.content_range(data, f"data/{key}").start for key in (0, 9, 13)]
    for offset in hit:
        data = corrupt.flip_bit(data, offset)
    put(run, 6, data)
    before = threading.active_count()
    report = verify(run, jobs=jobs)
    records = [item.place.record for item in report.findings if item.id == "FIL109"]
    assert records == ["data/0", "data/13", "data/9"]
    assert threading.active_count() == before


def test_progress_counts_every_byte_once_and_never_backwards(run: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    verify(run, progress=lambda *call: calls.append(call))
    total = sum(len(step_bytes(step)) for step in (2, 4, 6))
    assert calls[-1][:2] == (total, total)
    assert [done for done, _, _ in calls] == sorted(done for done, _, _ in calls)
    assert {label for _, _, label in calls} == {name(2), name(4), name(6)}


def test_an_interrupt_ends_the_threads(run: Path) -> None:
    big = {f"t{index}": torch.zeros(2_000_000) for index in range(6)}
    put(run, 6, saved({**training_state(6), "extra": big}))

    def interrupt(done: int, total: int, label: str) -> None:
        if label == name(6):
            raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        verify(run, progress=interrupt, jobs=2)
    assert threading.active_count() == before


def test_a_cancelled_meter_stops_workers() -> None:
    meter = Meter(10, None)
    with Workers(2, meter) as workers:
        assert list(workers.map(str, [1, 2, 3], 1 << 30)) == ["1", "2", "3"]
    meter.cancel()
    with pytest.raises(CancelledError):
        meter.add(1)


def test_commands_are_quoted() -> None:
    assert command("verify", "runs/a") == "ckpttool verify runs/a"
    assert command("verify", "a b") == "ckpttool verify 'a b'"
    assert command("verify", Path("$HOME")) == "ckpttool verify '$HOME'"


def test_a_damaged_newest_file_leaves_the_one_before(run: Path) -> None:
    put(run, 6, step_bytes(6)[:5000])
    report = verify(run)
    assert (report.newest_valid, report.newest_valid_path) == (4, str(run / name(4)))
    assert [file.state for file in report.files] == ["valid", "valid", "damaged"]


def test_files_are_judged_by_content_and_not_by_name(tmp_path: Path) -> None:
    for other in ("a.pth.tar", "b.zip", "c"):
        path = tmp_path / other
        path.write_bytes(step_bytes(4))
        path.chmod(0o644)
        assert verify(path).findings == []
        assert verify(path).files[0].state == "intact"


HONEST = {"truncated_legacy.pt": "damaged", "truncated_zip.pt": "damaged"}


def corpus_files(corpus: Path) -> list[Path]:
    return sorted(path for path in corpus.rglob("*") if path.is_file() and path.name != "README.md")


def test_no_honest_file_of_the_corpus_is_called_damaged_or_dangerous(corpus: Path) -> None:
    files = corpus_files(corpus)
    assert len(files) > 60
    for path in files:
        report = verify(path, finite=True)
        expected = HONEST.get(path.name)
        if expected is not None:
            assert report.files[0].state == expected, path
        else:
            assert report.files[0].state not in ("damaged", "dangerous", "unreadable"), path
            bad = [item for item in report.findings if item.severity is Severity.ERROR]
            assert {item.id for item in bad} <= {"FIL106"}, (path, bad)


@cache
def hundred_records() -> bytes:
    """A training checkpoint with more than a hundred storages."""
    state = training_state(4)
    generator = torch.Generator().manual_seed(7)
    for index in range(100):
        state["model"][f"layer.{index}.weight"] = torch.randn(5, 3, generator=generator)
    return saved(state)


def lone(tmp_path: Path, content: bytes) -> Report:
    path = tmp_path / name(4)
    path.write_bytes(content)
    path.chmod(0o644)
    return verify(path)


def test_the_hundred_records_are_sound(tmp_path: Path) -> None:
    assert lone(tmp_path, hundred_records()).findings == []


@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_byte_in_any_records_data_is_found(tmp_path: Path, seed: int) -> None:
    data = hundred_records()
    chance = random.Random(seed)
    places = {key: corrupt.content_range(data, key) for key in corrupt.entry_offsets(data)}
    offsets = [(key, offset) for key, content in places.items() for offset in content]
    for record, offset in chance.sample(offsets, 60):
        report = lone(tmp_path, corrupt.flip_byte(data, offset, 1 << chance.randrange(8)))
        found = [item for item in report.findings if item.id == "FIL109"]
        assert [item.place.record for item in found] == [record]
        assert report.files[0].state in ("damaged", "dangerous")
        assert report.newest_valid is None


@pytest.mark.parametrize("seed", range(2))
def test_a_flipped_byte_anywhere_else_is_found(tmp_path: Path, seed: int) -> None:
    data = hundred_records()
    chance = random.Random(seed)
    others = sorted(set(range(len(data))) - corrupt.content_bytes(data))
    for offset in chance.sample(others, 100):
        report = lone(tmp_path, corrupt.flip_byte(data, offset, 1 << chance.randrange(8)))
        assert report.findings, offset
        assert report.worst in (Severity.WARNING, Severity.ERROR)


@pytest.mark.parametrize("seed", range(2))
def test_every_cut_is_found(tmp_path: Path, seed: int) -> None:
    data = hundred_records()
    for length in random.Random(seed).sample(range(len(data)), 60):
        report = lone(tmp_path, data[:length])
        assert report.newest_valid is None, length
        assert report.worst is Severity.ERROR


@pytest.mark.parametrize("seed", range(2))
def test_a_pickle_cut_anywhere_is_damage_and_nothing_else_happens(
    tmp_path: Path, seed: int
) -> None:
    data = step_bytes(4)
    pickle = dict(corrupt.read_records(data))["archive/data.pkl"]
    for length in random.Random(seed).sample(range(len(pickle)), 60):
        report = lone(tmp_path, corrupt.replace_record(data, "data.pkl", pickle[:length]))
        assert report.files[0].state in ("damaged", "not-a-checkpoint", "dangerous"), length
        assert report.worst is Severity.ERROR


def test_a_root_folder_named_after_a_temporary_is_nothing_odd(tmp_path: Path) -> None:
    records = [
        (full.replace("archive/", ".step_000000000004.pt/", 1), content)
        for full, content in corrupt.read_records(step_bytes(4))
    ]
    assert lone(tmp_path, corrupt.torch_zip(records)).findings == []
