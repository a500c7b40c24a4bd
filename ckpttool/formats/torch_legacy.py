"""torch's legacy stream, as `torch.save` wrote it before 1.6, and still can.

Five pickles (magic number, protocol version, system information, the object, the keys of its
storages), then for each key eight bytes that count the storage's elements, little-endian, and its
bytes. There are no checksums, no names, and no alignment. Source: torch/serialization.py,
`_legacy_save` and `_legacy_load`; torch/csrc/serialization.cpp, `THPStorage_writeFileRaw`.

The second word on each storage's size is the pickle's. Where the stream's count differs, the
pickle's is followed, and said to differ: so a damaged count costs nothing, whatever it claims.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.formats.anomaly import Anomaly
from ckpttool.formats.container import STORED, Container, Record, cut_short
from ckpttool.formats.dtypes import BITS, storage_byte_count
from ckpttool.formats.pickle_cursor import PickleCursor
from ckpttool.formats.values import StorageRef

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from ckpttool.formats.limits import ReaderLimits
    from ckpttool.formats.static_pickle import PickleResult
    from ckpttool.io.reading import FileReader

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001
OBJECT = "data.pkl"
_COUNT_BYTES = 8


def open_legacy(reader: FileReader, limits: ReaderLimits) -> LegacyContainer:
    """Opens a legacy stream: reads its pickles and the counts between its storages, no storage.

    What is wrong in it is an anomaly. Raises UnreadableError when the system can't read the file.
    """
    return LegacyContainer(reader, limits)


class LegacyBase(Container):
    """What the stream and the tar have in common: storages as spans of the file, no checksums."""

    def span(self, name: str | Record) -> tuple[int, int]:
        """See `Container.span`."""
        record = self.record(name)
        start = record.header_offset + (record.stored_size - record.size)
        present = max(0, self.reader.size - start)
        if present < record.size:
            raise cut_short(record, record.size, present)
        return start, record.size

    def pickles(self) -> list[str]:
        """See `Container.pickles`."""
        return [OBJECT] if OBJECT in self.records else []

    def add(self, name: str, offset: int, size: int, *, before: int = 0) -> None:
        """A record of `size` bytes behind `before` bytes of its own bookkeeping at `offset`."""
        record = Record(name, size, size + before, None, STORED, 0, offset)
        if name in self.records:
            self.note("duplicate-record", name, count=2, offsets=[offset])
        self.entries.append(record)
        self.records[name] = record

    def note(self, code: str, record: str | None = None, **facts: Any) -> None:
        """Keeps an anomaly."""
        self.anomalies.append(Anomaly(code, record, **facts))

    def check_size(self, needed: int) -> None:
        """Compares the file's size with where its last storage ends."""
        if needed > self.reader.size:
            self.note("truncated", needed=needed, present=self.reader.size)
        elif needed < self.reader.size:
            from ckpttool.formats.torch_zip import trailing_zeros

            length = self.reader.size - needed
            zeros = trailing_zeros(self.reader, needed) == length
            self.note("trailing-bytes", length=length, zeros=zeros, where="behind")

    def check_side_pickle(self, part: str, result: PickleResult) -> None:
        """A pickle beside the main one holds numbers and names; a global in it is reported."""
        if not result.globals:
            return
        from ckpttool.formats.globals import Trust, classify

        trusts = {path: classify(ref.module, ref.name) for path, ref in result.globals.items()}
        dangerous = [path for path, trust in trusts.items() if trust is Trust.DANGEROUS]
        unknown = [path for path, trust in trusts.items() if trust is Trust.UNKNOWN]
        whole = result.error is None
        self.note("hidden-pickle", part, dangerous=dangerous, unknown=unknown, whole=whole)

    def element_count(self, offset: int) -> int | None:
        """The eight-byte count at `offset`, which is signed; None where the file ends before it."""
        data = self.reader.read(offset, _COUNT_BYTES)
        return int.from_bytes(data, "little", signed=True) if len(data) == _COUNT_BYTES else None


class LegacyContainer(LegacyBase):
    """A legacy stream. Its records are `data.pkl` (the object) and `data/<key>` for each storage.

    `pickle_results` has all five pickles: `magic_number`, `protocol_version`, `sys_info`,
    `data.pkl`, `storage_keys`.
    """

    format = "torch-legacy"

    def __init__(self, reader: FileReader, limits: ReaderLimits) -> None:
        super().__init__(reader, limits)
        self._cursor = PickleCursor(reader, limits, 0, reader.size)
        self._storages: dict[str, StorageRef] = {}
        if self._read_preamble() and self._read_object():
            self._read_storages()

    def _read_preamble(self) -> bool:
        for part, wanted in (
            ("magic_number", MAGIC_NUMBER),
            ("protocol_version", PROTOCOL_VERSION),
            ("sys_info", None),
        ):
            result = self._read_part(part)
            if result is None:
                return False
            if wanted is not None and result.value != wanted:
                self.note("legacy-header-damaged", field=part, found=_shown(result.value))
        version = self.pickle_results["protocol_version"].value
        self.facts["protocol_version"] = version if isinstance(version, int) else None
        info = self.pickle_results["sys_info"].value
        if isinstance(info, dict) and isinstance(info.get("little_endian"), bool):
            # Of the machine that wrote it. The storages are little-endian whatever this says.
            self.facts["little_endian"] = info["little_endian"]
        return True

    def _read_object(self) -> bool:
        start = self._cursor.position
        result = self._cursor.next(self._persistent())
        self.pickle_results[OBJECT] = result
        stop = self._cursor.position if result.error is None else self.reader.size
        self.add(OBJECT, start, min(stop - start, self.limits.pickle_bytes))
        if result.error is not None and self._cursor.ended_early:
            self.note("truncated", OBJECT, present=self.reader.size)
        return result.error is None

    def _persistent(self) -> Callable[[Any], Any]:
        from ckpttool.formats.rebuild import storage_from_persistent_id

        def load(pid: Any) -> Any:
            value = storage_from_persistent_id(pid)
            if isinstance(value, StorageRef):
                self._storages[value.key] = value
            return value

        return load

    def _read_part(self, part: str) -> PickleResult | None:
        """One of the small pickles, None if it can't be read."""
        result = self._cursor.next()
        self.pickle_results[part] = result
        self.check_side_pickle(part, result)
        if result.error is None:
            return result
        if self._cursor.ended_early:
            self.note("truncated", present=self.reader.size, part=part)
        else:
            self.note("legacy-header-damaged", field=part, reason=str(result.error))
        return None

    def _read_storages(self) -> None:
        result = self._read_part("storage_keys")
        if result is None:
            return
        keys = result.value
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            self.note("legacy-header-damaged", field="storage_keys", found=_shown(keys))
            return
        if len(keys) > self.limits.records:
            self.note("too-many-records", declared=len(keys), limit=self.limits.records)
            return
        position = self._cursor.position
        for key in keys:
            size = self._storage_size(key, position)
            if size is None:
                return
            self.add(f"data/{key}", position, size, before=_COUNT_BYTES)
            position += _COUNT_BYTES + size
        self.check_size(position)

    def _storage_size(self, key: str, position: int) -> int | None:
        """Bytes of a storage, by the pickle; what the stream says is compared. None if unknown."""
        record, storage = f"data/{key}", self._storages.get(key)
        count = self.element_count(position)
        if storage is None or storage.dtype not in BITS:
            # Nothing says how wide its elements are, so nothing behind it can be found.
            self.note("storage-unknown", record, key=key, elements=count)
            return None
        size = storage_byte_count(storage.dtype, storage.numel)
        if count is not None and count != storage.numel:
            actual = storage_byte_count(storage.dtype, count)
            facts = {"key": key, "declared": size, "actual": actual, "elements": count}
            self.note("storage-size-word", record, **facts)
        return size

    def check_structure(self) -> Iterator[Anomaly]:
        """Nothing is left to compare: opening has looked at all that the stream says twice."""
        return iter(())


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, (int, str, bytes)) else type(value).__name__
    return text if len(text) <= 80 else text[:77] + "..."
