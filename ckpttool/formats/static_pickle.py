"""A pickle reader that runs nothing: opcodes of protocols 0 to 5 become inert values.

Policy. Nothing is imported and nothing is called. A global stays a `GlobalRef`; a call of one of
the few globals in `rebuild.REBUILDERS` is replaced by our own stand-in; every other call, by
whatever opcode (REDUCE, NEWOBJ, NEWOBJ_EX, INST, OBJ, BUILD, EXT), stays an `Opaque`. The loop is
iterative, so nesting in the file cannot exhaust the stack; `ReaderLimits` bounds the work. Whatever
is wrong with the stream ends up in `PickleResult.error`, together with all that was seen up to
there: a stream that breaks after its payload has run it all the same when it is really loaded.

Source for the opcodes: CPython's Lib/pickletools.py and PEP 3154, PEP 574. The loop is written for
speed, since one file can hold millions of opcodes: the frequent ones come first and inline, the
rare ones are functions in `pickle_rare.RARE`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from struct import Struct
from struct import error as struct_error
from typing import Any

from ckpttool.errors import FormatError, LimitError, PickleError
from ckpttool.formats.collecting import paused_collection
from ckpttool.formats.limits import DEFAULT_LIMITS, ReaderLimits
from ckpttool.formats.pickle_machine import Machine, PickleResult, append, one_line, set_items
from ckpttool.formats.pickle_rare import HIGHEST_PROTOCOL, RARE
from ckpttool.formats.rebuild import REBUILDERS, storage_from_persistent_id
from ckpttool.formats.tensor_run import TensorRun
from ckpttool.formats.values import GlobalRef

__all__ = ["HIGHEST_PROTOCOL", "PickleResult", "read_pickle"]

_U4 = Struct("<I").unpack_from
_I4 = Struct("<i").unpack_from
_F8 = Struct(">d").unpack_from


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
    machine = Machine(data, limits, persistent)
    with paused_collection():
        interpret(machine, start)
    return machine.result


def interpret(machine: Machine, start: int) -> None:
    """Reads up to STOP; whatever is wrong is kept in `machine.result.error`."""
    if len(machine.data) - start > machine.limits.pickle_bytes:
        size = len(machine.data) - start
        machine.result.error = LimitError(
            f"the pickle has {size} bytes, more than the limit of {machine.limits.pickle_bytes}",
            limit="pickle_bytes",
        )
        return
    try:
        _loop(machine, start)
    except FormatError as error:
        machine.result.error = error
    except (IndexError, struct_error):
        machine.result.error = PickleError(
            "the stream ends too early or takes from an empty stack", position=machine.result.end
        )
    except KeyError as error:
        machine.result.error = PickleError(
            f"refers to memo entry {one_line(error)}, which was never set",
            position=machine.result.end,
        )
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        machine.result.error = PickleError(
            f"malformed: {one_line(error)}", position=machine.result.end
        )
    except MemoryError:
        machine.result.error = LimitError("not enough memory for the pickle", limit="memory")


# One long function on purpose: at millions of opcodes a call for each would double the time.
def _loop(machine: Machine, pos: int) -> None:  # noqa: C901
    """The interpreter. `pos` is the next byte; `stack` the part above the last mark."""
    data, memo, metastack = machine.data, machine.memo, machine.metastack
    u4, rare, memo_limit = _U4, RARE, machine.limits.memo_entries
    rebuild_v2 = REBUILDERS["torch._utils", "_rebuild_tensor_v2"]
    tensors = TensorRun(data, memo, memo_limit)
    usual = machine.persistent is storage_from_persistent_id
    size = len(data)
    highest = 0xFF  # memo index; BINPUT has the ones up to here
    stack: list[Any] = []
    try:
        for _ in repeat(None, machine.limits.opcodes):
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
                        stack[-1] = machine.malformed_call(target, args, error)
                else:
                    stack[-1] = machine.call(target, args, "REDUCE")
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
                stack[-1] = machine.persist(stack[-1])
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
                    machine.result.refused_opcodes.add("MEMOIZE")
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
                machine.result.refused_opcodes.add("SHORT_BINUNICODE")
            elif op == 0x75:  # SETITEMS
                items = stack
                stack = metastack.pop()
                set_items(stack[-1], items, machine.keys)
            elif op == 0x73:  # SETITEM
                last, key = stack.pop(), stack.pop()
                set_items(stack[-1], [key, last], machine.keys)
            elif op == 0x65:  # APPENDS
                items = stack
                stack = metastack.pop()
                append(stack[-1], items)
            elif op == 0x61:  # APPEND
                last = stack.pop()
                append(stack[-1], [last])
            elif op == 0x2E:  # STOP
                machine.result.value = stack.pop()
                return
            else:
                handler = rare.get(op)
                if handler is None:
                    raise PickleError(f"unknown opcode 0x{op:02x}", position=pos - 1)
                stack, pos = handler(machine, stack, pos)
        raise LimitError(f"more than {machine.limits.opcodes} opcodes", limit="opcodes")
    finally:
        machine.result.end = pos
