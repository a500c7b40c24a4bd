"""Pointers of other programs beside `latest.json`: a file or link that names the newest step.

DeepSpeed writes `latest` (the name of a folder, `global_step20`), Megatron
`latest_checkpointed_iteration.txt` (an iteration, or `release`), detectron2 `last_checkpoint` (the
name of a file); a link `latest` or `last` leads to a step.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.io.folder import Folder

if TYPE_CHECKING:
    from ckpttool.model.directory import CheckpointDirectory, Other

_FILES = frozenset(("latest", "latest.txt", "latest_checkpointed_iteration.txt", "last_checkpoint"))
_LINKS = frozenset(("latest", "last", "latest.pt", "last.pt"))
_MOST_BYTES = 4096
_STEP = re.compile(r"(?:\A|[^0-9])([0-9]{1,18})(?:\.[A-Za-z]+)?\Z")


class OtherPointer(NamedTuple):
    """`says` is its content, or where the link leads; `step` the number in that, None if there is
    none.
    """

    name: str
    says: str
    step: int | None
    is_link: bool


def other_pointers(directory: CheckpointDirectory) -> list[OtherPointer]:
    """The other pointers of a directory. Links are read, never followed. Raises for nothing."""
    found = (_pointer(directory.path, other) for other in directory.others)
    return [pointer for pointer in found if pointer is not None]


def _pointer(directory: str, other: Other) -> OtherPointer | None:
    if other.kind == "link" and other.name in _LINKS:
        says = other.link or ""
    elif other.kind == "foreign" and other.name in _FILES:
        says = _content(directory, other.name)
    else:
        return None
    match = _STEP.search(os.path.basename(says.rstrip("/")))
    return OtherPointer(
        other.name, says[:200], int(match[1]) if match else None, other.kind == "link"
    )


def _content(directory: str, name: str) -> str:
    """What a small file holds, without blanks around it; empty where it cannot be read."""
    try:
        with Folder(directory) as home:
            data = home.read(name, _MOST_BYTES) or b""
    except OSError:
        return ""
    return data.decode("utf-8", "backslashreplace").strip()
