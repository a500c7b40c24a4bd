"""PTR: what is said of the pointer, beside step files that are good or not."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from ckpttool.checks.verify import verify
from ckpttool.findings import Finding, Severity
from tests.ckpttool.checks.builders import name, point, put, step_bytes


def pointer_findings(run: Path, **options: Any) -> list[Finding]:
    return [item for item in verify(run, **options).findings if item.id.startswith("PTR")]


def the_finding(run: Path, **options: Any) -> Finding:
    (finding,) = pointer_findings(run, **options)
    assert finding.place.path == str(run / "latest.json")
    return finding


def write(run: Path, content: Any) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (run / "latest.json").write_text(text)


FIX = "ckpttool fix-pointer '{run}'"


def test_a_healthy_directory_has_no_finding_at_all(run: Path) -> None:
    report = verify(run)
    assert [finding.id for finding in report.findings] == []
    assert (report.newest_valid, report.newest_valid_path) == (6, str(run / name(6)))
    assert [(file.step, file.state, file.checksums) for file in report.files] == [
        (2, "valid", "checked"),
        (4, "valid", "checked"),
        (6, "valid", "checked"),
    ]


def test_ptr101_missing(run: Path) -> None:
    (run / "latest.json").unlink()
    finding = the_finding(run)
    assert (finding.id, finding.severity) == ("PTR101", Severity.WARNING)
    assert finding.remedy == FIX.format(run=run)


@pytest.mark.parametrize("content", ["", "null", "7", "[]", "{}", '{"step": 6, "fi', '{"file": 6}'])
def test_ptr102_malformed(run: Path, content: str) -> None:
    write(run, content)
    finding = the_finding(run)
    assert (finding.id, finding.severity) == ("PTR102", Severity.ERROR)
    assert finding.remedy == FIX.format(run=run)


@pytest.mark.parametrize("file", ["", ".", "..", "../x/step_000000000006.pt", "/etc/passwd"])
def test_ptr103_leads_elsewhere(run: Path, file: str) -> None:
    write(run, {"step": 6, "file": file})
    finding = the_finding(run)
    assert (finding.id, finding.severity) == ("PTR103", Severity.ERROR)


def test_ptr103_a_linked_target(run: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere.pt").write_bytes(step_bytes(8))
    (run / name(8)).symlink_to(tmp_path / "elsewhere.pt")
    point(run, 8)
    report = verify(run)
    assert [finding.id for finding in report.findings] == ["PTR103", "DIR105"] or [
        finding.id for finding in report.findings
    ] == ["DIR105", "PTR103"]
    assert report.newest_valid == 6
    assert report.files[-1].state == "not-opened"


def test_ptr104_behind_the_highest_valid_step(run: Path) -> None:
    point(run, 4)
    finding = the_finding(run)
    assert (finding.id, finding.severity) == ("PTR104", Severity.ERROR)
    assert "step 4" in finding.words
    assert "step 6" in finding.words
    assert finding.facts == {"pointer_step": 4, "newest_valid": 6}
    assert finding.remedy == FIX.format(run=run)


def test_a_pointer_at_the_highest_valid_step_is_not_behind_a_damaged_one(run: Path) -> None:
    put(run, 8, step_bytes(8)[:-40])
    assert pointer_findings(run) == []
    assert verify(run).newest_valid == 6


def test_ptr105_target_missing(run: Path) -> None:
    point(run, 8)
    finding = the_finding(run)
    assert (finding.id, finding.severity) == ("PTR105", Severity.ERROR)


def test_ptr106_step_and_file_disagree(run: Path) -> None:
    write(run, {"step": 999, "file": name(6)})
    finding = the_finding(run)
    assert (finding.id, finding.severity) == ("PTR106", Severity.ERROR)
    assert "999" in finding.words


def test_ptr106_no_step_at_all(run: Path) -> None:
    write(run, {"file": name(6)})
    assert the_finding(run).id == "PTR106"


def test_ptr107_target_damaged(run: Path) -> None:
    put(run, 6, step_bytes(6)[:-40])
    finding = the_finding(run)
    assert (finding.id, finding.severity) == ("PTR107", Severity.ERROR)
    assert finding.facts == {"file": name(6), "state": "damaged"}
    assert finding.remedy == f"ckpttool repair '{run}'"


def test_ptr107_without_any_valid_step_names_no_command(run: Path) -> None:
    for step in (2, 4, 6):
        put(run, step, b"")
    finding = the_finding(run)
    assert finding.id == "PTR107"
    assert finding.remedy is not None
    assert "ckpttool" not in finding.remedy


@pytest.mark.parametrize("make", ["link", "directory"])
def test_ptr108_not_a_regular_file(run: Path, make: str) -> None:
    pointer = run / "latest.json"
    pointer.rename(run / "pointer.json")
    if make == "link":
        pointer.symlink_to("pointer.json")
    else:
        pointer.mkdir()
    finding = the_finding(run)
    assert (finding.id, finding.severity) == ("PTR108", Severity.ERROR)
    assert finding.remedy == f"ckpttool repair '{run}'"


def test_ptr109_size(run: Path) -> None:
    size = len(step_bytes(6))
    write(run, {"step": 6, "file": name(6), "size": size})
    assert pointer_findings(run) == []
    write(run, {"step": 6, "file": name(6), "size": size + 1})
    finding = the_finding(run)
    assert (finding.id, finding.severity) == ("PTR109", Severity.ERROR)
    assert finding.facts == {"recorded": size + 1, "size": size}
    write(run, {"step": 6, "file": name(6), "size": "big"})
    assert the_finding(run).id == "PTR109"


def test_ptr109_sha256_is_not_looked_at_in_a_quick_look(run: Path) -> None:
    right = hashlib.sha256(step_bytes(6)).hexdigest()
    write(run, {"step": 6, "file": name(6), "sha256": right.upper()})
    assert pointer_findings(run) == []
    write(run, {"step": 6, "file": name(6), "sha256": "0" * 64})
    assert the_finding(run).id == "PTR109"
    assert pointer_findings(run, quick=True) == []


def test_remedies_are_quoted_for_a_shell(run: Path) -> None:
    odd = run.parent / "it's $HOME; rm -rf"
    run.rename(odd)
    (odd / "latest.json").unlink()
    quoted = str(odd).replace("'", "'\"'\"'")
    assert the_finding(odd).remedy == f"ckpttool fix-pointer '{quoted}'"


@pytest.mark.parametrize(
    ("others", "severity", "steps"),
    [
        ({}, None, []),
        ({"latest": "global_step6\n"}, "info", [6, 6]),
        ({"latest": "global_step20"}, "warning", [6, 20]),
        ({"latest_checkpointed_iteration.txt": " 10\r\n"}, "warning", [6, 10]),
        ({"latest_checkpointed_iteration.txt": "release"}, "warning", [6, None]),
        ({"latest": "step_000000000006", "last_checkpoint": "model_0000006.pth"}, "info", [6] * 3),
        ({"latest": ""}, "warning", [6, None]),
    ],
)
def test_pointers_side_by_side(
    run: Path, others: dict[str, str], severity: str | None, steps: list[int | None]
) -> None:
    for other, content in others.items():
        (run / other).write_text(content)
    found = [finding for finding in verify(run).findings if finding.id == "PTR111"]
    assert [finding.severity.value for finding in found] == ([severity] if severity else [])
    for finding in found:
        assert sorted(one["step"] or -1 for one in finding.facts["pointers"]) == sorted(
            step or -1 for step in steps
        )


def test_a_link_beside_the_pointer_counts_and_is_not_followed(run: Path) -> None:
    (run / "latest").symlink_to("step_000000000004.pt")
    (found,) = [finding for finding in verify(run).findings if finding.id == "PTR111"]
    assert [one["step"] for one in found.facts["pointers"]] == [6, 4]


def test_two_foreign_pointers_without_ours(run: Path) -> None:
    (run / "latest.json").unlink()
    (run / "latest").write_text("global_step20")
    (run / "latest_checkpointed_iteration.txt").write_text("10")
    (found,) = [finding for finding in verify(run).findings if finding.id == "PTR111"]
    assert found.severity.value == "warning"
    assert {one["step"] for one in found.facts["pointers"]} == {10, 20}
