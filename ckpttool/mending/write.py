"""Carries a plan out: a new, whole file, verified before it gets its name."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from ckpttool.errors import FormatError, RefusedError, UnreadableError, WriteError
from ckpttool.formats.values import StorageRef, TensorValue
from ckpttool.io.output import already_there, refuse_output
from ckpttool.mending import content as contents
from ckpttool.mending.checking import Digest, problems
from ckpttool.mending.losses import Standing, is_whole, standings
from ckpttool.mending.mark import mark_of
from ckpttool.mending.naming import MAIN_PICKLE
from ckpttool.mending.skeleton import Skeleton, read_skeleton
from ckpttool.model.mended import MARK_NAME
from ckpttool.model.walk import Walk, find_tensors
from ckpttool.writing.checkpoint import StorageSource, write_checkpoint
from ckpttool.writing.container import TorchZipWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ckpttool.io.durable import Progress
    from ckpttool.mending.content import Content
    from ckpttool.mending.parts import Part
    from ckpttool.mending.plan import Mending

MISSING = ("drop", "zeros", "from")
_MOST_SHOWN = 5


class Written(NamedTuple):
    """A file that was written: its path, size in bytes, and SHA-256 (64 hexadecimal digits).

    `proven` tells that the SHA-256 is the one that was known of the file. `replaced` lists the
    tensors that were taken from another file.
    """

    path: str
    size: int
    sha256: str
    proven: bool = False
    replaced: list[str] = []  # noqa: RUF012 - never changed


def write_mended(
    mending: Mending,
    out: str | os.PathLike[str],
    *,
    allow_loss: bool = False,
    missing: str = "drop",
    source: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Written | None:
    """Writes the mended file to `out`, durably; None where there was nothing to mend.

    What is lost is left out of its dictionary (`missing="drop"`), written as zeros (`"zeros"`), or
    taken from the file `source` (`"from"`), from its tensors of the same name, shape and type.

    Raises RefusedError where something would be lost and `allow_loss` is not set, where the file
    does not get its known SHA-256, and where `out` is the damaged file, or exists without `force`;
    FormatError where nothing can be got back; UnreadableError and WriteError for what the system
    refuses, or where what was written does not verify. In each case nothing is left behind.
    """
    target = os.fspath(out)
    if mending.healthy:
        return None
    if mending.hopeless is not None:
        raise FormatError(f"{mending.path}: nothing can be got back: {mending.hopeless}")
    refuse_output(target, mending.path, force=force)
    if mending.loses and not allow_loss:
        raise RefusedError(_loss_words(mending))
    writer = _Writing(mending, target, missing, source, progress)
    return writer.run(force)


def sha256_of_rewritten(mending: Mending) -> str:
    """The SHA-256 that the file would have if its records were written as the plan has them."""
    from hashlib import sha256

    sink = _HashOnly(sha256())
    _rewrite(mending, sink)  # type: ignore[arg-type]
    digest: str = sink.digest.hexdigest()
    return digest


def fresh_skeleton(mending: Mending) -> Skeleton:
    """The content read once more, for a tree that may be changed. Raises FormatError."""
    if mending.kind.startswith("torch-legacy"):
        from ckpttool.mending.plan_legacy import open_content

        return open_content(mending)
    part = mending.parts.get(MAIN_PICKLE)
    if part is None:
        raise FormatError("there is no pickle")
    data = (part.content or _as_it_stands(mending, part)).read()
    skeleton = read_skeleton(data, mending.limits)
    if skeleton is None:
        raise FormatError("the pickle cannot be read")
    return skeleton


def is_lost_by(standing: dict[str, Standing]) -> Callable[[Any], bool]:
    """Says of a tensor or a storage whether some of its bytes are gone."""

    def is_lost(value: Any) -> bool:
        if isinstance(value, TensorValue):
            return not is_whole(value, standing)
        if isinstance(value, StorageRef):
            found = standing[value.key]
            return found.present < found.size
        return False

    return is_lost


# Before anything is written.


def _loss_words(mending: Mending) -> str:
    lost = [loss.tensor for loss in mending.losses]
    parts = []
    if lost:
        more = f" and {len(lost) - _MOST_SHOWN:,} more" if len(lost) > _MOST_SHOWN else ""
        parts.append(f"lost: {', '.join(lost[:_MOST_SHOWN])}{more}")
    if mending.dropped:
        count = len(mending.dropped)
        more = f" and {count - _MOST_SHOWN:,} more" if count > _MOST_SHOWN else ""
        parts.append(f"left out: {'; '.join(mending.dropped[:_MOST_SHOWN])}{more}")
    return f"{mending.path}: {'; '.join(parts)}; --allow-loss writes what is left"


class _HashOnly:
    """A file that keeps nothing but its SHA-256."""

    def __init__(self, digest: Any) -> None:
        self.digest = digest

    def write(self, data: bytes | memoryview) -> int:
        self.digest.update(data)
        return len(data)


class _Writing:
    """One file being written."""

    def __init__(
        self,
        mending: Mending,
        target: str,
        missing: str,
        source: str | None,
        progress: Progress | None,
    ) -> None:
        if missing not in MISSING or (missing == "from") != (source is not None):
            raise ValueError(f"no such way to fill gaps: {missing!r} with {source!r}")
        self.mending = mending
        self.target = target
        self.missing = missing
        self.source = source
        self.progress = progress
        self.replaced: list[str] = []
        self.unfillable: set[int] = set()
        self.done = 0
        self.digest = ""

    def run(self, force: bool) -> Written:
        from ckpttool.io.durable import write_durably, write_error

        mode = stat.S_IMODE(os.fstat(self.mending.reader.fileno()).st_mode)
        try:
            size = write_durably(
                self.target, self.write, mode=mode, replace=force, check=self.check
            )
        except FileExistsError as error:
            raise already_there(self.target) from error
        except (UnreadableError, RefusedError):
            raise
        except OSError as error:
            raise write_error(self.target, error) from error
        known = self.mending.known_sha256
        return Written(self.target, size, self.digest, known == self.digest, self.replaced)

    def write(self, file: BinaryIO) -> int:
        mending = self.mending
        if mending.rewrites:
            _rewrite(mending, file, self.report)
        else:
            self.write_anew(file)
        if mending.reader.changed():
            raise UnreadableError(mending.path, "changed while it was being mended")
        return file.tell()

    def report(self, count: int) -> None:
        self.done += count
        if self.progress is not None:
            total = max(self.mending.size, self.done)
            self.progress(self.done, total, f"writing {os.path.basename(self.target)}")

    def check(self, temporary: str) -> None:
        """Verifies what was written, before it gets its name."""
        digest = Digest(temporary)
        found = problems(temporary)
        self.digest = digest.result()
        if found:
            raise WriteError(self.target, f"what was written does not verify: {found[0]}")
        known = self.mending.known_sha256
        if known is not None and self.digest != known and not self.mending.loses:
            raise RefusedError(
                f"{self.mending.path}: the mended file has SHA-256 {self.digest}, "
                f"while {known} is recorded of it: it is not what was written"
            )

    # What is left, with a new pickle.

    def write_anew(self, file: BinaryIO) -> None:
        from ckpttool.mending.prune import prune

        mending = self.mending
        parts = mending.parts.parts
        skeleton = fresh_skeleton(mending)
        standing = standings(parts, skeleton)
        fills, more = self.fill(skeleton, standing)
        tree, dropped = prune(skeleton.tree, lambda value: self.is_lost(value, standing))
        added = {source.key for source in more}
        old = {key: found for key, found in standing.items() if key not in added}
        sources = [*_sources(mending, tree, old, fills), *more]
        mark = mark_of(mending, self.missing, self.source, self.replaced, dropped)
        order = mending.container.byteorder if mending.container else "little"
        write_checkpoint(
            file,
            tree,
            sources,
            root=mending.parts.root or "archive",
            byteorder=order,
            extra={MARK_NAME: mark},
            progress=self.progress,
        )

    def is_lost(self, value: Any, standing: dict[str, Standing]) -> bool:
        """Whether a tensor or storage is left out."""
        return id(value) in self.unfillable or is_lost_by(standing)(value)

    def fill(
        self, skeleton: Skeleton, standing: dict[str, Standing]
    ) -> tuple[dict[str, Content], list[StorageSource]]:
        """Contents that stand in for lost storages, by key, and new storages.

        Marks what is filled as there, in `standing`.
        """
        fills: dict[str, Content] = {}
        more: list[StorageSource] = []
        if self.missing == "from" and self.source is not None:
            from ckpttool.mending.replacing import replace_from

            self.replaced, more = replace_from(self.source, skeleton, standing, self.mending)
        elif self.missing == "zeros":
            # Indices of zeros make no sparse tensor: what is built from several is left out.
            built = [value for value in skeleton.tensors.values() if value.parts]
            self.unfillable = {id(value) for value in built if not is_whole(value, standing)}
            for key, found in standing.items():
                if found.present < found.size:
                    standing[key] = found._replace(present=found.size)
                    fills[key] = _padded(self.mending, key, found)
        return fills, more


def _rewrite(
    mending: Mending, file: BinaryIO, report: Callable[[int], object] | None = None
) -> None:
    """Writes all records as they are, in torch's layout."""
    root = mending.parts.root or "archive"
    writer = TorchZipWriter(file, root, alignment=mending.alignment, checksums=mending.checksums)
    for part in mending.parts.parts:
        if part.content is None or part.size is None:
            raise FormatError(f"record {part.name!r} is lost", record=part.name)
        pieces = part.content.chunks()
        if report is not None:
            pieces = _reported(pieces, report)
        crc = writer.add(part.name, pieces, part.size)
        guessed = bool(part.facts.get("guessed"))
        if part.crcs and crc not in part.crcs and not guessed:
            raise UnreadableError(mending.path, "changed while it was being mended")
    writer.finish()


def _reported(
    pieces: Iterable[bytes | memoryview], report: Callable[[int], object]
) -> Iterator[bytes | memoryview]:
    for piece in pieces:
        yield piece
        report(len(piece))


def _sources(
    mending: Mending, tree: Any, standing: dict[str, Standing], fills: dict[str, Content]
) -> Iterator[StorageSource]:
    """The storages that the tree still refers to, in the file's order."""
    used, lone = _references(tree, mending)
    order = [part.name[5:] for part in mending.parts.parts]
    for key in dict.fromkeys([*order, *standing]):
        if key in used and key in standing:
            content = fills.get(key) or _padded(mending, key, standing[key])
            yield StorageSource(key, content.size, content.chunks)
    yield from _views(mending, lone)


def _views(mending: Mending, lone: list[StorageRef]) -> Iterator[StorageSource]:
    """The legacy formats can save a view of a storage without a tensor: a storage of its own."""
    from ckpttool.model.sources import view_source

    for ref in {ref.view[0]: ref for ref in lone if ref.view is not None}.values():
        if mending.container is not None:
            yield view_source(mending.container, ref)


def _references(tree: Any, mending: Mending) -> tuple[set[str], list[StorageRef]]:
    """The keys of all storages that a tree refers to, and the storages that stand alone."""
    from ckpttool.mending.losses import storages_of

    walk = Walk(mending.limits)
    keys = {ref.key for _, value in find_tensors(tree, "", walk) for ref in storages_of(value)}
    return keys | {ref.key for ref in walk.storages if ref.view is None}, walk.storages


def _padded(mending: Mending, key: str, found: Standing) -> Content:
    """A storage's bytes as far as they are there, then zeros."""
    part = mending.parts.get(f"data/{key}")
    if part is None or found.present == 0:
        return contents.zeros(found.size)
    if part.content is not None and part.content.size == found.size:
        return part.content
    head = contents.first(part.content or _as_it_stands(mending, part), found.present)
    return contents.joined(head, contents.zeros(found.size - found.present))


def _as_it_stands(mending: Mending, part: Part) -> Content:
    """What is in the file of a record that is damaged or cut."""
    found = part.found
    if found is None or found.method != 0:
        raise FormatError(f"record {part.name!r} is lost", record=part.name)
    return contents.of_span(mending.reader, found.start, part.present or found.present)
