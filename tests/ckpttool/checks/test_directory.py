"""DIR: what lies in a directory besides good step files and a pointer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckpttool.checks.verify import verify
from ckpttool.findings import Finding, Severity
from ckpttool.io.processes import process_is_alive
from tests.ckpttool.checks.builders import name, point, put, step_bytes


def findings(run: Path) -> list[tuple[str, Severity]]:
    return [(finding.id, finding.severity) for finding in verify(run).findings]


def the_finding(run: Path, id: str) -> Finding:
    (finding,) = (item for item in verify(run).findings if item.id == id)
    return finding


@pytest.fixture
def dead_pid() -> int:
    """The id of a process that has just ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def temporary(run: Path, step: int, pid: int, content: bytes) -> Path:
    path = run / f".{name(step)}.tmp-{pid}"
    path.write_bytes(content)
    return path


def test_dir101_a_leftover_that_is_cut_may_go(run: Path, dead_pid: int) -> None:
    path = temporary(run, 8, dead_pid, step_bytes(8)[:1000])
    finding = the_finding(run, "DIR101")
    assert finding.severity is Severity.WARNING
    assert finding.facts == {
        "pid": dead_pid,
        "process_alive": False,
        "looks_whole": False,
        "only_copy": False,
        "size": 1000,
    }
    assert finding.remedy == f"ckpttool repair '{run}'"
    assert finding.place.path == str(path)


def test_dir101_a_whole_leftover_may_be_the_only_copy_of_its_step(run: Path, dead_pid: int) -> None:
    temporary(run, 8, dead_pid, step_bytes(8))
    finding = the_finding(run, "DIR101")
    assert (finding.facts["looks_whole"], finding.facts["only_copy"]) == (True, True)
    assert "only good copy of step_000000000008.pt" in finding.words
    assert finding.remedy == f"ckpttool repair '{run}'"


def test_dir101_a_whole_leftover_beside_its_good_step_is_no_only_copy(
    run: Path, dead_pid: int
) -> None:
    temporary(run, 6, dead_pid, step_bytes(6))
    facts = the_finding(run, "DIR101").facts
    assert (facts["looks_whole"], facts["only_copy"]) == (True, False)


def test_dir101_a_whole_leftover_beside_its_damaged_step_is_kept(run: Path, dead_pid: int) -> None:
    temporary(run, 6, dead_pid, step_bytes(6))
    put(run, 6, step_bytes(6)[:-50])
    finding = the_finding(run, "DIR101")
    assert finding.facts["only_copy"] is True
    assert finding.remedy == f"ckpttool repair '{run}'"


def test_dir101_a_writer_at_work_is_only_an_info(run: Path) -> None:
    temporary(run, 8, os.getpid(), b"half")
    finding = the_finding(run, "DIR101")
    assert (finding.severity, finding.facts["process_alive"]) == (Severity.INFO, True)
    assert "rm" not in str(finding.remedy)


def test_dir101_a_leftover_of_the_pointer(run: Path, dead_pid: int) -> None:
    (run / f".latest.json.tmp-{dead_pid}").write_text("{}")
    finding = the_finding(run, "DIR101")
    assert "whole" not in finding.words
    assert finding.facts["looks_whole"] is False


def test_whether_a_process_is_alive(dead_pid: int) -> None:
    assert process_is_alive(os.getpid()) is True
    assert process_is_alive(1) is True
    assert process_is_alive(dead_pid) is False
    assert process_is_alive(0) is None
    assert process_is_alive(10**17) is None


def test_dir102_foreign_names_are_one_info(run: Path) -> None:
    for other in (".DS_Store", f"._{name(6)}", "Thumbs.db", "step_-hf.pt", "step_backup.pt"):
        (run / other).write_bytes(b"x")
    (run / "old").mkdir()
    (run / ".quarantine").mkdir()
    finding = the_finding(run, "DIR102")
    assert finding.severity is Severity.INFO
    assert finding.words.startswith("6 other names here")
    assert "old" in finding.facts["names"]
    assert len(findings(run)) == 1


def test_dir103_widths(run: Path) -> None:
    (run / name(6)).rename(run / "step_6.pt")
    put(run, 100_000, step_bytes(100_000)).rename(run / "step_0100000.pt")
    point(run, 4)
    report = verify(run)
    odd = [item for item in report.findings if item.id == "DIR103"]
    assert [item.facts["digits"] for item in odd] == [7, 1]
    assert odd[1].remedy == f"mv -n -- '{run}/step_6.pt' '{run}/{name(6)}'"
    assert {item.severity for item in odd} == {Severity.WARNING}
    # As text, "step_6.pt" would be the last one.
    assert report.newest_valid == 100_000


def test_dir104_modes(run: Path) -> None:
    (run / name(4)).chmod(0o600)
    finding = the_finding(run, "DIR104")
    assert finding.severity is Severity.WARNING
    assert finding.facts == {"modes": {"0600": 1, "0644": 2}}
    assert finding.remedy == f"chmod 644 -- '{run / name(4)}'"


def test_dir105_an_old_link_is_a_warning_and_never_valid(run: Path, tmp_path: Path) -> None:
    (run / name(4)).rename(tmp_path / "real.pt")
    (run / name(4)).symlink_to(tmp_path / "real.pt")
    report = verify(run)
    assert [(item.id, item.severity) for item in report.findings] == [("DIR105", Severity.WARNING)]
    assert report.files[1].state == "not-opened"


def test_dir105_the_highest_step_as_a_directory_is_an_error(run: Path) -> None:
    (run / name(8)).mkdir()
    assert findings(run) == [("DIR105", Severity.ERROR)]
    assert verify(run).newest_valid == 6


def test_dir106_two_files_for_one_step(run: Path) -> None:
    (run / "step_6.pt").write_bytes(step_bytes(6))
    (run / "step_6.pt").chmod(0o644)
    assert ("DIR106", Severity.ERROR) in findings(run)
    assert verify(run).newest_valid_path == str(run / name(6))


def test_dir107_no_step_files(tmp_path: Path) -> None:
    assert findings(tmp_path) == [("DIR107", Severity.ERROR)]
    assert verify(tmp_path).newest_valid is None


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("/nowhere/step_000000000006.pt", "absolute"),
        ("../elsewhere", "outside"),
        ("gone.pt", "nowhere"),
        ("latest", "nowhere"),  # a loop
    ],
)
def test_dir108_links_that_break(run: Path, target: str, words: str) -> None:
    (run / "latest").symlink_to(target)
    finding = the_finding(run, "DIR108")
    assert finding.severity is Severity.WARNING
    assert words in finding.words


def test_dir108_offers_the_relative_link(run: Path) -> None:
    (run / "latest").symlink_to(run / name(6))
    assert the_finding(run, "DIR108").remedy == f"ln -sfn -- {name(6)} '{run}/latest'"


def test_a_relative_link_inside_is_no_fault(run: Path) -> None:
    (run / "latest").symlink_to(name(6))
    assert findings(run) == []


def test_dir109_no_valid_step(run: Path) -> None:
    for step in (2, 4, 6):
        put(run, step, b"")
    report = verify(run)
    assert "DIR109" in [item.id for item in report.findings]
    assert (report.newest_valid, report.newest_valid_path) == (None, None)


@pytest.mark.parametrize("times", [(6, 4, 2), (1, 1, 1), (0, 0, 0)])
def test_times_decide_nothing(run: Path, times: tuple[int, int, int]) -> None:
    for step, time in zip((2, 4, 6), times, strict=True):
        os.utime(run / name(step), (time, time))
    assert findings(run) == []
    assert verify(run).newest_valid == 6
