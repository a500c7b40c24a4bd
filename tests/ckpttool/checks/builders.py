"""Checkpoint directories as a trainer leaves them, made with torch itself."""

from __future__ import annotations

import io
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import torch

State = dict[str, Any]


def training_state(step: int) -> State:
    """A complete checkpoint of a tiny model after `step` steps of two samples of 32 tokens."""
    torch.manual_seed(step)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    model(torch.randn(2, 4)).square().sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": None,
        "scheduler": scheduler.state_dict(),
        "step": step,
        "samples": 2 * step,
        "tokens": 64 * step,
        "config": {"run": {"name": "a", "hf_token": "<redacted>"}},
        "rng": {"python": random.Random(step).getstate(), "torch": torch.get_rng_state()},
        "coordinator": None,
        "precision": {"mode": "fp32", "autocast_enabled": False, "use_scaler": False},
    }


def saved(state: Any, **options: Any) -> bytes:
    """The bytes of `torch.save`."""
    buffer = io.BytesIO()
    torch.save(state, buffer, **options)
    return buffer.getvalue()


@cache
def step_bytes(step: int) -> bytes:
    """The bytes of a step file; the same ones each time in one process."""
    return saved(training_state(step))


def name(step: int) -> str:
    return f"step_{step:012d}.pt"


def point(directory: Path, step: int) -> None:
    """Writes a pointer as the training core does."""
    content = json.dumps({"step": step, "file": name(step)}, indent=2)
    (directory / "latest.json").write_text(content)


def put(directory: Path, step: int, content: bytes) -> Path:
    """Writes a step file with plain permissions."""
    path = directory / name(step)
    path.write_bytes(content)
    path.chmod(0o644)
    return path
