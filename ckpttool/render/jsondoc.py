"""JSON documents: one to a run, `schema_version` first, plain ASCII, valid under RFC 8259.

Values that JSON lacks are written as objects with one key that begins with `$`: a number that is
not finite as `{"$float": "nan"}`, bytes as `{"$bytes": "<base64>", "length": …}`. README lists
them. A long list may be given as an iterator, and is written as it comes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

from ckpttool.render.text import writer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SCHEMA_VERSION = 1

# Longer texts and byte strings are cut in a document, and say so.
TEXT_LIMIT = 4096
_INTEGER_BITS = 10_000  # Python refuses to spell much longer ones (CVE-2020-10735)


def write_document(document: Mapping[str, Any], stream: TextIO | None = None) -> None:
    """Writes one document, a top-level key to a line; an iterator becomes a list, item by item.

    A value that is a callable is called with the function that writes text, and writes itself.
    """
    write = writer(sys.stdout if stream is None else stream)
    write(f'{{"schema_version": {SCHEMA_VERSION}')
    for key, value in document.items():
        write(f",\n {dumps(key)}: ")
        if callable(value):
            value(write)
        elif isinstance(value, Iterator):
            _write_items(value, write)
        else:
            write(dumps(value))
    write("}\n")


def _write_items(items: Iterator[Any], write: Callable[[str], object]) -> None:
    separator = "[\n  "
    for item in items:
        write(separator + dumps(item))
        separator = ",\n  "
    write("[]" if separator[0] == "[" else "]")


def dumps(value: Any) -> str:
    """Compact JSON of plain data; what JSON lacks is written as the module says."""
    import json

    try:
        return json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return json.dumps(plain(value), allow_nan=False)


def error_document(error: BaseException, message: str, code: int) -> dict[str, Any]:
    """What `--json` prints where an error is all there is to say."""
    facts: dict[str, Any] = {"kind": type(error).__name__, "message": message}
    path = getattr(error, "path", None)
    if isinstance(path, str):
        facts["path"] = path
    return {"error": facts, "exit_code": int(code)}


def plain(value: Any, depth: int = 100) -> Any:
    """Data that `json` takes, made of any data; `depth` bounds the nesting."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float, str, bytes, bytearray)):
        return plain_scalar(value)
    if depth <= 0:
        return {"$truncated": "depth"}
    if isinstance(value, dict):
        return {_key(key): plain(item, depth - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item, depth - 1) for item in value]
    return repr(value)[:TEXT_LIMIT]


def plain_scalar(value: int | float | str | bytes | bytearray) -> Any:
    """A number, text or bytes as JSON has it, or as a `$` object where JSON has none."""
    if isinstance(value, int):
        return _plain_integer(value)
    if isinstance(value, float):
        finite = value - value == 0.0
        return float(value) if finite else {"$float": repr(float(value))}
    if isinstance(value, str):
        if len(value) <= TEXT_LIMIT:
            return str(value)
        return {"$text": value[:TEXT_LIMIT], "length": len(value)}
    from base64 import b64encode

    head = b64encode(value[:TEXT_LIMIT]).decode("ascii")
    return {"$bytes": head, "length": len(value)}


def _plain_integer(value: int) -> Any:
    if value.bit_length() > _INTEGER_BITS:
        return {"$int": hex(value)[:TEXT_LIMIT], "bits": value.bit_length()}
    return int(value)


def _key(key: Any) -> str:
    if isinstance(key, str):
        return key
    try:
        return repr(key)[:TEXT_LIMIT]
    except ValueError:  # an integer that Python refuses to spell
        return f"({type(key).__name__})"
