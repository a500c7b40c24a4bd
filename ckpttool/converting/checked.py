"""From a file that has been verified to a new one that has: what harden, slim and export share.

The source is opened and verified before anything is made of it, and never written to. The new file
goes to a temporary, is looked at again there, and gets its name only when it is what it should be.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.errors import RefusedError, UnreadableError, WriteError
from ckpttool.model.mended import MARK_NAME, read_mark

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO

    from ckpttool.checks.verify import Report
    from ckpttool.converting.extents import Piece
    from ckpttool.findings import Finding
    from ckpttool.formats.container import Container
    from ckpttool.io.durable import Progress
    from ckpttool.model.checkpoint import Checkpoint

# Findings that say "could not be checked", and those of files that are no checkpoint at all.
_UNCHECKED = frozenset(("FIL101", "FIL124", "FIL125"))
# What stands against loading with weights_only=True: dangerous, unknown and benign names, opcodes.
_NEEDS_MORE = frozenset(("TRU101", "TRU102", "TRU103", "TRU104"))
_SOMETHING_ELSE = frozenset(("FIL102", "FIL103", "FIL106"))


class Written(NamedTuple):
    """A file that was written: its path, and its size in bytes."""

    path: str
    size: int


def open_verified(path: str, progress: Progress | None = None) -> Checkpoint:
    """Opens a file of torch's and verifies it; the caller closes it. Errors: `open_judged`."""
    return open_judged(path, progress)[0]


def open_judged(path: str, progress: Progress | None = None) -> tuple[Checkpoint, list[Finding]]:
    """The same, with the findings that call the content dangerous.

    Raises RefusedError for what is damaged or no checkpoint, UnreadableError for what cannot be
    read or checked. Dangerous content is no reason: nothing of it is ever called.
    """
    from ckpttool.checks.verify import verify
    from ckpttool.io.reading import FileReader
    from ckpttool.model.checkpoint import open_checkpoint

    with FileReader(path) as before:
        # One after the other, so that the content is in memory only once.
        report = verify(path, progress=progress)
        _refuse_unsound(path, report)
        checkpoint = open_checkpoint(path)
        try:
            if before.changed():
                raise UnreadableError(path, "changed while it was read")
            _refuse_unreadable(path, checkpoint)
        except BaseException:
            checkpoint.close()
            raise
    return checkpoint, list(filter(is_danger, report.findings))


def is_danger(finding: Finding) -> bool:
    """Whether `verify` says of a file that it can run code, or hides something."""
    return finding.id.startswith("TRU") and finding.severity.value == "error"


def _refuse_unsound(path: str, report: Report) -> None:
    from ckpttool.checks.base import command

    errors = [one for one in report.findings if one.severity.value == "error"]
    found = {one.id: one for one in errors if one.id.startswith("FIL")}
    for id in found.keys() & _SOMETHING_ELSE:
        raise RefusedError(f"{path}: {found[id].words}: there is nothing to convert")
    damage = found.keys() - _UNCHECKED
    if damage:
        words = found[min(damage)].words
        hint = f"{command('mend', path, '-o', 'OUT')} gets back what can be got back"
        raise RefusedError(f"{path}: damaged: {words}; {hint}")
    if found:
        raise UnreadableError(path, f"could not be checked: {next(iter(found.values())).words}")


def _refuse_unreadable(path: str, checkpoint: Checkpoint) -> None:
    if not checkpoint.readable or checkpoint.container is None:
        raise RefusedError(f"{path}: {checkpoint.words}: there is nothing to convert")


def publish(
    out: str,
    write: Callable[[BinaryIO], None],
    check: Callable[[str], None],
    *,
    needed: int,
    force: bool,
) -> Written:
    """Writes `out` durably: `check` gets the path of the temporary, and raises if it is not right.

    `needed` is about how many bytes it will have; WriteError says so where the disk has not as
    many. An old file stays untouched until the new one is whole.
    """
    from ckpttool.io.durable import write_durably, write_error
    from ckpttool.io.output import already_there

    _require_space(out, needed)

    def write_and_check(file: BinaryIO) -> int:
        write(file)
        file.flush()
        check(file.name)
        return os.fstat(file.fileno()).st_size

    try:
        return Written(out, write_durably(out, write_and_check, replace=force))
    except FileExistsError as error:
        raise already_there(out) from error
    except UnreadableError:
        raise
    except OSError as error:
        raise write_error(out, error) from error


def _require_space(out: str, needed: int) -> None:
    if not hasattr(os, "statvfs"):
        return
    status = os.statvfs(os.path.dirname(out) or ".")
    if not status.f_blocks:
        return  # no disk at all (/proc), or a file system that doesn't tell
    free = status.f_bavail * status.f_frsize
    if needed > free:
        raise WriteError(out, f"about {needed:,} bytes are needed, {free:,} are free")


def write_torch_file(
    checkpoint: Checkpoint,
    out: str,
    tree: object,
    pieces: list[Piece],
    added: dict[str, bytes],
    *,
    weights_only: bool,
    force: bool,
    progress: Progress | None = None,
) -> Written:
    """Writes a zip of torch's with `tree` and the storages `pieces`, and proves it.

    Its own checksums are verified, each storage that was taken over whole must have the checksum
    that it had, and with `weights_only` the file must load that way. Raises WriteError if not.
    """
    from ckpttool.converting.storages import StorageBytes
    from ckpttool.writing.checkpoint import write_checkpoint
    from ckpttool.writing.pickled import pickled

    container = checkpoint.container
    assert container is not None
    storages = StorageBytes(container, added)
    pickle = pickled(tree)
    total = sum(piece.length for piece in pieces)

    def write(file: BinaryIO) -> None:
        records = write_checkpoint(
            file,
            tree,
            (piece.source(storages) for piece in pieces),
            byteorder=container.byteorder,
            extra=_mark(container),
            pickle=pickle,
            progress=progress,
        )
        _same_checksums(out, container, pieces, {name: crc for name, _, crc in records})
        if checkpoint.reader.changed():
            raise UnreadableError(checkpoint.path, "changed while it was read")

    def check(path: str) -> None:
        _prove(out, path, weights_only, progress)

    return publish(out, write, check, needed=total + len(pickle), force=force)


def _mark(container: Container) -> dict[str, bytes]:
    """What `mend` wrote into the file to say what was done to it: it goes on with the content."""
    # Under its name can lie anything, a pickle that runs code as well.
    return {} if read_mark(container) is None else {MARK_NAME: container.read(MARK_NAME)}


def _same_checksums(
    out: str, container: Container, pieces: list[Piece], written: dict[str, int]
) -> None:
    """What was taken over whole has the checksum that the source keeps of it."""
    if not container.has_checksums:
        return
    for piece in pieces:
        record = container.records.get(container.storage_record(piece.old))
        if record is None or record.crc is None or piece.length != record.size:
            continue
        if written[f"data/{piece.key}"] != record.crc:
            raise WriteError(out, f"{record.name} was read with another checksum than it has")


def _prove(out: str, path: str, weights_only: bool, progress: Progress | None) -> None:
    """Reads the new file back as any other: it must be intact, and load as it was promised to."""
    from ckpttool.checks.verify import verify

    findings = verify(path, progress=progress).findings
    wrong = [one for one in findings if _speaks_against(one) or is_danger(one)]
    if wrong:
        raise WriteError(out, f"what was written is not as it should be: {wrong[0].words}")
    if weights_only and any(one.id in _NEEDS_MORE for one in findings):
        raise WriteError(out, "what was written does not load with weights_only=True")


def _speaks_against(finding: Finding) -> bool:
    return finding.id.startswith("FIL") and finding.severity.value == "error"
