"""README is true: its tables are the code's, and its sessions are what a terminal shows.

A fenced block right after `<!-- console: FIXTURE as NAME -->` is run on a copy of that fixture,
placed at NAME: each line that begins with `$ ` in bash, in one directory, with what it prints
compared. A line that is only `…` stands for any number of lines. `<!-- python: … -->` runs code.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from ckpttool.checks.catalogue import CATALOGUE
from ckpttool.cli.main import VERBS, main
from ckpttool.exitcodes import ExitCode

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = README + (ROOT / "docs/many-machines.md").read_text(encoding="utf-8")
BLOCK = re.compile(
    r"^<!-- (?P<kind>console|python): (?P<fixture>[\w-]+) as (?P<name>[\w./-]+) -->\n+"
    r"```\w*\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    fixture: str
    name: str
    text: str


def blocks(kind: str) -> list[Block]:
    found = [one for one in BLOCK.finditer(PAGES) if one["kind"] == kind]
    return [Block(one["fixture"], one["name"], one["text"]) for one in found]


def section(title: str) -> str:
    """The text under a heading, up to the next heading of any level."""
    found = re.search(rf"^#+ {title}\n(.*?)(?=^#+ |\Z)", README, re.MULTILINE | re.DOTALL)
    assert found, f"README has no section {title!r}"
    return found[1]


def table(title: str) -> list[list[str]]:
    """The cells of the first table in a section, without its head, and without backquotes."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    rows = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]
    return rows[2:]


def test_the_table_of_findings_is_the_catalogue() -> None:
    documented = {row[0]: row[1] for row in table("Findings")}
    assert documented == {id: entry.severity.value for id, entry in CATALOGUE.items()}


def test_the_table_of_exit_codes_is_the_code() -> None:
    assert {int(row[0]) for row in table("Exit codes")} == {int(code) for code in ExitCode}


def test_every_verb_is_described() -> None:
    described = {row[0].split()[1] for row in table("Verbs")}
    assert described == set(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_every_verb_has_an_example_and_json(verb: str) -> None:
    context = click.Context(main, info_name="ckpttool")
    command = main.get_command(context, verb)
    assert command is not None
    shown = command.get_help(click.Context(command, info_name=verb, parent=context))
    assert re.search(rf"^ +(\$ )?(.*\$\()?ckpttool {verb}\b", shown, re.MULTILINE), shown
    assert "--json" in shown


def test_completion_is_described_for_the_three_shells() -> None:
    for shell in ("bash", "zsh", "fish"):
        assert f"_CKPTTOOL_COMPLETE={shell}_source ckpttool" in README


def place(block: Block, directory: Path) -> None:
    target = directory / block.name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(ROOT / "fixtures" / block.fixture, target)
    for path in target.iterdir():
        path.chmod(0o644)


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {"PATH": path, "LANG": "C.UTF-8", "TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "100"}


def shell(line: str, directory: Path) -> str:
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=directory,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout


def pattern(expected: str) -> str:
    """A regular expression for what a block shows."""
    lines = [
        r"(?:.*\n)*?" if line == "…" else re.escape(line) + "\n" for line in expected.split("\n")
    ]
    return "".join(lines)


def sessions(text: str) -> list[tuple[str, str]]:
    """The commands of a console block, each with what it should print."""
    parts = re.split(r"^\$ (.*)\n", text, flags=re.MULTILINE)
    assert parts[0] == "", "a console block begins with a command"
    return list(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("block", blocks("console"), ids=lambda block: block.name)
def test_a_console_session_is_what_a_terminal_shows(block: Block, tmp_path: Path) -> None:
    place(block, tmp_path)
    for command, expected in sessions(block.text):
        printed = shell(command, tmp_path)
        want = pattern(expected.rstrip("\n")) if expected.strip() else ""
        assert re.fullmatch(want, printed), f"$ {command}\n{printed}\n--- README says:\n{expected}"


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.name)
def test_a_python_example_runs(block: Block, tmp_path: Path) -> None:
    place(block, tmp_path)
    command = [sys.executable, "-W", "error", "-c", block.text]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_two_nodes_learn_together(tmp_path: Path) -> None:
    """The program that docs/many-machines.md shows, as master and as worker at once."""
    found = re.search(r"^<!-- script: node.py -->\n```python\n(.*?)^```$", PAGES, re.M | re.S)
    assert found
    (tmp_path / "node.py").write_text(found[1], encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    nodes = [
        subprocess.Popen([sys.executable, "node.py", *who], cwd=tmp_path, env=environment)
        for who in (("w", "worker"), ("m", "master"))
    ]
    try:
        assert [node.wait(300) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            node.kill()
    for verb in (("serve", "hub", "--once"), ("status", "hub", "--json")):
        command = [sys.executable, "-m", "trainer_core.diloco", *verb]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
    state = json.loads(done.stdout)
    dealt_with = {node["node_id"]: node["dealt_with"] for node in state["nodes"]}
    assert dealt_with == {"m": 65, "w": 65}, state


def test_there_are_sessions_and_examples() -> None:
    assert blocks("console")
    assert blocks("python")
