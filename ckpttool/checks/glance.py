"""A look that costs no more than opening: what `inspect` says of a file's or directory's state.

Nothing beyond the container's directory and the pickle is read. So what it calls good may still be
damaged; only `verify` tells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckpttool.checks.base import DirectorySubject, Examined
from ckpttool.checks.examine import Depth, Result, first_look, judge, not_opened, not_reached
from ckpttool.errors import UnreadableError
from ckpttool.model.schema import KEYS

if TYPE_CHECKING:
    from ckpttool.findings import Finding
    from ckpttool.io.durable import Progress
    from ckpttool.model.books import Books
    from ckpttool.model.checkpoint import Checkpoint, Section
    from ckpttool.model.directory import CheckpointDirectory, StepFile


class Row(NamedTuple):
    """A step file at a glance.

    `sections` has those of the training schema; it is empty, and `load_need` None, for a file that
    can't be read.
    """

    examined: Examined
    sections: dict[str, Section]
    load_need: str | None


def glance(path: str, step: int | None, checkpoint: Checkpoint) -> Result:
    """What an open file shows; `step` is the number in its name, None for a lone file."""
    return judge(first_look(path, step, checkpoint), Depth(quick=True))


def glance_step(file: StepFile) -> Row:
    """What one step of a directory shows. Links and the like are not opened."""
    from ckpttool.checks.whole_file import Unreadable

    if not file.opens:
        return Row(not_opened(file), {}, None)
    try:
        result, sections, need = _glance_at(file)
    except UnreadableError as error:
        findings = [Unreadable.at(file.path, error.reason)]
        result = not_reached(file.path, file.step, file.size, "unreadable", findings)
        return Row(Examined(file, *result), {}, None)
    known = {name: section for name, section in sections.items() if name in KEYS}
    return Row(Examined(file, *result), known, need)


def _glance_at(file: StepFile) -> tuple[Result, dict[str, Section], str | None]:
    """Result, sections and what loading takes. Raises UnreadableError."""
    if file.is_sharded:
        from ckpttool.checks.sharded_examine import judge_sharded
        from ckpttool.model.sharded import open_sharded

        with open_sharded(file.path) as sharded:
            result = judge_sharded(sharded, file.step, Depth(quick=True))
            return result, sharded.sections, sharded.load_need
    from ckpttool.model.checkpoint import open_checkpoint

    with open_checkpoint(file.path) as checkpoint:
        result = glance(file.path, file.step, checkpoint)
        return result, checkpoint.sections, checkpoint.load_need


def glance_directory(
    directory: CheckpointDirectory, books: Books, progress: Progress | None = None
) -> tuple[list[Row], list[Finding]]:
    """A row for each step file, ascending, and the findings about the directory as a whole."""
    from ckpttool.checks.verify import directory_findings

    total = sum(file.size for file in directory.steps)
    rows, done = [], 0
    for file in directory.steps:
        rows.append(glance_step(file))
        done += file.size
        if progress:
            progress(done, total, file.name)
    examined = [row.examined for row in rows]
    subject = DirectorySubject(directory, examined, set(), quick=True, books=books)
    return rows, list(directory_findings(subject))
