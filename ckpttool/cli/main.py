"""The `ckpttool` command: a group that imports only the verb that is asked for, and its edge.

At the edge every error becomes one line on standard error and an exit code.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import click

from ckpttool.errors import CkptToolError, RefusedError, WriteError
from ckpttool.exitcodes import ExitCode
from ckpttool.render.text import OUTPUT, Printer, escape

VERBS = {
    "inspect": "Show what a directory or file holds.",
    "verify": "Check everything that can be checked.",
    "latest": "Print the path of the newest valid step.",
    "repair": "Bring a directory back to the newest state that is proven good.",
    "mend": "Write a new, whole file from what is left of a damaged one.",
    "fix-pointer": "Point latest.json at the newest valid step.",
    "copy": "Copy a valid step, durably.",
    "prune": "Delete old step files, never the newest valid one.",
    "rollback": "Make an earlier step the latest.",
    "undo": "Take back what repair or rollback did.",
    "history": "List what was done and can be taken back.",
    "purge": "Delete for good what was set aside.",
    "harden": "Write a file anew so that weights_only=True takes it.",
    "slim": "Write a file anew without what is not needed.",
    "export": "Write the tensors of a file as safetensors.",
    "explain": "Explain a finding.",
}

EPILOG = """\b
Exit codes:
  0    nothing wrong, or everything wrong was mended
  1    findings of severity error (with --strict: warning)
  2    wrong usage
  3    could not finish: unreadable path, full disk, internal error
  4    refused: the action would lose data or run untrusted code, unconfirmed
  130  interrupted
"""


class VerbGroup(click.Group):
    """Finds verbs by name, imports them late, and turns every error into a line and a code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs, in the order in which a person meets them."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb's command, from its own module, or None for a name that is no verb."""
        if cmd_name not in VERBS:
            return None
        module = import_module("ckpttool.cli." + cmd_name.replace("-", "_"))
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of verbs for `--help`, without importing each."""
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the verb. Errors other than click's own end here."""
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.ClickException):
            raise
        except (click.Abort, KeyboardInterrupt) as error:
            _write_error(ctx, error, "interrupted", ExitCode.INTERRUPTED)
            raise
        except BrokenPipeError:
            return _output_lost()
        except CkptToolError as error:
            return _report(ctx, error, str(error))
        except OSError as error:
            what = f": {error.filename}" if error.filename else ""
            return _report(ctx, error, f"could not finish: {error.strerror or error}{what}")
        except Exception as error:
            if os.environ.get("CKPTTOOL_TRACEBACK") or ctx.meta.get("ckpttool.traceback"):
                from traceback import print_exc

                print_exc()
            return _report(ctx, error, _unexpected(error))

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> NoReturn:
        """Runs the command and exits. Never returns, and never lets a traceback out unasked."""
        # What a verb reads makes no cycles and is freed by itself; a collector that walks over a
        # million live objects would only cost time.
        gc.disable()
        _make_printable()
        sys.exit(self._run(args, prog_name or "ckpttool", complete_var, extra))

    def _run(
        self,
        args: Sequence[str] | None,
        prog_name: str,
        complete_var: str | None,
        extra: dict[str, Any],
    ) -> int:
        try:
            code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
            sys.stdout.flush()
        except (click.Abort, KeyboardInterrupt):
            _say("interrupted")
            return ExitCode.INTERRUPTED
        except click.ClickException as error:
            error.show()
            if _wants_json(sys.argv[1:] if args is None else args):
                from ckpttool.render.jsondoc import error_document, write_document

                write_document(error_document(error, error.format_message(), error.exit_code))
                sys.stdout.flush()
            return error.exit_code
        except SystemExit as error:  # click's own ways out: completion, a broken pipe
            if isinstance(error.__context__, OSError):
                return _output_lost()
            return error.code if isinstance(error.code, int) else ExitCode.OK
        except BrokenPipeError:
            return _output_lost()
        except OSError as error:
            _say(f"{OUTPUT}: {error.strerror or error}")
            return _output_lost()
        except Exception as error:  # in completion or in parsing, outside any verb
            _say(_unexpected(error))
            return ExitCode.COULD_NOT_FINISH
        return int(code or ExitCode.OK)


def _unexpected(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "out of memory"
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    hint = "please report; --traceback or CKPTTOOL_TRACEBACK=1 shows more"
    return f"internal error: {what} ({hint})"


def _report(ctx: click.Context, error: Exception, message: str) -> ExitCode:
    """One line on standard error; for `--json` a document too. The exit code is returned."""
    code = ExitCode.REFUSED if isinstance(error, RefusedError) else ExitCode.COULD_NOT_FINISH
    _say(message)
    if isinstance(error, WriteError) and error.path == OUTPUT:
        return _output_lost()
    _write_error(ctx, error, message, code)
    return code


def _write_error(ctx: click.Context, error: BaseException, message: str, code: int) -> None:
    """The document of an error, where one was asked for and none was written yet."""
    if ctx.meta.get("ckpttool.json"):
        from ckpttool.render.jsondoc import error_document, write_document

        write_document(error_document(error, message, code))


def _wants_json(words: Sequence[str]) -> bool:
    """Whether `--json` is among the options: wrong usage is found before options are looked at."""
    own = list(words)
    return "--json" in (own[: own.index("--")] if "--" in own else own)


def _say(message: str) -> None:
    printer = Printer(sys.stderr)
    printer.line(f"{printer.colour('ckpttool:', 'error')} {escape(message)}")


def _make_printable() -> None:
    """What the locale's encoding lacks is printed escaped instead of ending in an error."""
    if sys.stdout is None:  # started with standard output closed
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open as long as the process lives
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def _output_lost() -> ExitCode:
    """Nobody reads on. The interpreter's own last flush must find a place to write to."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        pass
    return ExitCode.COULD_NOT_FINISH


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        number = version("ckpttool")
    except PackageNotFoundError:
        number = "(not installed)"
    click.echo(f"ckpttool {number}")
    ctx.exit()


@click.group(
    cls=VerbGroup,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
@click.option("--traceback", is_flag=True, help="Show where an internal error came from.")
@click.pass_context
def main(ctx: click.Context, traceback: bool) -> None:
    """fsck for training checkpoints: inspects, verifies and repairs, and runs none of their code.

    From any crash, bit flip, truncation or hostile file, one command brings a run back to the
    newest state that can be proven good, and training goes on from there as if nothing had
    happened.
    """
    ctx.meta["ckpttool.traceback"] = traceback
