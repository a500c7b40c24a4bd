"""torch's first format, a tar of four members, as written before torch 0.1.10.

`sys_info` is a pickle; `storages` holds a pickled count, for each storage a pickled (key, location,
class), the count of its elements in eight bytes, and its bytes, and last a pickled list of views;
`tensors` a pickled count, and for each tensor a pickled (key, storage key, class), the number of
dimensions in eight bytes (of which four count), shape, strides and offset in eight bytes each;
`pickle` is the object, which refers to tensors and storages by key. Source: torch/serialization.py,
`_legacy_load.legacy_load`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.formats.dtypes import BITS, STORAGE_DTYPES, TENSOR_CLASS_DTYPES, storage_byte_count
from ckpttool.formats.pickle_cursor import PickleCursor
from ckpttool.formats.tar_layout import tar_members
from ckpttool.formats.torch_legacy import OBJECT, LegacyBase
from ckpttool.formats.values import GlobalRef, StorageRef, TensorValue

if TYPE_CHECKING:
    from typing import Any

    from ckpttool.formats.limits import ReaderLimits
    from ckpttool.formats.static_pickle import PickleResult
    from ckpttool.formats.tar_layout import TarMember
    from ckpttool.io.reading import FileReader

_MEMBERS = ("sys_info", "storages", "tensors", "pickle")
_MOST_MEMBERS = 1000
_WORD = 8
# torch itself allows 64.
_MOST_DIMENSIONS = 64


def open_legacy_tar(reader: FileReader, limits: ReaderLimits) -> LegacyTarContainer:
    """Opens a legacy tar: reads its pickles and the numbers between them, no storage.

    What is wrong in it is an anomaly. Raises UnreadableError when the system can't read the file.
    """
    return LegacyTarContainer(reader, limits)


class LegacyTarContainer(LegacyBase):
    """A legacy tar. Its records are `data.pkl` (the object) and `data/<key>` for each storage."""

    format = "torch-legacy-tar"

    def __init__(self, reader: FileReader, limits: ReaderLimits) -> None:
        super().__init__(reader, limits)
        self._values: dict[str, StorageRef | TensorValue] = {}
        self._members = self._find_members()
        for name, read in (
            ("sys_info", self._read_sys_info),
            ("storages", self._read_storages),
            ("tensors", self._read_tensors),
            ("pickle", self._read_object),
        ):
            member = self._members.get(name)
            if member is not None:
                read(member)

    def _find_members(self) -> dict[str, TarMember]:
        members: dict[str, TarMember] = {}
        for member in tar_members(self.reader, most=_MOST_MEMBERS):
            name = member.name[2:] if member.name.startswith("./") else member.name
            if name in _MEMBERS and name in members:
                self.note("duplicate-record", name, count=2, offsets=[member.header])
            members[name] = member
        needed = max((m.content + m.size for m in members.values()), default=0)
        missing = [name for name in _MEMBERS if name not in members]
        if needed > self.reader.size:
            self.note("truncated", needed=needed, present=self.reader.size)
        elif missing:
            self.note("truncated", present=self.reader.size, missing=missing)
        return members

    def _cursor(self, member: TarMember) -> PickleCursor:
        return PickleCursor(self.reader, self.limits, member.content, member.content + member.size)

    def _next(self, cursor: PickleCursor, part: str, *, plain: bool = True) -> PickleResult | None:
        """The next pickle of a member, None if it can't be read. A `plain` one names no global."""
        result = cursor.next()
        if plain or result.error is not None:
            self.check_side_pickle(part, result)
        if result.error is None:
            return result
        self.note("legacy-header-damaged", field=part, reason=str(result.error))
        return None

    def _read_sys_info(self, member: TarMember) -> None:
        result = self._next(self._cursor(member), "sys_info")
        if result is not None:
            self.pickle_results["sys_info"] = result
            if isinstance(result.value, dict):
                version = result.value.get("protocol_version")
                self.facts["protocol_version"] = version if isinstance(version, int) else None

    def _count(self, cursor: PickleCursor, part: str) -> int:
        result = self._next(cursor, part)
        count = result.value if result is not None else 0
        if type(count) is int and 0 <= count <= self.limits.records:
            return count
        self.note("legacy-header-damaged", field=part, reason="the count makes no sense")
        return 0

    def _triple(self, cursor: PickleCursor, part: str) -> tuple[str, Any, GlobalRef] | None:
        """The pickled (key, location or storage key, class) in front of each storage and tensor."""
        result = self._next(cursor, part, plain=False)
        if result is None:
            return None
        value = result.value
        kind = value[2] if isinstance(value, tuple) and len(value) == 3 else None
        if isinstance(kind, GlobalRef) and kind.module.split(".")[0] == "torch":
            if len(result.globals) > 1:
                self.check_side_pickle(part, result)
            if kind.name in STORAGE_DTYPES or kind.name in TENSOR_CLASS_DTYPES:
                return str(value[0]), value[1], kind
        self.check_side_pickle(part, result)
        self.note("legacy-header-damaged", field=part, reason="an entry makes no sense")
        return None

    def _read_storages(self, member: TarMember) -> None:
        cursor = self._cursor(member)
        for _ in range(self._count(cursor, "storages")):
            entry = self._triple(cursor, "storages")
            if entry is None:
                return
            key, location, kind = entry
            count = self.element_count(cursor.position)
            dtype = STORAGE_DTYPES.get(kind.name, "")
            if dtype not in BITS or count is None or not self._fits(cursor, dtype, count):
                facts = {"key": key, "elements": count, "class": kind.path}
                self.note("storage-unknown", f"data/{key}", **facts)
                return
            size = storage_byte_count(dtype, count)
            self._values[key] = StorageRef(dtype, key, str(location), count)
            self.add(f"data/{key}", cursor.position, size, before=_WORD)
            cursor.position += _WORD + size
        self._read_views(cursor)

    def _fits(self, cursor: PickleCursor, dtype: str, count: int) -> bool:
        left = cursor.stop - cursor.position - _WORD
        return count >= 0 and storage_byte_count(dtype, count) <= left

    def _read_views(self, cursor: PickleCursor) -> None:
        result = self._next(cursor, "storage views")
        if result is None:
            return
        for view in result.value if isinstance(result.value, list) else ():
            if not (isinstance(view, tuple) and len(view) == 4):
                continue
            root = self._values.get(str(view[1]))
            if isinstance(root, StorageRef) and type(view[2]) is type(view[3]) is int:
                name = (str(view[0]), view[2], view[3])
                self._values[str(view[0])] = StorageRef(
                    root.dtype, root.key, root.device, root.numel, name
                )

    def _read_tensors(self, member: TarMember) -> None:
        cursor = self._cursor(member)
        for _ in range(self._count(cursor, "tensors")):
            entry = self._triple(cursor, "tensors")
            if entry is None:
                return
            key, storage_key, kind = entry
            numbers = self._numbers(cursor)
            if numbers is None:
                self.note("legacy-header-damaged", field="tensors", reason=f"tensor {key[:40]}")
                return
            shape, stride, offset = numbers
            storage = self._values.get(str(storage_key))
            found = storage if isinstance(storage, StorageRef) else None
            if found is not None and found.view is not None:
                offset += found.view[1]
            dtype = TENSOR_CLASS_DTYPES.get(kind.name, found.dtype if found else "")
            self._values[key] = TensorValue(found, offset, shape, stride, False, dtype)

    def _numbers(self, cursor: PickleCursor) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
        """Shape, strides and offset of a tensor; None if they are not there or make no sense."""
        data = self.reader.read(cursor.position, _WORD)
        dimensions = int.from_bytes(data[:4], "little")
        length = _WORD * (2 * dimensions + 1)
        if len(data) < _WORD or dimensions > _MOST_DIMENSIONS:
            return None
        words = self.reader.read(cursor.position + _WORD, length)
        if len(words) < length or cursor.position + _WORD + length > cursor.stop:
            return None
        numbers = tuple(
            int.from_bytes(words[at : at + _WORD], "little", signed=True)
            for at in range(0, length, _WORD)
        )
        cursor.position += _WORD + length
        if min(numbers) < 0:
            return None
        return numbers[:dimensions], numbers[dimensions:-1], numbers[-1]

    def _read_object(self, member: TarMember) -> None:
        cursor = self._cursor(member)
        result = cursor.next(self._persistent)
        self.pickle_results[OBJECT] = result
        self.add(OBJECT, member.content, member.size)

    def _persistent(self, pid: Any) -> Any:
        """A tuple stands for the class in it, a number or its text for a tensor or a storage."""
        if isinstance(pid, tuple) and pid:
            return pid[0]
        value = self._values.get(str(pid)) if isinstance(pid, (int, str)) else None
        if value is None:
            raise ValueError("refers to nothing in the archive")
        return value
