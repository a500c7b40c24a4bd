"""Whom this rank waits for: said once when nothing has moved for a while, and then waited on.

torch counts, for each group of processes, how many exchanges a rank has begun. Threads beside
training post that count and the step into the store over which all ranks have met, a few times a
minute. A rank that stands still, while another one has begun fewer exchanges, waits for that one.
So a step costs nothing more.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

VARIABLE = "TRAINER_CORE_WAITING_SECONDS"
"""In the environment: after how many seconds without a movement it is said who is waited for."""
SECONDS = 60.0
_MOST_EVERY_S = 10.0
"""Between two posts."""
_MOST_NAMED = 3


class Run(Protocol):
    """What is needed of a Trainer."""

    step: int
    logger: logging.Logger


class _Post(NamedTuple):
    """What a rank says of itself: how often it has, its step, exchanges begun by group."""

    beat: int
    step: int
    begun: Mapping[str, int]


def seconds_to_wait() -> float:
    """What VARIABLE says, else SECONDS. Raises ValueError for what is no time."""
    text = os.environ.get(VARIABLE, "")
    try:
        seconds = float(text) if text else SECONDS
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"{VARIABLE} must be a number of seconds above 0, not {text[:40]!r}")
    return seconds


def exchanges_begun() -> dict[str, int]:
    """How many exchanges this rank has begun in each group that it is in, by the group's name."""
    begun: dict[str, int] = {}
    try:
        # torch has no public name for either; its own flight recorder tells ranks apart by them.
        from torch.distributed.distributed_c10d import _world

        group: Any
        for group, name in list(_world.pg_names.items()):
            begun[name] = group._get_sequence_number_for_group()
    except (ImportError, AttributeError, RuntimeError):  # a backend that does not count
        return begun
    return begun


class Waiting:
    """One rank's look at the others. `exchange` and `tick` are called again and again, each on a
    thread of its own, since a store whose process stands still never answers.

    `seconds`: how long nothing may move until it is said who is waited for.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        run: Run,
        store: Any,
        seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        begun: Callable[[], dict[str, int]] = exchanges_begun,
    ) -> None:
        self._rank, self._size, self._run, self._store = rank, size, run, store
        self._seconds, self._clock, self._begun = seconds, clock, begun
        self._every = min(_MOST_EVERY_S, seconds / 6)
        self._beat, self._post_at = 0, -math.inf
        self._answered = clock()
        self._lock = threading.Lock()
        self._move(None, clock())

    def _move(self, place: Any, now: float) -> None:
        self._place, self._since, self._has_said = place, now, False
        self._ask_at = now + self._seconds / 2
        self._before: dict[int, _Post] = {}
        self._after: dict[int, _Post] = {}

    # On the thread that asks the store

    def exchange(self) -> None:
        """Posts, if that is due, and asks for what the others have posted while this rank waits."""
        now = self._clock()
        if now >= self._post_at:
            self._post_at, self._beat = now + self._every, self._beat + 1
            post = _Post(self._beat, self._run.step, self._begun())
            self._store.set(_key(self._rank), json.dumps(post))
        with self._lock:
            since, is_due = self._since, not self._has_said and now >= self._ask_at
        if is_due:
            posts = self._posts()
            with self._lock:
                if since == self._since:  # else it has gone on meanwhile
                    self._asked(posts, now)
        self._answered = self._clock()

    def _asked(self, posts: dict[int, _Post], now: float) -> None:
        """The first answer is kept, to see who has said nothing since."""
        if not self._before:
            self._before, self._ask_at = posts, self._since + self._seconds
        else:
            # Where nobody is behind, all may be at work for long: asked less and less often.
            self._after, self._ask_at = posts, now + (now - self._since)

    def _posts(self) -> dict[int, _Post]:
        ranks = [rank for rank in range(self._size) if rank != self._rank]
        if not self._store.check([_key(rank) for rank in ranks]):
            ranks = [rank for rank in ranks if self._store.check([_key(rank)])]
        texts = self._store.multi_get([_key(rank) for rank in ranks])
        return {rank: _Post(*json.loads(text)) for rank, text in zip(ranks, texts, strict=True)}

    # On the other thread

    def tick(self) -> None:
        """Says whom this rank waits for, if it is time."""
        now, place = self._clock(), (self._run.step, self._begun())
        with self._lock:
            stood, had_said = now - self._since, self._has_said
            if place != self._place:
                self._move(place, now)
                words = f"going on after {stood:.0f} s" if had_said else None
            elif had_said or stood < self._seconds:
                return
            else:
                words = self._words(place[1], now)
                self._has_said = words is not None
                words = words and f"{words}; nothing has moved here for {stood:.0f} s"
        if words is not None:
            self._run.logger.warning("%s", words)

    def _words(self, begun: Mapping[str, int], now: float) -> str | None:
        if now - self._answered > self._seconds / 2:
            return (
                "waiting, and the store over which the ranks have met does not answer: is the "
                "process that keeps it stopped (torchrun's, or else rank 0)?"
            )
        found = []
        for rank, post in self._after.items():
            is_behind = any(post.begun.get(name, count) < count for name, count in begun.items())
            is_silent = rank in self._before and self._before[rank].beat == post.beat
            if is_behind or is_silent:
                state = "of its process nothing is heard" if is_silent else "its process is alive"
                words = f"rank {rank}, which was last heard of after step {post.step} ({state})"
                found.append(words)
        if not found:
            return None
        more = len(found) - _MOST_NAMED
        named = "; ".join(found[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
        return f"waiting for {named}"


def _key(rank: int) -> str:
    return f"at-{rank}"
