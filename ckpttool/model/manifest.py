"""The manifest: `manifest.jsonl`, in which a trainer records each step that it keeps.

A line is an object with `step`, `file`, `size` (bytes), `sha256` (hexadecimal), `run_id`, `parent`
(the step that training had gone on from, or null) and `saved` (UTC). Of several lines for a file
the last one counts; lines for files that are gone mean nothing. A last line without its end
was being written when the writer died.
"""

from __future__ import annotations

import errno
import os
import re
from typing import Any, NamedTuple

from ckpttool.errors import FormatError
from ckpttool.io.folder import Folder
from ckpttool.model.names import MANIFEST_NAME, parse_step_name
from ckpttool.model.pointer import Pointer, read_pointer

MOST_BYTES = 64 << 20

_SHA256 = re.compile(r"[0-9a-fA-F]{64}\Z")


class Entry(NamedTuple):
    """What a manifest records of one step file. Each is None where it is missing or malformed.

    `sha256` is in lower case.
    """

    file: str
    step: int | None = None
    size: int | None = None
    sha256: str | None = None
    run_id: str | None = None
    parent: int | None = None
    saved: str | None = None


class Manifest(NamedTuple):
    """The last line for each file, by its name, and what could not be read, in words.

    `entries` are in the order in which these lines stand.

    `exists` says whether there is a manifest at all. `older` are the lines before the last one, for
    files that have several.
    """

    entries: dict[str, Entry]
    problems: list[str]
    exists: bool = True
    older: dict[str, list[Entry]] = {}  # noqa: RUF012 - never changed


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """The manifest of a directory. Never raises; a link is not followed."""
    try:
        with Folder(directory) as home:
            data = home.read(MANIFEST_NAME, MOST_BYTES)
    except OSError as error:
        words = "it is a link" if error.errno == errno.ELOOP else error.strerror or str(error)
        return Manifest({}, [f"it could not be read: {words}"])
    if data is None:
        return Manifest({}, [], exists=False)
    entries: dict[str, Entry] = {}
    older: dict[str, list[Entry]] = {}
    problems: list[str] = []
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        if not line.strip():
            continue
        try:
            entry = _entry(line)
        except FormatError as error:
            problems.append(f"line {number}: {error}")
        else:
            if entry.file in entries:
                older.setdefault(entry.file, []).append(entries.pop(entry.file))
            entries[entry.file] = entry
    return Manifest(entries, problems, older=older)


def known_sha256(path: str | os.PathLike[str]) -> str | None:
    """The SHA-256 that the pointer or the manifest beside a step file records of it, in lower case.

    The pointer counts first, where it names the file. None where neither says.
    """
    directory, name = os.path.split(os.fspath(path))
    recorded = pointer_record(directory or os.curdir, name)
    if recorded is None or recorded.sha256 is None:
        recorded = read_manifest(directory or os.curdir).entries.get(name)
    return None if recorded is None else recorded.sha256


def pointer_record(directory: str | os.PathLike[str], name: str) -> Entry | None:
    """What the pointer's other keys record of the file `name`; None if it names another file."""
    pointer = read_pointer(directory)
    return recorded_by(pointer) if pointer.file == name else None


def recorded_by(pointer: Pointer) -> Entry | None:
    """What the pointer's other keys record of the file that it names; None if it names none."""
    if pointer.file is None:
        return None
    return _fields({"file": pointer.file, "step": pointer.step, **pointer.extra})


def _entry(line: bytes) -> Entry:
    import json

    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        raise FormatError("is not JSON") from None
    if not isinstance(content, dict):
        raise FormatError("is not an object")
    if not isinstance(content.get("file"), str) or parse_step_name(content["file"]) is None:
        raise FormatError("names no step file")
    return _fields(content)


def _fields(content: dict[str, Any]) -> Entry:
    def number(key: str) -> int | None:
        value = content.get(key)
        return value if type(value) is int and value >= 0 else None

    def text(key: str) -> str | None:
        value = content.get(key)
        return value if isinstance(value, str) else None

    sha256 = text("sha256")
    return Entry(
        content["file"],
        number("step"),
        number("size"),
        sha256.lower() if sha256 is not None and _SHA256.match(sha256) else None,
        text("run_id"),
        number("parent"),
        text("saved"),
    )
