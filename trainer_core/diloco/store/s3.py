"""S3 and what speaks its protocol, through s3fs.

Of s3fs this takes the connection, credentials and errors, and sends the requests through its
`_call_s3`: its files and listings go through caches, and know neither time-outs nor conditions.

An S3 PUT is atomic, a finished multi-part upload as well. Listings and reads see the last write
(strong consistency, since December 2020). `create` is a PUT under `If-None-Match: *`.
Parts of uploads that were killed cost space until a lifecycle rule of the bucket removes them
(`AbortIncompleteMultipartUpload`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, BinaryIO

from trainer_core.diloco.errors import MissingError, PassingError, PermanentError, StoreError
from trainer_core.diloco.names import check_name
from trainer_core.diloco.store.backend import CHUNK, Backend, Found, Take, judge_os
from trainer_core.diloco.store.loop import ask, within

PART = 8 << 20
"""Bytes of a part; longer files go in several (S3 takes parts from 5 MiB, and 10,000 of them)."""
_MOST_PARTS = 9_000

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
# Said with a status that sounds permanent, yet the next try may do.
_PASSING_CODES = frozenset(
    {"RequestTimeout", "SlowDown", "IncompleteBody", "BadDigest", "OperationAborted"}
    | {"ConditionalRequestConflict", "NoSuchUpload", "XAmzContentSHA256Mismatch"}
)
_PASSING_STATUS = frozenset({408, 409, 429})


class S3Backend(Backend):
    """Objects under `BUCKET/PREFIX`. `options` are those of `s3fs.S3FileSystem`."""

    def __init__(self, rest: str, timeout: float, options: Mapping[str, Any]) -> None:
        self._bucket, _, prefix = rest.partition("/")
        if not _BUCKET.fullmatch(self._bucket):
            raise PermanentError(f"{self._bucket!r} is no name of a bucket")
        prefix = prefix.strip("/")
        self._prefix = f"{check_name(prefix)}/" if prefix else ""
        self._timeout = timeout
        self._fs = _file_system(timeout, options)
        self._bucket_seen = False
        self._conditions_seen = False

    def read(self, name: str, start: int, end: int | None, take: Take) -> None:
        ask(self._read(name, start, end, take))

    def size(self, name: str) -> int | None:
        return ask(self._size(name))

    def write(self, name: str, file: BinaryIO, size: int) -> None:
        ask(self._write(name, file, size))

    def create(self, name: str, content: bytes) -> bool:
        """Refuses, with PermanentError, a server that would overwrite in silence."""
        return ask(self._create(name, content))

    def listing(self, folder: str) -> list[Found]:
        return ask(self._listing(folder))

    def tree(self, folder: str) -> list[Found]:
        """One request for each 1,000 files, however many folders they are in."""
        return ask(self._listing(folder, whole=True))

    def remove(self, name: str) -> None:
        ask(self._call("delete_object", Key=self._key(name)))

    def judge(self, error: Exception) -> type[StoreError]:
        return _judge(error)

    def close(self) -> None:
        creator = getattr(self._fs, "_s3creator", None)
        if creator is not None:
            self._fs.close_session(self._fs.loop, creator)

    async def _call(self, method: str, **arguments: Any) -> Any:
        call = self._fs._call_s3(method, Bucket=self._bucket, **arguments)
        return await within(self._timeout, call)

    async def _read(self, name: str, start: int, end: int | None, take: Take) -> None:
        if end is not None and end <= start:
            if await self._size(name) is None:
                raise FileNotFoundError(name)
            return
        asked: dict[str, str] = {}
        if start or end is not None:
            asked["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
        try:
            answer = await self._call("get_object", Key=self._key(name), **asked)
        except OSError as error:
            if _code(error) == "InvalidRange":  # it ends before `start`
                return
            raise
        async with answer["Body"] as body:
            await self._stream(body, int(answer["ContentLength"]), take)

    async def _stream(self, body: Any, expected: int, take: Take) -> None:
        """One GET is one state of the object, however long it takes to come."""
        while chunk := await within(self._timeout, body.read(CHUNK)):
            expected -= len(chunk)
            take(chunk)
        if expected:
            raise ConnectionError("the answer ended before its end")

    async def _size(self, name: str) -> int | None:
        try:
            answer = await self._call("head_object", Key=self._key(name))
        except FileNotFoundError:
            await self._require_bucket()
            return None
        return int(answer["ContentLength"])

    async def _require_bucket(self) -> None:
        """A HEAD says 404 for a bucket that isn't there as well; that must not look like a gap."""
        if self._bucket_seen:
            return
        try:
            await self._call("head_bucket")
        except FileNotFoundError:
            raise PermanentError(f"there is no bucket {self._bucket!r}") from None
        self._bucket_seen = True

    async def _write(self, name: str, file: BinaryIO, size: int) -> None:
        if size > PART:
            await self._write_parts(name, file, size)
            return
        body = file.read(size)
        _require(len(body) == size)
        await self._call("put_object", Key=self._key(name), Body=body)

    async def _write_parts(self, name: str, file: BinaryIO, size: int) -> None:
        key = self._key(name)
        upload = (await self._call("create_multipart_upload", Key=key))["UploadId"]
        try:
            parts = await self._upload_parts(key, upload, file, size)
            done = {"Parts": parts}
            call = "complete_multipart_upload"
            await self._call(call, Key=key, UploadId=upload, MultipartUpload=done)
        except BaseException:
            await self._abort(key, upload)
            raise

    async def _upload_parts(
        self, key: str, upload: str, file: BinaryIO, size: int
    ) -> list[dict[str, Any]]:
        length = max(PART, -(-size // _MOST_PARTS))
        parts: list[dict[str, Any]] = []
        for number in range(1, -(-size // length) + 1):
            body = file.read(min(length, size - length * (number - 1)))
            _require(len(body) == min(length, size - length * (number - 1)))
            named = {"Key": key, "UploadId": upload, "PartNumber": number}
            answer = await self._call("upload_part", Body=body, **named)
            parts.append({"PartNumber": number, "ETag": answer["ETag"]})
        return parts

    async def _abort(self, key: str, upload: str) -> None:
        try:
            await self._call("abort_multipart_upload", Key=key, UploadId=upload)
        except Exception:  # noqa: S110  (what went wrong before is what the caller must hear of)
            pass

    async def _create(self, name: str, content: bytes) -> bool:
        await self._require_conditions()
        return await self._put_new(self._key(name), content)

    async def _put_new(self, key: str, content: bytes) -> bool:
        try:
            await self._call("put_object", Key=key, Body=content, IfNoneMatch="*")
        except OSError as error:
            if isinstance(error, FileExistsError) or _code(error) in ("PreconditionFailed", "412"):
                return False
            raise
        return True

    async def _require_conditions(self) -> None:
        """Servers that don't know the condition take no notice of it: tried once, on a new name."""
        import secrets

        if self._conditions_seen:
            return
        key = f"{self._prefix}.probe-{secrets.token_hex(8)}"
        try:
            first, second = [await self._put_new(key, b"1"), await self._put_new(key, b"2")]
        finally:
            await self._call("delete_object", Key=key)
        if not first or second:
            words = "this server takes no notice of If-None-Match, so two creators could both win"
            raise PermanentError(words)
        self._conditions_seen = True

    async def _listing(self, folder: str, *, whole: bool = False) -> list[Found]:
        prefix = self._key(f"{folder}/") if folder else self._prefix
        asked: dict[str, Any] = {"Prefix": prefix} | ({} if whole else {"Delimiter": "/"})
        found: list[Found] = []
        while True:
            page = await self._call("list_objects_v2", **asked)
            for one in page.get("Contents", ()):
                if not one["Key"].endswith("/"):  # what some tools put there for a folder
                    found.append(Found(one["Key"][len(prefix) :], int(one["Size"])))
            for one in page.get("CommonPrefixes", ()):
                found.append(Found(one["Prefix"][len(prefix) :].rstrip("/"), None))
            if not page.get("IsTruncated"):
                return found
            asked["ContinuationToken"] = page["NextContinuationToken"]

    def _key(self, name: str) -> str:
        return self._prefix + name


def _file_system(timeout: float, options: Mapping[str, Any]) -> Any:
    import s3fs

    given = dict(options)
    # The Store tries again itself, with jitter and an end: no second layer of tries below it.
    defaults = {"retries": {"max_attempts": 0}, "connect_timeout": timeout, "read_timeout": timeout}
    config = {**defaults, **given.pop("config_kwargs", {})}
    uncached = {"skip_instance_cache": True, "use_listings_cache": False}
    fs = s3fs.S3FileSystem(**given, config_kwargs=config, **uncached)
    fs.retries = 1
    return fs


def _require(whole: bool) -> None:
    if not whole:
        raise PermanentError("the local file became shorter while it was being sent")


def _response(error: BaseException) -> dict[str, Any]:
    response = getattr(error.__cause__, "response", None)
    return response if isinstance(response, dict) else {}


def _code(error: BaseException) -> str:
    return str(_response(error).get("Error", {}).get("Code", ""))


def _judge(error: Exception) -> type[StoreError]:
    from aiohttp import ClientError as ConnectionFailure
    from botocore import exceptions as boto
    from botocore.parsers import ResponseParserError

    if response := _response(error):
        return _judge_answer(_code(error), response)
    passing = (
        *(boto.ConnectionError, boto.HTTPClientError, boto.IncompleteReadError),
        *(boto.ResponseStreamingError, ResponseParserError, ConnectionFailure),
    )
    if isinstance(error, passing):
        return PassingError
    return PermanentError if isinstance(error, boto.BotoCoreError) else judge_os(error)


def _judge_answer(code: str, response: Mapping[str, Any]) -> type[StoreError]:
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code in _PASSING_CODES or status in _PASSING_STATUS or status >= 500:
        return PassingError
    return MissingError if code in ("NoSuchKey", "404") else PermanentError
