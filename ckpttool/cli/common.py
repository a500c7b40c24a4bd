"""Options and words that several verbs share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from ckpttool.cli.sharded_paths import refuse_part
from ckpttool.errors import RefusedError, UnreadableError
from ckpttool.exitcodes import ExitCode
from ckpttool.render.text import Printer, escape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckpttool.actions.newest import Judged, Newest
    from ckpttool.actions.plan import Action, Plan
    from ckpttool.io.lock import WriterLock


# No `exists=True`: a path that is missing is not wrong usage (2) but unreadable (3).
# What cannot be read is no wrong usage: opening it says so, with an exit code of its own.
class _Path(click.Path):
    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        if value == "":  # of a variable that is not set, mostly
            self.fail("is empty", param, ctx)
        return super().convert(value, param, ctx)


PATH = _Path(readable=False)


path_argument = click.argument(
    "path", type=PATH, default=".", metavar="[PATH]", callback=refuse_part
)


def _remember_json(ctx: click.Context, _: click.Parameter, wanted: bool) -> bool:
    ctx.meta["ckpttool.json"] = wanted  # so that an error, too, becomes a document
    return wanted


json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    is_eager=True,
    callback=_remember_json,
    help="Print one JSON document and nothing else.",
)
dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Show what would be done, and do nothing."
)


def output_option(*, required: bool) -> Callable[..., Any]:
    """`-o OUT`; what is there already is judged by `io.output.refuse_output`."""
    names = ("-o", "--output", "out")
    return click.option(*names, type=PATH, required=required, metavar="OUT", help="The new file.")


def converting_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a verb that writes a file anew: `-o`, `--force`, `--dry-run`, `--json`."""
    options = (
        output_option(required=True),
        click.option("--force", is_flag=True, help="Overwrite the file at OUT."),
        dry_run_option,
        json_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


def finish_converting(
    plan: Any,
    out: str,
    *,
    proof: str,
    dry_run: bool,
    as_json: bool,
    problem: Exception | None = None,
    **options: Any,
) -> ExitCode:
    """How the verbs end that write a file anew: writes `plan` to `out`, and says what was written.

    `proof` says what shows that the result is right. With a `problem` nothing is written, and it is
    raised. `options` go to `plan.write`.
    """
    from ckpttool.render.convert_page import show_written

    written = None
    if problem is None and not dry_run:
        written = with_progress(plan.write, out, **options)
    if as_json:
        facts = {"out": out, "dry_run": dry_run, "written": written and written._asdict()}
        write_json({**plan.as_dict(), **facts})
    if problem is not None:
        raise problem
    if not as_json:
        show_written(Printer(), plan.size, written, proof)
    return ExitCode.OK


def example(*lines: str) -> str:
    """An epilog for `--help`: commands to copy, not rewrapped."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def write_json(document: dict[str, Any]) -> None:
    """Prints the verb's one document. An error after this adds none."""
    from ckpttool.render.jsondoc import write_document

    click.get_current_context().meta["ckpttool.json"] = False
    write_document(document)


def with_progress(work: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Calls `work` with a progress line on standard error."""
    from ckpttool.render.progress import ProgressLine

    with ProgressLine() as progress:
        return work(*args, progress=progress, **options)


@contextmanager
def writer_lock(path: str, verb: str) -> Iterator[WriterLock]:
    """Holds the lock of the directory `path` while the verb changes it.

    Waits a moment for another verb of this tool, which is mostly through soon. Raises
    UnreadableError for what is no directory, LockedError where a writer is at work.
    """
    from ckpttool.io.lock import WriterLock

    require_directory(path)
    end_cleanly_when_terminated()
    with WriterLock.acquire_soon(path, program=f"ckpttool {verb}") as lock:
        if lock.taken_over is not None:
            printer = Printer(sys.stderr)
            printer.line(f"took over the lock of {escape(lock.taken_over.words())}, which is gone")
        yield lock


def refuse_live_writer(path: str, verb: str, dry_run: bool) -> None:
    """LockedError where a writer is at work in the directory of `path`.

    For a dry run, which changes nothing, a line on standard error.
    """
    from ckpttool.io.lock import refuse_if_held

    _refuse(refuse_if_held, path, verb, dry_run)


def refuse_half_done(path: str, verb: str, dry_run: bool) -> None:
    """RefusedError where an operation was left half-way; for a dry run as above."""
    from ckpttool.actions.journal.operations import refuse_if_unfinished

    _refuse(refuse_if_unfinished, path, verb, dry_run)


def _refuse(check: Callable[[str], None], path: str, verb: str, dry_run: bool) -> None:
    try:
        check(path if os.path.isdir(path) else os.path.dirname(path) or os.curdir)
    except RefusedError as error:
        if not dry_run:
            raise
        Printer(sys.stderr).line(f"{verb} would be refused: {escape(str(error))}")


def require_directory(path: str) -> None:
    """UnreadableError for a path that is no directory."""
    import stat

    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        raise UnreadableError(path, getattr(error, "strerror", None) or str(error)) from error
    if not stat.S_ISDIR(mode):
        raise UnreadableError(path, "is not a directory")


def path_and_ids(path: str, ids: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """`[PATH] [ID…]` as they were meant: a first word that is an id, and no path, is the id."""
    from ckpttool.model.operations import is_id

    if is_id(path) and not os.path.lexists(path):
        return os.curdir, (path, *ids)
    return path, ids


def confirm(question: str, *, unasked: str, refused: str) -> None:
    """Asks on the terminal; RefusedError for any answer but yes, or without a terminal."""
    if not sys.stdin.isatty() or not sys.stderr.isatty():
        raise RefusedError(f"not confirmed: there is no terminal to ask on; {unasked}")
    sys.stdout.flush()
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise RefusedError(f"not confirmed: {refused}")


def end_cleanly_when_terminated() -> None:
    """SIGTERM, as a batch system sends it at a time limit, then ends like Ctrl-C: tidied up.

    The handler before is back once the verb has ended: the caller may be a program of its own.
    """
    import signal
    import threading

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        previous = signal.signal(signal.SIGTERM, interrupt)
        root = click.get_current_context().find_root()
        root.call_on_close(lambda: signal.signal(signal.SIGTERM, previous))


def show_passed_over(printer: Printer, passed_over: list[Judged]) -> None:
    """One line for each newer step file that is not valid, and why."""
    _show_judged(printer, passed_over, "passed over")


def show_plan(printer: Printer, plan: Plan) -> None:
    """The actions of a plan, one to a line."""
    show_actions(printer, plan.actions)


def show_actions(printer: Printer, actions: Sequence[Action], heading: str = "plan:") -> None:
    """Actions, one to a line."""
    printer.line(heading)
    for action in actions:
        printer.line(f"  {escape(action.describe())}")


def show_end(printer: Printer, dry_run: bool) -> None:
    """What became of the plan."""
    printer.line("dry run: nothing was changed" if dry_run else printer.colour("done", "ok"))


def say_no_step(path: str, newest: Newest, *, takes_step: bool) -> ExitCode:
    """Says on standard error why there is no newest valid step to act on; gives the exit code.

    `takes_step` says whether the verb has `--step`, with which one goes on all the same.
    """
    printer = Printer(sys.stderr)
    if not newest.unchecked:
        printer.line(f"ckpttool: {escape(_no_valid_step(path, newest))}")
        return ExitCode.FINDINGS
    show_unchecked(printer, newest.unchecked)
    where = f"ckpttool: {escape(path)}"
    if newest.found is None:
        printer.line(f"{where}: no step is proven valid")
        return ExitCode.COULD_NOT_FINISH
    step = newest.found.file.step
    how = "make the file readable or move it away"
    if takes_step:
        how += f", or take step {step} knowingly with --step {step}"
    else:
        how += f", or go on from step {step} knowingly with {escape(newest.found.file.name)}"
    printer.line(
        f"{where}: nobody knows whether step {step}, which is valid, is the newest; "
        f"nothing was done: {how}"
    )
    return ExitCode.COULD_NOT_FINISH


def show_unchecked(printer: Printer, unchecked: list[Judged]) -> None:
    """One line for each step file that could not be checked, and why."""
    _show_judged(printer, unchecked, "could not be checked")


def _show_judged(printer: Printer, files: list[Judged], what: str) -> None:
    for judged in files:
        step = printer.colour(f"step {judged.file.step}", "warning")
        printer.line(f"{step} {what}: {escape(judged.file.name)}: {escape(judged.why())}")


def _no_valid_step(path: str, newest: Newest) -> str:
    if not newest.passed_over:
        return f"{path}: no valid step: there are no step files"
    count = len(newest.passed_over)
    files = "the only step file is not valid" if count == 1 else f"none of {count} files is valid"
    first = newest.passed_over[0]
    return f"{path}: no valid step: {files} (newest: {first.file.name}: {first.why()})"
