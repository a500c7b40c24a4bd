"""A look at a file before it is loaded: whether it is whole, and the one that was saved."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ckpttool.errors import UnreadableError
from ckpttool.model.directory import step_entry
from ckpttool.model.pointer import Pointer

logger = logging.getLogger(__name__)


def say_if_replaced(pointer: Pointer, path: Path) -> None:
    """Verification knows whether the file is whole; only this tells that it is another one."""
    size = pointer.extra.get("size")
    if pointer.target is None or type(size) is not int:
        return
    try:
        step = step_entry(os.fspath(path), path.lstat())
    except OSError:
        return  # gone meanwhile: loading will say so
    if step is None or step.recorded_size in (None, size):
        return  # without its metadata, a sharded step is incomplete: loading will say so
    words = "%s has %d bytes, while %s records %d: it is not the file that was saved there"
    logger.warning(words, step.recorded_path, step.recorded_size, pointer.path, size)


def look_at(path: Path, weights_only: bool) -> tuple[str | None, bool]:
    """What keeps a step from being loaded, in words; and whether its checksums were all right."""
    from ckpttool.checks.verify import verify

    try:
        report = verify(path)
    except UnreadableError as error:
        return f"could not be read: {error.reason}", False
    verdict = report.files[0]
    if verdict.state in ("valid", "intact"):
        return None, verdict.checksums == "checked"
    errors = [finding for finding in report.findings if finding.severity.value == "error"]
    if path.is_dir():  # a sharded step has no use without a part of it
        words = f"{errors[0].id}: {errors[0].words}" if errors else "nothing says why"
        return f"is {verdict.state}: {words}", False
    families = ["FIL"]
    if verdict.state == "dangerous" and weights_only:
        families.insert(0, "TRU")
    if verdict.checksums not in ("checked", "none stored") or verdict.state == "wrong-step":
        families.append("SCH")
    # Else it is whole, only without a step: whoever saved that may have it back.
    for finding in (error for family in families for error in errors if error.id[:3] == family):
        return f"is {verdict.state}: {finding.id}: {finding.words}", False
    return None, False
