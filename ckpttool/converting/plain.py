"""The plain form of a file's content: what `torch.load(weights_only=True)` takes, the values equal.

`Plainer` walks the inert tree and gives a new one of plain data and tensors. Each kind of value has
a handler; one that has to see other values first is a generator, which yields (name, value) for
each of them and is sent its plain form. So the walk needs no recursion, and nesting in a file
cannot exhaust the stack. Objects that the file shares stay shared, cycles through dictionaries and
lists included. Nothing is called or imported that a file names.

What has no plain form is noted in `refused` by its path and class, and left out: of a dictionary
with its key, in a list or tuple as None.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from ckpttool.converting.forms import FORMS
from ckpttool.converting.modules import is_module, state_dict
from ckpttool.converting.objects import object_form
from ckpttool.converting.terms import (
    LEFT_OUT,
    Change,
    NoPlainFormError,
    Refusal,
    Steps,
    canonical,
    copy_tensor,
)
from ckpttool.formats.globals import Trust, classify
from ckpttool.formats.keys import KeyGuard
from ckpttool.formats.rebuild import TorchSize
from ckpttool.formats.values import (
    GlobalRef,
    NumpyArray,
    NumpyDtype,
    NumpyScalar,
    Opaque,
    OrderedMap,
    StorageRef,
    TensorValue,
)

if TYPE_CHECKING:
    from ckpttool.converting.storages import NewStorages

_AS_THEY_ARE = frozenset({str, float, bool, type(None), bytes, bytearray, complex, StorageRef})
# LONG1, the only opcode for them that is taken, has at most 255 bytes.
_LARGEST_INTEGER = 1 << (8 * 255 - 1)
_SAFE_CALLS = frozenset({"torch.device", "torch.serialization._get_layout", "collections.Counter"})
_PLAIN_LAYOUTS = frozenset(
    ("strided", "quantized", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")
) | {"nested", "meta"}
_LONGEST_PART = 80
_LONGEST_PATH = 400


class Plainer:
    """Makes inert content plain. `storages` takes the bytes of arrays that become tensors.

    `changes` and `refused` say what became of what, in the order of the content.
    """

    def __init__(self, storages: NewStorages) -> None:
        self.storages = storages
        self.changes: list[Change] = []
        self.refused: list[Refusal] = []
        self._names: list[Any] = []
        # By identity; the values are kept, so that no identity is used twice.
        self._done: dict[int, tuple[Any, Any]] = {}
        self._open: set[int] = set()
        self._reasons: dict[int, Refusal] = {}
        self._guard = KeyGuard()

    def plain(self, tree: Any, name: str = "") -> Any:
        """The plain form of `tree`, which is itself called `name`; LEFT_OUT if it has none."""
        frames: list[tuple[Any, Steps]] = []
        answer = self._look(name, tree, frames)
        while frames:
            value, steps = frames[-1]
            try:
                part, child = steps.send(answer)
            except StopIteration as end:
                answer = end.value
            except (NoPlainFormError, ValueError, OverflowError) as error:
                answer = self.refuse(value, str(error))
            else:
                answer = self._look(part, child, frames)
                continue
            frames.pop()
            self._names.pop()
            self._open.discard(id(value))
            self._done[id(value)] = (value, answer)
        return answer

    # For handlers.

    def begin(self, value: Any, result: Any) -> Any:
        """Says that `value` becomes `result`, which is still to be filled: cycles then find it."""
        self._done[id(value)] = (value, result)
        return result

    def note(self, was: str, now: str) -> None:
        """Writes down that what is being looked at, `was`, is `now` something else."""
        self.changes.append(Change(self._path(), was, now))

    def refuse(self, value: Any, why: str) -> Any:
        """Writes down that what is being looked at has no plain form; gives LEFT_OUT."""
        refusal = Refusal(self._path(), _what(value), why)
        self.refused.append(refusal)
        self._reasons[id(value)] = refusal
        return LEFT_OUT

    def members(self, items: Iterable[Any]) -> Generator[tuple[Any, Any], Any, list[Any]]:
        """The plain forms of the members of a list; None for those that have none."""
        result = []
        for index, item in enumerate(items):
            if type(item) not in _AS_THEY_ARE:
                item = yield index, item
            result.append(None if item is LEFT_OUT else item)
        return result

    def entries(
        self, result: dict[Any, Any], pairs: Iterable[tuple[Any, Any]]
    ) -> Generator[tuple[Any, Any], Any, None]:
        """Fills `result` with the plain forms of `pairs`; what has none is left out."""
        for key, item in pairs:
            if type(key) is not str:
                key = yield from self.key(key)
                if key is LEFT_OUT:
                    continue
            if type(item) not in _AS_THEY_ARE:
                item = yield key, item
                if item is LEFT_OUT:
                    continue
            if key in result:
                raise NoPlainFormError(f"two of its keys become {_shorten(repr(key))}")
            result[key] = item

    def key(self, key: Any) -> Steps:
        """The plain form of a key of a dictionary or a member of a set: it stays hashable."""
        if type(key) in _AS_THEY_ARE and type(key) is not bytearray:
            return key
        plain = yield "(key)", key
        if plain is LEFT_OUT:
            return plain
        plain = _hashable(plain)
        self._guard.check(self, (plain,))
        return plain

    # The walk.

    def _look(self, name: Any, value: Any, frames: list[tuple[Any, Steps]]) -> Any:
        """The plain form of `value` where that is known at once; else opens a frame for it."""
        if type(value) in _AS_THEY_ARE:
            return value
        self._names.append(name)
        known = self._done.get(id(value))
        if known is not None:
            if known[1] is LEFT_OUT:  # in a second place as well
                self.refused.append(self._reasons[id(value)]._replace(path=self._path()))
            self._names.pop()
            return known[1]
        answer = self._begin(value)
        if type(answer) is GeneratorType:
            self._open.add(id(value))
            frames.append((value, answer))
            return None
        self._names.pop()
        self._done[id(value)] = (value, answer)
        return answer

    def _begin(self, value: Any) -> Any:
        if id(value) in self._open:
            return self.refuse(value, "it contains itself")
        handler = _HANDLERS.get(type(value))
        if handler is None:
            return self.refuse(value, "nothing is known of its kind")
        try:
            return handler(self, value)
        except (NoPlainFormError, ValueError, OverflowError) as error:
            return self.refuse(value, str(error))

    def _path(self) -> str:
        text = ""
        for name in self._names:
            if len(text) > _LONGEST_PATH:  # however deep it goes on: a path costs a few steps
                break
            if name != "":
                text += "." * bool(text) + _shorten(str(name))
        return _shorten(text, _LONGEST_PATH)


def _shorten(text: str, width: int = _LONGEST_PART) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _what(value: Any) -> str:
    from ckpttool.model.inert import what

    return canonical(value) if isinstance(value, (Opaque, GlobalRef)) else what(value)


def _hashable(plain: Any) -> Any:
    if isinstance(plain, (set, list)):
        members = sorted(plain, key=repr) if isinstance(plain, set) else plain
        return tuple(map(_hashable, members))
    if isinstance(plain, tuple):
        return tuple(map(_hashable, plain))
    if isinstance(plain, (dict, bytearray)):
        raise NoPlainFormError("its plain form cannot be a key")
    return plain


# Handlers. Each takes the plainer and a value, and gives its plain form, or the steps to it.


def _integer(_: Plainer, value: int) -> int:
    if not -_LARGEST_INTEGER <= value < _LARGEST_INTEGER:
        raise NoPlainFormError("weights_only=True takes no integer of more than 255 bytes")
    return value


def _list(plainer: Plainer, value: list[Any]) -> Steps:
    result = plainer.begin(value, [])
    result.extend((yield from plainer.members(value)))
    return result


def _tuple(plainer: Plainer, value: tuple[Any, ...]) -> Steps:
    return tuple((yield from plainer.members(value)))


def _dict(plainer: Plainer, value: dict[Any, Any]) -> Steps:
    result: dict[Any, Any] = plainer.begin(value, {})
    yield from plainer.entries(result, value.items())
    return result


def _ordered(plainer: Plainer, value: OrderedMap) -> Steps:
    result = plainer.begin(value, OrderedMap())
    yield from plainer.entries(result, value.items())
    if value.attributes:
        attributes: dict[Any, Any] = {}
        yield from plainer.entries(attributes, value.attributes.items())
        result.attributes = attributes
    return result


def _set(plainer: Plainer, value: set[Any] | frozenset[Any]) -> Steps:
    result = plainer.begin(value, set())
    if isinstance(value, frozenset):
        plainer.note("frozenset", "set")
    for item in value:
        plain = yield from plainer.key(item)
        if plain is not LEFT_OUT:
            result.add(plain)
    return result


def _global(plainer: Plainer, value: GlobalRef) -> Any:
    """A class or function that stands in the content as itself."""
    trust = classify(value.module, value.name)
    if trust is Trust.DANGEROUS:
        raise NoPlainFormError("it leads to code")
    if trust is Trust.TORCH_SAFE and not value.name.endswith("Storage"):
        return value
    name = canonical(value)
    plainer.note(f"the name {name}", "text")
    return name


def _tensor(plainer: Plainer, value: TensorValue) -> Any:
    if value.extra is None and value.parts is None and value.layout in _PLAIN_LAYOUTS:
        return value
    return _dressed_tensor(plainer, value)


def _dressed_tensor(plainer: Plainer, value: TensorValue) -> Steps:
    """A tensor that has parts, attributes or a class of its own: the same bytes, without it."""
    extra = dict(value.extra or {})
    if value.layout == "numpy":
        from ckpttool.converting.arrays import device_tensor

        return device_tensor(plainer, value)
    if value.layout not in _PLAIN_LAYOUTS:
        raise NoPlainFormError("it has no bytes of its own; only its class knows what it holds")
    parts: dict[str, Any] = {}
    for name, part in (value.parts or {}).items():
        parts[name] = yield name, part
        if not isinstance(parts[name], TensorValue):
            raise NoPlainFormError(f"its part {name} has no plain form")
    if "quantizer" in extra:
        extra["quantizer"] = {**extra["quantizer"], **parts}
    state = extra.pop("state", None)
    if state is not None:
        extra["state"] = yield "(attributes)", state
        if extra["state"] is LEFT_OUT:
            del extra["state"]
    if extra.pop("layers", None):
        raise NoPlainFormError("it is a tensor with attributes inside of another with attributes")
    subclass = extra.pop("subclass", None)
    extra.pop("class", None)
    if subclass is not None:
        plainer.note(f"tensor of {subclass}", "tensor of the same bytes")
    return copy_tensor(value, parts, extra)


def _numpy_array(plainer: Plainer, value: NumpyArray) -> Any:
    from ckpttool.converting.arrays import array_form

    return array_form(plainer, value)


def _numpy_scalar(plainer: Plainer, value: NumpyScalar) -> Any:
    from ckpttool.converting.arrays import scalar_form

    return scalar_form(plainer, value)


def _numpy_dtype(plainer: Plainer, value: NumpyDtype) -> Any:
    from ckpttool.converting.arrays import real_dtype

    plainer.note("numpy dtype", "text")
    return str(real_dtype(value))


def _opaque(plainer: Plainer, value: Opaque) -> Any:
    """A call that the file asks for: its plain form if it is known or shows, else refused."""
    if not isinstance(value.target, GlobalRef):
        raise NoPlainFormError("what would be called is not a name but the result of a call")
    if classify(value.target.module, value.target.name) is Trust.DANGEROUS:
        raise NoPlainFormError("a call that can run code")
    path = canonical(value)
    if path in _SAFE_CALLS and value.opcode == "REDUCE":
        return _safe_call(plainer, value)
    form = FORMS.get(path)
    if form is not None:
        return form(plainer, value)
    return state_dict(plainer, value) if is_module(value) else object_form(plainer, value)


def _safe_call(plainer: Plainer, value: Opaque) -> Steps:
    """A call that `weights_only=True` makes itself; it stays one."""
    if value.kwargs or value.state is not None or value.items or value.pairs:
        raise NoPlainFormError("nothing else is known to be set on it")
    args = yield from plainer.members(value.args)
    return Opaque(value.target, tuple(args), opcode="REDUCE")


_HANDLERS: dict[type, Callable[[Plainer, Any], Any]] = {
    int: _integer,
    list: _list,
    tuple: _tuple,
    dict: _dict,
    OrderedMap: _ordered,
    set: _set,
    frozenset: _set,
    TorchSize: lambda plainer, value: value,
    GlobalRef: _global,
    TensorValue: _tensor,
    NumpyArray: _numpy_array,
    NumpyScalar: _numpy_scalar,
    NumpyDtype: _numpy_dtype,
    Opaque: _opaque,
}
