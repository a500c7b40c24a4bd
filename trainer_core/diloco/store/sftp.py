"""An SFTP server, through asyncssh.

Not through an fsspec file system: fsspec's own (paramiko) and sshfs write in place, so that readers
meet halves; neither reads a range, asks for a time-out, or connects again after a break, and sshfs
takes any host key unless told otherwise. asyncssh, which sshfs rests on, does all of it.

A file is written under a temporary name, synced where the server offers it, and renamed over its
target (`posix-rename@openssh.com`). `create` links a finished file to its name
(`hardlink@openssh.com`), which never overwrites. OpenSSH's server has both.
Host keys are checked against `known_hosts`, logins come from keys, an agent or ~/.ssh/config.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar
from urllib.parse import unquote, urlsplit

from ckpttool.io.durable import parse_temporary_name
from trainer_core.diloco.errors import MissingError, PassingError, PermanentError, StoreError
from trainer_core.diloco.store.backend import CHUNK, Backend, Found, Take, judge_os
from trainer_core.diloco.store.loop import ask, within

if TYPE_CHECKING:
    import asyncssh

T = TypeVar("T")

OLD_S = 24 * 3600.0
"""Seconds, by the server's clock, after which a temporary belongs to nobody."""


class SftpBackend(Backend):
    """Files under one directory of a server. `options` are those of `asyncssh.connect`.

    The directory is absolute (`sftp://host/data`), or in the home directory (`sftp://host/~/data`).
    """

    def __init__(self, rest: str, timeout: float, options: Mapping[str, Any]) -> None:
        import asyncssh  # noqa: F401  (so that a missing package is found here)

        self._server = _server(rest, options)
        path = unquote(urlsplit(f"sftp://{rest}").path)
        self._root = path.removeprefix("/~/").rstrip("/") if path != "/" else "/"
        if not self._root or ".." in self._root.split("/"):
            raise PermanentError("an sftp:// URL must name a directory, without '..'")
        self._timeout = timeout
        self._client: asyncssh.SFTPClient | None = None
        self._connection: asyncssh.SSHClientConnection | None = None
        self._connecting: asyncio.Lock | None = None
        self._swept: set[str] = set()

    def read(self, name: str, start: int, end: int | None, take: Take) -> None:
        ask(self._kept(self._read(self._path(name), start, end, take)))

    def size(self, name: str) -> int | None:
        return ask(self._kept(self._size(self._path(name))))

    def write(self, name: str, file: BinaryIO, size: int) -> None:
        ask(self._kept(self._write(self._path(name), file)))

    def create(self, name: str, content: bytes) -> bool:
        """Where the server has no links, the name itself is opened exclusively.

        Then a reader may meet the file half written, and it stays so if the winner dies.
        """
        return ask(self._kept(self._create(self._path(name), content)))

    def listing(self, folder: str) -> list[Found]:
        return ask(self._kept(self._listing(self._path(folder))))

    def remove(self, name: str) -> None:
        ask(self._kept(self._remove(self._path(name))))

    def judge(self, error: Exception) -> type[StoreError]:
        return _judge(error)

    def close(self) -> None:
        ask(self._disconnect())

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}".rstrip("/")

    async def _within(self, awaitable: Awaitable[T]) -> T:
        return await within(self._timeout, awaitable)

    async def _kept(self, work: Awaitable[T]) -> T:
        """After a failure that isn't an answer of the server the connection is made anew."""
        import asyncssh

        try:
            return await work
        except asyncssh.SFTPError as error:
            if isinstance(error, (asyncssh.SFTPConnectionLost, asyncssh.SFTPNoConnection)):
                await self._disconnect()
            raise
        except StoreError:
            raise
        except BaseException:
            await self._disconnect()
            raise

    async def _sftp(self) -> asyncssh.SFTPClient:
        if self._connecting is None:  # here, so that it belongs to the loop
            self._connecting = asyncio.Lock()
        async with self._connecting:
            if self._client is None:
                self._client = await self._within(self._connect())
            return self._client

    async def _connect(self) -> asyncssh.SFTPClient:
        import asyncssh

        # A server that dies without a word is noticed between two requests too.
        alive = {"keepalive_interval": max(1.0, self._timeout / 2), "keepalive_count_max": 2}
        self._connection = await asyncssh.connect(**{**alive, **self._server})
        return await self._connection.start_sftp_client()

    async def _disconnect(self) -> None:
        connection, self._connection, self._client = self._connection, None, None
        if connection is not None:
            connection.abort()

    async def _read(self, path: str, start: int, end: int | None, take: Take) -> None:
        sftp = await self._sftp()
        file: Any = await self._within(sftp.open(path, "rb"))
        async with _Closing(file, self._timeout):
            size = _file_size(await self._within(file.stat()), path)
            last = size if end is None else min(end, size)
            while start < last:
                chunk: bytes = await self._within(file.read(min(CHUNK, last - start), start))
                if not chunk:
                    raise EOFError("the file became shorter while it was being read")
                start += len(chunk)
                take(chunk)

    async def _size(self, path: str) -> int | None:
        import asyncssh

        sftp = await self._sftp()
        try:
            return _file_size(await self._within(sftp.stat(path)), path)
        except (asyncssh.SFTPNoSuchFile, asyncssh.SFTPNoSuchPath):
            return None

    async def _write(self, path: str, file: BinaryIO) -> None:
        sftp = await self._sftp()
        temporary = _temporary_beside(path)
        await self._write_whole(sftp, temporary, file, "xb")
        try:
            await self._within(sftp.posix_rename(temporary, path))
        except BaseException:
            await self._discard(sftp, temporary)
            raise
        await self._sweep(sftp, path)

    async def _write_whole(
        self, sftp: asyncssh.SFTPClient, path: str, file: BinaryIO, mode: str
    ) -> None:
        """Writes a file that nobody else has; what is left of it after a failure is removed."""
        import asyncssh

        try:
            output = await self._within(sftp.open(path, mode))
        except (asyncssh.SFTPNoSuchFile, asyncssh.SFTPNoSuchPath):
            folder = os.path.dirname(path)
            await self._within(sftp.makedirs(folder, exist_ok=True))
            output = await self._within(sftp.open(path, mode))
        try:
            async with _Closing(output, self._timeout):
                while chunk := file.read(CHUNK):
                    await self._within(output.write(chunk))
                try:
                    await self._within(output.fsync())
                except asyncssh.SFTPOpUnsupported:
                    pass
        except BaseException:
            await self._discard(sftp, path)
            raise

    async def _create(self, path: str, content: bytes) -> bool:
        import io

        import asyncssh

        sftp = await self._sftp()
        if await self._exists(sftp, path):
            return False
        temporary = _temporary_beside(path)
        await self._write_whole(sftp, temporary, io.BytesIO(content), "xb")
        try:
            await self._within(sftp.link(temporary, path))
            return True
        except (asyncssh.SFTPFailure, asyncssh.SFTPFileAlreadyExists, asyncssh.SFTPOpUnsupported):
            # The protocol has one code for "exists" and for "no links here".
            if await self._exists(sftp, path):
                return False
        finally:
            await self._discard(sftp, temporary)
        return await self._create_in_place(sftp, path, content)

    async def _create_in_place(self, sftp: asyncssh.SFTPClient, path: str, content: bytes) -> bool:
        import io

        import asyncssh

        try:
            await self._write_whole(sftp, path, io.BytesIO(content), "xb")
        except (asyncssh.SFTPFailure, asyncssh.SFTPFileAlreadyExists):
            if await self._exists(sftp, path):
                return False
            raise
        return True

    async def _exists(self, sftp: asyncssh.SFTPClient, path: str) -> bool:
        import asyncssh

        try:
            await self._within(sftp.lstat(path))
        except (asyncssh.SFTPNoSuchFile, asyncssh.SFTPNoSuchPath):
            return False
        return True

    async def _listing(self, path: str) -> list[Found]:
        import asyncssh

        sftp = await self._sftp()
        try:
            entries = await self._within(sftp.readdir(path))
        except (asyncssh.SFTPNoSuchFile, asyncssh.SFTPNoSuchPath):
            return []
        found = [_found(str(entry.filename), entry.attrs) for entry in entries]
        return [one for one in found if one is not None]

    async def _remove(self, path: str) -> None:
        import asyncssh

        sftp = await self._sftp()
        try:
            await self._within(sftp.remove(path))
        except (asyncssh.SFTPNoSuchFile, asyncssh.SFTPNoSuchPath):
            return

    async def _discard(self, sftp: asyncssh.SFTPClient, path: str) -> None:
        import asyncssh

        try:
            await within(min(self._timeout, 5.0), sftp.remove(path))
        except (OSError, asyncssh.Error):
            return  # swept later

    async def _sweep(self, sftp: asyncssh.SFTPClient, written: str) -> None:
        """Removes what killed writers left in this folder; once for each folder, never fails."""
        import asyncssh

        folder = os.path.dirname(written)
        if folder in self._swept:
            return
        self._swept.add(folder)
        try:
            now = (await self._within(sftp.stat(written))).mtime or 0
            for entry in await self._within(sftp.readdir(folder)):
                name, age = str(entry.filename), now - (entry.attrs.mtime or now)
                if parse_temporary_name(name) and age > OLD_S:
                    await self._discard(sftp, f"{folder}/{name}")
        except (OSError, asyncssh.Error):
            return


class _Closing:
    """Closes a remote file, within the time-out, unless the connection is the trouble."""

    def __init__(self, file: Any, timeout: float) -> None:
        self._file = file
        self._timeout = timeout

    async def __aenter__(self) -> Any:
        return self._file

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        import asyncssh

        if kind is None:
            await within(self._timeout, self._file.close())
        elif issubclass(kind, (asyncssh.SFTPError, StoreError)):
            try:
                await within(self._timeout, self._file.close())
            except (OSError, asyncssh.Error):
                return


def _server(rest: str, options: Mapping[str, Any]) -> dict[str, Any]:
    try:
        parts = urlsplit(f"sftp://{rest}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise PermanentError("the host or port of the sftp:// URL can't be read") from None
    if not host:
        raise PermanentError("the sftp:// URL names no host")
    server: dict[str, Any] = {"host": host}
    if port is not None:
        server["port"] = port
    if parts.username:
        server["username"] = unquote(parts.username)
    if parts.password:
        server["password"] = unquote(parts.password)
    return {**server, **options}


def _temporary_beside(path: str) -> str:
    import secrets

    folder, name = os.path.split(path)
    return f"{folder}/.{name}.tmp-{os.getpid()}-{secrets.token_hex(4)}"


def _file_size(attributes: asyncssh.SFTPAttrs, path: str) -> int:
    if not stat.S_ISREG(attributes.permissions or 0):
        raise PermanentError(f"{path} on the server is not a file")
    return int(attributes.size or 0)


def _found(name: str, attributes: asyncssh.SFTPAttrs) -> Found | None:
    """Files and folders; symbolic links are left out, as they may lead anywhere."""
    mode = attributes.permissions or 0
    if name in (".", "..") or parse_temporary_name(name):
        return None
    if stat.S_ISDIR(mode):
        return Found(name, None)
    return Found(name, int(attributes.size or 0)) if stat.S_ISREG(mode) else None


def _judge(error: Exception) -> type[StoreError]:
    import asyncssh

    if isinstance(error, (asyncssh.SFTPNoSuchFile, asyncssh.SFTPNoSuchPath)):
        return MissingError
    # SFTPFailure is what OpenSSH says for a full disk, an I/O error and much else.
    passing = (
        *(asyncssh.SFTPFailure, asyncssh.SFTPNoConnection, asyncssh.SFTPConnectionLost),
        *(asyncssh.SFTPNoSpaceOnFilesystem, asyncssh.SFTPQuotaExceeded, asyncssh.SFTPEOFError),
        *(asyncssh.ConnectionLost, asyncssh.ChannelOpenError, asyncssh.SFTPBadMessage),
        *(asyncssh.MACError, asyncssh.ServiceNotAvailable, asyncssh.SFTPInvalidHandle),
    )
    if isinstance(error, passing):
        return PassingError
    if isinstance(error, asyncssh.DisconnectError):
        return _judge_disconnect(error)
    return PermanentError if isinstance(error, asyncssh.Error) else judge_os(error)


def _judge_disconnect(error: asyncssh.DisconnectError) -> type[StoreError]:
    import asyncssh

    for_ever = (
        *(asyncssh.PermissionDenied, asyncssh.HostKeyNotVerifiable, asyncssh.IllegalUserName),
        *(asyncssh.KeyExchangeFailed, asyncssh.ProtocolNotSupported, asyncssh.ProtocolError),
    )
    return PermanentError if isinstance(error, for_ever) else PassingError
