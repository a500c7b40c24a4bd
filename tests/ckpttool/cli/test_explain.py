"""`explain`: the whole catalogue, or one entry."""

from __future__ import annotations

import re

import pytest

from ckpttool.checks.catalogue import CATALOGUE
from tests.ckpttool.cli.support import ckpttool, ckpttool_json


def test_list_names_every_finding() -> None:
    done = ckpttool("explain")
    assert done.returncode == 0
    assert re.findall(
        r"^  ([A-Z]{3}[0-9]{3})  (?:error|warning|info) ", done.stdout, re.M
    ) == sorted(CATALOGUE)


@pytest.mark.parametrize("id", ["PTR104", "ptr104"])
def test_one_entry(id: str) -> None:
    check = CATALOGUE["PTR104"]
    done = ckpttool("explain", id)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == f"PTR104  {check.severity.value}"
    assert lines[1] == check.title
    assert f"meaning  {check.meaning}" in lines
    assert f"why      {check.why}" in lines
    assert f"mends    {check.mends}" in lines


def test_json() -> None:
    assert [e["id"] for e in ckpttool_json("explain")["findings"]] == sorted(CATALOGUE)
    (entry,) = ckpttool_json("explain", "FIL101")["findings"]
    assert entry["title"] == CATALOGUE["FIL101"].title


def test_unknown_id() -> None:
    done = ckpttool("explain", "PTR10\x1b")
    assert done.returncode == 2
    assert "did you mean PTR1" in done.stderr
    assert "\x1b" not in done.stderr
    assert "lists all" in ckpttool("explain", "zzz").stderr
