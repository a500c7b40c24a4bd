"""The files that the benchmarks read, made once a run in a temporary directory."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

GB = 10**9
SIZE_GB = float(os.environ.get("CKPTTOOL_BENCH_GB", "2"))
LAYERS = 48


@functools.cache
def directory() -> Path:
    """A temporary directory, removed when the benchmarks end."""
    path = Path(tempfile.mkdtemp(prefix="ckpttool-bench-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def training_state(total_bytes: float, weights: Any) -> dict[str, Any]:
    """A training checkpoint of about `total_bytes`: weights and two moments of `LAYERS` layers.

    `weights(i, rows, columns)` gives one tensor, the i-th.
    """
    import torch

    from trainer_core.rng import capture_rng_state

    columns = 1024
    rows = max(1, int(total_bytes / (3 * LAYERS * columns * 4)))
    made = iter(range(3 * LAYERS))
    layers = {f"layers.{i}.weight": weights(next(made), rows, columns) for i in range(LAYERS)}
    moments = {
        i: {
            "step": torch.tensor(10.0),
            "exp_avg": weights(next(made), rows, columns),
            "exp_avg_sq": weights(next(made), rows, columns),
        }
        for i in range(LAYERS)
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    return {
        "model": layers,
        "optimizer": {"state": moments, "param_groups": [{**group, "params": [*range(LAYERS)]}]},
        "scaler": None,
        "scheduler": None,
        "step": 10,
        "samples": 80,
        "tokens": 5120,
        "config": None,
        "rng": capture_rng_state(),
        "coordinator": None,
        "precision": {"mode": "fp32", "autocast_enabled": False, "use_scaler": False},
    }


def real_state(total_bytes: float) -> dict[str, Any]:
    """The same with bytes that no file system and no page cache can store in less room."""
    import torch

    torch.manual_seed(0)
    return training_state(total_bytes, lambda i, rows, columns: torch.randn(rows, columns))


@functools.cache
def real_file() -> Path:
    """A step file of CKPTTOOL_BENCH_GB gigabytes with real bytes, in a directory with a pointer."""
    import torch

    target = _run_directory("real")
    torch.save(real_state(SIZE_GB * GB), target)
    return target


@functools.cache
def sparse_file(gigabytes: int) -> Path:
    """A step file of that size whose records are holes: it takes kilobytes of disk.

    torch writes it from fake tensors (`torch.serialization.skip_data`).
    """
    import torch
    from torch._subclasses import FakeTensorMode

    def fake(i: int, rows: int, columns: int) -> torch.Tensor:
        with FakeTensorMode():
            return torch.empty(rows, columns)

    target = _run_directory(f"sparse-{gigabytes}")
    state = training_state(gigabytes * GB, fake)
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(state, target)
    return target


@functools.cache
def many_tensors_file(count: int = 100_000) -> Path:
    """One file with `count` tensors of four elements, each with a storage of its own."""
    import torch

    target = _run_directory("many")
    values = torch.arange(count * 4, dtype=torch.float32).reshape(count, 4)
    state = {f"blocks.{i // 10}.part{i % 10}.weight": values[i].clone() for i in range(count)}
    torch.save({"model": state, "step": 10}, target)
    return target


def _run_directory(name: str) -> Path:
    path = directory() / name
    path.mkdir()
    file = path / "step_000000000010.pt"
    pointer = f'{{"step": 10, "file": "{file.name}"}}\n'
    (path / "latest.json").write_text(pointer, encoding="utf-8")
    return file
