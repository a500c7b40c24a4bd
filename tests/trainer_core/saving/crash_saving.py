"""The program that `test_crash_saving` kills at each of its file operations."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch

from trainer_core import CheckpointManager

RUN = "the-run"


def state_at(step: int, note: str = "") -> dict[str, Any]:
    """A training checkpoint whose weights are its step."""
    return {
        "model": {"w": torch.full((30_000,), float(step)), "v": torch.full((3,), float(step))},
        "optimizer": {"state": {}, "param_groups": []},
        "step": step,
        "config": {"note": note},
    }


def acknowledged(path: str) -> list[str]:
    """What the program was told is safe, in order."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().split()
    except FileNotFoundError:
        return []


def main(directory: str, acks: str, how: str) -> int:
    """Saves steps 2, 4 and 6, and 6 once more; notes each step when it is safe on disk.

    `how` is "sync", "async" or "goes on": then what cannot be saved is left out.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    on_error = "warn" if how == "goes on" else "raise"
    manager = CheckpointManager(
        directory, keep_last=2, run_id=RUN, async_save=how == "async", on_error=on_error
    )
    for step, note in ((2, ""), (4, ""), (6, ""), (6, "again")):
        path = manager.save(step, state_at(step, note))
        manager.wait()
        if path is not None:
            _acknowledge(acks, f"{step}{note}")
    manager.close()
    return 0


def _acknowledge(acks: str, words: str) -> None:
    descriptor = os.open(acks, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, f"{words}\n".encode())
    os.close(descriptor)
