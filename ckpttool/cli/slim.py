"""`ckpttool slim`: a smaller file with the same values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckpttool.cli.common import (
    PATH,
    converting_options,
    end_cleanly_when_terminated,
    example,
    finish_converting,
    with_progress,
)
from ckpttool.cli.sharded_paths import refuse_part, refuse_sharded
from ckpttool.exitcodes import ExitCode
from ckpttool.render.text import Printer

if TYPE_CHECKING:
    from ckpttool.converting.slim import Slimming


@click.command(
    epilog=example(
        "ckpttool slim step_000000000400.pt -o inference.pt --keep model",
        "ckpttool slim last.ckpt -o small.ckpt --drop optimizer --drop rng",
        "ckpttool slim views.pt -o small.pt",
    )
)
@click.argument("file", type=PATH, metavar="FILE", callback=refuse_part)
@converting_options
@click.option("--keep", multiple=True, metavar="SECTION", help="Keep only this top-level key.")
@click.option("--drop", multiple=True, metavar="SECTION", help="Leave this top-level key out.")
def command(
    file: str,
    out: str,
    force: bool,
    dry_run: bool,
    as_json: bool,
    keep: tuple[str, ...],
    drop: tuple[str, ...],
) -> ExitCode:
    """Write FILE anew without what is not needed: sections, and bytes that no tensor uses.

    Storages are cut to what their tensors reach, so that a saved slice no longer brings the whole
    tensor that it was cut from; tensors that overlap go on sharing memory. Records that nothing
    refers to are left out. --keep and --drop choose sections by name, and may be given several
    times: --keep model writes a file with the model and nothing else, not even the step.

    Values, shapes, strides and classes stay as they are. FILE is verified first and never changed,
    and what was written is read back. Content that can run code is refused (exit code 4).
    """
    from ckpttool.converting.sections import SectionError
    from ckpttool.converting.slim import plan_slim
    from ckpttool.io.output import refuse_output
    from ckpttool.render.convert_page import show_slimming

    if keep and drop:
        raise click.UsageError("--keep and --drop exclude each other")
    refuse_sharded(file, "slim")
    end_cleanly_when_terminated()
    refuse_output(out, file, force=force)
    try:
        opened = with_progress(plan_slim, file, keep=keep, drop=drop)
    except SectionError as error:
        raise click.UsageError(str(error)) from error
    plan: Slimming
    with opened as plan:
        if not as_json:
            show_slimming(Printer(), plan)
        return finish_converting(
            plan,
            out,
            proof="read back, all checksums match",
            dry_run=dry_run,
            as_json=as_json,
            force=force,
        )
