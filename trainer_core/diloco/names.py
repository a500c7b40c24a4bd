"""Which node ids and which names on the shared store are taken.

Both come from outside: from environment variables, from checkpoints, from what others wrote into
the store. So both are checked wherever they come in, and become part of a path only after that.
"""

from __future__ import annotations

import re

from trainer_core.diloco.errors import BadNameError

_NODE_ID = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
# The portable file name characters of POSIX (3.265), and `=`, `+`, `,` which all systems take too.
# No leading dot: such names are the store's own temporaries. No final one: Windows drops it.
_PART = re.compile(r"[A-Za-z0-9_=+,-](?:[A-Za-z0-9_.=+,-]*[A-Za-z0-9_=+,-])?")
_PART_LIMIT = 200
"""Characters; leaves a temporary's name below the 255 bytes that file systems take."""
_NAME_LIMIT = 700
"""Characters; leaves room for a prefix in the 1,024 bytes of an S3 key."""


def check_node_id(text: str) -> str:
    """The text, if it is a node id: 1 to 64 of `a-z0-9_.-`, a letter or digit first, no dot last.

    Raises BadNameError, which is a ValueError.
    """
    if not isinstance(text, str):
        raise BadNameError(repr(text), "a node id must be text")
    if not _NODE_ID.fullmatch(text) or text.endswith("."):
        rule = "1 to 64 of a-z, 0-9, '_', '.', '-', a letter or digit first, no dot last"
        raise BadNameError(text, f"not a node id ({rule})")
    return text


def is_node_id(text: str) -> bool:
    """Whether `check_node_id` takes it."""
    try:
        check_node_id(text)
    except BadNameError:
        return False
    return True


def check_name(text: str) -> str:
    """The text, if it is a name on the store: a relative path of portable parts, joined by `/`.

    So there is no `..`, no backslash, no leading dot or slash, no empty part. Raises BadNameError,
    which is a ValueError.
    """
    if not isinstance(text, str):
        raise BadNameError(repr(text), "a name on the store must be text")
    if not text or len(text) > _NAME_LIMIT:
        raise BadNameError(text, f"a name on the store has 1 to {_NAME_LIMIT} characters")
    for part in text.split("/"):
        if not is_part(part):
            raise BadNameError(text, f"the part {part[:80]!r} isn't fit for a name on the store")
    return text


def is_part(text: str) -> bool:
    """Whether the text can be one part of a name on the store."""
    return len(text) <= _PART_LIMIT and _PART.fullmatch(text) is not None
