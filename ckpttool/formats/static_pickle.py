"""A pickle reader that runs nothing: opcodes of protocols 0 to 5 become inert values.

Policy. Nothing is imported and nothing is called. A global stays a `GlobalRef`; a call of one of
the few globals in `rebuild.REBUILDERS` is replaced by our own stand-in; every other call, by
whatever opcode (REDUCE, NEWOBJ, NEWOBJ_EX, INST, OBJ, BUILD, EXT), stays an `Opaque`. The loop is
iterative, so nesting in the file cannot exhaust the stack; `ReaderLimits` bounds the work. Whatever
is wrong with the stream ends up in `PickleResult.error`, together with all that was seen up to
there: a stream that breaks after its payload has run it all the same when it is really loaded.

Source for the opcodes: CPython's Lib/pickletools.py and PEP 3154, PEP 574. The loop is written for
speed, since one file can hold millions of opcodes: the frequent ones come first and inline, the
rare ones are functions in `_RARE`.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from itertools import repeat
from struct import Struct
from struct import error as struct_error
from typing import Any

from ckpttool.errors import FormatError, LimitError, PickleError
from ckpttool.formats.budget import CopyBudget
from ckpttool.formats.collecting import paused_collection
from ckpttool.formats.keys import KeyGuard
from ckpttool.formats.limits import DEFAULT_LIMITS, ReaderLimits
from ckpttool.formats.rebuild import (
    COPIERS,
    REBUILDERS,
    UnknownRebuilderError,
    build_numpy_array,
    build_numpy_dtype,
    storage_from_persistent_id,
)
from ckpttool.formats.tensor_run import Memo, TensorRun
from ckpttool.formats.values import (
    GlobalRef,
    NumpyArray,
    NumpyDtype,
    Opaque,
    OrderedMap,
    TensorValue,
)

_U4 = Struct("<I").unpack_from
_I4 = Struct("<i").unpack_from
_U8 = Struct("<Q").unpack_from
_F8 = Struct(">d").unpack_from

_ESCAPE = re.compile(rb"\\([0-7]{1,3}|.)", re.DOTALL)
_MOST_MALFORMED = 1000
HIGHEST_PROTOCOL = 5


class PickleResult:
    """What one pickle stream says.

    `value` is the inert object (None if `error` is set), `end` the position after STOP, `protocol`
    the number that PROTO gave (0 without). `globals` maps dotted paths to each global named;
    `called` holds the paths of those that would be called without a stand-in here. `computed_calls`
    counts calls of something that is itself the result of a call. `refused_opcodes` are those that
    torch's weights-only unpickler does not take. `nested` are byte strings that the stream would
    load as torch files of their own. `malformed_calls` lists (path, reason) of known calls whose
    arguments made no sense.
    """

    __slots__ = (
        "called",
        "computed_calls",
        "end",
        "error",
        "globals",
        "malformed_calls",
        "nested",
        "protocol",
        "refused_opcodes",
        "value",
    )

    def __init__(self) -> None:
        self.value: Any = None
        self.end = 0
        self.protocol = 0
        self.globals: dict[str, GlobalRef] = {}
        self.called: set[str] = set()
        self.computed_calls = 0
        self.refused_opcodes: set[str] = set()
        self.nested: list[bytes] = []
        self.malformed_calls: list[tuple[str, str]] = []
        self.error: FormatError | None = None


def read_pickle(
    data: bytes,
    *,
    start: int = 0,
    limits: ReaderLimits = DEFAULT_LIMITS,
    persistent: Callable[[Any], Any] = storage_from_persistent_id,
) -> PickleResult:
    """Read the pickle that begins at `start` in `data`; never raises for what the bytes hold.

    `persistent` turns a persistent id into a value; a ValueError from it keeps the id as an
    `Opaque`.
    """
    machine = _Machine(data, limits, persistent)
    with paused_collection():
        machine.run(start)
    return machine.result


class _Machine:
    """The state of one reading: memo, stack of stacks, and the result being gathered."""

    __slots__ = ("budget", "data", "keys", "limits", "memo", "metastack", "persistent", "result")

    def __init__(self, data: bytes, limits: ReaderLimits, persistent: Callable[[Any], Any]) -> None:
        self.data = data
        self.limits = limits
        self.persistent = persistent
        self.memo = Memo()
        self.metastack: list[list[Any]] = []
        self.keys = KeyGuard()
        self.budget = CopyBudget(len(data))
        self.result = PickleResult()

    def run(self, start: int) -> None:
        """Interpret up to STOP; any error is kept in the result."""
        if len(self.data) - start > self.limits.pickle_bytes:
            size = len(self.data) - start
            self.result.error = LimitError(
                f"the pickle has {size} bytes, more than the limit of {self.limits.pickle_bytes}",
                limit="pickle_bytes",
            )
            return
        try:
            self._loop(start)
        except FormatError as error:
            self.result.error = error
        except (IndexError, struct_error):
            self.result.error = PickleError(
                "the stream ends too early or takes from an empty stack", position=self.result.end
            )
        except KeyError as error:
            self.result.error = PickleError(
                f"refers to memo entry {_one_line(error)}, which was never set",
                position=self.result.end,
            )
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            self.result.error = PickleError(
                f"malformed: {_one_line(error)}", position=self.result.end
            )
        except MemoryError:
            self.result.error = LimitError("not enough memory for the pickle", limit="memory")

    # One long function on purpose: at millions of opcodes a call for each would double the time.
    def _loop(self, pos: int) -> None:  # noqa: C901
        """The interpreter. `pos` is the next byte; `stack` the part above the last mark."""
        data, memo, metastack = self.data, self.memo, self.metastack
        u4, rare, memo_limit = _U4, _RARE, self.limits.memo_entries
        rebuild_v2 = REBUILDERS["torch._utils", "_rebuild_tensor_v2"]
        tensors = TensorRun(data, memo, memo_limit)
        usual = self.persistent is storage_from_persistent_id
        size = len(data)
        highest = 0xFF  # memo index; BINPUT has the ones up to here
        stack: list[Any] = []
        try:
            for _ in repeat(None, self.limits.opcodes):
                op = data[pos]
                pos += 1
                if op == 0x72:  # LONG_BINPUT
                    index = u4(data, pos)[0]
                    if index > highest:
                        highest = index
                        if index > memo_limit:
                            raise LimitError("too many memo entries", limit="memo_entries")
                    else:
                        tensors.forget_memo()
                    memo[index] = stack[-1]
                    pos += 4
                elif op == 0x68:  # BINGET
                    stack.append(memo[data[pos]])
                    pos += 1
                elif op == 0x4B:  # BININT1
                    stack.append(data[pos])
                    pos += 1
                elif op == 0x71:  # BINPUT
                    memo[data[pos]] = stack[-1]
                    pos += 1
                    tensors.forget_memo()
                elif op == 0x28:  # MARK
                    if (
                        stack
                        and data[pos] == 0x28
                        and getattr(stack[-1], "rebuild", 0) is rebuild_v2
                        and usual
                        and not memo.closed
                    ):
                        stride = tensors.read(pos, highest)
                        if stride is not None:
                            stack[-1], pos, highest = stride
                            continue
                    metastack.append(stack)
                    stack = []
                elif op == 0x74:  # TUPLE
                    group = tuple(stack)
                    stack = metastack.pop()
                    stack.append(group)
                elif op == 0x52:  # REDUCE
                    args = stack.pop()
                    target = stack[-1]
                    if type(target) is GlobalRef and target.rebuild is not None:
                        try:
                            stack[-1] = target.rebuild(*args)
                        except LimitError:
                            raise
                        except Exception as error:
                            stack[-1] = self._malformed_call(target, args, error)
                    else:
                        stack[-1] = self.call(target, args, "REDUCE")
                elif op == 0x58:  # BINUNICODE
                    end = pos + 4 + u4(data, pos)[0]
                    if end > size:
                        raise IndexError
                    stack.append(str(data[pos + 4 : end], "utf-8", "surrogatepass"))
                    pos = end
                elif op == 0x86:  # TUPLE2
                    last = stack.pop()
                    stack[-1] = (stack[-1], last)
                elif op == 0x51:  # BINPERSID
                    stack[-1] = self.persist(stack[-1])
                elif op == 0x29:  # EMPTY_TUPLE
                    stack.append(())
                elif op == 0x89:  # NEWFALSE
                    stack.append(False)
                elif op == 0x85:  # TUPLE1
                    stack[-1] = (stack[-1],)
                elif op == 0x4D:  # BININT2
                    stack.append(data[pos] | data[pos + 1] << 8)
                    pos += 2
                elif op == 0x4A:  # BININT
                    stack.append(_I4(data, pos)[0])
                    pos += 4
                elif op == 0x6A:  # LONG_BINGET
                    stack.append(memo[u4(data, pos)[0]])
                    pos += 4
                elif op == 0x87:  # TUPLE3
                    last, middle = stack.pop(), stack.pop()
                    stack[-1] = (stack[-1], middle, last)
                elif op == 0x88:  # NEWTRUE
                    stack.append(True)
                elif op == 0x4E:  # NONE
                    stack.append(None)
                elif op == 0x47:  # BINFLOAT
                    stack.append(_F8(data, pos)[0])
                    pos += 8
                elif op == 0x7D:  # EMPTY_DICT
                    stack.append({})
                elif op == 0x5D:  # EMPTY_LIST
                    stack.append([])
                elif op == 0x94:  # MEMOIZE
                    if not memo.closed:
                        memo.close()
                        self.result.refused_opcodes.add("MEMOIZE")
                    index = len(memo)
                    if index > memo_limit:
                        raise LimitError("too many memo entries", limit="memo_entries")
                    memo[index] = stack[-1]
                elif op == 0x8C:  # SHORT_BINUNICODE
                    end = pos + 1 + data[pos]
                    if end > size:
                        raise IndexError
                    stack.append(str(data[pos + 1 : end], "utf-8", "surrogatepass"))
                    pos = end
                    self.result.refused_opcodes.add("SHORT_BINUNICODE")
                elif op == 0x75:  # SETITEMS
                    items = stack
                    stack = metastack.pop()
                    _set_items(stack[-1], items, self.keys)
                elif op == 0x73:  # SETITEM
                    last, key = stack.pop(), stack.pop()
                    _set_items(stack[-1], [key, last], self.keys)
                elif op == 0x65:  # APPENDS
                    items = stack
                    stack = metastack.pop()
                    _append(stack[-1], items)
                elif op == 0x61:  # APPEND
                    last = stack.pop()
                    _append(stack[-1], [last])
                elif op == 0x2E:  # STOP
                    self.result.value = stack.pop()
                    return
                else:
                    handler = rare.get(op)
                    if handler is None:
                        raise PickleError(f"unknown opcode 0x{op:02x}", position=pos - 1)
                    stack, pos = handler(self, stack, pos)
            raise LimitError(f"more than {self.limits.opcodes} opcodes", limit="opcodes")
        finally:
            self.result.end = pos

    # What globals and calls become.

    def name_global(self, module: str, name: str) -> GlobalRef:
        """The one `GlobalRef` for this module and name."""
        path = f"{module}.{name}"
        known = self.result.globals.get(path)
        if known is None or known.module != module:
            rebuild = REBUILDERS.get((module, name))
            if rebuild in COPIERS:
                rebuild = self.budget.metered(rebuild)
            known = GlobalRef(module, name, rebuild)
            self.result.globals[path] = known
        return known

    def call(
        self, target: Any, args: Any, opcode: str, kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Keep a call as an `Opaque`, and note what it would have called."""
        if not isinstance(args, tuple):
            raise PickleError("a call without an argument tuple", position=self.result.end)
        if isinstance(target, GlobalRef):
            self.result.called.add(target.path)
            if target.path == "torch.storage._load_from_bytes" and len(args) == 1:
                self.result.nested.append(self._as_bytes(args[0]))
        else:
            self.result.computed_calls += 1
        return Opaque(target, args, opcode=opcode, kwargs=kwargs)

    def _as_bytes(self, value: Any) -> bytes:
        if not isinstance(value, (bytes, bytearray)):
            return b""
        self.budget.spend((value,))
        return bytes(value)

    def _note_malformed(self, path: str, error: Exception) -> None:
        if len(self.result.malformed_calls) < _MOST_MALFORMED:
            self.result.malformed_calls.append((path, _one_line(error)))

    def _malformed_call(self, target: GlobalRef, args: Any, error: Exception) -> Any:
        if isinstance(error, UnknownRebuilderError):
            self.result.called.add(error.path)
        else:
            self._note_malformed(target.path, error)
        if isinstance(args, tuple):
            self.budget.spend(args)
        return self.call(target, args, "REDUCE")

    def persist(self, pid: Any) -> Any:
        """The value of a persistent id, or an `Opaque` of it."""
        try:
            return self.persistent(pid)
        except (ValueError, TypeError, IndexError) as error:
            self._note_malformed("persistent id", error)
            return Opaque("persistent id", (pid,), opcode="PERSID")

    def build(self, target: Any, state: Any) -> Any:
        """BUILD: set `state` on the value below it, in our own way for each kind of value."""
        if isinstance(target, Opaque):
            target.state = state
        elif isinstance(target, OrderedMap):
            target.attributes = state if isinstance(state, dict) else {"": state}
        elif isinstance(target, NumpyArray):
            build_numpy_array(target, state)
        elif isinstance(target, NumpyDtype):
            build_numpy_dtype(target, state)
        elif isinstance(target, TensorValue):
            target.extra = {**(target.extra or {}), "state": state}
        elif isinstance(target, GlobalRef):
            # Sets attributes on a class, or calls its __setstate__: nothing honest does that.
            opaque = self.call(target, (), "BUILD")
            opaque.state = state
            return opaque
        else:
            raise PickleError(f"BUILD on a {type(target).__name__}", position=self.result.end)
        return target

    def line(self, pos: int) -> tuple[bytes, int]:
        """The bytes up to the next newline and the position after it."""
        end = self.data.find(b"\n", pos)
        if end < 0:
            raise IndexError
        return self.data[pos:end], end + 1

    def take(self, pos: int, count: int) -> tuple[bytes, int]:
        """`count` bytes at `pos` and the position after them; IndexError if they are not there."""
        end = pos + count
        if end > len(self.data):
            raise IndexError
        return self.data[pos:end], end


def _one_line(error: BaseException) -> str:
    return " ".join(f"{error}".split())[:200] or type(error).__name__


def _set_items(target: Any, flat: list[Any], guard: KeyGuard) -> None:
    """SETITEM(S): `flat` is key, value, key, value …"""
    keys, values = flat[::2], flat[1::2]
    if len(keys) != len(values):
        raise ValueError("a key without a value")
    if isinstance(target, dict):
        guard.check(target, keys)
        target.update(zip(keys, values, strict=True))
    elif isinstance(target, Opaque):
        if target.pairs is None:
            target.pairs = []
        target.pairs.extend(zip(keys, values, strict=True))
    else:
        raise ValueError(f"items set on a {type(target).__name__}")


def _append(target: Any, items: list[Any]) -> None:
    """APPEND(S) to a list, or noted on an opaque value."""
    if type(target) is list:
        target.extend(items)
    elif isinstance(target, Opaque):
        if target.items is None:
            target.items = []
        target.items.extend(items)
    else:
        raise ValueError(f"items appended to a {type(target).__name__}")


# The rare opcodes. Each takes the machine, the stack and the position after the opcode, and
# gives the stack and the position to go on with.

_Step = tuple[list[Any], int]
_Handler = Callable[[_Machine, list[Any], int], _Step]


def _proto(m: _Machine, stack: list[Any], pos: int) -> _Step:
    protocol = m.data[pos]
    if protocol > HIGHEST_PROTOCOL:
        raise PickleError(f"unknown pickle protocol {protocol}", position=pos)
    m.result.protocol = max(m.result.protocol, protocol)
    return stack, pos + 1


def _frame(m: _Machine, stack: list[Any], pos: int) -> _Step:
    length = _U8(m.data, pos)[0]
    if pos + 8 + length > len(m.data):
        raise PickleError("a frame reaches past the end", position=pos)
    return stack, pos + 8


def _global(m: _Machine, stack: list[Any], pos: int) -> _Step:
    module, pos = m.line(pos)
    name, pos = m.line(pos)
    stack.append(m.name_global(module.decode("utf-8"), name.decode("utf-8")))
    return stack, pos


def _stack_global(m: _Machine, stack: list[Any], pos: int) -> _Step:
    name, module = stack.pop(), stack.pop()
    if type(name) is not str or type(module) is not str:
        raise PickleError("a global whose name is not text", position=pos - 1)
    stack.append(m.name_global(module, name))
    return stack, pos


def _inst(m: _Machine, stack: list[Any], pos: int) -> _Step:
    module, pos = m.line(pos)
    name, pos = m.line(pos)
    target = m.name_global(module.decode("utf-8"), name.decode("utf-8"))
    args = tuple(stack)
    stack = m.metastack.pop()
    stack.append(m.call(target, args, "INST"))
    return stack, pos


def _obj(m: _Machine, stack: list[Any], pos: int) -> _Step:
    target, args = stack[0], tuple(stack[1:])
    stack = m.metastack.pop()
    stack.append(m.call(target, args, "OBJ"))
    return stack, pos


def _newobj(m: _Machine, stack: list[Any], pos: int) -> _Step:
    args = stack.pop()
    stack[-1] = m.call(stack[-1], args, "NEWOBJ")
    return stack, pos


def _newobj_ex(m: _Machine, stack: list[Any], pos: int) -> _Step:
    kwargs, args = stack.pop(), stack.pop()
    stack[-1] = m.call(stack[-1], args, "NEWOBJ_EX", kwargs)
    return stack, pos


def _extension(width: int) -> _Handler:
    def handle(m: _Machine, stack: list[Any], pos: int) -> _Step:
        code, pos = m.take(pos, width)
        number = int.from_bytes(code, "little")
        stack.append(m.name_global("copyreg", f"extension({number})"))
        return stack, pos

    return handle


def _build(m: _Machine, stack: list[Any], pos: int) -> _Step:
    state = stack.pop()
    stack[-1] = m.build(stack[-1], state)
    return stack, pos


def _persid(m: _Machine, stack: list[Any], pos: int) -> _Step:
    text, pos = m.line(pos)
    stack.append(m.persist(text.decode("ascii")))
    return stack, pos


def _counted(width: int, convert: Callable[[bytes], Any]) -> _Handler:
    """An argument of raw bytes behind a little-endian count of `width` bytes."""

    def handle(m: _Machine, stack: list[Any], pos: int) -> _Step:
        count, pos = m.take(pos, width)
        raw, pos = m.take(pos, int.from_bytes(count, "little"))
        stack.append(convert(raw))
        return stack, pos

    return handle


def _text_or_bytes(raw: bytes) -> str | bytes:
    """A Python 2 string: torch reads these as UTF-8; what is not stays bytes."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


def _utf8(raw: bytes) -> str:
    return str(raw, "utf-8", "surrogatepass")


def _long(width: int) -> _Handler:
    def handle(m: _Machine, stack: list[Any], pos: int) -> _Step:
        count, pos = m.take(pos, width)
        length = int.from_bytes(count, "little", signed=width == 4)
        if length < 0:
            raise PickleError("an integer of negative length", position=pos)
        raw, pos = m.take(pos, length)
        if length > m.limits.integer_bytes:
            raise LimitError(f"an integer of {length} bytes", limit="integer_bytes")
        stack.append(int.from_bytes(raw, "little", signed=True))
        return stack, pos

    return handle


def _text_int(m: _Machine, stack: list[Any], pos: int) -> _Step:
    """INT and LONG: decimal text; INT spells booleans as 00 and 01."""
    raw, pos = m.line(pos)
    if len(raw) > m.limits.integer_bytes * 2:
        raise LimitError(f"an integer of {len(raw)} digits", limit="integer_bytes")
    stack.append(raw == b"01" if raw in (b"00", b"01") else int(raw.removesuffix(b"L")))
    return stack, pos


def _text_float(m: _Machine, stack: list[Any], pos: int) -> _Step:
    raw, pos = m.line(pos)
    stack.append(float(raw))
    return stack, pos


def _text_string(m: _Machine, stack: list[Any], pos: int) -> _Step:
    raw, pos = m.line(pos)
    if len(raw) < 2 or raw[0] != raw[-1] or raw[0] not in b"\"'":
        raise PickleError("a string without quotes", position=pos)
    plain = _ESCAPE.sub(_plain_escape, raw[1:-1])
    stack.append(_text_or_bytes(codecs.escape_decode(plain)[0]))
    return stack, pos


def _plain_escape(match: re.Match[bytes]) -> bytes:
    """An escape that Python takes without a warning, for each that it merely tolerates."""
    escape = match[1]
    if escape[0] in b"01234567":
        return b"\\x%02x" % (int(escape, 8) & 0xFF)
    return match[0] if escape[0] in b"\\'\"abfnrtvx\n" else b"\\" + match[0]


def _text_unicode(m: _Machine, stack: list[Any], pos: int) -> _Step:
    raw, pos = m.line(pos)
    stack.append(str(raw, "raw-unicode-escape"))
    return stack, pos


def _get(m: _Machine, stack: list[Any], pos: int) -> _Step:
    raw, pos = m.line(pos)
    stack.append(m.memo[int(raw)])
    return stack, pos


def _put(m: _Machine, stack: list[Any], pos: int) -> _Step:
    raw, pos = m.line(pos)
    if raw.startswith(b"-"):
        raise PickleError("a memo entry of negative number", position=pos)
    if len(raw) > 10 or int(raw) > m.limits.memo_entries:
        raise LimitError("too many memo entries", limit="memo_entries")
    m.memo.close()
    m.memo[int(raw)] = stack[-1]
    return stack, pos


def _pop(m: _Machine, stack: list[Any], pos: int) -> _Step:
    if not stack:
        return m.metastack.pop(), pos
    stack.pop()
    return stack, pos


def _pop_mark(m: _Machine, stack: list[Any], pos: int) -> _Step:
    return m.metastack.pop(), pos


def _dup(m: _Machine, stack: list[Any], pos: int) -> _Step:
    stack.append(stack[-1])
    return stack, pos


def _list(m: _Machine, stack: list[Any], pos: int) -> _Step:
    below = m.metastack.pop()
    below.append(stack)
    return below, pos


def _dict(m: _Machine, stack: list[Any], pos: int) -> _Step:
    below = m.metastack.pop()
    below.append({})
    _set_items(below[-1], stack, m.keys)
    return below, pos


def _empty_set(m: _Machine, stack: list[Any], pos: int) -> _Step:
    stack.append(set())
    return stack, pos


def _add_items(m: _Machine, stack: list[Any], pos: int) -> _Step:
    below = m.metastack.pop()
    target = below[-1]
    if isinstance(target, set):
        m.keys.check(target, stack)
        target.update(stack)
    elif isinstance(target, Opaque):
        _append(target, stack)
    else:
        raise ValueError(f"items added to a {type(target).__name__}")
    return below, pos


def _frozen_set(m: _Machine, stack: list[Any], pos: int) -> _Step:
    below = m.metastack.pop()
    m.keys.check(stack, stack)
    below.append(frozenset(stack))
    return below, pos


def _next_buffer(m: _Machine, stack: list[Any], pos: int) -> _Step:
    stack.append(Opaque("out-of-band buffer", opcode="BUFFER"))
    return stack, pos


def _readonly_buffer(m: _Machine, stack: list[Any], pos: int) -> _Step:
    stack[-1]  # it must be there; being read-only changes nothing here
    return stack, pos


# torch's weights-only unpickler takes these and the inline ones but SHORT_BINUNICODE and MEMOIZE.
_TAKEN_BY_WEIGHTS_ONLY: dict[int, tuple[str, _Handler]] = {
    0x80: ("PROTO", _proto),
    0x63: ("GLOBAL", _global),
    0x81: ("NEWOBJ", _newobj),
    0x62: ("BUILD", _build),
    0x8F: ("EMPTY_SET", _empty_set),
    0x8A: ("LONG1", _long(1)),
    0x55: ("SHORT_BINSTRING", _counted(1, _text_or_bytes)),
}

_REFUSED_BY_WEIGHTS_ONLY: dict[int, tuple[str, _Handler]] = {
    0x95: ("FRAME", _frame),
    0x93: ("STACK_GLOBAL", _stack_global),
    0x69: ("INST", _inst),
    0x6F: ("OBJ", _obj),
    0x92: ("NEWOBJ_EX", _newobj_ex),
    0x82: ("EXT1", _extension(1)),
    0x83: ("EXT2", _extension(2)),
    0x84: ("EXT4", _extension(4)),
    0x50: ("PERSID", _persid),
    0x54: ("BINSTRING", _counted(4, _text_or_bytes)),
    0x42: ("BINBYTES", _counted(4, bytes)),
    0x43: ("SHORT_BINBYTES", _counted(1, bytes)),
    0x8E: ("BINBYTES8", _counted(8, bytes)),
    0x96: ("BYTEARRAY8", _counted(8, bytearray)),
    0x8D: ("BINUNICODE8", _counted(8, _utf8)),
    0x8B: ("LONG4", _long(4)),
    0x49: ("INT", _text_int),
    0x4C: ("LONG", _text_int),
    0x46: ("FLOAT", _text_float),
    0x53: ("STRING", _text_string),
    0x56: ("UNICODE", _text_unicode),
    0x67: ("GET", _get),
    0x70: ("PUT", _put),
    0x30: ("POP", _pop),
    0x31: ("POP_MARK", _pop_mark),
    0x32: ("DUP", _dup),
    0x6C: ("LIST", _list),
    0x64: ("DICT", _dict),
    0x90: ("ADDITEMS", _add_items),
    0x91: ("FROZENSET", _frozen_set),
    0x97: ("NEXT_BUFFER", _next_buffer),
    0x98: ("READONLY_BUFFER", _readonly_buffer),
}


def _noting(name: str, handler: _Handler) -> _Handler:
    """`handler`, after writing down that the weights-only unpickler would stop at this opcode."""

    def handle(m: _Machine, stack: list[Any], pos: int) -> _Step:
        m.result.refused_opcodes.add(name)
        return handler(m, stack, pos)

    return handle


_RARE: dict[int, _Handler] = {
    **{code: handler for code, (_, handler) in _TAKEN_BY_WEIGHTS_ONLY.items()},
    **{code: _noting(name, handler) for code, (name, handler) in _REFUSED_BY_WEIGHTS_ONLY.items()},
}
