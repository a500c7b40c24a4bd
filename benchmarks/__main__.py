"""Runs the benchmarks and prints one table: `python -m benchmarks [PART OF A NAME …]`."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from pathlib import Path

from tabulate import tabulate

from benchmarks.measure import REPEATS, Row

MODULES = (
    "inspect_start",
    "inspect_many",
    "verify_speed",
    "convert_speed",
    "durable_save",
    "training_step",
    "other_trainers",
    "exact_resume",
    "diloco_protocol",
)


def main(wanted: list[str]) -> None:
    names = [name for name in MODULES if not wanted or any(part in name for part in wanted)]
    rows = [row for name in names for row in _run(name)]
    print(machine())
    print(f"Times are medians of {REPEATS} or more, the sides taking turns; counts are exact.\n")
    headers = ["what", "ours", "baseline", "ratio", "bar", "met"]
    print(tabulate([_cells(row) for row in rows], headers, disable_numparse=True))


def _run(name: str) -> list[Row]:
    print(f"{name} …", file=sys.stderr, flush=True)
    rows: list[Row] = importlib.import_module(f"benchmarks.{name}").run()
    return rows


def machine() -> str:
    """What the figures were measured on, in one line."""
    import torch

    machine = f"{_processor()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}"
    return f"{machine}, Python {platform.python_version()}, torch {torch.__version__}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _cells(row: Row) -> list[str]:
    baseline = "" if row.baseline is None else _value(row.baseline, row.unit)
    ratio = "" if row.baseline is None else f"{row.ratio:.2f}x"
    return [row.name, _value(row.ours, row.unit), baseline, ratio, _bar(row), _met(row)]


def _value(value: float, unit: str) -> str:
    return f"{value * 1000:.3g} ms" if unit == "s" and value < 1 else f"{value:.3g} {unit}"


def _bar(row: Row) -> str:
    times = row.unit if row.baseline is None else "x"
    if row.at_least is not None:
        return f">= {row.at_least:g}{times} faster"
    return "" if row.at_most is None else f"<= {row.at_most:g}{' ' if times != 'x' else ''}{times}"


def _met(row: Row) -> str:
    if row.at_most is None and row.at_least is None:
        return ""
    return "yes" if row.ok else "NO"


if __name__ == "__main__":
    main(sys.argv[1:])
