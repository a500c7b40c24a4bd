"""Gradients that are summed over ranks once for a step, not once for each of its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

GradientSync = Callable[[bool], AbstractContextManager[Any]]


def gradient_sync(model: torch.nn.Module) -> GradientSync | None:
    """A context for forward and backward of one micro-batch; True for the last one of a step.

    Only in the last one gradients are exchanged: by `no_sync` of DistributedDataParallel, by
    `set_requires_gradient_sync` of what `fully_shard` made. None where the model has neither.
    """
    wrapped: list[Any] = [one for one in model.modules() if _is_wrapper(one)]
    sharded: list[Any] = [
        one for one in model.modules() if hasattr(one, "set_requires_gradient_sync")
    ]
    if not wrapped and not sharded:
        return None

    @contextmanager
    def within(is_last: bool) -> Iterator[None]:
        for module in sharded:
            module.set_requires_gradient_sync(is_last, recurse=False)
        with ExitStack() as stack:
            for module in wrapped if not is_last else ():
                stack.enter_context(module.no_sync())
            yield

    return within


def _is_wrapper(module: Any) -> bool:
    return isinstance(module, torch.nn.parallel.DistributedDataParallel)
