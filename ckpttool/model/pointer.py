"""The pointer: `latest.json`, which names the step file that a run resumes from.

Format, as the training core writes it: `{"step": 4, "file": "step_000000000004.pt"}`, UTF-8 JSON.
Other keys are allowed; `size` (bytes) and `sha256` (hex) may record what the file was. For a
sharded step `file` is the directory's name, and they record its `.metadata`.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Any

from ckpttool.model.names import POINTER_NAME, parse_step_file_name, parse_step_name

POINTER_BYTES = 64 * 1024
"""A pointer larger than this is not read: a real one has fewer than a hundred bytes."""

# A link is not followed, a FIFO does not block; both flags are missing on some platforms.
_OPEN_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
)


class Pointer:
    """What `latest.json` says, and whether it can be followed.

    `state` is `ok`, `missing`, `unreadable`, `not-a-file`, `malformed`, `unsafe-target` or
    `dangling`; `problem` puts every state but `ok` in words. `step` and `file` are what the JSON
    holds where it has the right type, `target` is the path to follow (only when `ok`), `extra` has
    the other keys. `mode` is the `st_mode` of a regular file, else None.
    """

    __slots__ = ("extra", "file", "mode", "path", "problem", "state", "step", "target")

    def __init__(
        self,
        path: str,
        state: str,
        problem: str | None = None,
        *,
        step: int | None = None,
        file: str | None = None,
        target: str | None = None,
        extra: dict[str, Any] | None = None,
        mode: int | None = None,
    ) -> None:
        self.path = path
        self.state = state
        self.problem = problem
        self.step = step
        self.file = file
        self.target = target
        self.extra = extra or {}
        self.mode = mode

    @property
    def file_step(self) -> int | None:
        """The step in the name of the file that the pointer names, or None."""
        return None if self.file is None else parse_step_name(self.file)

    def as_dict(self) -> dict[str, Any]:
        """The pointer as plain data."""
        return {
            "path": self.path,
            "state": self.state,
            "problem": self.problem,
            "step": self.step,
            "file": self.file,
            "target": self.target,
        }

    def __repr__(self) -> str:
        return f"Pointer({self.path!r}, {self.state}, step={self.step}, file={self.file!r})"


class _FlawError(Exception):
    """The pointer cannot be used: its state, and why. Never leaves this module."""

    def __init__(self, state: str, problem: str) -> None:
        super().__init__(problem)
        self.state = state
        self.problem = problem


def read_pointer(directory: str | os.PathLike[str]) -> Pointer:
    """The pointer of `directory`, read without following any link. Raises for nothing it finds."""
    path = os.path.join(os.fspath(directory), POINTER_NAME)
    try:
        pointer = _judge(path, _parse(_read_capped(path)))
    except _FlawError as problem:
        pointer = Pointer(path, problem.state, problem.problem)
    pointer.mode = _mode_of_regular(path)
    return pointer


def _mode_of_regular(path: str) -> int | None:
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return None
    return mode if stat.S_ISREG(mode) else None


def _read_capped(path: str) -> bytes:
    try:
        descriptor = os.open(path, _OPEN_FLAGS)
    except FileNotFoundError:
        raise _FlawError("missing", "there is no pointer") from None
    except OSError as error:
        raise _cannot_open(path, error) from None
    try:
        kind = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(kind):
            raise _FlawError("not-a-file", f"it is {_kind_in_words(kind)}, not a regular file")
        return _read_all(descriptor)
    except OSError as error:
        raise _FlawError("unreadable", error.strerror or str(error)) from None
    finally:
        os.close(descriptor)


def _cannot_open(path: str, error: OSError) -> _FlawError:
    # O_NOFOLLOW reports a link as ELOOP (EMLINK on some BSDs); a socket gives ENXIO.
    try:
        kind = os.lstat(path).st_mode
    except OSError:
        kind = stat.S_IFREG
    if not stat.S_ISREG(kind) and error.errno not in (errno.EACCES, errno.EIO):
        return _FlawError("not-a-file", f"it is {_kind_in_words(kind)}, not a regular file")
    return _FlawError("unreadable", error.strerror or str(error))


def _read_all(descriptor: int) -> bytes:
    parts: list[bytes] = []
    room = POINTER_BYTES + 1
    while room > 0 and (part := os.read(descriptor, room)):
        parts.append(part)
        room -= len(part)
    if room == 0:
        raise _FlawError("malformed", f"it is larger than {POINTER_BYTES} bytes")
    return b"".join(parts)


def _parse(data: bytes) -> dict[str, Any]:
    import json

    if not data.strip():
        raise _FlawError("malformed", "it is empty" if not data else "it holds nothing but blanks")
    if not data.strip(b"\0"):
        raise _FlawError("malformed", f"all of its {len(data)} bytes are zero")
    try:
        content = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _FlawError("malformed", f"it is not UTF-8 (byte {error.start})") from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise _FlawError("malformed", f"it is not JSON, or cut short: {reason}") from None
    if not isinstance(content, dict):
        raise _FlawError("malformed", f"it holds {_json_kind(content)} where an object should be")
    return content


def _judge(path: str, content: dict[str, Any]) -> Pointer:
    step = content.get("step")
    file = content.get("file")
    pointer = Pointer(
        path,
        "ok",
        step=step if isinstance(step, int) and not isinstance(step, bool) else None,
        file=file if isinstance(file, str) else None,
        extra={key: value for key, value in content.items() if key not in ("step", "file")},
    )
    try:
        if "file" not in content:
            raise _FlawError("malformed", 'it has no "file"')
        if pointer.file is None:
            raise _FlawError("malformed", f'its "file" is {_json_kind(file)} where text should be')
        pointer.target = _safe_target(os.path.dirname(path), pointer.file)
    except _FlawError as problem:
        pointer.state, pointer.problem = problem.state, problem.problem
    return pointer


def _safe_target(directory: str, file: str) -> str:
    """The path of `file` in `directory`: a plain step file there, or a sharded step; no link."""
    if parse_step_name(file) is None:
        raise _FlawError("unsafe-target", _why_unsafe(file))
    target = os.path.join(directory, file)
    try:
        kind = os.lstat(target).st_mode
    except FileNotFoundError:
        raise _FlawError("dangling", f"it names {file}, which does not exist") from None
    except OSError as error:
        raise _FlawError("unreadable", f"{file}: {error.strerror}") from None
    sharded = parse_step_file_name(file) is None
    if not (stat.S_ISDIR(kind) if sharded else stat.S_ISREG(kind)):
        what, wanted = _kind_in_words(kind), "a directory" if sharded else "a regular file"
        raise _FlawError("unsafe-target", f"it names {file}, which is {what}, not {wanted}")
    return target


def _why_unsafe(file: str) -> str:
    named = f'it names "{file[:80]}"'
    if not file:
        return f"{named}, an empty name"
    if os.path.isabs(file) or file[0] in "/\\":
        return f"{named}, an absolute path: only a step file beside the pointer is followed"
    if ".." in file.replace("\\", "/").split("/") or "/" in file or "\\" in file:
        return f"{named}, a path: only a step file beside the pointer is followed"
    return f"{named}, which is not the name of a step file"


def _kind_in_words(mode: int) -> str:
    kinds = {
        stat.S_IFREG: "a regular file",
        stat.S_IFDIR: "a directory",
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFIFO: "a named pipe",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "a device")


def _json_kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    kinds = {int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return kinds[type(value)]
