"""What is shipped: metadata, types, licence, and a start-up that stays light."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import Distribution, distribution, entry_points
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def package() -> Distribution:
    return distribution("ckpttool")


def test_runtime_dependencies_are_the_five_light_ones(package: Distribution) -> None:
    requirements = [one for one in package.requires or [] if "extra ==" not in one]
    names = {re.split(r"[^A-Za-z0-9-]", one)[0] for one in requirements}
    assert names == {"click", "tabulate", "numpy", "ml-dtypes", "isal"}


def test_torch_comes_with_the_extra_train(package: Distribution) -> None:
    wanted = [one for one in package.requires or [] if one.startswith("torch>")]
    assert wanted == ["torch>=2.6; extra == 'train'"]


def test_the_command_is_the_one_entry_point() -> None:
    found = [one for one in entry_points(group="console_scripts") if one.name == "ckpttool"]
    assert [one.value for one in found] == ["ckpttool.cli.main:main"]


@pytest.mark.parametrize("name", ["ckpttool", "trainer_core"])
def test_packages_say_that_they_are_typed(repository: Path, name: str) -> None:
    assert (repository / name / "py.typed").is_file()


def test_every_folder_with_code_is_a_package(repository: Path) -> None:
    for name in ("ckpttool", "trainer_core"):
        for path in (repository / name).rglob("*.py"):
            assert path.with_name("__init__.py").is_file(), path


def test_the_licence_is_apache_2(repository: Path) -> None:
    text = (repository / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text


def test_the_changelog_knows_this_version(repository: Path, package: Distribution) -> None:
    assert f"## [{package.version}]" in (repository / "CHANGELOG.md").read_text(encoding="utf-8")


def test_inspect_starts_without_heavy_imports(fixtures: Path) -> None:
    file = fixtures / "healthy" / "step_000000000006.pt"
    command = [sys.executable, "-X", "importtime", "-m", "ckpttool", "inspect", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    tops = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in lines}
    assert "click" in tops
    assert tops.isdisjoint({"torch", "numpy", "ml_dtypes", "isal", "hashlib", "subprocess"})


PERSONAL_PATH = re.compile(r"(?<![\w.$}~])/(?:work|root|home|Users)/\w+/")


def test_no_text_names_a_path_of_the_machine_it_was_written_on(repository: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git working tree")
    texts = [repository / name for name in listed.stdout.split("\0") if _is_text(name)]
    assert len(texts) > 10
    for path in texts:
        found = PERSONAL_PATH.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path}: {found}"


def _is_text(name: str) -> bool:
    return name.endswith((".py", ".md", ".toml", ".sh")) or name in {"Makefile", ".ci/run"}
