"""Exit codes of the `ckpttool` command, the same for every verb."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What the process exit status means. Click itself uses 2 for wrong usage."""

    OK = 0
    FINDINGS = 1
    USAGE = 2
    COULD_NOT_FINISH = 3
    REFUSED = 4
    INTERRUPTED = 130
