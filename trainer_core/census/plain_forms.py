"""Small values that never change, as plain ones, and back: dates, paths, exact numbers, members.

Each form is a dictionary whose first key begins with `$`. Names of classes in it lead to enums, and
to classes of the program's own, that this process has already; nothing is imported or called.
"""

from __future__ import annotations

import ast
import datetime
import decimal
import enum
import fractions
import itertools
import pathlib
import sys
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from trainer_core.saving.savable import CheckpointError

PLAIN = (type(None), bool, int, float, complex, str, bytes)

BY_VALUE = (
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, pathlib.PurePath),
    *(decimal.Decimal, fractions.Fraction, uuid.UUID, range, slice),
)
"""Of these, as of numbers and text, one is as good as another that is equal."""


def plain_form(value: Any) -> dict[str, Any] | None:
    """What is kept of such a value; None for one that has no plain form."""
    if isinstance(value, enum.Enum):
        return _of_member(value)
    for name, (kind, form, _) in _FORMS.items():
        if type(value) is kind:
            content = form(value)
            return None if content is None else {name: content}
    if isinstance(value, pathlib.PurePath) and type(value).__module__.startswith("pathlib"):
        return {"$path": str(value), "pure": not isinstance(value, pathlib.Path)}
    return None


def from_plain_form(form: str, kept: Mapping[str, Any], here: Any) -> Any:
    """The value again, for an attribute that is `here` now. Raises CheckpointError."""
    if form in _FORMS:
        return _FORMS[form][2](kept[form])
    if form == "$path":
        return (pathlib.PurePath if kept.get("pure") else pathlib.Path)(kept[form])
    if form in ("$enum", "$member"):
        return _member(form, kept, here)
    raise CheckpointError(f"is kept as {form[:40]!r}, which is not known here")


def class_named(module: Any, name: Any) -> type | None:
    """A class that a module of this process has under this name; None where there is none."""
    found: Any = sys.modules.get(module) if isinstance(module, str) else None
    for part in str(name).split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found if isinstance(found, type) else None


def is_found(kind: type) -> bool:
    """Whether `class_named` gives this very class for its name."""
    return class_named(kind.__module__, kind.__qualname__) is kind


def _of_member(value: enum.Enum) -> dict[str, Any] | None:
    kind = {"class": type(value).__qualname__, "module": type(value).__module__}
    if type(value.value) in PLAIN:
        return {"$enum": value.value, **kind}
    return {"$member": value.name, **kind} if value.name is not None else None


def _member(form: str, kept: Mapping[str, Any], here: Any) -> Any:
    name = kept["class"]
    kind = type(here) if type(here).__qualname__ == name else class_named(kept.get("module"), name)
    if kind is None or not issubclass(kind, enum.Enum):
        raise CheckpointError(f"is no {name} here, while one was saved")
    return kind(kept[form]) if form == "$enum" else kind[kept[form]]


# Each with what it makes of a value (None: it cannot), and of that again.


def _moment(value: datetime.datetime | datetime.time) -> Any:
    zone = _zone(value.tzinfo)
    return None if zone is None else [value.replace(tzinfo=None).isoformat(), value.fold, zone]


def _to_moment(kind: type[datetime.datetime] | type[datetime.time], content: Any) -> Any:
    text, fold, zone = content
    return kind.fromisoformat(text).replace(fold=fold, tzinfo=_to_zone(zone))


def _zone(zone: Any) -> Any:
    """Empty without one; None for one that only its class knows."""
    if zone is None:
        return []
    return _delta(zone.utcoffset(None)) if type(zone) is datetime.timezone else None


def _to_zone(zone: Any) -> datetime.timezone | None:
    return datetime.timezone(_to_delta(zone)) if zone else None


def _delta(value: datetime.timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _to_delta(content: Any) -> datetime.timedelta:
    return datetime.timedelta(*content)


def _bounds(value: Any) -> Any:
    bounds = [value.start, value.stop, value.step]
    return bounds if all(type(bound) in PLAIN for bound in bounds) else None


def _count(value: Any) -> Any:
    """Where it is, which it tells in its `repr` alone."""
    try:
        numbers = ast.literal_eval(repr(value).removeprefix("count"))
    except (ValueError, SyntaxError):  # of numbers that are no plain ones
        return None
    return list(numbers) if isinstance(numbers, tuple) else [numbers]


_FORMS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "$datetime": (datetime.datetime, _moment, partial(_to_moment, datetime.datetime)),
    "$date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "$time": (datetime.time, _moment, partial(_to_moment, datetime.time)),
    "$timedelta": (datetime.timedelta, _delta, _to_delta),
    "$timezone": (datetime.timezone, _zone, _to_zone),
    "$decimal": (decimal.Decimal, str, decimal.Decimal),
    "$fraction": (fractions.Fraction, str, fractions.Fraction),
    "$uuid": (uuid.UUID, str, uuid.UUID),
    "$count": (itertools.count, _count, lambda content: itertools.count(*content)),
    "$range": (range, _bounds, lambda content: range(*content)),
    "$slice": (slice, _bounds, lambda content: slice(*content)),
}
