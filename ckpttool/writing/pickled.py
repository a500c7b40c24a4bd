"""Inert content as a pickle of protocol 2, the one that torch writes and its loaders expect.

The spelling is that of CPython's `_pickle.c` under `torch.save`, down to the memo: content that was
read from a file of torch's mostly gives the same bytes again. What is one object in the tree is
written once and referred to from then on, so sharing and cycles come back. The writer keeps its own
stack, so nesting cannot exhaust Python's.

Opcodes: CPython's Lib/pickletools.py. What protocol 2 lacks and the content needs (NEWOBJ_EX, names
with dots) is written with the opcodes of protocol 4, and the stream then says that it is of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ckpttool.errors import UnwritableError
from ckpttool.formats.values import GlobalRef, Opaque, OrderedMap, StorageRef, TensorValue
from ckpttool.writing.calls import (
    ORDERED_DICT,
    REBUILD_TENSOR,
    STORAGE_CLASSES,
    Unwritable,
    call_of,
    has_storage_class,
)
from ckpttool.writing.places import KeyLabel, path_text
from ckpttool.writing.stream import TUPLE_OPCODES, PickleStream, integers

# A value that must be saved before its holder can go on, and what to call it in a path.
_Part = tuple[Any, Any]
_Parts = Iterator[_Part]

_BATCH = 1000  # items for one APPENDS or SETITEMS, as in _pickle.c
_SHORT_TEXT = 1 << 16
# What is made at once, a tuple or a call, can hold itself only by way of something else; each way
# round writes it again. Honest content has few of these, hostile content as many as it likes.
_MOST_AGAIN = 1_000_000
_AGAIN_COST = 16


def pickled(tree: Any) -> bytes:
    """The pickle of `tree`: plain data and inert values (`formats.values`).

    Raises UnwritableError with the dotted path of the first thing that has no form in a pickle.
    """
    return _Pickler().run(tree)


class _Pickler(PickleStream):
    """One pickle being written, and what in the tree is being written at the moment."""

    def __init__(self) -> None:
        super().__init__()
        self._extents: dict[tuple[int, ...], bytes] = {}
        self._open: set[int] = set()
        self._again = 0
        self._atoms: dict[type, Callable[[Any], object]] = {
            int: self.integer,
            bool: self.truth,
            type(None): self.none,
            float: self.real,
        }

    def run(self, tree: Any) -> bytes:
        """The whole stream."""
        labels: list[Any] = []
        try:
            self._walk(tree, labels)
        except Unwritable as error:
            raise UnwritableError(path_text(labels), str(error)) from error
        self.out += b"."
        return bytes(self.out)

    def _walk(self, tree: Any, labels: list[Any]) -> None:
        """Saves `tree`; `labels` is the path of what is being saved."""
        todo: list[_Parts] = [iter((("", tree),))]
        labels.append("")
        while todo:
            for labels[-1], value in todo[-1]:
                parts = self._begin(value)
                if parts is not None:
                    todo.append(parts)
                    labels.append("")
                    break
            else:
                labels.pop()
                todo.pop()

    def _begin(self, value: Any) -> _Parts | None:
        """Saves a value that has no parts; gives the parts of one that has, and saves on the way
        through them.
        """
        kind = type(value)
        atom = self._atoms.get(kind)
        if atom is not None:
            atom(value)
            return None
        known = self.memo.get(id(value))
        if known is not None:
            self.get(known)
            return None
        if kind is str:
            self.text(value)
        elif kind is TensorValue and value.extra is None and _is_plain(value):
            self.tensor(value)
        elif kind is StorageRef:
            self.storage(value)
        elif kind is GlobalRef:
            self.name(value)
        elif kind is bytes:
            self.byte_string(value)
        else:
            return self._members(kind, value)
        return None

    def _members(self, kind: type, value: Any) -> _Parts:
        if kind is dict:
            return self.dictionary(value)
        if kind is list:
            return self.sequence(value)
        if kind is tuple:
            return self.fixed(value)
        if kind is Opaque:
            return self.opaque(value)
        call = call_of(value)
        if call is None:
            raise Unwritable(f"a {kind.__module__}.{kind.__qualname__} has no form in a pickle")
        pairs = value.items() if kind is OrderedMap else None
        return self.call(call, value, pairs)

    def _replaced(self, value: Any, opcodes: bytes) -> bool:
        """Whether `value` came to be while its parts were saved: then these are taken off again."""
        known = self.memo.get(id(value))
        if known is None:
            return False
        self.out += opcodes
        self.get(known)
        return True

    def _enter(self, value: Any, size: int) -> bool:
        """Whether this is the outermost time that `value` is being saved."""
        if id(value) not in self._open:
            self._open.add(id(value))
            return True
        self._again += size + _AGAIN_COST
        if self._again > _MOST_AGAIN:
            raise Unwritable("it is made at once and holds itself")
        return False

    def storage(self, value: StorageRef) -> None:
        """The persistent id ('storage', class, key, location, elements).

        Zip containers have no views of storages: one of the legacy stream's is a storage by itself.
        """
        kind = STORAGE_CLASSES.get(value.dtype)
        if kind is None:
            raise Unwritable(f"there is no class of storages for {value.dtype!r}")
        key, numel = value.key, value.numel
        if value.view is not None:
            key, _, numel = value.view
        self._persistent_id(kind, key, value.device, numel)

    def _persistent_id(self, kind: GlobalRef, key: str, device: str, numel: int) -> None:
        self.out += b"("
        self.word("storage")
        self.name(kind)
        known = self.memo.get(id(key))
        if known is None:
            self.text(key)
        else:
            self.get(known)
        self.word(device)
        self.integer(numel)
        self.out += b"t"
        self.put()
        self.out += b"Q"

    def tensor(self, value: TensorValue) -> None:
        """An ordinary tensor: what `call` would write for it, without the detour."""
        storage = value.storage
        assert storage is not None and value.shape is not None and value.stride is not None
        self.name(REBUILD_TENSOR)
        self.out += b"("
        kind = STORAGE_CLASSES[storage.dtype]
        self._persistent_id(kind, storage.key, storage.device, storage.numel)
        self.integer(value.offset)
        self._extent(value.shape)
        self._extent(value.stride)
        self.out += b"\x88" if value.requires_grad else b"\x89"
        self.name(ORDERED_DICT)
        self.out += b")R"
        self.put()
        self.out += b"t"
        self.put()
        self.out += b"R"
        self.remember(value)

    def _extent(self, extent: tuple[int, ...]) -> None:
        known = self._extents.get(extent)
        if known is None:
            known = self._extents[extent] = integers(extent)
        self.out += known
        if extent:
            self.put()

    # What has parts: each saves itself between them.

    def sequence(self, value: list[Any]) -> _Parts:
        """EMPTY_LIST, and its items in batches."""
        self.out += b"]"
        self.remember(value)
        return self._items(value)

    def dictionary(self, value: dict[Any, Any]) -> _Parts:
        """EMPTY_DICT, and its items in batches."""
        self.out += b"}"
        self.remember(value)
        return self._exact_pairs(value)

    def _items(self, items: list[Any]) -> _Parts:
        """APPEND for one, else APPENDS."""
        atoms, single = self._atoms, len(items) == 1
        for start in range(0, len(items), _BATCH):
            self.out += b"" if single else b"("
            for index in range(start, min(start + _BATCH, len(items))):
                value = items[index]
                atom = atoms.get(type(value))
                if atom is None:
                    yield index, value
                else:
                    atom(value)
            self.out += b"a" if single else b"e"

    def _exact_pairs(self, value: dict[Any, Any]) -> _Parts:
        """SETITEM for one, else SETITEMS; a last batch that is full is followed by an empty one."""
        if not value:
            return
        single = len(value) == 1
        self.out += b"" if single else b"("
        for index, (key, item) in enumerate(value.items(), 1):
            yield from self._pair(key, item)
            if index % _BATCH == 0:
                self.out += b"u("
        self.out += b"s" if single else b"u"

    def _other_pairs(self, pairs: Iterable[tuple[Any, Any]]) -> _Parts:
        """The same for the items of what is not quite a dictionary: the last batch may have one."""
        batch: list[tuple[Any, Any]] = []
        for pair in pairs:
            batch.append(pair)
            if len(batch) == _BATCH:
                yield from self._batch(batch)
                batch = []
        if batch:
            yield from self._batch(batch)

    def _batch(self, batch: list[tuple[Any, Any]]) -> _Parts:
        single = len(batch) == 1
        self.out += b"" if single else b"("
        for key, item in batch:
            yield from self._pair(key, item)
        self.out += b"s" if single else b"u"

    def _pair(self, key: Any, item: Any) -> _Parts:
        if type(key) is str and id(key) not in self.memo and len(key) < _SHORT_TEXT:
            self.text(key)
        else:
            yield KeyLabel(key), key
        atom = self._atoms.get(type(item))
        if atom is None:
            yield key, item
        else:
            atom(item)

    def fixed(self, value: tuple[Any, ...]) -> _Parts:
        """EMPTY_TUPLE, TUPLE1 to TUPLE3, TUPLE."""
        size = len(value)
        if not size:
            self.out += b")"
            return
        outermost = self._enter(value, size)
        self.out += b"(" if size > 3 else b""
        yield from enumerate(value)
        if outermost:
            self._open.discard(id(value))
        if not self._replaced(value, b"1" if size > 3 else b"0" * size):
            self.out += b"t" if size > 3 else TUPLE_OPCODES[size]
            self.remember(value)

    def opaque(self, value: Opaque) -> _Parts:
        """A call that was kept as it stood in a file."""
        if value.opcode == "BUFFER":
            raise Unwritable("a buffer that lies outside of the pickle")
        return self.call(value, value, value.pairs)

    def call(self, call: Opaque, owner: Any, pairs: Iterable[tuple[Any, Any]] | None) -> _Parts:
        """A call whose result is `owner`; then its items, and last its state, as in `save_reduce`.

        `pairs` are the items of a mapping.
        """
        outermost = self._enter(owner, len(call.args))
        yield from _CALLS[call.opcode](self, call)
        if outermost:
            self._open.discard(id(owner))
        if self._replaced(owner, b"0"):
            return
        self.remember(owner)
        if call.items:
            yield from self._items(call.items)
        if pairs:
            yield from self._other_pairs(pairs)
        if call.state is not None:
            yield "" if isinstance(call.state, dict) else "state", call.state
            self.out += b"b"

    def reduced(self, call: Opaque, opcode: bytes = b"R") -> _Parts:
        """REDUCE."""
        yield "target", call.target
        yield "args", call.args
        self.out += opcode

    def new_object(self, call: Opaque) -> _Parts:
        """NEWOBJ."""
        return self.reduced(call, b"\x81")

    def new_object_ex(self, call: Opaque) -> _Parts:
        """NEWOBJ_EX, an opcode of protocol 4."""
        self.need_protocol_4()
        yield "target", call.target
        yield "args", call.args
        yield "kwargs", {} if call.kwargs is None else call.kwargs
        self.out += b"\x92"

    def instance(self, call: Opaque) -> _Parts:
        """INST, of protocol 0: a class called with what stands above the mark."""
        self.out += b"("
        yield from enumerate(call.args)
        target = call.target
        self.out += f"i{target.module}\n{target.name}\n".encode("utf-8", "surrogatepass")

    def instance_of(self, call: Opaque) -> _Parts:
        """OBJ, of protocol 1: the same, with the class above the mark as well."""
        self.out += b"("
        yield "target", call.target
        yield from enumerate(call.args)
        self.out += b"o"

    def persistent(self, call: Opaque) -> _Parts:
        """A persistent id that is none of torch's."""
        yield "id", call.args[0]
        self.out += b"Q"

    def built(self, call: Opaque) -> _Parts:
        """A global that BUILD sets something on."""
        yield "target", call.target


_CALLS: dict[str, Callable[[_Pickler, Opaque], _Parts]] = {
    "REDUCE": _Pickler.reduced,
    "NEWOBJ": _Pickler.new_object,
    "NEWOBJ_EX": _Pickler.new_object_ex,
    "INST": _Pickler.instance,
    "OBJ": _Pickler.instance_of,
    "PERSID": _Pickler.persistent,
    "BUILD": _Pickler.built,
}


def _is_plain(value: TensorValue) -> bool:
    """Whether `_Pickler.tensor` can write it."""
    return (
        value.layout == "strided"
        and value.shape is not None
        and value.stride is not None
        and has_storage_class(value)
    )
