"""`fsck` for training checkpoints: inspect, verify and mend them without running a byte of them.

    import ckpttool

    with ckpttool.open("run/step_000000000004.pt") as checkpoint:
        weight = checkpoint.tensors["model.layers.0.weight"]
        print(weight.dtype, weight.shape, weight.numpy().mean())

    directory = ckpttool.scan("run")        # names only; no step file is opened
    report = ckpttool.verify("run")         # findings, and the newest step that is proven good

Nothing is imported before it is used, so that `import ckpttool` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ckpttool.checks.verify import Report, verify
    from ckpttool.errors import CkptToolError
    from ckpttool.findings import Finding, Severity
    from ckpttool.model.checkpoint import Checkpoint
    from ckpttool.model.checkpoint import open_checkpoint as open  # noqa: A004 - its public name
    from ckpttool.model.directory import CheckpointDirectory, scan
    from ckpttool.model.tensor import TensorRef

__all__ = [
    "Checkpoint",
    "CheckpointDirectory",
    "CkptToolError",
    "Finding",
    "Report",
    "Severity",
    "TensorRef",
    "open",
    "scan",
    "verify",
]

_HOMES = {
    "Checkpoint": ("ckpttool.model.checkpoint", "Checkpoint"),
    "CheckpointDirectory": ("ckpttool.model.directory", "CheckpointDirectory"),
    "CkptToolError": ("ckpttool.errors", "CkptToolError"),
    "Finding": ("ckpttool.findings", "Finding"),
    "Report": ("ckpttool.checks.verify", "Report"),
    "Severity": ("ckpttool.findings", "Severity"),
    "TensorRef": ("ckpttool.model.tensor", "TensorRef"),
    "open": ("ckpttool.model.checkpoint", "open_checkpoint"),
    "scan": ("ckpttool.model.directory", "scan"),
    "verify": ("ckpttool.checks.verify", "verify"),
}


def __getattr__(name: str) -> Any:
    """PEP 562: find a public name in its module when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ckpttool' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value
