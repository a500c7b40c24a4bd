"""A pause for the garbage collector while a big structure without cycles is built."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collection() -> Iterator[None]:
    """Within, nothing is collected; the collector would only walk over what is being built.

    A file of 100,000 tensors makes a million objects, and a collection for every few thousand of
    them.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
