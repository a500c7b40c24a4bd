"""The outer loop over a shared store: DiLoCo (Douillard et al. 2023, arXiv 2311.08105).

`DumbDiLoCoCoordinator` is what a Trainer takes as its coordinator, `SitedCoordinator` where several
ranks train one model (`coordinator_for` gives the right one); `Settings` are their options, `Store`
the shared store by URL. `python -m trainer_core.diloco status URL` shows what is there.
"""

from __future__ import annotations

from trainer_core.diloco.coordinator import DumbDiLoCoCoordinator
from trainer_core.diloco.errors import (
    BadNameError,
    DiLoCoError,
    MissingError,
    PassingError,
    PermanentError,
    StoreError,
)
from trainer_core.diloco.settings import Settings
from trainer_core.diloco.sited import SitedCoordinator, coordinator_for
from trainer_core.diloco.store import Store

__all__ = [
    "BadNameError",
    "DiLoCoError",
    "DumbDiLoCoCoordinator",
    "MissingError",
    "PassingError",
    "PermanentError",
    "Settings",
    "SitedCoordinator",
    "Store",
    "StoreError",
    "coordinator_for",
]
