"""Who holds the lock of a directory: the lock file read, and judged whether its holder lives.

`.writer.lock` is JSON: `pid`, `host`, `boot_id`, `pid_namespace`, `started` (see `io.processes`),
`program`, `run_id`, `acquired` and `refreshed` (UTC), `token`, which no other lock has, and
`refreshed_every`: seconds, where the holder has a thread that does nothing else.

A lock of this machine is held exactly as long as its process lives. Of another machine or container
nobody here can ask that, so its holder refreshes the lock four times a minute, and one that has not
been refreshed for five minutes may be taken over. Times are those of the file system. Who waits
beside it may know earlier, and whatever the clocks say: see `io.lock_watch`.
"""

from __future__ import annotations

import os
import re
import stat
import time
from typing import Any, NamedTuple

from ckpttool.io import processes

LOCK_NAME = ".writer.lock"
REFRESH_SECONDS = 15
STALE_SECONDS = 300
MOST_BYTES = 64 * 1024
# A link is not followed, and a pipe does not block.
FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Holder(NamedTuple):
    """Who a lock file says holds it, and whether that can still be so.

    `state` is `held`; `dead`, where its process is known to have ended; `stale`, where it was not
    refreshed for too long; `unreadable`, where the file says nothing (`problem` tells why), which
    counts as held while it is younger than five minutes. `age` is in seconds since the last sign of
    life, by the file system's clock. `identity` tells this lock from any later one.
    """

    path: str
    state: str
    age: float
    identity: str
    pid: int | None = None
    host: str | None = None
    boot_id: str | None = None
    pid_namespace: str | None = None
    started: int | None = None
    program: str | None = None
    run_id: str | None = None
    acquired: str | None = None
    refreshed: str | None = None
    refreshed_every: int | None = None
    problem: str | None = None

    @property
    def is_held(self) -> bool:
        """Whether nobody else may write here now."""
        return self.state == "held" or (self.state == "unreadable" and self.age < STALE_SECONDS)

    @property
    def life(self) -> tuple[str, str | None]:
        """What is another one as soon as the holder has shown that it lives."""
        return self.identity, self.refreshed

    def words(self) -> str:
        """`pid 4711 on node1 (trainer_core), since 2026-11-29T19:40:42Z`. Not escaped."""
        if self.state == "unreadable":
            return f"somebody whose lock file cannot be read ({self.problem})"
        since = f", since {self.acquired}" if self.acquired else ""
        return f"pid {self.pid} on {self.host} ({self.program or 'unknown'}){since}"

    def as_dict(self) -> dict[str, Any]:
        """The holder as plain data."""
        return {key: value for key, value in self._asdict().items() if key != "identity"}


def read_holder(directory: str | os.PathLike[str]) -> Holder | None:
    """Who holds the lock of a directory, None where there is no lock. Nothing is written or raised.

    Whether a lock of another machine is stale is judged by this one's clock here; Taking it knows
    better.
    """
    return look(os.path.join(os.fspath(directory), LOCK_NAME), time.time())


def look(path: str, now: float) -> Holder | None:
    """The lock at `path`, judged at the time `now`; None where there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | FLAGS)
    except FileNotFoundError:
        return None
    except OSError as error:
        return _unreadable(path, now, error.strerror or str(error))
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return _unreadable(path, now, "is not a regular file")
        content = parse(os.read(descriptor, MOST_BYTES))
    except OSError as error:
        return _unreadable(path, now, error.strerror or str(error))
    finally:
        os.close(descriptor)
    if isinstance(content, str):
        return _unreadable(path, now, content)
    return _judge(_holder(path, content, now, status))


def _unreadable(path: str, now: float, problem: str) -> Holder | None:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    except OSError:  # who may not look knows nothing of its age
        return Holder(path, "unreadable", 0.0, "", problem=problem)
    return Holder(path, "unreadable", now - status.st_mtime, _identity(status), problem=problem)


def parse(data: bytes) -> dict[str, Any] | str:
    """What a lock file holds; or, as text, why it cannot be read."""
    import json

    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return "it is empty" if not data else "it is not JSON, or cut short"
    if not isinstance(content, dict):
        return "it holds no object"
    pid = content.get("pid")
    if type(pid) is not int or pid <= 0:
        return "it names no process"
    return content


def _identity(status: os.stat_result, token: object = None) -> str:
    """What names this very lock, fit for a file name: its token, or what the file system says."""
    if isinstance(token, str) and re.fullmatch("[0-9a-f]{8,64}", token):
        return token
    return f"{status.st_ino:x}z{status.st_mtime_ns:x}z{status.st_size:x}"


def _holder(path: str, content: dict[str, Any], now: float, status: os.stat_result) -> Holder:
    def text(key: str) -> str | None:
        value = content.get(key)
        return value[:200] if isinstance(value, str) else None

    def number(key: str) -> int | None:
        value = content.get(key)
        return value if type(value) is int else None

    names = ("host", "boot_id", "pid_namespace", "program", "run_id", "acquired", "refreshed")
    return Holder(
        path,
        "held",
        now - status.st_mtime,
        _identity(status, content.get("token")),
        pid=content["pid"],
        started=number("started"),
        refreshed_every=number("refreshed_every"),
        **{name: text(name) for name in names},
    )


def _judge(holder: Holder) -> Holder:
    if is_from_here(holder):
        alive = processes.is_same_process(holder.pid or 0, holder.started)
        return holder._replace(state="held" if alive else "dead")
    return holder._replace(state="held" if holder.age < STALE_SECONDS else "stale")


def is_from_here(holder: Holder) -> bool:
    """Whether its process id means here what it meant there."""
    there = (holder.host, holder.boot_id, holder.pid_namespace)
    return there == (processes.host_name(), processes.boot_id(), processes.pid_namespace())
