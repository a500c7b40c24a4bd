"""Kills a Python program before each of its file operations, one by one, or lets one fail.

    with CrashRig("ckpttool.cli.main:main") as rig:
        whole = rig.run(["repair", "runs/a", "--apply"])           # runs to its end; whole.ops
        for at in range(len(whole.ops)):
            ... put the directory back as it was ...
            rig.run(["repair", "runs/a", "--apply"], kill_at=at)   # SIGKILL before operation `at`
            ... look at what is left ...

How it works: a server process imports the program once (and what its first run imported besides),
with wrappers around every function of `os` and `io` that changes a file system, and forks a child
for each run: a run costs milliseconds, and every child begins from the same state. The wrappers count; before the operation with the
number `kill_at` the child kills itself with SIGKILL, so that nothing is flushed, closed or tidied
up. Dying after an operation is the same as dying before the next one. `torn=True` lets a write that
is the boundary reach the file with half of its bytes first. `fail_at` with an `errno` makes one
operation fail instead, and every later one that would fail for the same reason: a disk that is full
(ENOSPC) from then on, or read-only (EROFS).

Syncing is counted and not done: it changes nothing that a killed process leaves behind, and takes
most of the time.

Counted are opening with creation or truncation, all kinds of writing, truncating, renaming,
linking, removing, making directories, changing modes, owners, times and attributes, and syncing.
Not seen is what C code does by itself (torch given a path instead of an open file, a mapping that is
written to, another process that the program starts). `tests/test_crash.py` compares the count with
what strace sees, where there is one.

With `record=True` each operation also carries what it did, in enough detail to do it again.
"""

# The server wraps `os` before anything else is imported: no pathlib, tempfile or shutil up here,
# as some of their versions keep functions of `os` for themselves.
from __future__ import annotations

import builtins
import errno
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import IO, Any, NamedTuple

from tests import operation_log

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# Each function of `os` that changes a file system, and the name that its operations go by.
_BY_PATH = {
    "link": "link",
    "symlink": "symlink",
    "rename": "rename",
    "replace": "rename",
    "unlink": "unlink",
    "remove": "unlink",
    "rmdir": "rmdir",
    "mkdir": "mkdir",
    "mkfifo": "mknod",
    "mknod": "mknod",
    "chmod": "chmod",
    "lchmod": "chmod",
    "fchmod": "chmod",
    "chown": "chown",
    "lchown": "chown",
    "fchown": "chown",
    "utime": "utime",
    "truncate": "truncate",
    "ftruncate": "truncate",
    "posix_fallocate": "allocate",
    "setxattr": "xattr",
    "removexattr": "xattr",
    "fsync": "fsync",
    "fdatasync": "fsync",
    "sync": "sync",
    "sendfile": "write",
    "copy_file_range": "write",
    "splice": "write",
    "writev": "write",
    "pwritev": "write",
}
_CLAIMS = frozenset(("open", "write", "mkdir", "link", "symlink", "allocate", "mknod"))
_STANDARD = (0, 1, 2)
_SECONDS = 300


class Op(NamedTuple):
    """One operation: its kind (`write`, `rename`, `fsync`, …) and what it was done to.

    `detail` is what `tests/operation_log.py` tells of it, where that was asked for.
    """

    kind: str
    target: str
    detail: dict[str, Any] = {}  # noqa: RUF012 - never changed


class Outcome(NamedTuple):
    """What came of a run. `ops` are the operations that were done; `code` is None if killed."""

    code: int | None
    ops: list[Op]
    output: str

    @property
    def killed(self) -> bool:
        """Whether it died at the boundary that was asked for."""
        return self.code is None


def boundaries(ops: Sequence[Op], *, every: int = 1) -> list[tuple[int, bool]]:
    """Each place to die at, and for writes also with half of the bytes written.

    After an fsync the disk is as it was before it, which a kill never tells apart (a power cut
    does, see `tests/power_cut.py`): so one of the two is enough. `every` takes one of so many.
    """
    found = []
    for at, op in enumerate(ops):
        if at == 0 or ops[at - 1].kind not in ("fsync", "sync"):
            found.append((at, False))
        if op.kind == "write":
            found.append((at, True))
    return found[::every]


class CrashRig:
    """A server that runs `target` (`package.module:function`) in a child as often as asked.

    `preload` names more modules to import beforehand. Use it as a context manager.
    """

    def __init__(self, target: str, *, preload: Sequence[str] = ()) -> None:
        import subprocess
        import tempfile

        self._folder = tempfile.TemporaryDirectory(prefix="crash-")
        self._server = subprocess.Popen(
            [sys.executable, "-B", "-m", "tests.crash", target, self._folder.name, *preload],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(
        self,
        *arguments: Any,
        kill_at: int | None = None,
        torn: bool = False,
        fail_at: int | None = None,
        errno: int = errno.ENOSPC,
        cwd: str | os.PathLike[str] | None = None,
        record: bool = False,
    ) -> Outcome:
        """Calls the function with `arguments` (plain data) in a child of its own."""
        order = {
            "arguments": arguments,
            "kill_at": kill_at,
            "torn": torn,
            "fail_at": fail_at,
            "errno": errno,
            "record": record,
            "cwd": os.fspath(cwd or ROOT),
        }
        print(json.dumps(order, default=os.fspath), file=self._server.stdin, flush=True)
        answer = self._server.stdout.readline()
        if not answer:
            raise RuntimeError(f"the server ended with {self._server.wait()}")
        status = json.loads(answer)
        with open(os.path.join(self._folder.name, "ops"), encoding="utf-8") as file:
            ops = [Op(*json.loads(line)) for line in file]
        with open(os.path.join(self._folder.name, "output"), encoding="utf-8") as file:
            return Outcome(_code(status, kill_at), ops, file.read())

    def close(self) -> None:
        """Ends the server."""
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()
        self._folder.cleanup()

    def __enter__(self) -> CrashRig:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _code(status: int, kill_at: int | None) -> int | None:
    code = os.waitstatus_to_exitcode(status)
    return None if kill_at is not None and code == -signal.SIGKILL else code


# ---- in the server and its children


class _Counter:
    """Counts operations, and kills or fails where it was told to."""

    def __init__(self) -> None:
        self.order: dict[str, Any] = {}
        self.count = 0
        self.log = -1
        self.write = os.write
        self.kill = os.kill
        self.failed = False

    def start(self, order: dict[str, Any], log: int) -> None:
        self.order, self.log, self.count = order, log, 0

    def operation(
        self,
        kind: str,
        target: Any,
        call: Callable[[], Any],
        half: Callable[[], Any] | None = None,
        taken: Callable[[], bool] = lambda: False,
        detail: Callable[[Any], dict[str, Any]] = lambda done: {},
    ) -> Any:
        """Does `call`, unless this is where it ends; `half` does the half of it.

        `taken` says whether the name that is asked for is taken: systems say that first. `detail`
        tells what was done, from what `call` gave.
        """
        if self.log < 0:
            return call()
        at, self.count = self.count, self.count + 1
        if at == self.order["kill_at"]:
            if self.order["torn"] and half is not None:
                half()
            self.kill(os.getpid(), signal.SIGKILL)
        if at == self.order["fail_at"] or (self.failed and self._fails(kind) and not taken()):
            self.failed = True
            raise OSError(self.order["errno"], os.strerror(self.order["errno"]), _words(target))
        done = call()
        line: list[Any] = [kind, _words(target)]
        if self.order["record"]:
            line.append(detail(done))
        self.write(self.log, (json.dumps(line) + "\n").encode())
        return done

    def _fails(self, kind: str) -> bool:
        """Whether an operation fails for the same reason as one before it."""
        if self.order["errno"] == errno.EROFS:
            return kind not in ("fsync", "sync")
        return self.order["errno"] in (errno.ENOSPC, errno.EDQUOT) and kind in _CLAIMS


_counter = _Counter()


def _words(target: Any) -> str:
    if isinstance(target, int):
        try:
            return _readlink(f"/proc/self/fd/{target}")
        except OSError:
            return f"descriptor {target}"
    return os.fsdecode(target)


_readlink = os.readlink
_plain_open = io.open


class _CountedFile(io.FileIO):
    """The raw file under one that Python opened for writing."""

    def write(self, data: Any, /) -> int:
        if self.fileno() in _STANDARD:
            return super().write(data)
        view = memoryview(data).cast("B")
        plain = super().write
        half = lambda: plain(view[: len(view) // 2])  # noqa: E731
        detail = lambda done: operation_log.written(self.fileno(), done)  # noqa: E731
        fd = self.fileno()
        return int(_counter.operation("write", fd, lambda: plain(view), half, detail=detail))

    def truncate(self, size: int | None = None, /) -> int:
        plain = super().truncate
        detail = lambda _: operation_log.resized(self.fileno())  # noqa: E731
        fd = self.fileno()
        return int(_counter.operation("truncate", fd, lambda: plain(size), detail=detail))


def _counted_open(
    file: Any,
    mode: str = "r",
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: Any = None,
) -> Any:
    """`open`, with a counted raw file under whatever is opened for writing."""
    if not set(mode) & set("wax+"):
        return _plain_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
    raw_mode = mode.replace("b", "").replace("t", "")

    def make() -> _CountedFile:
        return _CountedFile(file, raw_mode, closefd, opener)

    creates = bool(set(mode) & set("wax")) and not isinstance(file, int) and opener is None
    detail = lambda _: operation_log.opened(file, "w" in mode)  # noqa: E731
    raw = _counter.operation("open", file, make, detail=detail) if creates else make()
    if buffering == 0:
        return raw
    size = buffering if buffering > 1 else getattr(raw, "_blksize", io.DEFAULT_BUFFER_SIZE)
    buffer = io.BufferedRandom(raw, size) if "+" in mode else io.BufferedWriter(raw, size)
    if "b" in mode:
        return buffer
    text = io.TextIOWrapper(buffer, encoding, errors, newline, line_buffering=buffering == 1)
    text.mode = mode
    return text


def _no_sync(*_: object) -> None:
    return


def _wrap(name: str, kind: str) -> None:
    plain = _no_sync if kind in ("fsync", "sync") else getattr(os, name)
    # Those that copy name the file they write to first, but for splice and copy_file_range.
    place = 1 if name in ("copy_file_range", "splice") else 0

    def wrapped(*args: Any, **options: Any) -> Any:
        target = args[place] if len(args) > place else next(iter(options.values()), "")
        if target in _STANDARD and kind == "write":
            return plain(*args, **options)
        taken = lambda: name == "link" and _is_taken(args, options)  # noqa: E731

        def detail(done: Any) -> dict[str, Any]:
            return _detail(name, kind, target, args, options, done)

        call = lambda: plain(*args, **options)  # noqa: E731
        return _counter.operation(kind, target, call, taken=taken, detail=detail)

    _replace(name, wrapped)


def _detail(
    name: str, kind: str, target: Any, args: tuple[Any, ...], options: dict[str, Any], done: Any
) -> dict[str, Any]:
    if kind == "write":
        return operation_log.written(target, done, args[2] if name == "pwritev" else None)
    if kind in ("truncate", "allocate"):
        return operation_log.resized(target)
    if kind in ("fsync", "sync"):
        return operation_log.synced(target)
    return operation_log.named(name, args, options)


def _is_taken(args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether the second name of a link is there."""
    try:
        os.stat(args[1], dir_fd=options.get("dst_dir_fd"), follow_symlinks=False)
    except OSError:
        return False
    return True


def _replace(name: str, function: Any) -> None:
    plain = getattr(os, name)
    setattr(os, name, function)
    # So that `os.chmod in os.supports_follow_symlinks` and the like go on telling the truth.
    for known in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        if plain in known:
            known.add(function)


def _wrap_open() -> None:
    plain = os.open

    def wrapped(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        def call() -> int:
            return plain(path, flags, mode, dir_fd=dir_fd)

        def detail(_: Any) -> dict[str, Any]:
            return operation_log.opened(path, bool(flags & os.O_TRUNC), dir_fd)

        creates = flags & (os.O_CREAT | os.O_TRUNC)
        return int(_counter.operation("open", path, call, detail=detail)) if creates else call()

    _replace("open", wrapped)


def _wrap_write() -> None:
    for name in ("write", "pwrite"):
        plain = getattr(os, name)

        def wrapped(fd: int, data: Any, *rest: Any, plain: Any = plain) -> int:
            if fd in _STANDARD:
                return int(plain(fd, data, *rest))
            view = memoryview(data).cast("B")

            def half() -> None:
                plain(fd, view[: len(view) // 2], *rest)

            def detail(done: Any) -> dict[str, Any]:
                return operation_log.written(fd, done, rest[0] if rest else None)

            call = lambda: plain(fd, view, *rest)  # noqa: E731
            return int(_counter.operation("write", fd, call, half, detail=detail))

        _replace(name, wrapped)


def install() -> None:
    """Puts the wrappers in place, for good."""
    for name, kind in _BY_PATH.items():
        if hasattr(os, name):
            _wrap(name, kind)
    _wrap_open()
    _wrap_write()
    io.open = builtins.open = _counted_open


def _load(target: str) -> Callable[..., Any]:
    from importlib import import_module

    module, _, name = target.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


def _child(function: Callable[..., Any], order: dict[str, Any], folder: str) -> int:
    """One run. What it prints goes to a file, and what it returns or raises becomes a code."""
    signal.alarm(_SECONDS)
    create = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for number in (1, 2):
        how = create if number == 1 else os.O_WRONLY | os.O_APPEND
        os.dup2(os.open(os.path.join(folder, "output"), how | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open(os.path.join(folder, "ops"), create)
    os.chdir(order["cwd"])
    _counter.start(order, log)
    try:
        code = function(*order["arguments"])
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        from traceback import print_exc

        print_exc()
        code = 70
    _counter.log = -1
    with _plain_open(os.path.join(folder, "modules"), "w", encoding="utf-8") as file:
        file.write(json.dumps(list(sys.modules)))
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else 0


def _import_what_a_run_imported(folder: str) -> None:
    """Spares later runs the time; a run that was killed has told nothing."""
    from importlib import import_module

    try:
        with _plain_open(os.path.join(folder, "modules"), encoding="utf-8") as file:
            names = json.load(file)
        os.unlink(file.name)
    except OSError:
        return
    for name in names:
        if name not in sys.modules:
            try:
                import_module(name)
            except ImportError:
                continue


def serve(target: str, folder: str, preload: Sequence[str], orders: IO[str], out: IO[str]) -> None:
    """Answers each line of orders with the wait status of the child that carried it out."""
    import gc
    from importlib import import_module

    for name in preload:
        import_module(name)
    function = _load(target)
    for line in orders:
        gc.freeze()  # so that no child touches, and so copies, what it only inherited
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                code = _child(function, json.loads(line), folder)
            finally:
                os._exit(code)
        status = os.waitpid(pid, 0)[1]
        _import_what_a_run_imported(folder)
        print(status, file=out, flush=True)


if __name__ == "__main__":
    install()
    # The module that runs is `__main__`, so that its counter is the one that the wrappers know.
    serve(sys.argv[1], sys.argv[2], sys.argv[3:], sys.stdin, sys.stdout)
