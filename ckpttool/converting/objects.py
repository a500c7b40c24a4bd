"""Objects of classes that are not known: the plain data that they are made of, where that shows.

A pickle tells how an object is made again: a class, arguments, attributes to set, members to add.
An object that is nothing but its attributes becomes a dictionary of them (a dataclass, a config);
one that is made from one plain value becomes that value (a member of an enum, a subclass of str or
int), from several a tuple of them (a named tuple); a subclass of list or dict becomes its members.
The class is lost, and the table of changes says so. What is none of these has no plain form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.converting.terms import NoPlainFormError, Steps, canonical
from ckpttool.formats.values import GlobalRef, Opaque

if TYPE_CHECKING:
    from ckpttool.converting.plain import Plainer

_PLAIN = (str, bool, int, float, bytes, complex, type(None))
_RECONSTRUCTORS = frozenset({"copyreg._reconstructor", "copy_reg._reconstructor"})
# Classes that keep their items as attributes as well, or bookkeeping that means nothing elsewhere.
_NOTHING_BUT_ITEMS = frozenset({"easydict.EasyDict", "addict.addict.Dict", "yacs.config.CfgNode"})


def attributes_of(value: Opaque) -> dict[Any, Any] | None:
    """What BUILD would set, by name; None where the state is in a form of the class's own.

    A class with slots has two dictionaries (copyreg, `__reduce_ex__` of protocol 2), each or None.
    """
    state = value.state
    if state is None:
        return {}
    if isinstance(state, dict):
        return state
    if type(state) is tuple and len(state) == 2:
        first, second = state
        if isinstance(second, dict) and (first is None or isinstance(first, dict)):
            return {**(first or {}), **second}
    return None


def object_form(plainer: Plainer, value: Opaque) -> Steps:
    """The plain data that an object is made of; see the module."""
    name, args = _class_and_arguments(value)
    attributes = attributes_of(value)
    if attributes is None:
        raise NoPlainFormError("its state is in a form that only its class knows")
    if value.kwargs or (args and (attributes or value.items or value.pairs)):
        raise NoPlainFormError("it is made of more than attributes or members")
    if args:
        return (yield from _made_of_arguments(plainer, value, name, args))
    if value.pairs is None and value.items is None:
        if not _is_class(name):
            raise NoPlainFormError("a call of a function that is not known")
        plainer.note(f"object of {name}", "dict of its attributes")
        result = plainer.begin(value, {})
        yield from plainer.entries(result, attributes.items())
        return result
    return (yield from _collection(plainer, value, name, attributes))


def _class_and_arguments(value: Opaque) -> tuple[str, tuple[Any, ...]]:
    """The class of an object, and what it is made from besides attributes and members."""
    name, args = canonical(value), value.args
    if name in _RECONSTRUCTORS and len(args) == 3 and isinstance(args[0], GlobalRef):
        base, content = args[1], args[2]  # protocols 0 and 1: (class, base class, its content)
        is_object = isinstance(base, GlobalRef) and canonical(base) == "builtins.object"
        return canonical(args[0]), () if is_object else (content,)
    return name, args


def _made_of_arguments(plainer: Plainer, value: Opaque, name: str, args: tuple[Any, ...]) -> Steps:
    # A function may make anything of its arguments; a class is mostly made of them.
    if value.opcode == "REDUCE" and not _is_class(name):
        raise NoPlainFormError("a call of a function that is not known")
    plain = yield from plainer.members(args)
    if len(plain) == 1:
        plainer.note(f"object of {name}", "the value that it is made from")
        return plain[0]
    plainer.note(f"object of {name}", "tuple of what it is made from")
    return tuple(plain)


def _collection(plainer: Plainer, value: Opaque, name: str, attributes: dict[Any, Any]) -> Steps:
    """A subclass of list or dict, with attributes beside its members or without."""
    if value.items is not None and value.pairs is not None:
        raise NoPlainFormError("it has both items and keys")
    members: Any = {} if value.items is None else []
    extra = {} if name in _NOTHING_BUT_ITEMS else _beside(attributes, value.pairs or [])
    result = plainer.begin(value, {"items": members, "attributes": {}} if extra else members)
    if value.pairs is not None:
        yield from plainer.entries(members, value.pairs)
    else:
        members.extend((yield from plainer.members(value.items or ())))
    kind = "dict" if value.items is None else "list"
    if extra:
        yield from plainer.entries(result["attributes"], extra.items())
        kind = f"dict of items ({kind}) and attributes"
    plainer.note(f"object of {name}", kind)
    return result


def _beside(attributes: dict[Any, Any], pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """The attributes that are not items under another name."""
    items = {key: value for key, value in pairs if type(key) is str}
    return {k: v for k, v in attributes.items() if k not in items or items[k] is not v}


def _is_class(name: str) -> bool:
    """Whether a name looks like that of a class: its last part begins with a capital."""
    return name.rpartition(".")[2].lstrip("_")[:1].isupper()
