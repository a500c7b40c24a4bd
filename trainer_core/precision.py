"""Which floating-point type the forward pass runs in, and whether the loss needs scaling.

After Micikevicius et al. 2018, "Mixed Precision Training" (arXiv 1710.03740): float16 has so narrow
a range that small gradients vanish unless the loss is scaled up first; bfloat16 has float32's range
and needs no scaling.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)

MODES = ("auto", "fp32", "bf16", "fp16")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class PrecisionPlan:
    """How a run computes: `mode` is "fp32", "bf16" or "fp16" (what "auto" came to, never "auto").

    `autocast_enabled`: the forward pass runs under `torch.autocast` with `dtype`. `use_scaler`: the
    backward pass goes through a `torch.amp.GradScaler`.
    """

    mode: str
    autocast_enabled: bool
    use_scaler: bool

    def __post_init__(self) -> None:
        if self.mode not in _DTYPES:
            raise ValueError(f"unknown precision mode {self.mode!r}; one of {', '.join(_DTYPES)}")

    @property
    def dtype(self) -> torch.dtype:
        """The type that autocast computes in; `torch.float32` where there is no autocast."""
        return _DTYPES[self.mode]

    def as_dict(self) -> dict[str, str | bool]:
        """The plan as plain data, as a checkpoint stores it under `precision`."""
        return {
            "mode": self.mode,
            "autocast_enabled": self.autocast_enabled,
            "use_scaler": self.use_scaler,
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> PrecisionPlan:
        """The plan that `as_dict` gave. Raises ValueError for anything else."""
        mode = value.get("mode")
        flags = value.get("autocast_enabled"), value.get("use_scaler")
        if not isinstance(mode, str) or not all(isinstance(flag, bool) for flag in flags):
            raise ValueError(f"not a precision plan: {dict(value)!r}")
        return cls(mode, bool(flags[0]), bool(flags[1]))


def resolve_precision(
    mode: str = "auto", device: torch.device | str | int = "cpu"
) -> PrecisionPlan:
    """Turns a wish ("auto", "fp32", "bf16", "fp16") into what `device` can do.

    "auto" is bf16 on a CUDA device that has it natively, fp16 on one that has not, and fp32
    everywhere else. fp16 needs loss scaling, which is done on CUDA only: on any other device it
    becomes fp32, and a log warning says so. Raises ValueError for another mode.
    """
    if mode not in MODES:
        raise ValueError(f"unknown precision mode {mode!r}; one of {', '.join(MODES)}")
    where = torch.device(device)
    if mode == "auto":
        mode = _automatic(where)
    if mode == "fp16" and where.type != "cuda":
        logger.warning("precision fp16 needs loss scaling, not done on %s: fp32 is used", where)
        mode = "fp32"
    return PrecisionPlan(mode, autocast_enabled=mode != "fp32", use_scaler=mode == "fp16")


def _automatic(device: torch.device) -> str:
    if device.type != "cuda":
        return "fp32"
    if not torch.cuda.is_available():
        return "fp16"
    with torch.cuda.device(device):
        # Emulated bfloat16 is correct but slower than float16.
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if native else "fp16"
