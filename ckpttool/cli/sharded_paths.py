"""What is said of a path that is a sharded step, or a part of one, where the verb takes another."""

from __future__ import annotations

import os

import click

_TAKE_PARTS = frozenset(("inspect", "verify"))  # which say what a part is, and of what
_TAKE_FILES = frozenset(("mend", "slim", "harden"))
_TAKE_NAMED = frozenset(("latest", "copy"))
_TAKE_RUNS = frozenset(("repair", "fix-pointer", "prune", "rollback", "undo", "history", "purge"))


def refuse_part(ctx: click.Context, _: click.Parameter, path: str) -> str:
    """The path itself; UsageError for what is only a part of what the verb takes.

    That is a file within a sharded step, or one checkpoint where a run's directory belongs.
    """
    verb = str(ctx.info_name)
    _refuse_file_of_step(path, verb)
    if verb in _TAKE_RUNS or verb in _TAKE_NAMED:
        _refuse_lone_checkpoint(path, verb)
    return path


def _refuse_lone_checkpoint(path: str, verb: str) -> None:
    from ckpttool.model.names import parse_step_directory_name
    from ckpttool.model.sharded_listing import holds_shards

    if not os.path.isdir(path) or not holds_shards(path):
        return
    from ckpttool.checks.base import command

    whole = os.path.normpath(path)
    words = f"{path} is one checkpoint, a directory of torch.distributed.checkpoint"
    is_step = parse_step_directory_name(os.path.basename(whole)) is not None
    if is_step and verb in _TAKE_RUNS:
        run = command(verb, os.path.dirname(whole) or os.curdir)
        raise click.UsageError(f"{words}, and {verb} takes a run's directory: {run}")
    if is_step:
        return
    checks = f"{command('verify', whole)} says whether it is whole"
    if verb in _TAKE_RUNS:
        hint = "and what is lost of it can only be copied again from its source"
        raise click.UsageError(f"{words}, and {verb} takes a run's directory: {checks}, {hint}")
    hint = "which are named step_<12 digits>"
    raise click.UsageError(f"{words}, and {verb} takes steps, {hint}: {checks}")


def _refuse_file_of_step(path: str, verb: str) -> None:
    if not path.endswith((".metadata", ".distcp")) or verb in _TAKE_PARTS:
        return  # at once, without an import: this is asked of every call
    from ckpttool.checks.base import command
    from ckpttool.model.names import parse_step_directory_name
    from ckpttool.model.sharded_listing import step_with_part

    whole = step_with_part(path)
    if whole is None:
        return
    words = f"{path} is a part of the sharded step {whole}"
    if verb in _TAKE_RUNS and parse_step_directory_name(os.path.basename(whole)) is not None:
        whole = os.path.dirname(whole) or os.curdir
    verb = "verify" if verb in _TAKE_FILES else verb
    raise click.UsageError(f"{words}: {command(verb, whole)}")


def refuse_sharded(path: str, verb: str) -> None:
    """UsageError for a directory of shards, where `verb` takes one file: says which take it."""
    from ckpttool.checks.base import command
    from ckpttool.model.names import parse_step_directory_name
    from ckpttool.model.sharded_listing import holds_shards

    if not os.path.isdir(path) or not holds_shards(path):
        return
    whole = os.path.normpath(path)
    words = f"{path} is a sharded step (a directory of torch.distributed.checkpoint)"
    words += f", and {verb} takes single files"
    takes = [f"{command('verify', whole)} says what is wrong with it"]
    if verb == "mend" and parse_step_directory_name(os.path.basename(whole)) is not None:
        run = os.path.dirname(whole) or os.curdir
        takes.append(f"{command('repair', run)} goes back to the newest step that is whole")
    if verb != "mend":
        exporting = command("export", whole, "-o")
        takes.append(f"{exporting} OUT.safetensors writes its model as one file")
    raise click.UsageError(f"{words}: {'; '.join(takes)}")
