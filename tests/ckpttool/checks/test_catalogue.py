"""The catalogue and the code name the same findings, and every anomaly becomes one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpttool.checks import sharded as sharded_checks
from ckpttool.checks.base import Check
from ckpttool.checks.catalogue import CATALOGUE, FAMILIES, entry
from ckpttool.checks.container import known_codes
from ckpttool.findings import Severity


def subclasses(check: type[Check]) -> Iterator[type[Check]]:
    for child in check.__subclasses__():
        yield child
        yield from subclasses(child)


def test_every_check_with_an_id_is_in_the_catalogue_and_no_other() -> None:
    with_id = [check for check in subclasses(Check) if check.id]
    assert len({check.id for check in with_id}) == len(with_id)
    assert {check.id: check for check in with_id} == CATALOGUE


def test_every_id_in_the_source_is_in_the_catalogue(repository: Path) -> None:
    sources = (repository / "ckpttool").rglob("*.py")
    pattern = re.compile(r"\b(?:PTR|FIL|SCH|SHD|TRU|DIR|VAL)[0-9]{3}\b")
    named = {id for path in sources for id in pattern.findall(path.read_text())}
    assert named == set(CATALOGUE)


@pytest.mark.parametrize("id", sorted(CATALOGUE))
def test_an_entry_says_what_it_has_to(id: str) -> None:
    check = CATALOGUE[id]
    assert id[:3] in FAMILIES
    assert isinstance(check.severity, Severity)
    assert 8 <= len(check.title) <= 72
    assert not check.title.endswith(".")
    for text in (check.meaning, check.why, check.mends):
        assert text.endswith("."), text
        assert 1 <= len(re.findall(r"[.!?](?:\s|$)", text)) <= 4
        assert "  " not in text


def test_entries_name_only_verbs_that_exist() -> None:
    from ckpttool.cli.main import VERBS

    for check in CATALOGUE.values():
        for verb in re.findall(r"`ckpttool ([a-z-]+)", check.mends):
            assert verb in VERBS


def test_entry_takes_any_case() -> None:
    assert entry(" ptr104 ") is CATALOGUE["PTR104"]
    assert entry("PTR999") is None


def anomaly_codes(source: str) -> Iterator[str]:
    """First arguments of `Anomaly(…)` and `….note(…)` calls, also where chosen by a condition."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        called = node.func
        name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
        if name in ("Anomaly", "note"):
            for part in ast.walk(node.args[0]):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def test_every_anomaly_that_a_format_notes_becomes_a_finding_of_its_own(repository: Path) -> None:
    folders = ("formats", "model", "checks")
    paths = [path for folder in folders for path in (repository / "ckpttool" / folder).glob("*.py")]
    codes = {code for path in paths for code in anomaly_codes(path.read_text())}
    assert len(codes) > 30
    sharded = {code for check in sharded_checks.CHECKS for code in check.codes}
    assert codes - known_codes() == sharded
