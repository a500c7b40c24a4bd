"""The entries of a shard, each an archive of torch's: opened where it lies, and read once.

A shard whose SHA-256 is recorded is read in order by one thread, for checksums and hash together;
of others the entries are dealt out to several threads.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ckpttool.checks import container as container_checks
from ckpttool.checks import trust as trust_checks
from ckpttool.checks import whole_file
from ckpttool.checks.base import FileSubject
from ckpttool.checks.sharded_check import UNPICKLES
from ckpttool.errors import UnreadableError
from ckpttool.findings import Place
from ckpttool.formats.anomaly import Anomaly
from ckpttool.formats.values import TensorValue
from ckpttool.io.reading import BytesReader, FileReader, HashingReader, WindowReader
from ckpttool.model.checkpoint import Checkpoint
from ckpttool.model.inert import what
from ckpttool.model.schema import TrainingFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckpttool.checks.examine import Depth
    from ckpttool.checks.measure import Meter, Workers
    from ckpttool.checks.sharded_digests import Recorded
    from ckpttool.findings import Finding
    from ckpttool.model.sharded import ShardedStep
    from ckpttool.model.sharded_metadata import Item, Piece, ShardedTensor

_NOT_READ = frozenset(("safetensors",))
_BATCH = 64
# An entry of no more bytes is read at once, instead of its end, its directory, its headers …
_SMALL = 1 << 20


class ItemSubject(FileSubject):
    """One entry of a shard. Places in it are the shard's, and name the entry.

    `is_object` says that it is no tensor: then torch loads it with `weights_only=False`.
    """

    __slots__ = ("is_object", "name")

    def __init__(self, path: str, checkpoint: Checkpoint, name: str, is_object: bool) -> None:
        super().__init__(path, checkpoint, TrainingFacts(None), None, 0)
        self.name = name
        self.is_object = is_object

    @property
    def unpickled_by(self) -> str | None:
        """Whoever loads the step, if it is an object."""
        return UNPICKLES if self.is_object else None

    def place(self, record: str | None = None, *, key: str | None = None) -> Place:
        """A place in this entry."""
        return Place(self.path, record=record, tensors=(self.name,), key=key)

    def tensors_in(self, record: str) -> tuple[str, ...]:
        """The entry itself: it is the only one in its archive."""
        return (self.name,)


def check_items(
    sharded: ShardedStep, depth: Depth, workers: Workers, records: list[Recorded]
) -> Iterator[Finding | Anomaly]:
    """What is wrong with every shard that is there: its entries, and its SHA-256 by `records`."""
    metadata, sizes = sharded.metadata, sharded.listed.sizes
    pieces = {
        piece.item: (tensor, piece)
        for tensor in (() if metadata is None else metadata.tensors.values())
        for piece in tensor.pieces
        if piece.item is not None
    }
    files = {} if metadata is None else metadata.files()
    recorded: dict[str, list[Recorded]] = {}
    for one in records:
        recorded.setdefault(one.shard, []).append(one)
    shards = ShardCheck(sharded, files, pieces, recorded, depth, workers)
    total = sum(sizes[file] for file in recorded)
    for outcome in workers.map(shards.in_order, list(recorded), total):
        yield from outcome
    for file in files:
        if file in sizes and file not in recorded:
            yield from shards.side_by_side(file)


class ShardCheck:
    """Looks at shards one by one; `files` has the entries of each, `recorded` what its hash is."""

    def __init__(
        self,
        sharded: ShardedStep,
        files: dict[str, list[Item]],
        pieces: dict[Item, tuple[ShardedTensor, Piece]],
        recorded: dict[str, list[Recorded]],
        depth: Depth,
        workers: Workers,
    ) -> None:
        self._sharded = sharded
        self._files = files
        self._pieces = pieces
        self._recorded = recorded
        self._depth = depth
        self._workers = workers

    def in_order(self, file: str) -> list[Finding | Anomaly]:
        """A shard with a recorded SHA-256: in this thread, each byte read once for both."""
        from ckpttool.checks.sharded_digests import compare

        path = self._sharded.file(file)
        try:
            reader = HashingReader(path)
            with reader:
                found = list(self._entries(reader, file, map))
                sha256 = reader.sha256()
                if reader.changed():
                    return [*found, _changed(path)]
        except UnreadableError as error:
            return [whole_file.Unreadable.at(path, error.reason)]
        return [*found, *compare(self._recorded[file], sha256)]

    def side_by_side(self, file: str) -> Iterator[Finding | Anomaly]:
        """Any other shard: its entries in several threads."""
        path = self._sharded.file(file)
        try:
            reader = FileReader(path)
        except UnreadableError as error:
            yield whole_file.Unreadable.at(path, error.reason)
            return
        with reader:
            total = sum(item.length for item in self._files[file])
            deal_out = partial(self._workers.map, total_bytes=total)
            yield from self._entries(reader, file, deal_out)
            if reader.changed():
                yield _changed(path)

    def _entries(
        self, reader: FileReader, file: str, deal_out: Callable[..., Any]
    ) -> Iterator[Finding | Anomaly]:
        items = self._files.get(file, [])
        whole = [item for item in items if item.stop <= reader.size and not item.transforms]
        yield from _transformed(file, items)
        batches = [whole[start : start + _BATCH] for start in range(0, len(whole), _BATCH)]
        other = 0
        for found in deal_out(partial(self._batch, reader), batches):
            for one in found:
                if isinstance(one, Anomaly) and one.code == "sharded-transformed":
                    other += 1
                else:
                    yield one
        if other:
            yield Anomaly("sharded-transformed", file, count=other, stored_as="safetensors")

    def _batch(self, reader: FileReader, batch: list[Item]) -> list[Finding | Anomaly]:
        found: list[Finding | Anomaly] = []
        for item in batch:
            described, meter = self._pieces.get(item), self._workers.meter
            found += _check_item(reader, item, described, self._depth, meter)
        return found


def _changed(path: str) -> Finding:
    words = "the shard changed or was replaced while it was read"
    return whole_file.ChangedWhileRead.finding(Place(path), words, "verify again")


def _transformed(file: str, items: list[Item]) -> Iterator[Anomaly]:
    kinds: dict[tuple[str, ...], int] = {}
    for item in items:
        if item.transforms:
            kinds[item.transforms] = kinds.get(item.transforms, 0) + 1
    for transforms, count in kinds.items():
        yield Anomaly("sharded-transformed", file, count=count, stored_as=", ".join(transforms))


def _check_item(
    reader: FileReader,
    item: Item,
    described: tuple[ShardedTensor, Piece] | None,
    depth: Depth,
    meter: Meter,
) -> list[Finding | Anomaly]:
    from ckpttool.checks.hidden_pickles import hidden_pickles
    from ckpttool.checks.measure import check_each_record

    window: FileReader
    if item.length <= _SMALL:
        window = BytesReader(reader.read(item.offset, item.length), reader.path)
    else:
        window = WindowReader(reader, item.offset, item.length)
    checkpoint = Checkpoint(reader.path, window, depth.limits)
    if checkpoint.kind in _NOT_READ:
        return [Anomaly("sharded-transformed", item.file)]
    subject = ItemSubject(reader.path, checkpoint, item.name, item.offsets is None)
    subject.anomalies.extend(checkpoint.anomalies)
    container = checkpoint.container
    if container is not None:
        subject.anomalies.extend(container.check_structure())
        subject.anomalies.extend(hidden_pickles(checkpoint))
        subject.anomalies.extend(check_each_record(container, meter))
    if depth.finite and container is not None:
        subject.anomalies.extend(_values(checkpoint))
    findings: list[Finding | Anomaly] = list(_look(subject))
    if problem := _difference(checkpoint, described):
        facts = {"names": (item.name,), "problem": problem}
        findings.append(Anomaly("sharded-item-differs", item.file, **facts))
    return findings


def _values(checkpoint: Checkpoint) -> Iterator[Anomaly]:
    from ckpttool.checks.measure import Meter, Workers
    from ckpttool.checks.values import count_values

    with Workers(1, Meter(0, None)) as alone:  # this runs in a thread of the pool already
        yield from count_values(checkpoint, alone)


def _look(subject: ItemSubject) -> Iterator[Finding]:
    for family in (container_checks.CHECKS, trust_checks.CHECKS):
        for check in family:
            yield from check.look(subject)
    if any(subject.seen("values-nan", "values-infinite")):
        from ckpttool.checks.values import CHECKS

        for value_check in CHECKS:
            for finding in value_check.look(subject):
                finding.place = subject.place()
                yield finding


def _difference(
    checkpoint: Checkpoint, described: tuple[ShardedTensor, Piece] | None
) -> str | None:
    """How an entry's content is not what the metadata says of it, in words; None if it is."""
    if checkpoint.container is None or not checkpoint.container.entries:
        return f"where it should lie is {checkpoint.words}, no archive of torch's"
    if described is None or not checkpoint.readable:
        return None
    tensor, piece = described
    held = checkpoint.tree
    if not isinstance(held, TensorValue):
        return f"the shard holds {what(held)} where this tensor should be"
    if held.dtype != tensor.dtype:
        return f"the shard holds it as {held.dtype}, the metadata says {tensor.dtype}"
    if held.shape != piece.sizes:
        shape = None if held.shape is None else list(held.shape)
        return f"the shard holds a piece of shape {shape}, the metadata says {list(piece.sizes)}"
    return None
