"""Writing files that are wholly there or not at all, whatever happens meanwhile."""

from __future__ import annotations

import json
import os
from typing import Any

from trainer_core.saving.container import content_of
from trainer_core.saving.publishing import PlainBytes, publish


def atomic_torch_save(state: Any, path: str | os.PathLike[str]) -> None:
    """`torch.save` to `path`, durably: after any crash the old file is there, or the whole new one.

    Makes missing directories. A state that cannot be pickled raises what pickle raises, a full disk
    WriteError (an OSError, with `errno` and the free space), an interrupt KeyboardInterrupt; each
    leaves the old file as it was and no temporary.
    """
    publish(content_of(state), path)


def atomic_json_dump(value: Any, path: str | os.PathLike[str]) -> None:
    """Writes `value` as indented JSON, as durably as `atomic_torch_save`, with the same errors."""
    publish(json_bytes(value), path)


def json_bytes(value: Any) -> PlainBytes:
    """`value` as indented JSON, to be published. Raises TypeError for what is no JSON."""
    return PlainBytes((json.dumps(value, indent=2) + "\n").encode())
