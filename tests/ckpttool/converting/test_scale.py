"""Memory: what a conversion takes does not grow with the file."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import pytest

ROOT = Path(__file__).parents[3]
LAUNCHER = ROOT / "benchmarks" / "launch.py"
RECORDS, RECORD_BYTES = 20, 50 << 20
MOST_BYTES = 100 * 10**6 + RECORD_BYTES


class Holes:
    """A file in which zeros are not written but stepped over, so that they take no room."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def write(self, data: bytes) -> int:
        if len(data) > 4096 and not any(data):
            self.file.seek(len(data), 1)
            return len(data)
        return self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gigabyte of zeros in twenty storages; the tensor on each uses half of it."""
    path = tmp_path_factory.mktemp("big") / "big.pt"
    rows = RECORD_BYTES // 4 // 1024
    parts = [b"\x80\x02}("]
    for index in range(RECORDS):
        storage = pickle.dumps(("storage", 0, str(index), "cpu", rows * 1024), 2)[2:-1]
        shape = pickle.dumps((rows // 2, 1024), 2)[2:-1]
        parts += [
            pickle.dumps(f"layer.{index}", 2)[2:-1], b"ctorch._utils\n_rebuild_tensor_v2\n(",
            storage.replace(b"K\x00", b"ctorch\nFloatStorage\n", 1), b"QK\x00", shape,
            b"M\x00\x04K\x01\x86\x89ccollections\nOrderedDict\n)RtR",
        ]  # fmt: skip
    zeros = bytes(1 << 20)
    with path.open("wb") as file, zipfile.ZipFile(Holes(file), "w") as archive:  # type: ignore[arg-type]
        archive.writestr("archive/data.pkl", b"".join([*parts, b"u."]))
        archive.writestr("archive/byteorder", "little")
        for index in range(RECORDS):
            with archive.open(f"archive/data/{index}", "w", force_zip64=True) as record:
                for _ in range(RECORD_BYTES >> 20):
                    record.write(zeros)
        archive.writestr("archive/version", "3\n")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["harden", "slim", "export"])
def test_memory_does_not_grow_with_the_file(verb: str, big: Path, tmp_path: Path) -> None:
    """The peak of the process and of each of its children, as the kernel counts it."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "ckpttool", verb, str(big), "-o", str(out)]
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(LAUNCHER), *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["peak_kib"] * 1024 < MOST_BYTES
    half = RECORDS * RECORD_BYTES // 2
    assert out.stat().st_size > (2 * half if verb == "harden" else half)
