"""Secrets that were left in a config: which keys, never which values."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ckpttool.formats.values import Opaque
from ckpttool.model.inert import key_text

_SECRET_WORDS = frozenset(
    ("password", "passwd", "passphrase", "secret", "credential", "credentials", "apikey")
)
# With the word before it, "key" is a secret: api_key, ACCESS-KEY, privateKey.
_KEY_OWNERS = frozenset(("api", "access", "private", "secret"))
# "pad_token" is a word of a vocabulary, "max_token" a count.
_VOCABULARY = frozenset(
    (
        *("pad", "padding", "eos", "bos", "unk", "unknown", "mask", "sep", "cls", "special"),
        *("image", "audio", "video", "vision", "start", "end", "stop", "begin", "newline", "blank"),
        *("decoder", "encoder", "num", "n", "max", "min", "total", "per", "next", "each", "every"),
        *("new", "first", "last", "extra", "added", "prefix", "suffix", "text", "input", "output"),
        "sub",
    )
)
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_REDACTED = re.compile(r"\W*(redacted|removed|hidden|masked|none|null)?\W*|[*x.]+", re.I)
_LONGEST_PLACEHOLDER = 64
# Nobody nests a config deeper; a hostile file might, to make the dotted names cost quadratic space.
_LONGEST_PLACE = 1_000


def is_secret_key(key: Any) -> bool:
    """Whether a key by this name holds a secret: `hf_token`, `apiKey`, `db-password`, `api_key`."""
    if not isinstance(key, str):
        return False
    words = [part.lower() for part in _PARTS.findall(key[:200])]
    if words[-1:] == ["token"]:
        return words[-2:-1] == [] or words[-2] not in _VOCABULARY
    pairs = zip([None, *words], words, strict=False)
    return any(
        word in _SECRET_WORDS or (word == "key" and before in _KEY_OWNERS) for before, word in pairs
    )


def unredacted_secrets(config: Any) -> list[str]:
    """Dotted keys of `config`, at any depth, whose name says secret and whose value is still there.

    Only text and bytes count: a number under `token` is a count, None and `<redacted>` are fine.
    """
    found: list[str] = []
    seen: set[int] = set()
    todo: list[tuple[str, Any, bool]] = [("config", config, False)]
    while todo:
        place, value, secret = todo.pop()
        if isinstance(value, (str, bytes)):
            if secret and not _is_redacted(value):
                found.append(place)
            continue
        if id(value) in seen or len(place) > _LONGEST_PLACE:
            continue
        children = list(_children(value))
        if children:
            seen.add(id(value))
        for key, child in reversed(children):
            todo.append((f"{place}.{key_text(key)}", child, secret or is_secret_key(key)))
    return found


def _children(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    if isinstance(value, Opaque):  # an argparse.Namespace keeps its options in its state
        return [*_children(value.state), *(value.pairs or ())]
    return ()


def _is_redacted(value: str | bytes) -> bool:
    if isinstance(value, bytes) or len(value) > _LONGEST_PLACEHOLDER:
        return not value
    return _REDACTED.fullmatch(value) is not None
