"""When one rank fails, the others hear of it, instead of waiting for it in an exchange.

The rank that fails writes who it is, its step and the error's words into the store over which all
ranks have met, then lets its group go: whoever waits for it there, or comes to it, is refused at
once, looks the words up, and raises them as RankError. A thread on each rank looks into the store
as well, for those who wait where that does not help (a gloo group of the model's own), and says who
is waited for where none has failed (see `trainer_core.site.waiting`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

import torch

from trainer_core.loop.preemption import is_told
from trainer_core.site.ranks import RankError, Site, forget
from trainer_core.site.waiting import Waiting, seconds_to_wait

_EVERY_S = 1.0
"""Between two looks into the store, on each rank."""
GRACE_S = 30.0
"""How long a rank may be stuck after another one's failure until its process is ended."""
_ALIKE_S = 1.0
"""How long a failed rank looks whether all have failed by themselves, and nobody waits."""
_MOST_WORDS = 500
_EXCHANGE_WORDS = ("gloo", "nccl", "processgroup", "c10d", "connection closed by peer")


class Run(Protocol):
    """What is needed of a Trainer."""

    step: int
    logger: logging.Logger


class Guard:
    """A context for what all ranks of `site` do together; it may be entered within itself.

    What its body raises on one rank only ends the others, too: they raise RankError. What all ranks
    know of already (see `trainer_core.loop.preemption.told_to_all`), and what all raise by
    themselves within a second, changes nothing. Without a site, or in one of one rank, it does
    nothing. `is_saving`: asked before a process is ended that cannot be brought to raise.
    """

    def __init__(self, site: Site | None, run: Run, is_saving: Callable[[], bool]) -> None:
        self._site = site if site is not None and site.size > 1 else None
        self._run, self._is_saving = run, is_saving
        self._depth = 0
        self._is_over = False
        self._left = threading.Event()
        self._said = threading.Lock()
        self._has_said = False
        self._store: Any = None
        self._waiting: Waiting | None = None
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Guard:
        self._depth += 1
        if self._site is None or self._depth > 1:
            return self
        site, seconds = self._site, seconds_to_wait()
        site.fits += 1
        # No fit may find what was said in another one, of a site that was left after a failure.
        self._store = _store(f"trainer_core/site-{site.number}/fit-{site.fits}/")
        if self._store is not None:
            self._waiting = Waiting(site.rank, site.size, self._run, self._store, seconds)
            works = {"other ranks": self._look, "waiting for ranks": self._tick}
            for name, work in works.items():
                self._threads.append(threading.Thread(target=work, name=name, daemon=True))
                self._threads[-1].start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        try:
            if self._site is not None and error is not None and not self._is_over:
                self._is_over = True
                self._failed(self._site, error)
        finally:
            if self._depth == 0:
                self._left.set()
                for thread in self._threads:
                    thread.join()

    def _failed(self, site: Site, error: BaseException) -> None:
        if is_told(error):
            return
        if not _is_of_exchange(error):
            if not self._post(site, _first_line(error)):
                forget(site)
            return
        there = self._found()
        if there is None:
            there = "another rank is gone or did not come, and none has said why (was it killed?)"
            there = f"{there}: {_first_line(error)}"
            self._post(site, there)
        self._say(there)
        forget(site)
        raise RankError(there) from error

    def _post(self, site: Site, words: str) -> bool:
        """Tells the others, the first one's words counting; whether all have failed alike."""
        store = self._store
        if store is None:
            return False
        try:
            if store.add("failed", 1) == 1:
                said = {"rank": site.rank, "step": self._run.step, "words": words}
                store.set("failure", json.dumps(said))
            until = time.monotonic() + _ALIKE_S
            while store.add("failed", 0) < site.size:
                if time.monotonic() >= until:
                    return False
                time.sleep(0.02)
        except RuntimeError:  # the store is gone with the rank that kept it
            return False
        return True

    def _found(self) -> str | None:
        """What another rank has said of its failure."""
        assert self._site is not None
        try:
            if self._store is None or not self._store.check(["failure"]):
                return None
            said = json.loads(self._store.get("failure"))
        except (RuntimeError, ValueError):
            return None
        if said["rank"] == self._site.rank:
            return None
        return f"rank {said['rank']} failed after step {said['step']}: {said['words']}"

    def _say(self, words: str) -> None:
        with self._said:
            if not self._has_said:
                self._has_said = True
                self._run.logger.error("%s", words)

    # On threads

    def _tick(self) -> None:
        assert self._waiting is not None
        while not self._left.wait(_EVERY_S) and not self._has_said:
            self._waiting.tick()

    def _look(self) -> None:
        assert self._waiting is not None
        while not self._left.wait(_EVERY_S):
            if (words := self._found()) is not None:
                break
            with contextlib.suppress(RuntimeError):  # the store is gone with whoever kept it
                self._waiting.exchange()
        else:
            return
        if self._is_over:
            return  # failed as well, by itself
        self._say(words)
        if self._left.wait(GRACE_S) or self._is_over:
            return
        while self._is_saving():
            if self._left.wait(_EVERY_S):
                return
        self._run.logger.critical(
            "this rank waits in an exchange that nothing else can end: its process ends now"
        )
        os._exit(1)


def _store(prefix: str) -> Any:
    """The store over which the ranks have met; None where there is no way to it."""
    try:
        # torch has no public name for it; its own launcher and loaders use this one.
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        return PrefixStore(prefix, _get_default_store())
    except (ImportError, RuntimeError, ValueError):
        return None


def _first_line(error: BaseException) -> str:
    words = str(error).strip().partition("\n")[0][:_MOST_WORDS]
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def _is_of_exchange(error: BaseException | None) -> bool:
    """Whether an error comes from an exchange between ranks, as far as one can tell."""
    seen = 0
    while error is not None and seen < 10:
        if isinstance(error, (RankError, torch.distributed.DistError)):
            return True
        words = str(error).lower()
        if isinstance(error, RuntimeError) and any(word in words for word in _EXCHANGE_WORDS):
            return True
        error, seen = error.__cause__, seen + 1
    return False


def ends_together(site: Site | None, can_end: bool) -> Callable[[bool], bool]:
    """For the end of a loader: takes whether this rank's has ended, says whether any has.

    All ranks call this, and then the function at each batch: it costs a small exchange where the
    loader of any rank can end (`can_end`: an iterator), and else nothing.
    """
    if site is None or site.size == 1:
        return lambda has_ended: has_ended
    if site.sum(can_end)[0]:
        return lambda has_ended: site.sum(has_ended)[0] > 0

    def refuse(has_ended: bool) -> bool:
        if has_ended:
            raise RuntimeError("the dataloader of this rank has ended, and gives nothing anew")
        return False

    return refuse
