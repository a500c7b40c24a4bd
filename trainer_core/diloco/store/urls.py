"""Which kind of store a URL names. Says so in words that hold no credentials."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from trainer_core.diloco.errors import PermanentError
from trainer_core.diloco.store.backend import Backend

SCHEMES = {
    "file": "a directory (a plain path is one too)",
    "memory": "this process's memory, for tests",
    "s3": "s3://BUCKET/PREFIX",
    "sftp": "sftp://[USER@]HOST[:PORT]/DIRECTORY",
    "hf": "hf://[datasets/]OWNER/NAME[@REVISION][/FOLDER]",
}
"""Every scheme that can be opened."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)
# Options that errors may show; any other text in the options is taken for a secret.
_SHOWN = frozenset({"endpoint", "endpoint_url", "region_name", "username", "profile", "host"})
# What a package that is missing is called when it is installed, by the module that isn't found.
_EXTRAS = {"s3": "s3", "sftp": "sftp", "hf": "hf"}


class Place(NamedTuple):
    """A URL, taken apart. `words` is the URL without password; `secrets` must never be shown."""

    scheme: str
    rest: str
    words: str
    secrets: tuple[str, ...]


def parse(url: str | os.PathLike[str], options: Mapping[str, Any]) -> Place:
    """Takes a path or URL apart. Raises PermanentError for a scheme that isn't known."""
    text = os.fspath(url)
    match = _SCHEME.fullmatch(text)
    scheme, rest = (match[1].lower(), match[2]) if match else ("file", text)
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}:// ({what})" for name, what in SCHEMES.items())
        raise PermanentError(f"no store of the kind {scheme!r}; known are: {known}")
    if not rest:
        raise PermanentError(f"{scheme}:// names no place: expected {SCHEMES[scheme]}")
    password = ""
    if match and scheme != "file":
        rest_shown, password = _without_password(scheme, rest)
        shown = f"{scheme}://{rest_shown}"
    else:
        shown = rest
    secrets = tuple(one for one in (password, *_texts(options)) if one)
    return Place(scheme, rest, shown.rstrip("/") or shown, secrets)


def open_backend(place: Place, timeout: float, options: Mapping[str, Any]) -> Backend:
    """The backend for a place; its packages are imported only here.

    Raises PermanentError where one is missing.
    """
    try:
        return _open(place, timeout, options)
    except ImportError as error:
        if (extra := _EXTRAS.get(place.scheme)) is None:
            raise
        words = f"{place.scheme}:// needs a package that isn't there ({error.name})"
        raise PermanentError(f"{words}: pip install 'ckpttool[{extra}]'") from None


def _open(place: Place, timeout: float, options: Mapping[str, Any]) -> Backend:
    if place.scheme == "file":
        from trainer_core.diloco.store.local import LocalBackend

        return LocalBackend(place.rest, timeout)
    if place.scheme == "memory":
        from trainer_core.diloco.store.memory import MemoryBackend

        return MemoryBackend(place.rest)
    if place.scheme == "s3":
        from trainer_core.diloco.store.s3 import S3Backend

        return S3Backend(place.rest, timeout, options)
    if place.scheme == "sftp":
        from trainer_core.diloco.store.sftp import SftpBackend

        return SftpBackend(place.rest, timeout, options)
    from trainer_core.diloco.store.hub import HubBackend

    return HubBackend(place.rest, timeout, options)


def _without_password(scheme: str, rest: str) -> tuple[str, str]:
    """The part after `://` as it may be shown, and the password that was in it."""
    host, slash, path = rest.partition("/")
    login, at, server = host.rpartition("@")
    if not at:
        return rest, ""
    if scheme != "sftp":
        if scheme == "hf":  # there `@` stands before a revision, in what comes after the slash
            raise PermanentError("hf:// takes no login: set HF_TOKEN, or log in with `hf auth`")
        words = f"{scheme}:// takes no login in its URL: credentials belong in the environment"
        raise PermanentError(words)
    user, _, password = login.partition(":")
    return f"{user}@{server}{slash}{path}", password


def _texts(value: object) -> list[str]:
    """Every text in the options but for those that are known to be no secret."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        hidden = (one for name, one in value.items() if name not in _SHOWN)
        return [text for one in hidden for text in _texts(one)]
    return []
