"""`ckpttool export`: the tensors of a checkpoint as a safetensors file."""

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
from ckpttool.cli.sharded_paths import refuse_part
from ckpttool.exitcodes import ExitCode
from ckpttool.render.text import Printer

if TYPE_CHECKING:
    from ckpttool.converting.export import Exporting


@click.command(
    epilog=example(
        "ckpttool export step_000000000400.pt -o model.safetensors",
        "ckpttool export ddp.pt -o model.safetensors --strip-prefix module.",
        "ckpttool export last.ckpt -o ema.safetensors --section ema_state_dict",
    )
)
@click.argument("file", type=PATH, metavar="FILE", callback=refuse_part)
@converting_options
@click.option("--section", metavar="NAME", help="The top-level key to export (default: the model).")
@click.option(
    "--strip-prefix",
    "prefixes",
    multiple=True,
    metavar="PREFIX",
    help="Take this off the beginning of names.",
)
@click.option("--allow-loss", is_flag=True, help="Leave out what the format has no place for.")
def command(
    file: str,
    out: str,
    force: bool,
    dry_run: bool,
    as_json: bool,
    section: str | None,
    prefixes: tuple[str, ...],
    allow_loss: bool,
) -> ExitCode:
    """Write the tensors of FILE as a safetensors file, through the safetensors library.

    FILE may be a directory of torch.distributed.checkpoint: the pieces of each tensor are put
    together, in memory of a few megabytes.

    Without --section the model is exported: the section model, state_dict, model_state_dict or
    module, or the whole of FILE where that is a state dict or a module itself. Names are the keys,
    joined by dots. Prefixes that wrappers left (module., _orig_mod.) are shown, and taken off on
    request: _orig_mod. at every level, others at the beginning, as often as all names have them;
    names that would collide are refused. Tensors that share memory are stored once, and the
    metadata names the others, as safetensors' save_model does it.

    What the format has no place for (other values, quantized and sparse tensors, views of a larger
    tensor beside it) is named, and nothing is written (exit code 4), except with --allow-loss. FILE
    is verified first and never changed; what was written is opened by the library, and every byte
    compared with FILE.
    """
    from ckpttool.converting.export import plan_export
    from ckpttool.converting.safetensors import require_library
    from ckpttool.converting.sections import SectionError
    from ckpttool.io.output import refuse_output
    from ckpttool.render.convert_page import show_exporting

    require_library()
    end_cleanly_when_terminated()
    refuse_output(out, file, force=force)
    try:
        opened = with_progress(plan_export, file, section=section, strip_prefixes=prefixes)
    except SectionError as error:
        raise click.UsageError(str(error)) from error
    plan: Exporting
    with opened as plan:
        if not as_json:
            show_exporting(Printer(), plan, allow_loss=allow_loss)
        return finish_converting(
            plan,
            out,
            proof="opened again, every byte compared",
            dry_run=dry_run,
            as_json=as_json,
            problem=plan.problem(allow_loss=allow_loss),
            allow_loss=allow_loss,
            force=force,
        )
