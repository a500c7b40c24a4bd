"""`ckpttool harden`: the same content, so that `torch.load(weights_only=True)` takes it."""

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
    from ckpttool.converting.harden import Hardening


@click.command(
    epilog=example(
        "ckpttool harden run.ckpt -o safe.pt",
        "ckpttool harden run.ckpt -o safe.pt --dry-run",
        "ckpttool harden whole_model.pt -o state_dict.pt",
    )
)
@click.argument("file", type=PATH, metavar="FILE", callback=refuse_part)
@converting_options
@click.option("--allow-loss", is_flag=True, help="Leave out what has no plain form.")
def command(
    file: str, out: str, force: bool, dry_run: bool, as_json: bool, allow_loss: bool
) -> ExitCode:
    """Write FILE anew so that torch.load takes it with weights_only=True, its default.

    Tensors keep every bit. All else becomes plain data: numpy arrays become tensors (of text:
    lists; structured ones: dictionaries of columns), numpy scalars numbers, argparse and omegaconf
    configurations dictionaries, enums their values, paths, dates and decimals text, other objects
    the dictionary of their attributes, a whole module its state dict. The table tells what became
    what.

    Nothing that FILE names is imported or called, and what can run code is never carried over. What
    has no plain form is named, and nothing is written (exit code 4), except with --allow-loss. FILE
    is verified first and never changed, and what was written is read back and proven to load.
    """
    from ckpttool.converting.harden import plan_harden
    from ckpttool.io.output import refuse_output
    from ckpttool.render.convert_page import show_hardening

    refuse_sharded(file, "harden")
    end_cleanly_when_terminated()
    refuse_output(out, file, force=force)
    plan: Hardening
    with with_progress(plan_harden, file) as plan:
        if not as_json:
            show_hardening(Printer(), plan, allow_loss=allow_loss)
        return finish_converting(
            plan,
            out,
            proof="loads with weights_only=True",
            dry_run=dry_run,
            as_json=as_json,
            problem=plan.problem(allow_loss=allow_loss),
            allow_loss=allow_loss,
            force=force,
        )
