"""What a run's numbers hang on besides its own state: versions, hardware, settings of torch."""

from __future__ import annotations

import platform
import sys
from typing import Any

import torch


def environment(device: torch.device) -> dict[str, Any]:
    """The facts of this process for a run on `device`, as plain values.

    Where one of them differs, the same arithmetic may come out differently in its last bits, or be
    drawn from other random numbers.
    """
    facts: dict[str, Any] = {
        "torch": torch.__version__ + "",
        "python": platform.python_version(),
        "numpy": getattr(sys.modules.get("numpy"), "__version__", None),
        "device": device.type,
        "device_name": _device_name(device),
        "world_size": _world_size(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }
    if device.type == "cpu":
        facts["threads"] = torch.get_num_threads()
    if device.type == "cuda":
        facts |= {
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            "cudnn_deterministic": torch.backends.cudnn.deterministic,
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        }
    return facts


def _device_name(device: torch.device) -> str:
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return platform.machine()


def _world_size() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return 1
