"""The opcodes of a pickle that are rare in checkpoints, as functions in a table.

Each takes the machine, the stack and the position after the opcode, and gives the stack and the
position to go on with. The frequent ones are inline in `ckpttool.formats.static_pickle`.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from struct import Struct
from typing import Any

from ckpttool.errors import LimitError, PickleError
from ckpttool.formats.pickle_machine import Machine, append, set_items
from ckpttool.formats.values import Opaque

HIGHEST_PROTOCOL = 5

_U8 = Struct("<Q").unpack_from
_ESCAPE = re.compile(rb"\\([0-7]{1,3}|.)", re.DOTALL)

_Step = tuple[list[Any], int]
_Handler = Callable[[Machine, list[Any], int], _Step]


def _proto(m: Machine, stack: list[Any], pos: int) -> _Step:
    protocol = m.data[pos]
    if protocol > HIGHEST_PROTOCOL:
        raise PickleError(f"unknown pickle protocol {protocol}", position=pos)
    m.result.protocol = max(m.result.protocol, protocol)
    return stack, pos + 1


def _frame(m: Machine, stack: list[Any], pos: int) -> _Step:
    length = _U8(m.data, pos)[0]
    if pos + 8 + length > len(m.data):
        raise PickleError("a frame reaches past the end", position=pos)
    return stack, pos + 8


def _global(m: Machine, stack: list[Any], pos: int) -> _Step:
    module, pos = m.line(pos)
    name, pos = m.line(pos)
    stack.append(m.name_global(module.decode("utf-8"), name.decode("utf-8")))
    return stack, pos


def _stack_global(m: Machine, stack: list[Any], pos: int) -> _Step:
    name, module = stack.pop(), stack.pop()
    if type(name) is not str or type(module) is not str:
        raise PickleError("a global whose name is not text", position=pos - 1)
    stack.append(m.name_global(module, name))
    return stack, pos


def _inst(m: Machine, stack: list[Any], pos: int) -> _Step:
    module, pos = m.line(pos)
    name, pos = m.line(pos)
    target = m.name_global(module.decode("utf-8"), name.decode("utf-8"))
    args = tuple(stack)
    stack = m.metastack.pop()
    stack.append(m.call(target, args, "INST"))
    return stack, pos


def _obj(m: Machine, stack: list[Any], pos: int) -> _Step:
    target, args = stack[0], tuple(stack[1:])
    stack = m.metastack.pop()
    stack.append(m.call(target, args, "OBJ"))
    return stack, pos


def _newobj(m: Machine, stack: list[Any], pos: int) -> _Step:
    args = stack.pop()
    stack[-1] = m.call(stack[-1], args, "NEWOBJ")
    return stack, pos


def _newobj_ex(m: Machine, stack: list[Any], pos: int) -> _Step:
    kwargs, args = stack.pop(), stack.pop()
    stack[-1] = m.call(stack[-1], args, "NEWOBJ_EX", kwargs)
    return stack, pos


def _extension(width: int) -> _Handler:
    def handle(m: Machine, stack: list[Any], pos: int) -> _Step:
        code, pos = m.take(pos, width)
        number = int.from_bytes(code, "little")
        stack.append(m.name_global("copyreg", f"extension({number})"))
        return stack, pos

    return handle


def _build(m: Machine, stack: list[Any], pos: int) -> _Step:
    state = stack.pop()
    stack[-1] = m.build(stack[-1], state)
    return stack, pos


def _persid(m: Machine, stack: list[Any], pos: int) -> _Step:
    text, pos = m.line(pos)
    stack.append(m.persist(text.decode("ascii")))
    return stack, pos


def _counted(width: int, convert: Callable[[bytes], Any]) -> _Handler:
    """An argument of raw bytes behind a little-endian count of `width` bytes."""

    def handle(m: Machine, stack: list[Any], pos: int) -> _Step:
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
    def handle(m: Machine, stack: list[Any], pos: int) -> _Step:
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


def _text_int(m: Machine, stack: list[Any], pos: int) -> _Step:
    """INT and LONG: decimal text; INT spells booleans as 00 and 01."""
    raw, pos = m.line(pos)
    if len(raw) > m.limits.integer_bytes * 2:
        raise LimitError(f"an integer of {len(raw)} digits", limit="integer_bytes")
    stack.append(raw == b"01" if raw in (b"00", b"01") else int(raw.removesuffix(b"L")))
    return stack, pos


def _text_float(m: Machine, stack: list[Any], pos: int) -> _Step:
    raw, pos = m.line(pos)
    stack.append(float(raw))
    return stack, pos


def _text_string(m: Machine, stack: list[Any], pos: int) -> _Step:
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


def _text_unicode(m: Machine, stack: list[Any], pos: int) -> _Step:
    raw, pos = m.line(pos)
    stack.append(str(raw, "raw-unicode-escape"))
    return stack, pos


def _get(m: Machine, stack: list[Any], pos: int) -> _Step:
    raw, pos = m.line(pos)
    stack.append(m.memo[int(raw)])
    return stack, pos


def _put(m: Machine, stack: list[Any], pos: int) -> _Step:
    raw, pos = m.line(pos)
    if raw.startswith(b"-"):
        raise PickleError("a memo entry of negative number", position=pos)
    if len(raw) > 10 or int(raw) > m.limits.memo_entries:
        raise LimitError("too many memo entries", limit="memo_entries")
    m.memo.close()
    m.memo[int(raw)] = stack[-1]
    return stack, pos


def _pop(m: Machine, stack: list[Any], pos: int) -> _Step:
    if not stack:
        return m.metastack.pop(), pos
    stack.pop()
    return stack, pos


def _pop_mark(m: Machine, stack: list[Any], pos: int) -> _Step:
    return m.metastack.pop(), pos


def _dup(m: Machine, stack: list[Any], pos: int) -> _Step:
    stack.append(stack[-1])
    return stack, pos


def _list(m: Machine, stack: list[Any], pos: int) -> _Step:
    below = m.metastack.pop()
    below.append(stack)
    return below, pos


def _dict(m: Machine, stack: list[Any], pos: int) -> _Step:
    below = m.metastack.pop()
    below.append({})
    set_items(below[-1], stack, m.keys)
    return below, pos


def _empty_set(m: Machine, stack: list[Any], pos: int) -> _Step:
    stack.append(set())
    return stack, pos


def _add_items(m: Machine, stack: list[Any], pos: int) -> _Step:
    below = m.metastack.pop()
    target = below[-1]
    if isinstance(target, set):
        m.keys.check(target, stack)
        target.update(stack)
    elif isinstance(target, Opaque):
        append(target, stack)
    else:
        raise ValueError(f"items added to a {type(target).__name__}")
    return below, pos


def _frozen_set(m: Machine, stack: list[Any], pos: int) -> _Step:
    below = m.metastack.pop()
    m.keys.check(stack, stack)
    below.append(frozenset(stack))
    return below, pos


def _next_buffer(m: Machine, stack: list[Any], pos: int) -> _Step:
    stack.append(Opaque("out-of-band buffer", opcode="BUFFER"))
    return stack, pos


def _readonly_buffer(m: Machine, stack: list[Any], pos: int) -> _Step:
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

    def handle(m: Machine, stack: list[Any], pos: int) -> _Step:
        m.result.refused_opcodes.add(name)
        return handler(m, stack, pos)

    return handle


RARE: dict[int, _Handler] = {
    **{code: handler for code, (_, handler) in _TAKEN_BY_WEIGHTS_ONLY.items()},
    **{code: _noting(name, handler) for code, (name, handler) in _REFUSED_BY_WEIGHTS_ONLY.items()},
}
