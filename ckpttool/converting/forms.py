"""The plain forms of known classes: of the standard library, numpy, torch and omegaconf.

Each is a function that takes the plainer and the call that the pickle asks for, and gives the plain
form or the steps to it. What the calls look like follows from each class's `__reduce__`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ckpttool.converting.objects import attributes_of
from ckpttool.converting.terms import NoPlainFormError, Steps, canonical
from ckpttool.formats.values import NumpyArray, Opaque

if TYPE_CHECKING:
    from ckpttool.converting.plain import Plainer

Form = Callable[["Plainer", Opaque], Any]


def _malformed() -> NoPlainFormError:
    return NoPlainFormError("its arguments are not those of its class")


def _attributes(plainer: Plainer, value: Opaque) -> Steps:
    """A namespace: the dictionary of its attributes."""
    attributes = attributes_of(value)
    given = value.args[0] if len(value.args) == 1 else {}  # Python 3.13: SimpleNamespace(mapping)
    if attributes is None or not isinstance(given, dict):
        raise _malformed()
    plainer.note(canonical(value), "dict")
    result: dict[Any, Any] = plainer.begin(value, {})
    yield from plainer.entries(result, {**given, **attributes}.items())
    return result


def _defaultdict(plainer: Plainer, value: Opaque) -> Steps:
    """`defaultdict(factory)` with items: a dictionary; the factory is lost."""
    plainer.note("collections.defaultdict", "dict")
    result: dict[Any, Any] = plainer.begin(value, {})
    yield from plainer.entries(result, value.pairs or ())
    return result


def _deque(plainer: Plainer, value: Opaque) -> Steps:
    """`deque((), maxlen)` with items: a list; its bound is lost."""
    plainer.note("collections.deque", "list")
    result: list[Any] = plainer.begin(value, [])
    given = value.args[0] if value.args and isinstance(value.args[0], (list, tuple)) else ()
    result.extend((yield from plainer.members([*given, *(value.items or ())])))
    return result


def _wrapped(plainer: Plainer, value: Opaque) -> Steps:
    """UserDict and UserList: what they wrap."""
    state = value.state
    if not isinstance(state, dict) or "data" not in state:
        raise _malformed()
    plainer.note(canonical(value), "what it wraps")
    return (yield "data", state["data"])


def _text_wrapped(plainer: Plainer, value: Opaque) -> Any:
    """UserString."""
    state = value.state if isinstance(value.state, dict) else {}
    return _text(plainer, value, state.get("data"))


def _bounds(plainer: Plainer, value: Opaque) -> Steps:
    """A range or slice: its start, stop and step."""
    if len(value.args) != 3:
        raise _malformed()
    plainer.note(canonical(value), "dict of start, stop and step")
    names = ("start", "stop", "step")
    plain = yield from plainer.members(value.args)
    return dict(zip(names, plain, strict=True))


def _text(plainer: Plainer, value: Opaque, text: Any) -> str:
    if not isinstance(text, str):
        raise _malformed()
    plainer.note(canonical(value), "text")
    return text


def _number_text(plainer: Plainer, value: Opaque) -> str:
    """Decimal('1.5'), Fraction(1, 3) or Fraction('1/3'): text that the class reads again."""
    args = value.args
    if len(args) == 2 and all(type(part) is int for part in args):
        return _text(plainer, value, f"{args[0]}/{args[1]}")
    return _text(plainer, value, args[0] if len(args) == 1 else None)


def _path(plainer: Plainer, value: Opaque) -> str:
    """A path of pathlib, made from its parts: text."""
    import pathlib

    if not all(isinstance(part, str) for part in value.args):
        raise _malformed()
    windows = "Windows" in canonical(value)
    kind = pathlib.PureWindowsPath if windows else pathlib.PurePosixPath
    return _text(plainer, value, str(kind(*value.args)))


def _uuid(plainer: Plainer, value: Opaque) -> str:
    """UUID: text; its state is `{"int": …}`."""
    import uuid

    number = value.state.get("int") if isinstance(value.state, dict) else None
    if type(number) is not int:
        raise _malformed()
    return _text(plainer, value, str(uuid.UUID(int=number)))


def _timedelta(plainer: Plainer, value: Opaque) -> dict[str, int]:
    """A timedelta: its days, seconds and microseconds, all exact."""
    names = ("days", "seconds", "microseconds")
    if len(value.args) != 3 or not all(type(part) is int for part in value.args):
        raise _malformed()
    plainer.note(canonical(value), "dict of days, seconds and microseconds")
    return dict(zip(names, value.args, strict=True))


def _date(plainer: Plainer, value: Opaque) -> Any:
    """A date, time or datetime, made from packed bytes and a fixed offset: ISO 8601 text.

    That says nothing of `fold` (the second time that a clock shows an hour): it goes beside it.
    """
    date = _real_date(value)
    fold = getattr(date, "fold", 0)
    if not fold:
        return _text(plainer, value, date.isoformat())
    plainer.note(canonical(value), "dict of isoformat and fold")
    return {"isoformat": date.isoformat(), "fold": fold}


def _timezone(plainer: Plainer, value: Opaque) -> str:
    """A fixed offset: text such as `UTC+01:00`."""
    return _text(plainer, value, str(_real_timezone(value)))


def _real_date(value: Opaque) -> Any:
    """Python's own object; the constructors check the bytes, and call nothing."""
    import datetime

    packed, *zone = value.args or (None,)
    if isinstance(packed, str):  # Python 2 wrote them as text
        packed = packed.encode("latin-1", "replace")
    kind = getattr(datetime, canonical(value).rpartition(".")[2])
    if not isinstance(packed, bytes) or len(zone) > 1:
        raise _malformed()
    try:
        return kind(packed, *map(_real_timezone, zone))
    except TypeError as error:
        raise _malformed() from error


def _real_timezone(value: Any) -> Any:
    import datetime

    known = isinstance(value, Opaque) and canonical(value) == "datetime.timezone"
    if not known or not value.args or not isinstance(value.args[0], Opaque):
        raise NoPlainFormError("its time zone is no fixed offset")
    offset, *name = value.args
    if canonical(offset) != "datetime.timedelta" or not all(type(n) is int for n in offset.args):
        raise _malformed()
    if not all(isinstance(part, str) for part in name):
        raise _malformed()
    return datetime.timezone(datetime.timedelta(*offset.args), *name)


def _masked(plainer: Plainer, value: Opaque) -> Any:
    from ckpttool.converting.arrays import masked_array

    return masked_array(plainer, value)


def _from_buffer(plainer: Plainer, value: Opaque) -> Any:
    """numpy's `_frombuffer(buffer, dtype, shape, order)`: an array, in protocol 5."""
    from ckpttool.converting.arrays import array_form

    if len(value.args) != 4 or value.args[3] not in ("C", "F"):
        raise _malformed()
    array = NumpyArray()
    array.data, array.dtype, array.shape, order = value.args
    if not isinstance(array.data, (bytes, bytearray)) or not isinstance(array.shape, tuple):
        raise _malformed()
    array.fortran_order = order == "F"
    return array_form(plainer, array)


def _random_state(plainer: Plainer, value: Opaque) -> Steps:
    """numpy's RandomState, Generator and bit generators: the dictionary that is their state.

    It is what `bit_generator.state = …` and `set_state` take, who read arrays number by number: of
    a tensor of uint64 that fails, so those become lists. A bit generator's pickle has its state
    beside its seed sequence, which is kept under `seed_seq`.
    """
    inner = value.args[0] if value.args and isinstance(value.args[0], Opaque) else None
    state = value.state
    if state is None and inner is not None:
        state = inner.state
    seed = None
    if type(state) is tuple and len(state) == 2:
        state, seed = state
    if not isinstance(state, dict):
        raise _malformed()
    kind = canonical(value).rpartition(".")[2].strip("_").removesuffix("_ctor")
    plainer.note(f"numpy random {kind.replace('_', ' ')}", "dict, its state")
    result: dict[Any, Any] = plainer.begin(value, {})
    inside = {k: _with_lists(v) if isinstance(v, dict) else v for k, v in state.items()}
    yield from plainer.entries(result, _with_lists(inside).items())
    if seed is not None:
        yield from plainer.entries(result, (("seed_seq", seed),))
    return result


def _with_lists(state: dict[Any, Any]) -> dict[Any, Any]:
    """The same with lists of integers for arrays of uint64."""
    from ckpttool.converting.arrays import real_array

    lists = {}
    for name, value in state.items():
        if isinstance(value, NumpyArray) and not isinstance(value.data, list):
            array = real_array(value)
            if array.dtype.name == "uint64":
                lists[name] = array.tolist()
    return {**state, **lists}


def _seed_sequence(plainer: Plainer, value: Opaque) -> Steps:
    """numpy's SeedSequence: its fields by name, as Cython's pickle has them in order."""
    names = ("entropy", "n_children_spawned", "pool", "pool_size", "spawn_key")
    if not isinstance(value.state, tuple) or len(value.state) != len(names):
        raise _malformed()
    plainer.note("numpy SeedSequence", "dict")
    result: dict[Any, Any] = plainer.begin(value, {})
    yield from plainer.entries(result, zip(names, value.state, strict=True))
    return result


def _torch_generator(plainer: Plainer, value: Opaque) -> Steps:
    """torch.Generator(device) with (seed, offset, state): a dictionary of them."""
    names = ("seed", "offset", "state")
    if not isinstance(value.state, tuple) or len(value.state) != len(names) or not value.args:
        raise _malformed()
    plainer.note("torch.Generator", "dict of device, seed, offset and state")
    result: dict[Any, Any] = plainer.begin(value, {})
    pairs = (("device", value.args[0]), *zip(names, value.state, strict=True))
    yield from plainer.entries(result, pairs)
    return result


def _config(plainer: Plainer, value: Opaque) -> Steps:
    """omegaconf's DictConfig and ListConfig: their content, interpolations unresolved.

    As `OmegaConf.to_container(config)`: a missing value is the text `???`.
    """
    state = value.state
    if not isinstance(state, dict) or "_content" not in state:
        raise _malformed()
    content = state["_content"]
    plainer.note(canonical(value), type(content).__name__)
    if isinstance(content, dict):
        result: Any = plainer.begin(value, {})
        yield from plainer.entries(result, content.items())
        return result
    if isinstance(content, list):
        result = plainer.begin(value, [])
        result.extend((yield from plainer.members(content)))
        return result
    return (yield "_content", content)


def _config_node(_: Plainer, value: Opaque) -> Steps:
    """One value of an omegaconf config."""
    name = "_val" if isinstance(value.state, dict) and "_val" in value.state else "_content"
    if not isinstance(value.state, dict) or name not in value.state:
        raise _malformed()
    return (yield "", value.state[name])


def _torch_version(plainer: Plainer, value: Opaque) -> str:
    return _text(plainer, value, value.args[0] if len(value.args) == 1 else None)


_NODES = ("Any", "Integer", "Float", "Boolean", "String", "Bytes", "Path", "Enum", "Union", "Value")

FORMS: Mapping[str, Form] = {
    **dict.fromkeys(("argparse.Namespace", "types.SimpleNamespace"), _attributes),
    "collections.defaultdict": _defaultdict,
    "collections.deque": _deque,
    **dict.fromkeys(("collections.UserDict", "collections.UserList"), _wrapped),
    "collections.UserString": _text_wrapped,
    **dict.fromkeys(("builtins.range", "builtins.slice"), _bounds),
    **dict.fromkeys(("decimal.Decimal", "fractions.Fraction"), _number_text),
    **{
        f"pathlib.{pure}{kind}Path": _path
        for pure in ("", "Pure")
        for kind in ("", "Posix", "Windows")
    },
    "uuid.UUID": _uuid,
    "datetime.timedelta": _timedelta,
    **dict.fromkeys(("datetime.datetime", "datetime.date", "datetime.time"), _date),
    "datetime.timezone": _timezone,
    "numpy.ma.core._mareconstruct": _masked,
    "numpy._core.numeric._frombuffer": _from_buffer,
    **{
        f"numpy.random._pickle.{name}": _random_state
        for name in ("__randomstate_ctor", "__generator_ctor", "__bit_generator_ctor")
    },
    "numpy.random.bit_generator.__pyx_unpickle_SeedSequence": _seed_sequence,
    **dict.fromkeys(("torch._C.Generator", "torch.Generator"), _torch_generator),
    "torch.torch_version.TorchVersion": _torch_version,
    **{f"omegaconf.{name}": _config for name in ("dictconfig.DictConfig", "listconfig.ListConfig")},
    **{f"omegaconf.nodes.{name}Node": _config_node for name in _NODES},
}
