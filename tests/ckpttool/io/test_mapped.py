"""`io.mapped`: the same checksums as zlib's, and a file cut meanwhile costs a child and no more.

Each test runs a process of its own: forking is only safe where there is one thread.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SAME = """
import sys, zlib
from ckpttool.io.mapped import can_map, mapped_checksums
from ckpttool.io.reading import FileReader

data = open(sys.argv[1], "rb").read()
spans = [(0, 1), (5, 70_000_000), (4095, 2), (70_000_000, 12_345), (len(data) - 7, 7)]
with FileReader(sys.argv[1]) as reader:
    assert can_map(reader) in (True, False)
    for jobs in (1, 2, 9):
        counts = []
        found = mapped_checksums(reader, spans, jobs, counts.append)
        assert found == {i: zlib.crc32(data[o : o + n]) for i, (o, n) in enumerate(spans)}, found
        assert sum(counts) == sum(length for _, length in spans)
print("same")
"""

CUT = """
import os, sys
from ckpttool.io import mapped
from ckpttool.io.reading import FileReader

# So many messages that the pipe is full long before the child is done: it waits for the cut.
mapped._WINDOW_BYTES = 4096
with FileReader(sys.argv[1]) as reader:
    spans = [(0, 4096), (1 << 20, 127 << 20)]
    found = mapped.mapped_checksums(reader, spans, 1, lambda count: os.truncate(sys.argv[1], 4096))
print(sorted(found))
"""

THREADS = """
import sys, threading
from ckpttool.io.mapped import can_map
from ckpttool.io.reading import FileReader

done = threading.Event()
threading.Thread(target=done.wait).start()
with FileReader(sys.argv[1]) as reader:
    print(can_map(reader))
done.set()
"""

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="maps on Linux only")


def run(script: str, file: Path) -> str:
    command = [sys.executable, "-W", "error", "-c", script, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_checksums_are_those_of_zlib(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(os.urandom(1 << 20) * 71)
    assert run(SAME, file) == "same"


def test_a_file_that_is_cut_ends_a_child_and_not_the_caller(tmp_path: Path) -> None:
    file = tmp_path / "data"
    with file.open("wb") as stream:
        stream.truncate(128 << 20)
    assert run(CUT, file) == "[0]"


def test_a_process_with_threads_is_not_forked(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(b"x")
    assert run(THREADS, file) == "False"


def test_verify_of_a_file_that_is_large_enough_to_be_mapped(tmp_path: Path) -> None:
    """A healthy file is called valid, and one flipped bit is found in its record."""
    file = tmp_path / "step_000000000001.pt"
    weight = torch.arange(17 << 20, dtype=torch.float64)
    torch.save({"model": {"weight": weight, "bias": torch.ones(3)}, "step": 1}, file)
    command = [sys.executable, "-m", "ckpttool", "verify", "--json", "--jobs", "2", str(file)]
    whole = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "FIL109" not in whole.stdout
    with file.open("r+b") as stream:
        stream.seek(100_000_000)
        byte = stream.read(1)[0]
        stream.seek(100_000_000)
        stream.write(bytes([byte ^ 0x10]))
    flipped = subprocess.run(command, capture_output=True, text=True, check=False)
    assert flipped.returncode == 1
    assert "FIL109" in flipped.stdout
    assert "model.weight" in flipped.stdout
    assert "model.bias" not in flipped.stdout
