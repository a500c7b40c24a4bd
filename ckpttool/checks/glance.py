"""A look that costs no more than opening: what `inspect` says of a file's or directory's state.

Nothing beyond the container's directory and the pickle is read. So what it calls good may still be
damaged; only `verify` tells.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.checks.base import DirectorySubject, Examined, FileSubject, FileVerdict
from ckpttool.checks.examine import Depth, Result, judge, kind_anomalies
from ckpttool.errors import UnreadableError
from ckpttool.model.schema import KEYS, training_facts

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpttool.findings import Finding
    from ckpttool.model.checkpoint import Checkpoint, Section
    from ckpttool.model.directory import CheckpointDirectory, StepFile

    Progress = Callable[[int, int, str], None]


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
    mode = os.fstat(checkpoint.reader.fileno()).st_mode
    facts = training_facts(checkpoint.tree if checkpoint.readable else None)
    subject = FileSubject(path, checkpoint, facts, step, mode)
    subject.anomalies.extend(checkpoint.anomalies)
    subject.anomalies.extend(kind_anomalies(checkpoint))
    if checkpoint.readable and (step is not None or facts.follows_schema):
        subject.anomalies.extend(facts.problems)
    return judge(subject, Depth(quick=True))


def glance_step(file: StepFile) -> Row:
    """What one step file of a directory shows. Links and the like are not opened."""
    from ckpttool.checks.container import Unreadable
    from ckpttool.model.checkpoint import open_checkpoint

    if not file.is_regular:
        verdict = FileVerdict(file.step, file.name, file.path, 0, "not-opened", "not reached")
        return Row(Examined(file, verdict, []), {}, None)
    try:
        with open_checkpoint(file.path) as checkpoint:
            result = glance(file.path, file.step, checkpoint)
            sections = {k: v for k, v in checkpoint.sections.items() if k in KEYS}
            need = checkpoint.load_need
    except UnreadableError as error:
        state = "unreadable"
        verdict = FileVerdict(file.step, file.name, file.path, file.size, state, "not reached")
        finding = Unreadable.at(file.path, error.reason)
        return Row(Examined(file, verdict, [finding]), {}, None)
    return Row(Examined(file, *result), sections, need)


def glance_directory(
    directory: CheckpointDirectory, progress: Progress | None = None
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
    subject = DirectorySubject(directory, examined, set(), quick=True)
    return rows, list(directory_findings(subject))
