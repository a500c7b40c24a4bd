"""`harden`, `slim` and `export` against `torch.load` and `torch.save` of the same file.

Ours as whole processes, with everything that they do besides: the source is verified first, and
what was written is read back. The baseline without its process's start and imports. Both end with
an fsync. Then the peak memory of each of ours: it may have 100 MB and the largest record.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.inputs import SIZE_GB, directory, real_file
from benchmarks.measure import CKPTTOOL, Process, Row, in_one_process, interleaved, process

VERBS = ("harden", "slim", "export")
MOST_MB = 100

LOAD_AND_SAVE = """
import json, os, sys, time

import torch

start = time.perf_counter()
state = torch.load(sys.argv[1], weights_only=True)
torch.save(state, sys.argv[2])
descriptor = os.open(sys.argv[2], os.O_RDWR)
os.fsync(descriptor)
os.close(descriptor)
print(json.dumps({"seconds": time.perf_counter() - start}))
"""


def _convert(verb: str, file: Path, out: Path) -> Process:
    out.unlink(missing_ok=True)
    return process(CKPTTOOL, verb, file, "-o", out)


def _load_and_save(file: Path, out: Path) -> Process:
    out.unlink(missing_ok=True)
    return Process(in_one_process(LOAD_AND_SAVE, file, out)["seconds"], 0)


def _largest_record_mb(file: Path) -> float:
    import zipfile

    with zipfile.ZipFile(file) as archive:
        return max(info.file_size for info in archive.infolist()) / 1e6


def run() -> list[Row]:
    file, ours, theirs = real_file(), directory() / "ours", directory() / "theirs"
    sides = [lambda verb=verb: _convert(verb, file, ours) for verb in VERBS]
    *converted, baseline = interleaved(*sides, lambda: _load_and_save(file, theirs))
    size = f"{SIZE_GB:g} GB"
    most = MOST_MB + _largest_record_mb(file)
    rows = []
    for verb, one in zip(VERBS, converted, strict=True):
        name = f"{verb} {size} / torch.load + torch.save + fsync"
        rows.append(Row(name, one.seconds, baseline.seconds, at_most=1))
        rows.append(Row(f"{verb} {size}, peak memory", one.peak_mb, None, "MB", at_most=most))
    ours.unlink()
    theirs.unlink()
    return rows
