"""The command: `python -m trainer_core.diloco status URL`."""

from __future__ import annotations

import argparse
import json
import sys

from ckpttool.exitcodes import ExitCode
from trainer_core.diloco.errors import DiLoCoError
from trainer_core.diloco.status import status_lines, status_of
from trainer_core.diloco.store import Store

_EPILOG = """\
URL is a directory, or s3://BUCKET/PREFIX, sftp://USER@HOST/DIRECTORY, hf://OWNER/NAME.

example: how far the nodes are that meet in a shared directory, and the same for a script

  python -m trainer_core.diloco status /mnt/shared/run7
  python -m trainer_core.diloco status s3://training/run7 --json

exit status: 0, or 3 where the store can't be read or holds no outer loop
"""


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; gives the exit status."""
    options = _parse(arguments)
    try:
        store = Store.open(options.url, timeout=options.timeout, attempts=options.attempts)
        status = status_of(store)
        if status.is_empty:
            raise DiLoCoError(f"nothing of an outer loop is at {store.url}, or not yet")
    except DiLoCoError as error:
        sys.stderr.write(f"error: {error}\n")
        return ExitCode.COULD_NOT_FINISH
    if options.json:
        sys.stdout.write(json.dumps(status.as_dict(), indent=1) + "\n")
    else:
        sys.stdout.write("\n".join(status_lines(status)) + "\n")
    return ExitCode.OK


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m trainer_core.diloco",
        description="Looks at the shared store of an outer loop.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    status = verbs.add_parser(
        "status",
        help="outer step, master, nodes, their newest deltas and lags, sizes",
        description="Shows the outer step, who is master, what each node delivered last and from "
        "which base, how far that lags behind, what was refused, and sizes. Reads no tensors and "
        "changes nothing.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    status.add_argument("url", metavar="URL", help="the store, or a directory")
    status.add_argument("--json", action="store_true", help="as one JSON document")
    status.add_argument("--timeout", type=float, default=20.0, help="seconds for each request (20)")
    status.add_argument("--attempts", type=int, default=3, help="tries for each request (3)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
