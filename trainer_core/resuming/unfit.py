"""A part of a checkpoint that this run cannot take, in words that say what to do.

torch names every key of a model that does not fit, and nothing that helps. What is raised instead
is a CheckpointError, and so a RuntimeError as torch's is for a model, and a ValueError as torch's
is for an optimizer: whoever catches torch's own catches this. The cause is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from trainer_core.resuming.wording import some
from trainer_core.state import CheckpointError
from trainer_core.wrappers import own_state

_MOST_WORDS = 2000
_WAYS = {
    "model": "loads what fits",
    "optimizer": "goes on without that state",
    "attributes": "leaves them as they are here",
}
# What has nothing to do with whether a part fits.
_OF_THE_SYSTEM = (OSError, MemoryError, torch.OutOfMemoryError)


class UnfitError(CheckpointError, ValueError):
    """A part of a checkpoint does not fit this run; `allow_partial` may leave it out."""

    def with_facts(self, lines: Iterable[str]) -> UnfitError:
        """The same, with what is known of how its part differs."""
        part = str(self).partition(":")[0].partition(".")[0]
        own = [line for line in lines if re.match(rf"{re.escape(part)}\b", line)]
        return UnfitError("\n  - ".join([str(self), *own])) if part == "optimizer" else self


def unfit(name: str, error: Exception, saved: Any, module: Any) -> Exception:
    """`error`, met while the part `name` was loaded, with the way out; to be raised from `error`.

    `saved` and `module` are what was to be loaded, and into what, where that is a module.
    """
    if isinstance(error, _OF_THE_SYSTEM) or "allow_partial" in str(error):
        return error
    part = name.partition(".")[0]
    way = f'allow_partial=("{part}",) {_WAYS.get(part, "leaves it as it is here")}'
    if isinstance(error, CheckpointError):
        return UnfitError(f"{error} ({way})")
    said = (str(error) or type(error).__name__)[:_MOST_WORDS]
    words = _what_is_unlike(saved, module)
    if not words:
        return UnfitError(f"{name}: does not fit: {said} ({way})")
    return UnfitError(f"{name}: does not fit: {words} ({way})\n{said}")


def _what_is_unlike(saved: Any, module: Any) -> str:
    if not isinstance(module, torch.nn.Module) or not isinstance(saved, Mapping):
        return ""
    saved, own = own_state(saved, module), module.state_dict()
    both = [name for name in own if name in saved]
    shapes = [
        f"{name} {tuple(saved[name].shape)}, here {tuple(own[name].shape)}"
        for name in both
        if hasattr(saved[name], "shape")
        and hasattr(own[name], "shape")
        and saved[name].shape != own[name].shape
    ]
    lists = {
        "not in the checkpoint": [name for name in own if name not in saved],
        "only in the checkpoint": [name for name in saved if name not in own],
        "of another shape": shapes,
    }
    return "; ".join(
        f"{len(names)} {what}: {some(names)}" for what, names in lists.items() if names
    )
