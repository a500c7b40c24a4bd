"""Files that torch wrote for these tests, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ckpttool.model.checkpoint import open_checkpoint
from ckpttool.model.sources import storage_sources
from ckpttool.writing.checkpoint import write_checkpoint


@pytest.fixture(scope="session")
def torch_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `torch_files.py` fills."""
    folder = tmp_path_factory.mktemp("torch files")
    run_torch(str(Path(__file__).with_name("torch_files.py")), str(folder))
    return folder


class Copied(NamedTuple):
    """A file, its copy by `write_checkpoint`, and what torch says of the two."""

    source: Path
    copy: Path
    said: dict[str, Any]


def copy_of(source: Path, copy: Path) -> None:
    """Reads a file and writes it again, from its inert content."""
    with open_checkpoint(source) as checkpoint, copy.open("wb") as file:
        container = checkpoint.container
        write_checkpoint(
            file,
            checkpoint.tree,
            storage_sources(checkpoint),
            root=container.prefix if container and container.prefix else "archive",
            byteorder=container.byteorder if container else "little",
        )


@pytest.fixture(scope="session")
def copies(
    tmp_path_factory: pytest.TempPathFactory, corpus: Path, torch_files: Path
) -> dict[str, Copied]:
    """A copy of every whole file that `torch.load` takes, by its name; see `torch_compares.py`."""
    home = tmp_path_factory.mktemp("copies")
    made = home / "made"
    made.mkdir()
    run_torch("-c", MAKE, str(Path(__file__).parents[1] / "model"), str(made))
    sources = {str(path.relative_to(corpus)): path for path in sorted(corpus.rglob("*"))}
    sources |= {f"made/{path.name}": path for path in sorted(made.iterdir())}
    sources |= {f"contents/{path.name}": path for path in (torch_files / "contents").iterdir()}
    pairs = {}
    for name, source in sources.items():
        if source.is_file() and name not in CUT and is_loadable(source):
            pairs[name] = (str(source), str(home / f"{name.replace('/', '-')}.copy"))
            copy_of(source, Path(pairs[name][1]))
    unlike = sorted((torch_files / "contents").glob("unlike-*-a.pt"))
    others = {
        f"unlike/{path.name}": (str(path), str(path).replace("-a.pt", "-b.pt")) for path in unlike
    }
    said = compare(home, [*pairs.values(), *others.values()])
    return {
        name: Copied(Path(one), Path(two), said[two])
        for name, (one, two) in (pairs | others).items()
    }


MAKE = (
    "import sys; sys.path.insert(0, sys.argv[1]); import torch_says; torch_says.make(sys.argv[2])"
)
CUT = ("torch-2.13.0/truncated_zip.pt", "torch-2.13.0/truncated_legacy.pt")
LOADABLE = ("torch-zip", "torch-legacy", "torch-legacy-tar", "pickle")


def is_loadable(path: Path) -> bool:
    """Whether torch or pickle loads this kind of file."""
    with open_checkpoint(path) as checkpoint:
        return checkpoint.readable and checkpoint.kind in LOADABLE


def compare(home: Path, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """What `torch_compares.py` says of each pair, by the second file's path."""
    (home / "pairs.json").write_text(json.dumps(pairs), encoding="utf-8")
    script = str(Path(__file__).with_name("torch_compares.py"))
    run_torch(script, str(home / "answers.json"), str(home / "pairs.json"))
    answers: dict[str, Any] = json.loads((home / "answers.json").read_text(encoding="utf-8"))
    return answers


def run_torch(*arguments: str) -> None:
    """A Python process that uses torch."""
    command = [sys.executable, "-W", "ignore", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
