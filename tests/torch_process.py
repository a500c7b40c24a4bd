"""Python processes that begin with torch imported: a fork each, in milliseconds instead of seconds.

    with TorchProcesses() as torch_processes:
        done = torch_processes.run("-c", "import torch; print(torch.ones(1))", cwd=tmp_path)

As `python …` would, but for the imports that are already made. A server, itself started
afresh and doing nothing with torch but importing it, forks one child for each run. Its children
share nothing with each other or with the tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
_SECONDS = 300


class TorchProcesses:
    """The server. `preload` names modules that are imported beside torch. A context manager."""

    def __init__(self, *preload: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="torch-processes-")
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.torch_process", *preload],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(
        self,
        *arguments: str | os.PathLike[str],
        cwd: str | os.PathLike[str] = ROOT,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs `python ARGUMENTS`: `-c PROGRAM`, `-m MODULE` or a script, and what follows that.

        `env` is added to this process's own. A negative `returncode` is the signal that ended it.
        """
        command = [os.fspath(argument) for argument in arguments]
        order = {
            "command": command,
            "cwd": os.fspath(cwd),
            "env": dict(env or {}),
            "output": self._folder.name,
        }
        assert self._server.stdin is not None and self._server.stdout is not None
        print(json.dumps(order), file=self._server.stdin, flush=True)
        answer = self._server.stdout.readline()
        if not answer:
            raise RuntimeError(f"the server ended with {self._server.wait()}")
        said = [Path(self._folder.name, name).read_text() for name in ("1", "2")]
        return subprocess.CompletedProcess(command, int(answer), *said)

    def __enter__(self) -> TorchProcesses:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.communicate()
        self._folder.cleanup()


# ---- in the server and its children


def _become(order: dict[str, Any]) -> int:
    """What Python does with such a command; gives its exit code."""
    import runpy
    import signal

    signal.alarm(_SECONDS)
    os.chdir(order["cwd"])
    os.environ.update(order["env"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (1, 2):
        path = os.path.join(order["output"], str(number))
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), number)
    first, *rest = order["command"]
    try:
        if first == "-c":
            program, sys.argv = rest[0], ["-c", *rest[1:]]
            exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
        elif first == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [first, *rest]
            runpy.run_path(first, run_name="__main__")
    except SystemExit as stop:
        code = stop.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
        return code if isinstance(code, int) else int(code is not None)
    return 0


def _serve(orders: IO[str], out: IO[str], preload: Sequence[str]) -> None:
    import gc
    import traceback
    import warnings
    from importlib import import_module

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("torch", *preload):
            import_module(name)
    gc.freeze()  # so that no child touches, and so copies, what it only inherited
    for line in orders:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = _become(json.loads(line))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=out, flush=True)


if __name__ == "__main__":
    _serve(sys.stdin, sys.stdout, sys.argv[1:])
