"""Starts one command and prints, as JSON, its wall time and its peak memory.

Run with `python -I -S`, so that this process stays small: see `measure.process`.
"""

import json
import os
import sys
import time


def main() -> None:
    command = sys.argv[1:]
    quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    start = time.perf_counter()
    pid = os.posix_spawn(command[0], command, os.environ, file_actions=quiet)
    _, status, usage = os.wait4(pid, 0)
    seconds = time.perf_counter() - start
    if status:
        sys.exit(f"exit status {os.waitstatus_to_exitcode(status)}")
    # Linux gives KiB here, macOS bytes.
    peak = usage.ru_maxrss // (1024 if sys.platform == "darwin" else 1)
    print(json.dumps({"seconds": seconds, "peak_kib": peak}))


if __name__ == "__main__":
    main()
