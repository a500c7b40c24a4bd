"""A repository on the Hugging Face Hub, through huggingface_hub.

Through its `HfApi`, on which its fsspec file system rests too: that one remembers listings, and has
no way to say which commit a write must follow. Every write is a commit, so it is whole or not there
at all; `create` is a commit on the condition that nobody else's came since the name was seen free.

Tried against a small server of our own that speaks this part of the protocol, not against the real
Hub. There, commits are limited in number per hour, and everything that was ever written stays in
the history until that is squashed (`HfApi.super_squash_history`): good for a few nodes with long
inner phases.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any, BinaryIO

from trainer_core.diloco.errors import MissingError, PassingError, PermanentError, StoreError
from trainer_core.diloco.names import check_name
from trainer_core.diloco.store.backend import CHUNK, Backend, Found, Take, judge_os
from trainer_core.diloco.store.deadline import Pulse, run_watched

SLOWEST_B_S = 1e6
"""Bytes a second: what an upload gets in time beyond the time-out, as its progress isn't seen."""
_MOST_CONFLICTS = 10
_PLACE = re.compile(
    r"(?:(?P<kind>models|datasets)/)?(?P<repo>[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+)"
    r"(?:@(?P<revision>[A-Za-z0-9_.-]+))?(?:/(?P<folder>.*))?"
)


class HubBackend(Backend):
    """Files under a folder of one branch. `options` are those of `huggingface_hub.HfApi`."""

    def __init__(self, rest: str, timeout: float, options: Mapping[str, Any]) -> None:
        from huggingface_hub import HfApi

        match = _PLACE.fullmatch(rest.rstrip("/"))
        if match is None:
            words = "expected hf://[datasets/]OWNER/NAME[@REVISION][/FOLDER]"
            raise PermanentError(f"that is no repository on the Hub: {words}")
        folder = (match["folder"] or "").strip("/")
        self._prefix = f"{check_name(folder)}/" if folder else ""
        self._timeout = timeout
        self._revision = match["revision"] or "main"
        kind = "dataset" if match["kind"] == "datasets" else "model"
        self._repo: dict[str, Any] = {"repo_id": match["repo"], "repo_type": kind}
        self._at: dict[str, Any] = {**self._repo, "revision": self._revision}
        self._api = HfApi(**options)

    def read(self, name: str, start: int, end: int | None, take: Take) -> None:
        run_watched(lambda pulse: self._read(name, start, end, take, pulse), self._timeout)

    def size(self, name: str) -> int | None:
        return run_watched(lambda _: self._size(name, self._revision), self._timeout)

    def write(self, name: str, file: BinaryIO, size: int) -> None:
        content = file.read(size)
        deadline = self._timeout + size / SLOWEST_B_S
        run_watched(lambda pulse: self._commit(name, content, pulse, parent=None), deadline)

    def create(self, name: str, content: bytes) -> bool:
        return run_watched(lambda pulse: self._create(name, content, pulse), self._timeout)

    def listing(self, folder: str) -> list[Found]:
        return run_watched(lambda _: self._listing(folder), self._timeout)

    def tree(self, folder: str) -> list[Found]:
        """One request for each 1,000 files, however many folders they are in."""
        found = run_watched(lambda _: self._listing(folder, whole=True), self._timeout)
        return [one for one in found if one.size is not None]

    def remove(self, name: str) -> None:
        run_watched(lambda _: self._remove(name), self._timeout)

    def judge(self, error: Exception) -> type[StoreError]:
        return _judge(error)

    def _read(self, name: str, start: int, end: int | None, take: Take, pulse: Pulse) -> None:
        from huggingface_hub import get_session, hf_hub_url

        # Documented there, but not re-exported in the way that mypy asks for.
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            build_hf_headers,
            hf_raise_for_status,
        )

        if end is not None and end <= start:
            if self._size(name, self._revision) is None:
                raise FileNotFoundError(name)
            return
        place = {**self._at, "endpoint": self._api.endpoint}
        url = hf_hub_url(filename=self._prefix + name, **place)
        headers = {**build_hf_headers(token=self._api.token), "Accept-Encoding": "identity"}
        if start or end is not None:
            headers["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
        with get_session().stream("GET", url, headers=headers, timeout=self._timeout) as answer:
            if answer.status_code == 416:  # it ends before `start`
                return
            if answer.is_error:
                answer.read()
            hf_raise_for_status(answer)
            expected = int(answer.headers["Content-Length"])
            for chunk in answer.iter_bytes(CHUNK):
                pulse.beat()
                expected -= len(chunk)
                take(chunk)
        if expected:
            raise ConnectionError("the answer ended before its end")

    def _size(self, name: str, revision: str) -> int | None:
        place: dict[str, Any] = {**self._repo, "revision": revision}
        found = self._api.get_paths_info(paths=[self._prefix + name], **place)
        sizes = [getattr(one, "size", None) for one in found]
        return sizes[0] if sizes else None

    def _commit(self, name: str, content: bytes, pulse: Pulse, parent: str | None) -> None:
        from huggingface_hub import CommitOperationAdd

        path = self._prefix + name
        add = CommitOperationAdd(path_in_repo=path, path_or_fileobj=_Beating(content, pulse))
        message: dict[str, Any] = {"commit_message": f"Write {path}", "parent_commit": parent}
        self._api.create_commit(operations=[add], **message, **self._at)

    def _create(self, name: str, content: bytes, pulse: Pulse) -> bool:
        from huggingface_hub.errors import HfHubHTTPError

        for _ in range(_MOST_CONFLICTS):
            pulse.beat()
            info = self._api.repo_info(timeout=self._timeout, **self._at)
            if self._size(name, str(info.sha)) is not None:
                return False
            try:
                self._commit(name, content, pulse, parent=str(info.sha))
                return True
            except HfHubHTTPError as error:
                if error.response.status_code != 412:  # somebody's commit came between
                    raise
        raise ConnectionError("others' commits came between each time")

    def _listing(self, folder: str, *, whole: bool = False) -> list[Found]:
        from huggingface_hub import RepoFile
        from huggingface_hub.errors import EntryNotFoundError

        path = (self._prefix + folder).rstrip("/") or None
        try:
            tree = self._api.list_repo_tree(path_in_repo=path, recursive=whole, **self._at)
            found = list(tree)
        except EntryNotFoundError:
            return []
        start = len(path) + 1 if path else 0
        return [
            Found(one.path[start:], one.size if isinstance(one, RepoFile) else None)
            for one in found
        ]

    def _remove(self, name: str) -> None:
        from huggingface_hub import CommitOperationDelete
        from huggingface_hub.errors import EntryNotFoundError

        if self._size(name, self._revision) is None:
            return
        path = self._prefix + name
        remove = [CommitOperationDelete(path_in_repo=path)]
        try:
            message = f"Remove {path}"
            self._api.create_commit(operations=remove, commit_message=message, **self._at)
        except EntryNotFoundError:
            return


class _Beating(io.BytesIO):
    """Content whose reading is progress, and which can't be sent once the call was given up.

    Below it huggingface_hub tries some requests again for half a minute, whoever waits.
    """

    def __init__(self, content: bytes, pulse: Pulse) -> None:
        super().__init__(content)
        self._pulse = pulse

    def read(self, size: int | None = -1) -> bytes:
        self._pulse.beat()
        return super().read(size)


def _judge(error: Exception) -> type[StoreError]:
    from huggingface_hub import errors as hub

    if isinstance(error, hub.EntryNotFoundError):
        return MissingError
    if isinstance(error, hub.HfHubHTTPError):
        status = getattr(error.response, "status_code", 0)
        passing = status in (408, 409, 412, 429) or status >= 500
        return PassingError if passing else PermanentError
    # The HTTP client's own errors, whichever client this version brings along.
    if any(base.__name__ == "TransportError" for base in type(error).__mro__):
        return PassingError
    return judge_os(error)
