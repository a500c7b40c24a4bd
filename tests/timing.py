"""Bounds for work that must not grow without measure."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def processor_seconds_below(bound: float) -> Iterator[None]:
    """Fails where the block took more processor time than that, whatever else the machine does.

    For faults that cost a thousand times as much or never end; a bound leaves room for slow machines.
    """
    began = time.process_time()
    yield
    took = time.process_time() - began
    assert took < bound, f"{took:.1f} s of processor time, {bound:g} are allowed"
