"""Who is master: files with rising numbers, of which the highest counts.

`global/lease/<12 digits>.json` is made by an exclusive create, so one node gets each number. Its
holder raises a counter in it from time to time. No clock of another machine is trusted, nor our
own wall clock: a candidate watches, by its monotonic clock, whether the counter moves, and takes
the next number when it has not for `lease_seconds`, or when the holder says that it has stopped.

The number is a fencing number: every commit carries it, and readers refuse one with a lower number
than was committed before. So a master that was only asleep does no harm when it wakes. It does not
even then depend on the lease that a delta is applied once: that rests on commits being created
exclusively.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from trainer_core.diloco.errors import DiLoCoError, MissingError, StoreError
from trainer_core.diloco.repeating import Rarely
from trainer_core.diloco.store import Store

logger = logging.getLogger(__name__)

FOLDER = "global/lease"
NAME = re.compile(r"(\d{12})\.json")
"""The name of a lease within its folder."""
_MOST_BYTES = 4096


class LeaseError(DiLoCoError):
    """Another node is master; `holder` is its id."""

    def __init__(self, words: str, holder: str) -> None:
        super().__init__(words)
        self.holder = holder


class Claim(NamedTuple):
    """What the newest lease file says. `beat` is -1 in one that can't be read."""

    number: int
    holder: str
    session: str
    beat: int
    is_released: bool

    @property
    def is_readable(self) -> bool:
        """Whether anybody can tell whose it is."""
        return self.beat >= 0


def newest_claim(store: Store) -> Claim | None:
    """The claim with the highest number; None if there was never one."""
    numbers = [int(match[1]) for entry in store.entries(FOLDER) if (match := _matched(entry.name))]
    if not numbers:
        return None
    number = max(numbers)
    try:
        document = json.loads(store.read(lease_name(number), 0, _MOST_BYTES))
        return Claim(
            number,
            str(document["holder"])[:64],
            str(document["session"])[:64],
            int(document["beat"]),
            bool(document.get("released", False)),
        )
    except (MissingError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return Claim(number, "unknown", "", -1, False)


class Lease:
    """The lease as one node sees it. `number`: the fencing number while it holds it, else None.

    `require`: asked where nobody has it; raises PassingError where the Hub itself is gone.
    """

    def __init__(
        self,
        store: Store,
        node_id: str,
        session: str,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        require: Callable[[], None] = lambda: None,
    ) -> None:
        self._require = require
        self.number: int | None = None
        self.session = session
        self._store, self._node_id = store, node_id
        self._seconds, self._clock = seconds, clock
        self._beat = 0
        self._watched: tuple[int, int] | None = None
        self._since = 0.0
        self._lock = threading.RLock()

    def acquire(self, patience: float) -> None:
        """Takes the lease, watching for as long as it needs to, but at most `patience` seconds.

        Raises LeaseError, naming the holder, as soon as another one shows that it is alive.
        """
        first, begun = newest_claim(self._store), self._clock()
        while not self.attempt():
            claim = newest_claim(self._store)
            if claim is not None and self._is_alive(first, claim):
                raise LeaseError(_held_words(claim), claim.holder)
            if self._clock() - begun > patience:
                words = f"no answer within {patience:g} s to whether {_holder(claim)} still lives"
                raise LeaseError(words, "" if claim is None else claim.holder)
            time.sleep(min(0.5, self._seconds / 10))

    def attempt(self) -> bool:
        """One look, without waiting. True if the lease is ours now."""
        with self._lock:
            if self.number is not None:
                return True
            claim = newest_claim(self._store)
            if claim is None:
                self._require()
                return self._take(1)
            # A process of this node that died needs no watching: node ids are unique, and an older
            # process that lives after all finds the higher number and stops.
            if claim.is_released or claim.holder == self._node_id:
                return self._take(claim.number + 1)
            seen = claim.number, claim.beat
            if seen != self._watched:
                self._watched, self._since = seen, self._clock()
                return False
            return self._clock() - self._since >= self._seconds and self._take(claim.number + 1)

    def check(self) -> None:
        """Raises LeaseError if the lease is not ours any more; costs one listing."""
        with self._lock:
            if self.number is None:
                raise LeaseError(f"{self._node_id} is not the master", "")
            claim = newest_claim(self._store)
            if claim is None:
                self._require()
            # Under our number a file that can't be read is ours, damaged: the next beat mends it.
            is_ours = claim is not None and claim.number == self.number
            if claim is None or not is_ours or claim.session not in (self.session, ""):
                self.number = None
                raise self._lost(claim)

    def beat(self) -> None:
        """Says that the holder lives, if the lease is ours; else raises LeaseError."""
        with self._lock:
            self.check()
            self._beat += 1
            self._write(is_released=False)

    def raise_above(self, fence: int, session: str) -> None:
        """Takes a number above `fence`, where the one that it has is not; else raises LeaseError.

        `session` is whose number `fence` is; its own may stay. For a log whose fencing numbers are
        higher than any lease file, since somebody removed these: what was committed under a lower
        number would never count.
        """
        with self._lock:
            if self.number is None or self.number > fence:
                return
            if self.number == fence and session == self.session:
                return
            self.check()
            logger.warning("the lease files of fencing numbers up to %d were removed", fence)
            self.number = None
            if not self._take(fence + 1):
                raise self._lost(newest_claim(self._store))

    def release(self) -> None:
        """Lets the next candidate take over at once. Without effect if the lease isn't ours."""
        with self._lock:
            if self.number is None:
                return
            self.check()
            self._write(is_released=True)
            self.number = None

    def _lost(self, claim: Claim | None) -> LeaseError:
        words = f"{self._node_id} is no longer the master: {_holder(claim)} has the lease"
        if claim is not None and claim.holder == self._node_id:
            words += ". That is another process under this node's id: each needs one of its own"
        return LeaseError(words, "" if claim is None else claim.holder)

    def _take(self, number: int) -> bool:
        self._watched = None
        self._beat = 0
        content = self._content(is_released=False)
        if not self._store.create(lease_name(number), content):
            # Raises where something lies there that is no file, which nobody would ever get past.
            self._store.size(lease_name(number))
            return False
        # An old listing may have hidden higher numbers, whose lower ones were removed.
        claim = newest_claim(self._store)
        if claim is not None and (claim.number > number or claim.session != self.session):
            return False
        self.number = number
        self._remove_before(number)
        return True

    def _remove_before(self, number: int) -> None:
        try:
            for entry in self._store.entries(FOLDER):
                match = _matched(entry.name)
                if match and int(match[1]) < number:
                    self._store.remove(lease_name(int(match[1])))
        except StoreError as error:
            logger.debug("old lease files stay for now: %s", error)

    def _write(self, *, is_released: bool) -> None:
        assert self.number is not None
        self._store.write(lease_name(self.number), self._content(is_released=is_released))

    def _content(self, *, is_released: bool) -> bytes:
        document = {"holder": self._node_id, "session": self.session, "beat": self._beat}
        return json.dumps(document | {"released": is_released}).encode()

    def _is_alive(self, first: Claim | None, claim: Claim) -> bool:
        if claim.holder == self._node_id or claim.is_released:
            return False
        before = None if first is None else (first.number, first.beat)
        return (claim.number, claim.beat) != before


class Keeper:
    """Raises the counter at a third of the lease's time, on a thread, while a master lives."""

    def __init__(self, lease: Lease, seconds: float) -> None:
        self._lease, self._interval = lease, seconds / 3
        self._rarely = Rarely(logger)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="diloco lease", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, without waiting for a request that it may be in."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            if self._lease.number is None:
                continue
            try:
                self._lease.beat()
            except LeaseError as error:
                self._rarely.warning("%s", error, about=f"lease of {error.holder}")
            except DiLoCoError as error:
                self._rarely.info("the lease could not be renewed: %s", error)


def lease_name(number: int) -> str:
    """The name of a lease file on the store."""
    return f"{FOLDER}/{number:012d}.json"


def _matched(name: str) -> re.Match[str] | None:
    return NAME.fullmatch(name.rsplit("/", 1)[-1])


def _holder(claim: Claim | None) -> str:
    return "nobody" if claim is None else f"{claim.holder} (fencing number {claim.number})"


def _held_words(claim: Claim) -> str:
    return (
        f"{_holder(claim)} is the master and alive; a second one is refused. Make this node a "
        "worker, stop the other, or wait for its place with standby=True"
    )
