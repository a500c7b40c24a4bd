"""A store that fails on purpose, for tests of what rests on one: by chance (seeded) or by rule.

    history = History()
    store = FaultyStore(Store.open("memory://x"), Faults(passing=0.1, unknown=0.1), seed=3)
    store = FaultyStore(…, Faults(stale=5), history=history)     # one history for all nodes
    store = FaultyStore(…, rule=lambda number, method, name: "die" if number == 17 else None)

The faults sit below the real `Store`, whose own tries they go through: with `attempts=1`, the
default here, each of them reaches the caller.
"""

from __future__ import annotations

import io
import random
import threading
import time
from collections.abc import Callable
from typing import BinaryIO, Literal, NamedTuple, get_args

from trainer_core.diloco.errors import StoreError
from trainer_core.diloco.store import Store
from trainer_core.diloco.store.backend import Backend, Found, Take

Fault = Literal["passing", "permanent", "unknown", "half", "die", "die after"]
"""What can befall one operation.

passing     nothing is done, and the error is one that passes
permanent   nothing is done, and the error is one that doesn't
unknown     it is done, and reported as failed for a passing reason
half        the first half of what was to be written lies under the name, and the error is one that
            passes. No real store does so on `write`; `create` may where there are no links
die         the process is killed before it: `Killed`, from then on by every operation
die after   the same when it was done, before anybody was told
"""

Rule = Callable[[int, str, str], "Fault | None"]


class Killed(BaseException):
    """Stands for SIGKILL: no `except Exception` may catch it, nothing may be tidied up after it."""


class Faults(NamedTuple):
    """How likely each fault is, from 0 to 1; and what is no error.

    `delay_s`: each operation is held back by up to so many seconds. `stale`: what others did in up
    to so many of the last changes isn't seen yet by reads, sizes and listings (one's own always is,
    as with a network file system that caches attributes).
    """

    passing: float = 0.0
    permanent: float = 0.0
    unknown: float = 0.0
    half: float = 0.0
    delay_s: float = 0.0
    stale: int = 0


class History:
    """Every change to one store by any of the faulty stores over it, which it starts empty."""

    def __init__(self) -> None:
        self._changes: list[tuple[object, str, bytes | None]] = []
        self._lock = threading.Lock()

    def record(self, who: object, name: str, content: bytes | None) -> None:
        with self._lock:
            self._changes.append((who, name, content))

    def seen_by(self, who: object, lag: int) -> dict[str, bytes]:
        """The files as somebody sees them who has not heard of others' last `lag` changes."""
        with self._lock:
            changes, known = list(self._changes), len(self._changes) - lag
        files: dict[str, bytes] = {}
        for number, (writer, name, content) in enumerate(changes):
            if number >= known and writer is not who:
                continue
            if content is None:
                files.pop(name, None)
            else:
                files[name] = content
        return files


class FaultyStore(Store):
    """A store that does what `faults` and `rule` say. `calm()` ends it, `partitioned` cuts it off.

    `log` holds (number, method, name, fault) of each operation; numbers start at 1.
    """

    def __init__(
        self,
        store: Store,
        faults: Faults | None = None,
        *,
        rule: Rule | None = None,
        seed: int = 0,
        history: History | None = None,
        attempts: int = 1,
    ) -> None:
        backend = FaultyBackend(
            store._backend, faults or Faults(), rule, seed, history or History()
        )
        super().__init__(backend, store.url, attempts=attempts)
        self.faulty = backend
        self.first_wait_s = 0.001

    @property
    def log(self) -> list[tuple[int, str, str, Fault | None]]:
        return self.faulty.log

    @property
    def partitioned(self) -> bool:
        return self.faulty.partitioned

    @partitioned.setter
    def partitioned(self, value: bool) -> None:
        self.faulty.partitioned = value

    def calm(self) -> None:
        """No more faults from now on."""
        self.faulty.faults, self.faulty.rule, self.faulty.partitioned = Faults(), None, False


class FaultyBackend(Backend):
    def __init__(
        self, under: Backend, faults: Faults, rule: Rule | None, seed: int, history: History
    ) -> None:
        self.faults, self.rule, self.partitioned = faults, rule, False
        self.log: list[tuple[int, str, str, Fault | None]] = []
        self._under, self._history = under, history
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._count = 0
        self._dead = False

    def read(self, name: str, start: int, end: int | None, take: Take) -> None:
        fault, lag = self._before("read", name)
        if lag:
            seen = self._history.seen_by(self, lag)
            if name not in seen:
                raise FileNotFoundError(name)
            take(seen[name][start:end])
        else:
            self._under.read(name, start, end, take)
        self._after(fault)

    def size(self, name: str) -> int | None:
        fault, lag = self._before("size", name)
        if lag:
            content = self._history.seen_by(self, lag).get(name)
            size = None if content is None else len(content)
        else:
            size = self._under.size(name)
        self._after(fault)
        return size

    def write(self, name: str, file: BinaryIO, size: int) -> None:
        content = file.read()
        fault, _ = self._before("write", name)
        if fault == "half":
            content = content[: len(content) // 2]
        self._under.write(name, io.BytesIO(content), len(content))
        self._history.record(self, name, content)
        self._after(fault)

    def create(self, name: str, content: bytes) -> bool:
        fault, _ = self._before("create", name)
        if fault == "half":
            content = content[: len(content) // 2]
        won = self._under.create(name, content)
        if won:
            self._history.record(self, name, content)
        self._after(fault)
        return won

    def listing(self, folder: str) -> list[Found]:
        fault, lag = self._before("listing", folder)
        if lag:
            found = _listed(self._history.seen_by(self, lag), folder)
        else:
            found = self._under.listing(folder)
        self._after(fault)
        return found

    def remove(self, name: str) -> None:
        fault, _ = self._before("remove", name)
        self._under.remove(name)
        self._history.record(self, name, None)
        self._after(fault)

    def judge(self, error: Exception) -> type[StoreError]:
        return self._under.judge(error)

    def close(self) -> None:
        self._under.close()

    def _before(self, method: str, name: str) -> tuple[Fault | None, int]:
        """Notes the operation and does what befalls it before it; else what will, and its lag."""
        with self._lock:
            if self._dead:
                raise Killed
            self._count += 1
            number = self._count
        # Without the lock: a rule may wait for another thread that is about to come here.
        fault = self.rule(number, method, name) if self.rule else None
        with self._lock:
            if self._dead:
                raise Killed
            fault = fault or self._drawn(method)
            self.log.append((number, method, name, fault))
            self._dead = fault == "die"
            delay = self._random.uniform(0, self.faults.delay_s)
            lag = self._random.randint(0, self.faults.stale)
        if delay:
            time.sleep(delay)
        if fault == "die":
            raise Killed
        if fault == "passing" or self.partitioned:
            raise ConnectionError("a fault on purpose that passes")
        if fault == "permanent":
            raise PermissionError("a fault on purpose that stays")
        return fault, lag

    def _after(self, fault: Fault | None) -> None:
        if fault == "die after":
            self._dead = True
            raise Killed
        if fault in ("unknown", "half"):
            raise ConnectionError("a fault on purpose, of an outcome that isn't known")
        if self._dead:  # killed by another thread meanwhile
            raise Killed

    def _drawn(self, method: str) -> Fault | None:
        chance = self._random.random()
        for fault in get_args(Fault):
            odds = getattr(self.faults, fault, 0.0)
            if fault == "half" and method not in ("write", "create"):
                odds = 0.0
            if chance < odds:
                return fault  # type: ignore[no-any-return]  # get_args gives Any
            chance -= odds
        return None


def _listed(files: dict[str, bytes], folder: str) -> list[Found]:
    start, found = f"{folder}/" if folder else "", {}
    for name, content in files.items():
        if name.startswith(start):
            first, slash, _ = name[len(start) :].partition("/")
            found[first] = Found(first, None if slash else len(content))
    return list(found.values())
