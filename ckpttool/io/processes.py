"""Who is who among processes: what tells one from another that later got the same number.

A process id alone names nothing: it is given out again, it means something else on another machine
and in another container. With the machine's boot id, the pid namespace and the time at which the
process started it names one process for good (proc_pid_stat(5), random(4), pid_namespaces(7)).
"""

from __future__ import annotations

import os

# Clocks of file servers differ from ours, and kernels count a process's start from the boot on.
_CLOCK_SECONDS = 60.0


def host_name() -> str:
    """The name of this machine, as `uname -n` says it."""
    return os.uname().nodename


def boot_id() -> str | None:
    """What this boot of the machine is called by its kernel, and no other is; None where unknown.

    Containers have the id of the machine that they run on.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip() or None
    except (OSError, ValueError):
        return None


def pid_namespace() -> str | None:
    """Within which process ids mean the same (`pid:[4026531836]`); None where unknown."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def process_is_alive(pid: int) -> bool | None:
    """Whether a process with this id runs on this host; None where that cannot be told.

    One that has ended and is only waited for (a zombie) is not alive.
    """
    if pid <= 0:
        return None  # 0 and below would ask for whole process groups
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    except (OverflowError, OSError):
        return None
    fields = _status_fields(pid)
    return fields is None or fields[0] not in (b"Z", b"X")


def start_ticks(pid: int) -> int | None:
    """When a living process began, in clock ticks after boot; None where that cannot be told.

    It is field 22 of `/proc/<pid>/stat`.
    """
    fields = _status_fields(pid)
    try:
        return None if fields is None or fields[0] in (b"Z", b"X") else int(fields[19])
    except (ValueError, IndexError):
        return None


def is_same_process(pid: int, started: int | None) -> bool:
    """Whether the process that had this id and began at `started` (in ticks) still runs here.

    Where the system hides when it began, a living process with the id counts as the same.
    """
    now = start_ticks(pid)
    if now is not None and started is not None:
        return now == started
    return process_is_alive(pid) is not False


def may_be_writing(pid: int, changed_at: float) -> bool | None:
    """Whether the process `pid` may be the writer of a file that last changed at `changed_at`.

    The time is the inode's (`st_ctime`, in seconds since 1970), which no program can set back. A
    process that was started well after it has only inherited the number, as happens in containers
    that count from 1 each time. This very process is nobody's writer. None where nobody knows.
    """
    if pid == os.getpid():
        return False
    alive = process_is_alive(pid)
    if alive:
        started = started_at(pid)
        return started is None or changed_at > started - _CLOCK_SECONDS
    return alive


def started_at(pid: int) -> float | None:
    """When a living process was started, in seconds since 1970; None where nobody says.

    From its start in ticks after the boot, and `btime` of `/proc/stat` (`proc(5)`).
    """
    ticks = start_ticks(pid)
    if ticks is None:
        return None
    try:
        with open("/proc/stat", "rb") as file:
            boot = next(int(line.split()[1]) for line in file if line.startswith(b"btime "))
        return boot + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _status_fields(pid: int) -> list[bytes] | None:
    """The fields of `/proc/<pid>/stat` from the third on, which is the state; None if unknown."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The second field is the program's name in brackets, which may hold anything.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields or None
