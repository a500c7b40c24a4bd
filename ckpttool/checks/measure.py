"""Measuring for `verify`: checksums, side by side in threads, and progress that they report.

Only here are the contents of records read. What is found is noted as an anomaly, like what the
formats notice by themselves, and judged by `checks.container`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from ckpttool.errors import FormatError, LimitError
from ckpttool.formats.anomaly import Anomaly

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from ckpttool.formats.container import Container, Record
    from ckpttool.io.durable import Progress

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

# Below this many bytes, starting threads costs more than they save.
_WORTH_THREADS = 16 << 20
# Below this many, starting processes costs more than mapping saves; and below this many in one
# record, finding its place and telling its checksum does.
_WORTH_MAPPING = 128 << 20
_WORTH_TELLING = 64 << 10
_BATCH_BYTES = 8 << 20
_BATCH_RECORDS = 256
# Long enough to keep the cost of reporting out of sight, short enough for a moving bar.
_SLICE_BYTES = 64 << 20
_ALIGNMENT = 64


class CancelledError(Exception):
    """The main thread was interrupted while workers were busy; never leaves this package."""


class Meter:
    """Counts bytes that have been dealt with, from any thread, and tells `progress` about it.

    `progress(done, total, label)` is called by one thread at a time. `cancel` makes every further
    count raise, so that busy workers end soon.
    """

    __slots__ = ("_cancelled", "_done", "_lock", "_progress", "label", "total")

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total = total
        self.label = ""
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()
        self._cancelled = False

    def add(self, count: int) -> None:
        """`count` more bytes are done."""
        if self._cancelled:
            raise CancelledError
        with self._lock:
            self._done += count
            if self._progress is not None:
                self._progress(min(self._done, self.total), self.total, self.label)

    @property
    def done(self) -> int:
        """How many bytes have been counted."""
        return self._done

    def cancel(self) -> None:
        """Makes workers stop at their next count."""
        self._cancelled = True


class Workers:
    """Runs functions side by side in up to `jobs` threads; a context manager.

    Threads start only when there is work for them. They are worth having because reading and
    checksums release the interpreter lock.
    """

    __slots__ = ("_pool", "jobs", "meter")

    def __init__(self, jobs: int | None, meter: Meter) -> None:
        self.jobs = jobs or min(4, os.cpu_count() or 1)
        self.meter = meter
        self._pool: ThreadPoolExecutor | None = None

    def map(
        self, function: Callable[[_Item], _Result], items: list[_Item], total_bytes: int
    ) -> Iterable[_Result]:
        """`function` of every item, in order."""
        if self.jobs == 1 or len(items) < 2 or total_bytes < _WORTH_THREADS:
            return map(function, items)
        return self._threads().map(function, items)

    def submit(self, function: Callable[..., _Result], *arguments: Any) -> Future[_Result]:
        """Calls `function` in a thread of the pool."""
        return self._threads().submit(function, *arguments)

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            from concurrent.futures import ThreadPoolExecutor

            self._pool = ThreadPoolExecutor(self.jobs, thread_name_prefix="ckpttool")
        return self._pool

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._pool is not None:
            if kind is not None:
                self.meter.cancel()
            self._pool.shutdown(wait=True, cancel_futures=kind is not None)


def check_records(container: Container, workers: Workers) -> Iterator[Anomaly]:
    """Reads every record: `crc-mismatch`, `crc-missing`, `record-unreadable`, `misaligned`.

    Hidden records (behind a namesake, outside of the root folder) are read as well.
    """
    total = sum(record.size for record in container.entries)
    batches = list(_batches(container.entries))
    known = _mapped(container, workers, total)

    def work(batch: list[Record]) -> list[Anomaly]:
        found = [_check_record(container, record, workers.meter, known) for record in batch]
        return [anomaly for anomalies in found for anomaly in anomalies]

    for anomalies in workers.map(work, batches, total):
        yield from anomalies


def check_each_record(container: Container, meter: Meter) -> Iterator[Anomaly]:
    """The same in this very thread, for one of many small archives."""
    for record in container.entries:
        yield from _check_record(container, record, meter, {})


def _mapped(container: Container, workers: Workers, total: int) -> dict[Record, int]:
    """Checksums of the records that lie in the file as they are, where it may be mapped."""
    if total < _WORTH_MAPPING or workers.jobs < 2 or not container.has_checksums:
        return {}
    from ckpttool.io.mapped import can_map, mapped_checksums

    if not can_map(container.reader):
        return {}
    spans: dict[Record, tuple[int, int]] = {}
    for record in container.entries:
        if record.crc is None or record.size < _WORTH_TELLING:
            continue
        try:
            span = container.span(record)
        except FormatError:
            continue  # it is read later on, and then said why it can't be
        if span is not None:
            spans[record] = span
    places = list(spans)
    found = mapped_checksums(
        container.reader, list(spans.values()), workers.jobs, workers.meter.add
    )
    return {places[place]: value for place, value in found.items()}


def _batches(records: list[Record]) -> Iterator[list[Record]]:
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        size += record.size
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_RECORDS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _check_record(
    container: Container, record: Record, meter: Meter, known: dict[Record, int]
) -> list[Anomaly]:
    """What is wrong with one record. `known` are checksums that have been taken already."""
    found = []
    try:
        span = container.span(record)
        is_storage = container.format == "torch-zip" and record.name.startswith("data/")
        if is_storage and span is not None and span[0] % _ALIGNMENT:
            found.append(Anomaly("misaligned", record.name, offset=span[0]))
        if record.crc is None or not container.has_checksums:
            meter.add(record.size)
            return found
        actual = known.get(record)
        if actual is None:
            actual = _crc32(container, record, span, meter)
    except LimitError as error:
        return [Anomaly("record-limit", record.name, reason=str(error))]
    except FormatError as error:
        return [Anomaly("record-unreadable", record.name, reason=str(error))]
    if actual != record.crc:
        code = "crc-mismatch" if record.crc else "crc-missing"
        facts = {"declared": f"{record.crc:08x}", "actual": f"{actual:08x}"}
        found.append(Anomaly(code, record.name, **facts))
    return found


def _crc32(container: Container, record: Record, span: tuple[int, int] | None, meter: Meter) -> int:
    if span is None or span[1] <= _SLICE_BYTES:
        value = container.crc32(record)
        meter.add(record.size)
        return value
    from ckpttool.io.checksum import crc32_of

    offset, length = span
    value = 0
    for start in range(0, length, _SLICE_BYTES):
        piece = min(_SLICE_BYTES, length - start)
        value = crc32_of(container.reader, offset + start, piece, value)
        meter.add(piece)
    return value
