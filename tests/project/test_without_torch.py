"""The tool in an environment that has its runtime dependencies and nothing else: no torch."""

from __future__ import annotations

import json
import os
import subprocess
import venv
from collections.abc import Callable
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUNTIME = ("click", "tabulate", "numpy", "ml-dtypes", "isal")


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new virtual environment with links to what the tool may import."""
    home = tmp_path_factory.mktemp("bare")
    venv.EnvBuilder(with_pip=False, symlinks=os.name != "nt").create(home)
    python = home / "bin" / "python"
    asked = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    for name in RUNTIME:
        for source in _top_level(distribution(name)):
            (site / source.name).symlink_to(source)
    for name in ("ckpttool", "trainer_core"):
        (site / name).symlink_to(ROOT / name)
    return python


def _top_level(package: Distribution) -> list[Path]:
    """The files and folders that a distribution put into site-packages."""
    names = {file.parts[0] for file in package.files or [] if file.parts[0] != ".."}
    assert names
    return [Path(str(package.locate_file(name))) for name in names if name != "__pycache__"]


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(bare_python: Path, tmp_path: Path) -> Run:
    """Runs `ckpttool` with the bare interpreter, in a temporary directory, and checks the code."""

    def command(*arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(bare_python), "-m", "ckpttool", *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={"PATH": os.defpath, "LANG": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done

    return command


def test_the_environment_has_no_torch(bare_python: Path) -> None:
    done = subprocess.run(
        [str(bare_python), "-c", "import click, numpy, torch"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "No module named 'torch'" in done.stderr


def test_the_training_core_names_the_extra_in_one_line(bare_python: Path) -> None:
    done = subprocess.run(
        [str(bare_python), "-c", "import trainer_core"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "ckpttool[train]" in last
    assert "During handling" not in done.stderr


def test_inspect(run: Run, fixtures: Path) -> None:
    directory = json.loads(run("inspect", "--json", fixtures / "healthy").stdout)
    assert next(iter(directory)) == "schema_version"
    file = fixtures / "healthy" / "step_000000000006.pt"
    tensors = json.loads(run("inspect", "--json", file).stdout)["tensors"]
    shapes = {one["name"]: (one["dtype"], one["shape"]) for one in tensors}
    assert shapes["model.block.linear.weight"] == ("float32", [8, 8])


def test_verify(run: Run, fixtures: Path) -> None:
    run("verify", fixtures / "healthy")
    run("verify", fixtures / "bit-flipped", code=1)
    run("verify", "--finite", fixtures / "healthy")


def test_fix_pointer(run: Run, fixture_copy: Callable[[str], Path]) -> None:
    directory = fixture_copy("pointer-behind")
    run("verify", directory, code=1)
    run("fix-pointer", directory)
    assert json.loads((directory / "latest.json").read_text())["step"] == 6
    run("verify", directory)


def test_copy(run: Run, fixtures: Path, tmp_path: Path) -> None:
    name = "step_000000000006.pt"
    (tmp_path / "kept").mkdir()
    run("copy", fixtures / "healthy", tmp_path / "kept")
    assert (tmp_path / "kept" / name).read_bytes() == (fixtures / "healthy" / name).read_bytes()


def test_prune(run: Run, fixture_copy: Callable[[str], Path]) -> None:
    directory = fixture_copy("healthy")
    run("prune", directory, "--keep-last", "1", code=4)
    run("prune", directory, "--keep-last", "1", "--yes")
    assert [path.name for path in directory.glob("*.pt")] == ["step_000000000006.pt"]


def test_latest_and_explain(run: Run, fixtures: Path) -> None:
    done = run("latest", fixtures / "newest-cut")
    assert Path(done.stdout.strip()) == fixtures / "newest-cut" / "step_000000000004.pt"
    run("explain")
