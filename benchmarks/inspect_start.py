"""`ckpttool inspect FILE` as a whole process: it costs what its answer costs, whatever the size.

Against `python -c "import click, tabulate"`, the least that such a tool could take, and against a
process that imports torch and maps the file. That one sees the real file only: torch maps files
privately, which Linux refuses for one that is much larger than memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.inputs import SIZE_GB, real_file, sparse_file
from benchmarks.measure import CKPTTOOL, Row, interleaved, process, python

IMPORTS = "import click, tabulate"
TORCH = "import sys, torch; torch.load(sys.argv[1], mmap=True, weights_only=True)"
MOST_MB = 40


def run() -> list[Row]:
    rows = [*_rows(f"inspect {SIZE_GB:g} GB", real_file()), _torch(real_file())]
    for size in (5, 100):
        rows.extend(_rows(f"inspect {size} GB sparse", sparse_file(size)))
    return rows


def _rows(name: str, file: Path) -> Iterator[Row]:
    ours, imports = interleaved(lambda: process(CKPTTOOL, "inspect", file), lambda: python(IMPORTS))
    yield Row(f"{name} / import click, tabulate", ours.seconds, imports.seconds, at_most=2)
    yield Row(f"{name}, peak memory", ours.peak_mb, None, unit="MB", at_most=MOST_MB)


def _torch(file: Path) -> Row:
    ours, torch = interleaved(
        lambda: process(CKPTTOOL, "inspect", file), lambda: python(TORCH, file)
    )
    name = f"inspect {SIZE_GB:g} GB / import torch, torch.load(mmap=True)"
    return Row(name, ours.seconds, torch.seconds, at_least=10)
