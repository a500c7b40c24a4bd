"""Asking asynchronous libraries from any thread, with a time-out for each request."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def ask(coroutine: Coroutine[Any, Any, T]) -> T:
    """What the coroutine gives, run on the one loop that fsspec keeps in a thread of its own."""
    from fsspec.asyn import get_loop

    future = asyncio.run_coroutine_threadsafe(coroutine, get_loop())
    try:
        return future.result()
    except (asyncio.CancelledError, concurrent.futures.CancelledError):
        # Of the loop's side: something below gave the request up. Ours would be an interrupt.
        raise ConnectionAbortedError("the request was broken off") from None
    except BaseException:
        future.cancel()
        raise


async def within(timeout: float, awaitable: Awaitable[T]) -> T:
    """What it gives; after `timeout` seconds it is cancelled and TimeoutError raised."""
    try:
        return await asyncio.wait_for(awaitable, timeout)
    except asyncio.TimeoutError:  # another class than TimeoutError in Python 3.10
        raise TimeoutError(f"no answer within {timeout:g} s") from None
