"""A small PyTorch training core that trains, writes checkpoints, and resumes from them."""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    # Under this package's own name, so that `python -m trainer_core.demo` ends in one line as well.
    words = "trainer_core needs torch: pip install 'ckpttool[train]'"
    raise ImportError(words, name=__name__) from None

from trainer_core.atomic import atomic_json_dump, atomic_torch_save
from trainer_core.callbacks import Callback
from trainer_core.checkpoint import (
    CheckpointManager,
    CheckpointWarning,
    SaveWarning,
    TrustWarning,
)
from trainer_core.coordinator import SyncCoordinator
from trainer_core.precision import PrecisionPlan, resolve_precision
from trainer_core.resuming.resume import ResumeWarning
from trainer_core.rng import capture_rng_state, restore_rng_state
from trainer_core.site.ranks import RankError
from trainer_core.state import CheckpointError, build_checkpoint, check_checkpoint, redact
from trainer_core.trainer import Trainer, TrainResult

__all__ = [
    "Callback",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointWarning",
    "PrecisionPlan",
    "RankError",
    "ResumeWarning",
    "SaveWarning",
    "SyncCoordinator",
    "TrainResult",
    "Trainer",
    "TrustWarning",
    "atomic_json_dump",
    "atomic_torch_save",
    "build_checkpoint",
    "capture_rng_state",
    "check_checkpoint",
    "redact",
    "resolve_precision",
    "restore_rng_state",
]
