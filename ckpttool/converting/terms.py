"""What the handlers of the plain form share: their signature, their words, and names of globals."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

from ckpttool.formats.values import GlobalRef, Opaque, TensorValue

Steps = Generator[tuple[Any, Any], Any, Any]
"""A handler that has to see other values first: it yields (name, value), and is sent plain ones."""

LEFT_OUT: Any = object()
"""Stands for what has no plain form, in what a handler is sent."""

# What protocol 2 calls modules and builtins, which has Python 2's names (Lib/_compat_pickle.py).
_MODULES = {
    "__builtin__": "builtins",
    "exceptions": "builtins",
    "copy_reg": "copyreg",
    "UserDict": "collections",
    "UserList": "collections",
    "UserString": "collections",
    "pathlib._local": "pathlib",
    "numpy.core.multiarray": "numpy._core.multiarray",
    "numpy.core.numeric": "numpy._core.numeric",
}
_NAMES = {
    "builtins.xrange": "builtins.range",
    "builtins.unicode": "builtins.str",
    "builtins.long": "builtins.int",
    "builtins.basestring": "builtins.str",
    "collections.IterableUserDict": "collections.UserDict",
}


class Change(NamedTuple):
    """Something that became something else: where it is, what it was, what it is now."""

    path: str
    was: str
    now: str


class Refusal(NamedTuple):
    """Something without a plain form: where it is, what it is (its class, mostly), and why."""

    path: str
    what: str
    why: str


class NoPlainFormError(ValueError):
    """Raised by a handler for a value that has no plain form; the message says why."""


def canonical(value: Opaque | GlobalRef) -> str:
    """The dotted name of a global, or of what a call would call, as Python 3 knows it."""
    target = value.target if isinstance(value, Opaque) else value
    if not isinstance(target, GlobalRef):
        return value.path
    path = f"{_MODULES.get(target.module, target.module)}.{target.name}"
    return _NAMES.get(path, path)


def copy_tensor(
    value: TensorValue, parts: dict[str, Any] | None, extra: dict[str, Any] | None
) -> TensorValue:
    """The same tensor with other parts and extras."""
    return TensorValue(
        value.storage,
        value.offset,
        value.shape,
        value.stride,
        value.requires_grad,
        value.dtype,
        value.layout,
        parts or None,
        extra or None,
    )
