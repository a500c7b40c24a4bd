"""A run's configuration as plain data without its secrets, fit to be stored in a checkpoint.

Which keys name secrets is a guess from their words. It errs towards hiding, except for what
language models call tokens: `tokenizer`, `max_tokens`, `pad_token`, `token_dropout` stay readable.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import os
import re
import uuid
from collections.abc import Mapping
from typing import Any

import torch
import torch.utils.data

REDACTED = "<redacted>"

# Found anywhere in a key, however its words are joined: `db_password`, `dbPassword`, `DBPASSWORD`.
_STRONG = (
    *("password", "passwd", "passphrase", "secret", "credential", "apikey"),
    *("accesskey", "privatekey", "authkey", "signingkey", "encryptionkey", "sshkey"),
)
# Secret where they are a word of their own.
_WORDS = frozenset(
    {"pwd", "auth", "authorization", "authentication", "bearer", "cookie", "cookies"}
)
# Words next to `token` that make it a piece of text. `token_id` is one, `id_token` is a login.
_BEFORE_TOKEN = frozenset(
    (
        *("pad", "padding", "eos", "bos", "unk", "unknown", "mask", "sep", "cls", "special"),
        *("image", "audio", "video", "vision", "start", "end", "stop", "begin", "newline", "blank"),
        *("decoder", "encoder", "num", "n", "max", "min", "total", "per", "next", "each", "every"),
        *("new", "first", "last", "extra", "added", "prefix", "suffix", "text", "input", "output"),
        "sub",
    )
)
_AFTER_TOKEN = frozenset(
    (
        *("id", "ids", "type", "types", "dropout", "drop", "embedding", "embeddings", "embed"),
        *("dim", "size", "length", "len", "limit", "count", "counts", "budget", "rate", "weight"),
        *("weights", "freq", "frequency", "level", "loss", "shift", "mixing", "merging", "index"),
        *("idx", "position", "positions", "per", "ratio", "batch", "classification", "pooling"),
    )
)
# Words before `tokens` that make it logins after all.
_BEFORE_LOGIN_TOKENS = frozenset(
    ("api", "access", "auth", "bearer", "refresh", "session", "hf", "github", "user")
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_PASSWORD_IN_URL = re.compile(r"(?<=://)([^/\s:@]*):[^/\s@]+@")
# What some services give out says what it is by its first letters.
_BY_SHAPE = re.compile(
    r"\b(?:gh[oprsu]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|hf_\w{20,}|sk-[\w-]{20,}"
    r"|xox[abeprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|AIza[\w-]{30,})"
    r"|(?<=hooks\.slack\.com/services/)[\w/]+"
)
# `?token=x&sig=y`, `HF_TOKEN=x`, `--api-key x`: a name, and its value in the same text.
_ASSIGNED = re.compile(r"(?<![\w-])((?:--)?([A-Za-z][\w-]*)=|--([A-Za-z][\w-]*) +)([^\s&;\"']+)")
_SIGNATURES = frozenset({"sig", "signature"})
_AS_TEXT = (
    *(os.PathLike, uuid.UUID, decimal.Decimal, datetime.date, datetime.time, datetime.timedelta),
    *(range, complex),
)
_OPAQUE = (torch.nn.Module, torch.optim.Optimizer, torch.utils.data.Dataset)
_MOST_NUMBERS = 1_000
_MOST_DEPTH = 100


def redact(config: Any) -> dict[str, Any] | None:
    """`config` as plain data (dicts, lists, strings, numbers, None) with its secrets hidden.

    Takes a mapping, a dataclass, an object with `to_dict()` or with attributes (argparse's
    Namespace), or None, which stays None. The value of a key such as token, password, secret,
    api_key or credential, at any depth, becomes "<redacted>", unless it is None or a bool; so do,
    within a text, the password in a URL, the value of such a name (`?token=`, `HF_TOKEN=`,
    `--api-key `), and what is a token by its shape (`ghp_`, `hf_`, `sk-`, `AKIA`). Paths become
    text, enums their values, arrays lists; what is no data becomes the name of its type. Redacting
    twice changes nothing. Raises TypeError for a config
    that has no keys (a list, a string, a number).
    """
    if config is None:
        return None
    plain = _plain(config, ())
    if not isinstance(plain, dict):
        raise TypeError(
            f"a config is a mapping, a dataclass or None, not a {type(config).__name__}"
        )
    return plain


def is_secret_key(key: str) -> bool:
    """Whether a key of this name looks as if its value were a secret."""
    words = [word.lower() for word in _WORD.findall(key)]
    joined = "".join(words)
    if any(strong in joined for strong in _STRONG) or not _WORDS.isdisjoint(words):
        return True
    return any(_is_login_token(words, index) for index in range(len(words)))


def _is_login_token(words: list[str], index: int) -> bool:
    before = words[index - 1] if index else ""
    after = words[index + 1] if index + 1 < len(words) else ""
    word = words[index]
    if word == "tokens":
        return before in _BEFORE_LOGIN_TOKENS
    if not word.endswith("token"):
        return False
    joined = word[: -len("token")]  # `hftoken`, `padtoken`
    return before not in _BEFORE_TOKEN and joined not in _BEFORE_TOKEN and after not in _AFTER_TOKEN


def _plain(value: Any, parents: tuple[int, ...]) -> Any:
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, enum.Enum):
        return _plain(value.value, parents)
    if isinstance(value, str):
        return _text(str(value))
    if isinstance(value, (int, float)):
        return _base_number(value)
    if id(value) in parents or len(parents) > _MOST_DEPTH:
        return _type_name(value)
    try:
        return _compound(value, (*parents, id(value)))
    except Exception:  # an object's own to_dict or __iter__ may do anything
        return _type_name(value)


def _text(text: str) -> str:
    """A text without passwords, tokens of known shape, and values of secret names inside it."""
    text = _PASSWORD_IN_URL.sub(rf"\1:{REDACTED}@", text)
    return _ASSIGNED.sub(_hide_assigned, _BY_SHAPE.sub(REDACTED, text))


def _hide_assigned(found: re.Match[str]) -> str:
    name = found[2] or found[3]
    hide = is_secret_key(name) or name.lower() in _SIGNATURES
    return found[1] + REDACTED if hide else found[0]


def _compound(value: Any, parents: tuple[int, ...]) -> Any:
    if isinstance(value, Mapping):
        return _mapping(value, parents)
    if isinstance(value, (list, tuple)):
        return [_plain(item, parents) for item in value]
    if isinstance(value, (set, frozenset)):
        items = [_plain(item, parents) for item in value]
        return sorted(items, key=lambda item: (type(item).__name__, str(item)))
    if isinstance(value, _AS_TEXT):
        return _plain(str(value), parents)
    if isinstance(value, _OPAQUE):
        return _type_name(value)
    if hasattr(value, "__qualname__"):  # a class or a function
        return f"{value.__module__}.{value.__qualname__}"
    if type(value).__module__.split(".")[0] in ("numpy", "torch", "ml_dtypes"):
        return _numeric(value, parents)
    fields = _fields(value)
    return _type_name(value) if fields is None else _mapping(fields, parents)


def _mapping(value: Mapping[Any, Any], parents: tuple[int, ...]) -> dict[Any, Any]:
    plain = {}
    for key, item in value.items():
        name = key if key is None or isinstance(key, (bool, int, float)) else _key_text(key)
        hide = isinstance(name, str) and is_secret_key(name) and not _says_nothing(item)
        plain[name] = REDACTED if hide else _plain(item, parents)
    return plain


def _key_text(key: Any) -> str:
    return str(key.value if isinstance(key, enum.Enum) else key)


def _says_nothing(value: Any) -> bool:
    """`token=None` and `use_auth=False` tell no secret, and are worth knowing."""
    return value is None or isinstance(value, bool)


def _base_number(value: int | float) -> int | float:
    return int(value) if isinstance(value, int) else float(value)


def _fields(value: Any) -> Mapping[Any, Any] | None:
    """The named parts of an object, or None."""
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    to_dict = getattr(value, "to_dict", None)
    if callable(to_dict):
        try:
            made = to_dict()
        except Exception:
            made = None
        if isinstance(made, Mapping):
            return made
    return vars(value) if hasattr(value, "__dict__") else None


def _numeric(value: Any, parents: tuple[int, ...]) -> Any:
    """A dtype or device by its name, a scalar or small array by its numbers, else the type."""
    kind = type(value).__name__
    if kind in ("dtype", "device", "layout", "memory_format") or kind.endswith("DType"):
        return str(value)
    if hasattr(value, "tolist") and getattr(value, "size", None) is not None:
        count = value.numel() if hasattr(value, "numel") else value.size
        if count <= _MOST_NUMBERS:
            return _plain(value.tolist(), parents)
    return _type_name(value)


def _type_name(value: Any) -> str:
    return f"<{type(value).__module__}.{type(value).__qualname__}>"
