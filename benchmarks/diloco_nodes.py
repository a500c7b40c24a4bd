"""Nodes of a small run as processes: started, killed, started again, and always ended.

`Forks` gives each node a process of its own in a few milliseconds: it keeps one process that has
imported torch and forks it. `Commands` runs `python -m trainer_core.diloco.demo` as anybody would.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
MODULE = "trainer_core.diloco.demo"
_PR_SET_PDEATHSIG = 1


class Starter(Protocol):
    """Starts processes, by the arguments of the demo's command."""

    def start(self, arguments: Sequence[str], log: Path) -> int:
        """The process's id; what it says is appended to `log`."""

    def poll(self, pid: int) -> int | None:
        """None while it runs; then its exit status, negative for the signal that ended it."""


class Node:
    """One node: the same command whenever it is started. `lives`: how often it was."""

    def __init__(self, starter: Starter, name: str, arguments: Sequence[str], log: Path) -> None:
        self.name, self.arguments, self.log = name, list(arguments), log
        self.lives = 0
        self.pid: int | None = None
        self.starter = starter

    def start(self) -> None:
        self.pid = self.starter.start(self.arguments, self.log)
        self.lives += 1

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""
        assert self.pid is not None
        return self.starter.poll(self.pid)

    def kill(self) -> bool:
        """SIGKILL; whether it was alive until then."""
        assert self.pid is not None
        if self.poll() is not None:
            return False
        os.kill(self.pid, signal.SIGKILL)
        while (code := self.poll()) is None:
            time.sleep(0.001)
        return code == -signal.SIGKILL

    def end_of_log(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-12:])


class Forks:
    """A process that has imported torch, forked for each node. Ends with all its children."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.diloco_nodes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT},
        )

    def start(self, arguments: Sequence[str], log: Path) -> int:
        return int(self._ask("start", list(arguments), str(log)))

    def poll(self, pid: int) -> int | None:
        code = self._ask("poll", pid)
        return None if code is None else int(code)

    def __enter__(self) -> Forks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()
        self._process.wait()

    def _ask(self, *question: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the process that starts the nodes has ended")
        return json.loads(answer)


class Commands:
    """Runs the command itself, after `prefix(node's arguments)` where one is given."""

    def __init__(self, prefixes: dict[str, Sequence[str]] | None = None) -> None:
        self._prefixes = prefixes or {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, arguments: Sequence[str], log: Path) -> int:
        name = arguments[arguments.index("--node-id") + 1]
        command = [*self._prefixes.get(name, ()), sys.executable, "-m", MODULE, *arguments]
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=ROOT,
                env={**os.environ, **ENVIRONMENT},
            )
        self._processes[process.pid] = process
        return process.pid

    def poll(self, pid: int) -> int | None:
        return self._processes[pid].poll()

    def __enter__(self) -> Commands:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


class RunError(RuntimeError):
    """A node ended in another way than it was meant to, or not in time."""


def wait_for_all(nodes: Sequence[Node], seconds: float) -> None:
    """Waits until each has ended with 0. Raises RunError."""
    deadline = time.monotonic() + seconds
    while not all_done(nodes):
        if time.monotonic() > deadline:
            words = "\n".join(f"{node.name}:\n{node.end_of_log()}" for node in nodes)
            raise RunError(f"not done after {seconds:g} s\n{words}")
        time.sleep(0.02)


def all_done(nodes: Sequence[Node]) -> bool:
    """Whether all have; each is looked at, so that one that failed is told at once."""
    done = [is_done(node) for node in nodes]
    return all(done)


def is_done(node: Node) -> bool:
    """Whether it has ended with 0; False while it runs. Raises RunError for another status."""
    code = node.poll()
    if code not in (None, 0):
        raise RunError(f"{node.name} ended with {code}\n{node.end_of_log()}")
    return code == 0


@contextlib.contextmanager
def ends_on_sigterm() -> Iterator[None]:
    """SIGTERM ends this process like Ctrl-C does, so that everything it started is ended too."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# The process that is forked


def serve() -> None:
    """Answers lines on standard input until it ends; then kills what still runs."""
    import safetensors.torch
    import torch

    from trainer_core.diloco.demo.__main__ import main

    # The first optimizer and the first save import a good deal more: now, for all of them.
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    safetensors.torch.save({"one": torch.zeros(1)})
    assert _threads() == 1, "a process with threads can't be forked safely"
    running: set[int] = set()
    for line in sys.stdin:
        verb, *rest = json.loads(line)
        answer: int | None
        if verb == "start":
            answer = _fork(main, *rest)
            running.add(answer)
        else:
            answer = _reap(rest[0], running)
        print(json.dumps(answer), flush=True)
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def _threads() -> int:
    """Those of libraries too, where the system tells."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


_ended: dict[int, int] = {}


def _reap(pid: int, running: set[int]) -> int | None:
    """Until it is asked for, a process that has ended keeps its id: no other can have it."""
    if pid in running:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            running.discard(pid)
            _ended[pid] = os.waitstatus_to_exitcode(status)
    return _ended.get(pid)


def _fork(main: Any, arguments: list[str], log: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        with contextlib.suppress(OSError, AttributeError):  # Linux only: dies with its parent
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        for ours, standard in ((null, 0), (output, 1), (output, 2)):
            os.dup2(ours, standard)
        code = main(arguments)
        sys.stderr.flush()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    serve()
