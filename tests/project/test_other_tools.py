"""README's table of what `python -m zipfile -t`, torch and `ckpttool` say of the same files.

A first cell names one of `FILES`; the others say `accepts` or `refuses`, and for `ckpttool verify`
the ids of its findings.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fixtures import generate, hostile_files

ROOT = Path(__file__).resolve().parents[2]
HEALTHY = ROOT / "fixtures" / "healthy" / "step_000000000006.pt"
TORCH = "import sys, torch; torch.load(sys.argv[1], weights_only=True)"


def flipped_weight(data: bytes) -> bytes:
    weight = generate.model_state(6)["block.linear.weight"].numpy().tobytes()
    return generate.flip_bit(data, data.index(weight) + 101)


def flipped_learning_rate(data: bytes) -> bytes:
    """One bit of the float 0.001 (BINFLOAT, big-endian) in the pickle."""
    return generate.flip_bit(data, data.index(b"G\x3f\x50\x62\x4d\xd2\xf1\xa9\xfc") + 8)


def zeroed_block(data: bytes) -> bytes:
    """256 bytes of the generator's state, which fills several KiB."""
    start = data.index(torch.Generator().manual_seed(6).get_state().numpy().tobytes()) + 512
    return data[:start] + bytes(256) + data[start + 256 :]


def without_checksums(data: bytes) -> bytes:
    buffer = io.BytesIO()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(generate.training_state(6), buffer)
    finally:
        torch.serialization.set_crc32_options(True)
    return buffer.getvalue()


FILES: dict[str, Callable[[bytes], bytes]] = {
    "healthy": lambda data: data,
    "one bit of a weight flipped": flipped_weight,
    "one bit of the learning rate flipped": flipped_learning_rate,
    "256 bytes in the middle zeroed": zeroed_block,
    "the last 40 % missing": lambda data: data[: len(data) * 6 // 10],
    "the last 22 bytes missing": lambda data: data[:-22],
    "the last 4 KiB zeroed": lambda data: data[:-4096] + bytes(4096),
    "64 KiB appended": lambda data: data + b"\xa5" * (1 << 16),
    "written without checksums": without_checksums,
    "the file of another step": lambda data: generate.zip_bytes(generate.training_state(4)),
    "runs a command when loaded": lambda data: hostile_files.with_payload(
        data, hostile_files.os_system()
    ),
}
TITLE = "What other tools say"


def documented() -> dict[str, list[str]]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"^#+ {TITLE}\n(.*?)(?=^#+ |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"README has no section {TITLE!r}"
    lines = [line for line in found[1].splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {row[0]: row[1:] for row in rows}


def says(*command: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, check=False
    )
    return "refuses" if done.returncode or "corrupt" in done.stdout else "accepts"


def ids(file: Path) -> str:
    command = [sys.executable, "-m", "ckpttool", "verify", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    findings = json.loads(done.stdout)["findings"]
    worth = sorted({one["id"] for one in findings if one["severity"] != "info"})
    return ", ".join(worth) if worth else "accepts"


def observed(name: str, directory: Path) -> list[str]:
    file = directory / HEALTHY.name
    file.write_bytes(FILES[name](HEALTHY.read_bytes()))
    file.chmod(0o644)
    return [says("-m", "zipfile", "-t", file), says("-c", TORCH, file), ids(file)]


def test_the_table_has_every_file() -> None:
    assert list(documented()) == list(FILES)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_row_says_what_each_tool_says(name: str, tmp_path: Path) -> None:
    assert documented()[name] == observed(name, tmp_path)
