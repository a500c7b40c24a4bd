"""A directory has one writer at a time: the lock file that sees to it.

What the file says, and whether its holder lives, tells `io.lock_holder`. Everything here rests on
what network file systems do atomically, too: making a hard link fails where the name is taken, and
renaming replaces at once. Whoever takes a dead holder's lock over first links a claim, whose name
is made from the old lock's token: of any number of takers one gets it. Only it may rename its
claim over the lock, after a last look whether the old lock is still the one. A taker that died in
between leaves a claim that is taken over in the same way.

The time of a lock is compared with that of a file just made beside it: the clocks of two machines
never meet.
"""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING, Any

from ckpttool.errors import RefusedError, UnreadableError
from ckpttool.io import processes
from ckpttool.io.durable import NO_LINKS, parse_temporary_name, temporary_name, write_error
from ckpttool.io.lock_holder import (
    FLAGS,
    LOCK_NAME,
    MOST_BYTES,
    REFRESH_SECONDS,
    STALE_SECONDS,
    Holder,
    is_from_here,
    look,
    parse,
    read_holder,
)

if TYPE_CHECKING:
    from types import TracebackType

    from ckpttool.io.durable import Progress
    from ckpttool.io.lock_watch import Life, Watch

__all__ = [
    "LOCK_NAME",
    "REFRESH_SECONDS",
    "STALE_SECONDS",
    "Holder",
    "LockedError",
    "WriterLock",
    "read_holder",
    "refuse_if_held",
]

_MOST_TRIES = 1000
_FAMILY_PATIENCE_S = 2.0


class LockedError(RefusedError):
    """Somebody else is writing in the directory, or took its lock over. `holder` is who."""

    def __init__(self, path: str, words: str, holder: Holder | None) -> None:
        super().__init__(f"{path}: {words}")
        self.path = path
        self.holder = holder


def refuse_if_held(directory: str | os.PathLike[str]) -> None:
    """LockedError where another writer is at work in the directory. Nothing is written.

    UnreadableError where it may not be looked into.
    """
    holder = read_holder(directory)
    if holder is None or not holder.is_held:
        return
    if not holder.identity:
        raise UnreadableError(holder.path, holder.problem or "cannot be looked at")
    raise _is_held(os.fspath(directory), holder)


class WriterLock:
    """The lock of a directory, held by this process. Use `acquire`; a context manager.

    `taken_over` is the holder whose lock was found dead or stale and taken over, or None. A child
    that was forked off does not hold it: for it, every method does nothing.
    """

    __slots__ = ("_facts", "_owner", "_refreshed", "directory", "path", "taken_over")

    def __init__(self, directory: str, facts: dict[str, Any]) -> None:
        self.directory = directory
        self.path = os.path.join(directory, LOCK_NAME)
        self.taken_over: Holder | None = None
        self._facts = facts
        self._owner = os.getpid()
        self._refreshed = time.monotonic()

    @classmethod
    def acquire(
        cls,
        directory: str | os.PathLike[str],
        *,
        program: str,
        run_id: str | None = None,
        patience: float = 0.0,
        watch: Watch | None = None,
        refreshed_every: int | None = None,
    ) -> WriterLock:
        """Takes the lock of a directory that exists, from a dead holder too.

        While it is held, asks again for `patience` seconds; and with a `watch` for as long as that
        waits to see whether a holder elsewhere is alive. `refreshed_every`: a promise to `refresh`
        as often as that, in seconds, by a thread of its own. Raises LockedError, which says
        who holds it, and WriteError where the system does not let us write there.
        """
        where = os.fspath(directory)
        deadline = time.monotonic() + patience
        while True:
            try:
                lock = cls(where, _facts_of_this_process(program, run_id, refreshed_every))
                lock._take(frozenset() if watch is None else watch.silent)
                return lock
            except LockedError as error:
                if watch is not None and watch.goes_on(error.holder):
                    continue
                if time.monotonic() >= deadline:
                    raise
                time.sleep(min(1.0, patience / 10))
            except OSError as error:
                raise write_error(os.path.join(where, LOCK_NAME), error) from error

    @classmethod
    def acquire_soon(cls, directory: str | os.PathLike[str], *, program: str) -> WriterLock:
        """`acquire`, with two seconds of patience where the holder is a program of the same family.

        That is one whose name begins with the same word: `ckpttool undo` is mostly through soon,
        while a trainer holds the lock for days.
        """
        try:
            return cls.acquire(directory, program=program)
        except LockedError as error:
            if not _same_family(error.holder, program):
                raise
        return cls.acquire(directory, program=program, patience=_FAMILY_PATIENCE_S)

    def refresh(self) -> None:
        """Says that the holder lives: to be called every `REFRESH_SECONDS`.

        Raises LockedError where the lock is no longer ours, so that nothing more may be written,
        and WriteError where the system does not let us write.
        """
        if os.getpid() != self._owner:
            return
        try:
            descriptor = self._open_own()
            try:
                self._facts["refreshed"] = _now()
                os.pwrite(descriptor, _encode(self._facts), 0)  # of the same length as before
            finally:
                os.close(descriptor)
        except LockedError:
            raise
        except OSError as error:
            raise write_error(self.path, error) from error
        self._refreshed = time.monotonic()

    def refresh_if_due(self, after: float = REFRESH_SECONDS) -> None:
        """Refreshes when the last time was `after` seconds ago; costs next to nothing else."""
        if time.monotonic() - self._refreshed >= after:
            self.refresh()

    def keeping(self, progress: Progress | None = None) -> Progress:
        """A `progress` that refreshes the lock while it counts, and tells `progress`."""

        def keep(done: int, total: int, label: str) -> None:
            self.refresh_if_due()
            if progress is not None:
                progress(done, total, label)

        return keep

    def release(self) -> None:
        """Gives the lock back; does nothing where it is not ours any more. Never raises OSError.

        A lock that cannot be removed is dead as soon as this process has ended.
        """
        if os.getpid() != self._owner:
            return
        try:
            os.close(self._open_own())
            os.unlink(self.path)
        except OSError:
            return

    def _open_own(self) -> int:
        """The lock file, open for writing. LockedError where it is not ours any more."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | FLAGS)
        except FileNotFoundError:
            raise LockedError(self.directory, "our lock was removed", None) from None
        content = parse(os.read(descriptor, MOST_BYTES))
        if isinstance(content, dict) and content.get("token") == self._facts["token"]:
            return descriptor
        os.close(descriptor)
        holder = look(self.path, time.time())
        who = holder.words() if holder else "somebody"
        raise LockedError(self.directory, f"our lock was taken over by {who}", holder)

    def _take(self, silent: frozenset[Life] = frozenset()) -> None:
        """Takes it, from a holder of `silent` too."""
        temporary = self._write_temporary()
        try:
            now = os.stat(temporary).st_mtime
            self._place_or_take_over(temporary, now, silent)
        finally:
            _unlink_quietly(temporary)
        self._sweep(now)

    def _place_or_take_over(self, temporary: str, now: float, silent: frozenset[Life]) -> None:
        for _ in range(_MOST_TRIES):
            if _place(temporary, self.path):
                return
            holder = look(self.path, now)
            if holder is None:
                continue  # it was released meanwhile
            if holder.identity == self._facts["token"]:
                return  # the link was made, though an answer that got lost said otherwise
            if os.path.isdir(self.path) and not os.path.islink(self.path):
                words = f"a directory lies in the place of the lock: {_removal(self.path)}"
                raise LockedError(self.directory, words, None)  # nobody to wait for
            if holder.is_held and holder.life not in silent:
                raise _is_held(self.directory, holder)
            if self._take_over(holder, temporary, now, silent):
                self.taken_over = holder
                return
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), self.path)

    def _write_temporary(self) -> str:
        """The lock's content, whole and durable, under a name that nobody else uses."""
        attempt = 0
        while True:
            name = temporary_name(LOCK_NAME, os.getpid(), attempt)
            path = os.path.join(self.directory, name)
            try:
                _write_new(path, _encode(self._facts))
                return path
            except FileExistsError:
                attempt += 1

    def _take_over(self, old: Holder, temporary: str, now: float, silent: frozenset[Life]) -> bool:
        """Replaces the lock of a dead holder, unless somebody else is faster."""
        dead = old.identity
        while not _place(temporary, claim := self._claim_on(dead)):
            other = look(claim, now)
            if other is None:
                return False  # whoever had it is through: look at the lock again
            if other.identity == self._facts["token"]:
                break
            if other.is_held and other.life not in silent:
                raise _is_held(self.directory, other)
            dead = other.identity  # it died while it took over, so its claim is taken over in turn
        try:
            there = look(self.path, now)
            if there is None or there.life != old.life:
                return False
            os.replace(claim, self.path)
        finally:
            _unlink_quietly(claim)
        return True

    def _claim_on(self, identity: str) -> str:
        # Like the temporary of a writer whose pid nobody knows, and if left over, reported as such.
        return os.path.join(self.directory, f".{LOCK_NAME}.tmp-0-{identity}")

    def _sweep(self, now: float) -> None:
        """Removes what takers that died have left: no claim means anything once the lock is new."""
        try:
            names = os.listdir(self.directory)
        except OSError:
            return
        for name in names:
            temporary = parse_temporary_name(name)
            if temporary is None or temporary.target != LOCK_NAME:
                continue
            path = os.path.join(self.directory, name)
            holder = look(path, now)
            if temporary.pid == 0 or holder is None or not holder.is_held:
                _unlink_quietly(path)

    def __enter__(self) -> WriterLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def _same_family(holder: Holder | None, program: str) -> bool:
    return holder is not None and (holder.program or "").split()[:1] == program.split()[:1]


def _facts_of_this_process(
    program: str, run_id: str | None, refreshed_every: int | None
) -> dict[str, Any]:
    now = _now()
    return {
        "pid": os.getpid(),
        "host": processes.host_name(),
        "boot_id": processes.boot_id(),
        "pid_namespace": processes.pid_namespace(),
        "started": processes.start_ticks(os.getpid()),
        "program": program,
        "run_id": run_id,
        "acquired": now,
        "refreshed": now,
        "token": os.urandom(16).hex(),
        **({} if refreshed_every is None else {"refreshed_every": refreshed_every}),
    }


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _encode(facts: dict[str, Any]) -> bytes:
    import json

    return (json.dumps(facts, indent=2) + "\n").encode("ascii")


def _is_held(directory: str, holder: Holder) -> LockedError:
    if holder.state == "unreadable":
        words = f"a writer may be at work here: {holder.words()}; {_lapses(holder)}"
        return LockedError(directory, words, holder)
    words = f"a writer is at work here: {holder.words()}"
    if holder.pid == os.getpid() and is_from_here(holder):
        words += ", which is this process"
    elif not is_from_here(holder):
        words += f"; {_lapses(holder)}"
    return LockedError(directory, words, holder)


def _lapses(holder: Holder) -> str:
    """When a lock whose holder nobody here can ask lapses, and what can be done before."""
    if holder.age < -STALE_SECONDS:
        when = f"its time lies {-holder.age:,.0f} s ahead, and it is valid until then"
    else:
        age = max(0, round(holder.age))
        when = f"last sign of life {age} s ago, and it lapses {STALE_SECONDS} s after that"
    return f"{when}; if you know that no writer is at work: {_removal(holder.path)}"


def _removal(path: str) -> str:
    from shlex import quote

    is_folder = os.path.isdir(path) and not os.path.islink(path)
    return f"mv -n -- {quote(path)} {quote(path + '.old')}" if is_folder else f"rm -- {quote(path)}"


def _place(temporary: str, path: str) -> bool:
    """Gives a whole file this name as well, unless the name is taken. Atomic."""
    try:
        os.link(temporary, path, follow_symlinks=False)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        return _place_without_links(temporary, path)
    return True


def _place_without_links(temporary: str, path: str) -> bool:
    # A reader may find it empty for a moment: then it is unreadable and young, so it is held.
    with open(temporary, "rb") as file:
        content = file.read()
    try:
        _write_new(path, content)
    except FileExistsError:
        return False
    return True


def _write_new(path: str, content: bytes) -> None:
    """Makes a file. FileExistsError where there is one; nothing is left behind by a failure."""
    with open(path, "xb") as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            _unlink_quietly(path)
            raise


def _unlink_quietly(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return
