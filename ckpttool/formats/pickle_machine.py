"""What one reading of a pickle is made of: its memo, its stacks, and what calls become.

Nothing is imported and nothing is called here; see `ckpttool.formats.static_pickle` for the policy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckpttool.errors import FormatError, PickleError
from ckpttool.formats.budget import CopyBudget
from ckpttool.formats.keys import KeyGuard
from ckpttool.formats.limits import ReaderLimits
from ckpttool.formats.rebuild import (
    COPIERS,
    REBUILDERS,
    UnknownRebuilderError,
    build_numpy_array,
    build_numpy_dtype,
)
from ckpttool.formats.tensor_run import Memo
from ckpttool.formats.values import (
    GlobalRef,
    NumpyArray,
    NumpyDtype,
    Opaque,
    OrderedMap,
    TensorValue,
)

_MOST_MALFORMED = 1000


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


class Machine:
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
            self.result.malformed_calls.append((path, one_line(error)))

    def malformed_call(self, target: GlobalRef, args: Any, error: Exception) -> Any:
        """A known call with arguments that make no sense, kept as any other call."""
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


def one_line(error: BaseException) -> str:
    """What an error says, cut to what fits into a line."""
    return " ".join(f"{error}".split())[:200] or type(error).__name__


def set_items(target: Any, flat: list[Any], guard: KeyGuard) -> None:
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


def append(target: Any, items: list[Any]) -> None:
    """APPEND(S) to a list, or noted on an opaque value."""
    if type(target) is list:
        target.extend(items)
    elif isinstance(target, Opaque):
        if target.items is None:
            target.items = []
        target.items.extend(items)
    else:
        raise ValueError(f"items appended to a {type(target).__name__}")
