"""`ckpttool inspect`: what a directory or a file holds."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from ckpttool.checks.base import command as command_line
from ckpttool.cli.common import example, json_option, path_argument, with_progress, write_json
from ckpttool.exitcodes import ExitCode
from ckpttool.render.text import Printer

if TYPE_CHECKING:
    from ckpttool.findings import Finding
    from ckpttool.render.file_page import Wanted


@click.command(
    epilog=example(
        "ckpttool inspect runs/a",
        "ckpttool inspect runs/a/step_000000000400.pt --tensors 'optimizer.*'",
        "ckpttool inspect model.pt --json | jq '.tensors[].name'",
    )
)
@path_argument
@click.option(
    "--tensors",
    is_flag=False,
    flag_value="*",
    metavar="[GLOB]",
    help="List tensors, or those whose names fit GLOB (quoted).",
)
@click.option("--tree", is_flag=True, help="Show the whole content as a tree.")
@click.option("--records", is_flag=True, help="List the container's records.")
@click.option("--globals", "globals_", is_flag=True, help="List every global that is named.")
@json_option
def command(
    path: str, tensors: str | None, tree: bool, records: bool, globals_: bool, as_json: bool
) -> ExitCode:
    """Show what PATH, a directory or a file, holds. Nothing that it holds is run.

    A directory: its steps, its pointer, leftovers. A directory of torch.distributed.checkpoint:
    tensors, shards, ranks, counters; no shard is read. A file: container, sections, tensors,
    counters, precision, optimizer, RNG, coordinator, and what loading it takes. Only what is shown
    is read, however large the file is. Exit code 1 means that something is visibly wrong.
    """
    if tensors is not None and os.path.exists(tensors) and _is_left_out("path"):
        path, tensors = tensors, "*"  # `inspect --tensors FILE`: the parser took FILE for the GLOB
    if not os.path.isdir(path):
        from ckpttool.render.file_page import Wanted

        return _inspect_file(path, Wanted(tensors, tree, records, globals_), as_json)
    from ckpttool.model.sharded_listing import holds_shards

    if holds_shards(path):
        from ckpttool.render.file_page import Wanted

        return _inspect_sharded(path, Wanted(tensors, tree, records, globals_), as_json)
    if tensors is not None or tree or records or globals_:
        raise click.UsageError(
            "--tensors, --tree, --records and --globals want a file or a sharded step as PATH"
        )
    return _inspect_directory(path, as_json)


def _is_left_out(parameter: str) -> bool:
    source = click.get_current_context().get_parameter_source(parameter)
    return source is click.core.ParameterSource.DEFAULT


def _inspect_directory(path: str, as_json: bool) -> ExitCode:
    from ckpttool.checks.glance import glance_directory
    from ckpttool.model.books import read_books
    from ckpttool.model.directory import scan
    from ckpttool.render.directory_page import directory_document, show_directory

    directory = scan(path)
    books = read_books(directory)
    rows, findings = with_progress(glance_directory, directory, books)
    if as_json:
        write_json(directory_document(directory, rows, findings, books))
    else:
        show_directory(Printer(), directory, rows, findings, books, command_line("verify", path))
    return _code([*findings, *(f for row in rows for f in row.examined.findings)])


def _inspect_file(path: str, wanted: Wanted, as_json: bool) -> ExitCode:
    from ckpttool.checks.glance import glance
    from ckpttool.model.checkpoint import open_checkpoint
    from ckpttool.model.names import parse_step_file_name
    from ckpttool.model.schema import TrainingFacts
    from ckpttool.model.sharded_listing import step_with_part

    with open_checkpoint(path) as checkpoint:
        step = parse_step_file_name(os.path.basename(path))
        result = glance(path, step, checkpoint)
        facts = result.facts or TrainingFacts(None)
        if as_json:
            from ckpttool.render.file_json import file_document
            from ckpttool.render.file_page import matching

            listed = matching(checkpoint, wanted.tensors or "*")
            write_json(
                file_document(checkpoint, facts, result.findings, listed, records=wanted.records)
            )
        else:
            from ckpttool.render.file_page import show_file

            command = command_line("verify", step_with_part(path) or path)
            show_file(Printer(), checkpoint, facts, result.findings, wanted, command)
    return _code(result.findings)


def _inspect_sharded(path: str, wanted: Wanted, as_json: bool) -> ExitCode:
    from ckpttool.checks.examine import Depth
    from ckpttool.checks.sharded_examine import judge_sharded
    from ckpttool.model.names import parse_step_name
    from ckpttool.model.sharded import open_sharded
    from ckpttool.render.sharded_page import sharded_document, show_sharded

    with open_sharded(path) as sharded:
        step = parse_step_name(os.path.basename(os.path.normpath(path)))
        result = judge_sharded(sharded, step, Depth(quick=True))
        if as_json:
            write_json(sharded_document(sharded, result, wanted))
        else:
            show_sharded(Printer(), sharded, result, wanted, command_line("verify", path))
    return _code(result.findings)


def _code(findings: list[Finding]) -> ExitCode:
    if any(finding.facts.get("could_not_check") for finding in findings):
        return ExitCode.COULD_NOT_FINISH
    worst = max((finding.severity.rank for finding in findings), default=0)
    return ExitCode.FINDINGS if worst == 2 else ExitCode.OK
