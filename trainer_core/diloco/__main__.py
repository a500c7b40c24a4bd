"""The command: `python -m trainer_core.diloco status URL` and `… serve URL`."""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from ckpttool.exitcodes import ExitCode
from trainer_core.diloco.commit import Commit
from trainer_core.diloco.errors import DiLoCoError
from trainer_core.diloco.names import check_node_id
from trainer_core.diloco.serving import Service, Until, settings_of
from trainer_core.diloco.settings import MOST, Settings
from trainer_core.diloco.status import status_lines, status_of
from trainer_core.diloco.store import Store

_URLS = "URL is a directory, or s3://BUCKET/PREFIX, sftp://USER@HOST/DIRECTORY, hf://OWNER/NAME.\n"
_STATUS = f"""\
{_URLS}
example: how far the nodes are that meet in a shared directory, and the same for a script

  python -m trainer_core.diloco status /mnt/shared/run7
  python -m trainer_core.diloco status s3://training/run7 --json

exit status: 0; 1 where something of it is missing or damaged, which is said with what mends it; 2
for wrong usage; 3 where the store can't be read or holds no outer loop
"""
_SERVE = f"""\
{_URLS}
example: apply what the nodes have left behind, and end; or be the master until nobody has sent
anything for an hour

  python -m trainer_core.diloco serve /mnt/shared/run7 --once
  python -m trainer_core.diloco serve s3://training/run7 --until-idle 3600 --quorum 4

exit status: 0, also when it was told to end by SIGTERM or Ctrl-C; 2 for wrong usage; 3 where the
store can't be used, has no global model yet, or another master lives
"""
_SERVICE = (
    *("outer_lr", "outer_momentum", "quorum", "quorum_seconds", "weighting", "max_staleness"),
    *("max_norm", "keep_commits", "lease_seconds", "poll_seconds", "standby"),
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; gives the exit status."""
    options = _parse(arguments)
    try:
        store = Store.open(options.url, timeout=options.timeout, attempts=options.attempts)
        return _serve(store, options) if options.verb == "serve" else _status(store, options)
    except (DiLoCoError, ValueError, TypeError) as error:
        sys.stderr.write(f"error: {error}\n")
        return ExitCode.COULD_NOT_FINISH


def _status(store: Store, options: argparse.Namespace) -> int:
    status = status_of(store)
    if status.is_empty:
        raise DiLoCoError(f"nothing of an outer loop is at {store.url}, or not yet")
    if options.json:
        sys.stdout.write(json.dumps(status.as_dict(), indent=1) + "\n")
    else:
        sys.stdout.write("\n".join(status_lines(status)) + "\n")
    return ExitCode.FINDINGS if status.problems else ExitCode.OK


def _serve(store: Store, options: argparse.Namespace) -> int:
    given = {
        name: getattr(options, name) for name in _SERVICE if getattr(options, name) is not None
    }
    if given.get("keep_commits") == 0:
        given["keep_commits"] = None
    settings = settings_of(store, **given)
    idle = 0.0 if options.once else options.until_idle
    with _told_to_end() as is_told, Service(store, options.node_id, settings) as service:
        made = service.run(Until(options.rounds, idle, lambda: bool(is_told)), _say)
    sys.stdout.write(f"{made} outer steps\n")
    return ExitCode.OK


def _say(commit: Commit) -> None:
    nodes = len({one.node_id for one in commit.applied})
    sys.stdout.write(
        f"outer step {commit.outer_step}: {len(commit.applied)} deltas of {nodes} nodes, "
        f"{len(commit.refused)} refused\n"
    )
    sys.stdout.flush()


@contextmanager
def _told_to_end() -> Iterator[list[int]]:
    """Collects SIGTERM and SIGINT, so that the lease is given back; a second one ends at once."""
    told: list[int] = []
    before: dict[signal.Signals, Any] = {}

    def note(number: int, _: object) -> None:
        told.append(number)
        for each, handler in before.items():
            signal.signal(each, handler)

    for each in (signal.SIGTERM, signal.SIGINT):
        before[each] = signal.signal(each, note)
    try:
        yield told
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(ExitCode.USAGE, f"error: {message} (see {self.prog} --help)\n")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m trainer_core.diloco",
        description="Looks at the shared store of an outer loop, or makes its outer steps.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    status = verbs.add_parser(
        "status",
        help="outer step, master, nodes, their newest deltas and lags, sizes",
        description="Shows the outer step, who is master, what each node delivered last and from "
        "which base, how far that lags behind, what was refused, and sizes. Reads no tensors and "
        "changes nothing.",
        epilog=_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    status.add_argument("--json", action="store_true", help="as one JSON document")
    serve = verbs.add_parser(
        "serve",
        help="a master without training: applies what nodes deliver",
        description="Is the master of a Hub that has a global model, without training itself: "
        "takes the lease, applies deltas, publishes. Needs no model code. Ends when it is told to, "
        "or as asked; the lease is given back.",
        epilog=_SERVE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_serve(serve)
    for verb, seconds in ((status, 20.0), (serve, 60.0)):
        verb.add_argument("url", metavar="URL", help="the store, or a directory")
        words = f"seconds for each request ({seconds:g})"
        timeout = _number(float, above=0.0)
        verb.add_argument("--timeout", type=timeout, default=seconds, metavar="S", help=words)
        words = "tries for each request (3)"
        verb.add_argument("--attempts", type=_number(int, 1), default=3, metavar="N", help=words)
    return parser.parse_args(arguments)


def _add_serve(serve: argparse.ArgumentParser) -> None:
    end = serve.add_mutually_exclusive_group()
    end.add_argument("--once", action="store_true", help="end when all that is there is dealt with")
    words = "… for S seconds nothing came"
    end.add_argument("--until-idle", type=_number(float, 0.0), metavar="S", help=words)
    words = "end after N outer steps"
    serve.add_argument("--rounds", type=_number(int, 1), metavar="N", help=words)
    # Not the same for all: a candidate takes the place of its own id at once, as after a restart.
    serve.add_argument(
        "--node-id",
        type=_node_id,
        default=f"server-{uuid.uuid4().hex[:8]}",
        metavar="ID",
        help="its own id, no other node's (server-RANDOM); one that was killed and comes back with "
        "the same takes its place at once",
    )
    serve.add_argument("--standby", action="store_true", help="wait while another master lives")
    for name, kind, words in (
        ("outer-lr", float, "of Nesterov SGD (as in the newest commit)"),
        ("outer-momentum", float, "likewise"),
        ("quorum", int, "the least number of nodes for a round (1)"),
        ("quorum-seconds", float, "after so long a round is made of what there is"),
        ("max-staleness", int, "the most outer steps between a delta's base and now"),
        ("max-norm", float, "of one delta"),
    ):
        metavar = "N" if kind is int else "X"
        serve.add_argument(f"--{name}", type=_setting(name, kind), metavar=metavar, help=words)
    words = "equal (the default), or samples"
    serve.add_argument("--weighting", choices=("equal", "samples"), help=words)
    words = "how many stay on the store (3); 0 keeps all"
    serve.add_argument("--keep-commits", type=_number(int, 0), metavar="N", help=words)
    # Shorter ones would ask the store without a pause.
    words = "silent for so long, its place is free (30)"
    serve.add_argument("--lease-seconds", type=_number(float, 0.1), metavar="S", help=words)
    words = "between two looks (1)"
    serve.add_argument("--poll-seconds", type=_number(float, 0.01), metavar="S", help=words)


# Kinds of options: what they don't take is wrong usage, said with the range and what was given


def _number(
    kind: type[int] | type[float], least: float | None = None, above: float | None = None
) -> Callable[[str], Any]:
    """A finite number within bounds, at most as large as counts and seconds may be."""
    noun = "whole number" if kind is int else "number"
    rule = f"a {noun} above {above:g}" if least is None else f"a {noun} of at least {least:g}"

    def parse(text: str) -> Any:
        value = _plain_number(kind, text)
        if (
            value is None
            or value > MOST
            or (least is not None and value < least)
            or (above is not None and value <= above)
        ):
            words = f"must be {rule}, and at most {MOST:,}, not {text[:40]!r}"
            raise argparse.ArgumentTypeError(words)
        return value

    return parse


def _setting(name: str, kind: type[int] | type[float]) -> Callable[[str], Any]:
    """A number in the range that the option of this name has in Settings."""
    name = name.replace("-", "_")

    def parse(text: str) -> Any:
        value = _plain_number(kind, text)
        if value is None:
            noun = "whole number" if kind is int else "finite number"
            raise argparse.ArgumentTypeError(f"must be a {noun}, not {text[:40]!r}")
        try:
            return getattr(Settings.of({name: value}), name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix(f"{name} ")) from None

    return parse


def _plain_number(kind: type[int] | type[float], text: str) -> Any:
    """None where the text is none of this kind, or not finite."""
    try:
        value = kind(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _node_id(text: str) -> str:
    try:
        return check_node_id(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
