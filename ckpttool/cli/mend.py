"""`ckpttool mend`: a new, whole file from what is left of a damaged one."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Any

import click

from ckpttool.cli.common import (
    PATH,
    dry_run_option,
    end_cleanly_when_terminated,
    example,
    json_option,
    output_option,
    with_progress,
    write_json,
)
from ckpttool.cli.sharded_paths import refuse_part, refuse_sharded
from ckpttool.exitcodes import ExitCode
from ckpttool.render.text import Printer, escape

if TYPE_CHECKING:
    from ckpttool.mending.plan import Burst, Mending
    from ckpttool.mending.write import Written

_BURST = re.compile(r"(?P<record>.+)@(?P<byte>[0-9]{1,18})(?::(?P<bits>[0-9]{1,2}))?\Z", re.DOTALL)
_MOST_BITS = 32


class OddsType(click.FloatRange):
    """Odds above 0, up to 1. What is no number is in no range, and not out of it either."""

    name = "ODDS"

    def __init__(self) -> None:
        super().__init__(0, 1, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number."""
        odds = super().convert(value, param, ctx)
        if not 0 < odds <= 1:
            self.fail(f"{value} is not in the range 0<x<=1.", param, ctx)
        return odds


class BurstType(click.ParamType):  # type: ignore[type-arg]
    """`RECORD@BYTE[:BITS]`."""

    name = "RECORD@BYTE[:BITS]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The parts: record, byte, bits."""
        match = _BURST.match(value)
        bits = int(match["bits"] or 8) if match else 0
        if match is None or not 1 <= bits <= _MOST_BITS:
            self.fail(f"{value!r} is no RECORD@BYTE[:BITS] with 1 to 32 bits", param, ctx)
        return match["record"], int(match["byte"]), bits


@click.command(
    epilog=example(
        "ckpttool mend runs/a/step_000000000400.pt --dry-run",
        "ckpttool mend runs/a/step_000000000400.pt -o mended.pt",
        "ckpttool mend cut.pt -o what_is_left.pt --allow-loss --from step_000000000200.pt",
    )
)
@click.argument("file", type=PATH, metavar="FILE", callback=refuse_part)
@output_option(required=False)
@click.option("--allow-loss", is_flag=True, help="Write what is left, even if tensors are lost.")
@click.option(
    "--missing",
    type=click.Choice(["drop", "zeros"]),
    help="Lost tensors: left out of their dictionaries (default), or zeros.",
)
@click.option(
    "--from",
    "source",
    type=PATH,
    metavar="OTHER",
    help="Take lost tensors from OTHER: those of the same name, shape and type.",
)
@click.option(
    "--donor", "donors", type=PATH, multiple=True, help="Look for whole records in this file, too."
)
@click.option("--no-donors", is_flag=True, help="Take no record from the step files beside FILE.")
@click.option(
    "--bit-odds",
    type=OddsType(),
    default=0.01,
    show_default=True,
    help="Turn bits back only if other damage looks so in no larger a share of cases than this. "
    "Above 0.01 what fits is not proven, and the file is marked.",
)
@click.option(
    "--burst",
    "bursts",
    type=BurstType(),
    multiple=True,
    help="BITS (8; up to 32) from this byte of a record on are damaged: find out which.",
)
@click.option("--archive", type=click.IntRange(min=1), help="Mend the Nth archive in FILE.")
@click.option("--sha256", metavar="HEX", help="The SHA-256 that FILE had when it was whole.")
@click.option("--force", is_flag=True, help="Overwrite OUT.")
@dry_run_option
@json_option
def command(file: str, out: str | None, as_json: bool, dry_run: bool, **options: Any) -> ExitCode:
    """Write a new, whole file from what survives of FILE.

    FILE is never touched. Lost structure is rebuilt from its copies, a damaged record replaced by
    one that provably held the same bytes (in FILE or a step file beside it), a single flipped bit
    turned back. Each mended record is proven by its checksum. Where the pointer or the manifest
    records FILE's SHA-256, the mended file must have it. What cannot be mended is listed, and
    written without only with --allow-loss (else exit code 4). A healthy FILE is left alone.
    """
    if out is None and not dry_run:
        raise click.UsageError("say where to write with -o OUT, or look only with --dry-run")
    if options["missing"] == "zeros" and options["source"] is not None:
        raise click.UsageError("--missing zeros and --from OTHER exclude each other")
    from ckpttool.io.output import refuse_output
    from ckpttool.mending.plan import plan_mend

    refuse_sharded(file, "mend")
    end_cleanly_when_terminated()
    if out is not None:
        refuse_output(out, file, force=options["force"])
    known = _known(file, options["sha256"])
    donors = [*options["donors"], *([] if options["no_donors"] else _siblings(file))]
    plan = with_progress(
        plan_mend,
        file,
        siblings=donors,
        bit_odds=options["bit_odds"],
        known_sha256=known,
        bursts=_bursts(options["bursts"]),
        archive=options["archive"],
    )
    with plan:
        _require_bursts(plan, options["bursts"])
        return _carry_out(plan, None if dry_run else out, options, as_json)


def _carry_out(
    mending: Mending, output: str | None, options: dict[str, Any], as_json: bool
) -> ExitCode:
    from ckpttool.render.mend_page import show_mending, show_written

    if not as_json:
        show_mending(Printer(), mending)
    written = None
    if output is not None and mending.hopeless is None and _may_write(mending, options):
        written = _write(mending, output, options)
    if as_json:
        write_json(_document(mending, written, output is None))
    elif written is not None:
        show_written(Printer(), written)
    elif output is None:
        Printer().line("dry run: nothing was written")
    return _exit_code(mending, options)


def _may_write(mending: Mending, options: dict[str, Any]) -> bool:
    return not mending.loses or options["allow_loss"]


def _write(mending: Mending, output: str, options: dict[str, Any]) -> Written | None:
    from ckpttool.mending.write import write_mended

    source = options["source"]
    written: Written | None = with_progress(
        write_mended,
        mending,
        output,
        allow_loss=options["allow_loss"],
        missing="from" if source is not None else options["missing"] or "drop",
        source=source,
        force=options["force"],
    )
    return written


def _exit_code(mending: Mending, options: dict[str, Any]) -> ExitCode:
    if mending.healthy:
        return ExitCode.OK
    if mending.hopeless is not None:
        return ExitCode.FINDINGS
    if mending.has_known_sha256 is False:
        return ExitCode.REFUSED
    if _may_write(mending, options):
        return ExitCode.OK
    Printer(sys.stderr).line(
        f"ckpttool: {escape(mending.path)}: refused: something would be lost; "
        "--allow-loss writes what is left"
    )
    return ExitCode.REFUSED


def _known(file: str, stated: str | None) -> str | None:
    """The SHA-256 that the file should have: as stated, else as pointer or manifest record it."""
    if stated is not None:
        if not re.fullmatch(r"\s*[0-9a-fA-F]{64}\s*", stated):
            raise click.UsageError("--sha256 takes 64 hexadecimal digits")
        return stated.strip().lower()
    from ckpttool.model.manifest import known_sha256

    return known_sha256(file)


def _bursts(wanted: list[tuple[str, int, int]]) -> list[Burst]:
    from ckpttool.mending.proofs import Burst

    return [Burst(record, 8 * byte, bits) for record, byte, bits in wanted]


def _require_bursts(mending: Mending, wanted: list[tuple[str, int, int]]) -> None:
    """Raises UsageError for a burst where there is no such record, or no such byte of it."""
    if not mending.records:
        return
    for record, byte, bits in wanted:
        part = mending.parts.get(record)
        if part is None:
            names = ", ".join(found.name for found in mending.records[:4])
            raise click.UsageError(f"--burst: there is no record {record!r} (but {names}, …)")
        if part.size is not None and 8 * byte + bits > 8 * part.size:
            raise click.UsageError(
                f"--burst: record {record} has {part.size:,} bytes; "
                f"{bits} bits from byte {byte:,} on are not in it"
            )


def _siblings(file: str) -> list[str]:
    """The other step files in the directory of `file`, the nearest step first."""
    from ckpttool.errors import UnreadableError
    from ckpttool.model.directory import scan
    from ckpttool.model.names import parse_step_file_name

    directory, name = os.path.split(file)
    step = parse_step_file_name(name)
    try:
        steps = [entry for entry in scan(directory or os.curdir).steps if entry.is_regular]
    except UnreadableError:
        return []
    others = [entry for entry in steps if entry.name != name]
    if step is not None:
        others.sort(key=lambda entry: abs(entry.step - step))
    return [entry.path for entry in others]


def _document(mending: Mending, written: Written | None, dry_run: bool) -> dict[str, Any]:
    done = None if written is None else written._asdict()
    return {**mending.as_dict(), "dry_run": dry_run, "written": done}
