"""Small step files without torch, and running the real command."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
CORPUS = ROOT / "fixtures" / "corpus"
NOTE = "note " * 200


def write_step(
    directory: Path, step: int, *, name: str | None = None, inside: int | None = None
) -> Path:
    """A step file in torch's zip layout, made with zipfile and pickle alone; it holds no tensor."""
    content = {
        "model": {},
        "optimizer": {"state": {}, "param_groups": []},
        "scaler": None,
        "scheduler": None,
        "step": step if inside is None else inside,
        "samples": 8 * step,
        "tokens": 64 * step,
        "config": {"note": NOTE},
        "rng": {},
        "coordinator": None,
        "precision": {"mode": "fp32", "autocast_enabled": False, "use_scaler": False},
    }
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / (name or f"step_{step:012d}.pt")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(content, 2))
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
    return path


def write_pointer(directory: Path, step: int, file: str | None = None) -> Path:
    path = directory / "latest.json"
    path.write_text(json.dumps({"step": step, "file": file or f"step_{step:012d}.pt"}))
    return path


def make_run(directory: Path, *steps: int, pointer: int | None = None) -> Path:
    """A directory with these steps, and a pointer to the last or to `pointer`."""
    for step in steps:
        write_step(directory, step)
    if steps:
        write_pointer(directory, steps[-1] if pointer is None else pointer)
    return directory


def flip(path: Path) -> None:
    """One bit of a text inside the pickle: everything still parses, only the checksum knows."""
    data = bytearray(path.read_bytes())
    at = data.index(NOTE.encode()) + len(NOTE) // 2
    data[at] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    """The second half is gone."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def write_unchecked(directory: Path, step: int) -> Path:
    """A step file that no reader within its limits can judge: an integer of 2,000 bytes."""
    path = directory / f"step_{step:012d}.pt"
    with zipfile.ZipFile(path, "w") as archive:
        long = b"\x80\x02\x8b" + (2000).to_bytes(4, "little") + b"\x01" * 2000 + b"."
        archive.writestr("archive/data.pkl", long)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
    return path


def asked_on_a_terminal(
    *arguments: str | Path, until: bytes
) -> tuple[subprocess.Popen[bytes], int]:
    """The command on a terminal of its own, when it has shown `until`; and the terminal's end."""
    import pty

    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "ckpttool", *map(str, arguments)],
        cwd=ROOT,
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    shown = b""
    while until not in shown:
        shown += os.read(master, 1000)
    return process, master


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def pointer_of(directory: Path) -> Any:
    return json.loads((directory / "latest.json").read_bytes())


def ckpttool(
    *arguments: str | bytes | Path, env: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs the command as a person would, in a process of its own, without a terminal."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("CKPTTOOL", "PYTHONIOENC"))}
    settings: dict[str, Any] = {"capture_output": True, "stdin": subprocess.DEVNULL} | options
    done = subprocess.run(
        [sys.executable, "-m", "ckpttool", *arguments],
        env={**clean, "PYTHONPATH": str(ROOT), **(env or {})},
        encoding="utf-8",
        errors="surrogateescape",
        timeout=600,
        **settings,
    )
    assert "Traceback" not in (done.stderr or "")
    return done


def ckpttool_json(*arguments: str | Path, code: int = 0, **options: Any) -> Any:
    """Runs the command with --json and gives its one document; nothing else may be printed."""
    done = ckpttool(*arguments, "--json", **options)
    assert done.returncode == code, done.stderr
    document = json.loads(done.stdout)
    assert next(iter(document)) == "schema_version"
    assert document["schema_version"] == 1
    return document
