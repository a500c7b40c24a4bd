"""SHA-256 of whole files, taken in the background while `verify` checks their records.

A SHA-256 is taken from front to back and costs several times what all checksums do. So each file
has a process of its own, or a thread where that is not safe, and up to `jobs` run side by side. The
checksums of the same file are taken meanwhile, so that what comes from a slow disk is mostly read
once.
"""

from __future__ import annotations

import os
import sys
import threading
from struct import Struct
from typing import TYPE_CHECKING, Protocol

from ckpttool.errors import UnreadableError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ckpttool.checks.measure import Meter, Workers
    from ckpttool.io.reading import FileReader
    from ckpttool.model.directory import StepFile

# Below this many bytes, starting a process or a thread costs more than it saves.
_WORTH_STARTING = 16 << 20
_CHUNK_BYTES = 1 << 20
_TOLD_BYTES = 32 << 20
# What a child tells, in one write that a pipe never splits: bytes done since it last told, and,
# at its end, the digest.
_MESSAGE = Struct("<Q32s")
_NOT_YET = bytes(32)


class _Running(Protocol):
    """A SHA-256 that is being taken."""

    def result(self) -> str | None:
        """The digest in hexadecimal; None where the file could not be read or changed."""

    def stop(self) -> None:
        """Ends it early."""


class FileHashes:
    """Hashes files in the background; a context manager. `start` each, then ask `results`."""

    __slots__ = ("_found", "_running", "_workers")

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._running: dict[str, _Running] = {}
        self._found: dict[str, str | None] = {}

    def start(self, file: StepFile) -> None:
        """Begins to hash a file; waits for the one begun first while too many are under way."""
        while len(self._running) >= self._workers.jobs:
            self._collect(next(iter(self._running)))
        try:
            self._running[file.name] = _begin(file, self._workers)
        except (UnreadableError, OSError):
            self._found[file.name] = None

    def results(self) -> dict[str, str | None]:
        """The digests by name, once all are there; None for a file that could not be hashed."""
        for name in list(self._running):
            self._collect(name)
        return self._found

    def _collect(self, name: str) -> None:
        running = self._running[name]
        try:
            self._found[name] = running.result()
        finally:
            running.stop()
            del self._running[name]

    def __enter__(self) -> FileHashes:
        return self

    def __exit__(self, *_: object) -> None:
        for running in self._running.values():
            running.stop()
        self._running.clear()


def _begin(file: StepFile, workers: Workers) -> _Running:
    from ckpttool.io.reading import FileReader

    reader = FileReader(file.recorded_path)
    if reader.size >= _WORTH_STARTING and workers.jobs > 1:
        # A process with several threads must not be forked: another one may hold a lock.
        if sys.platform.startswith("linux") and threading.active_count() == 1:
            return _InChild(reader, workers.meter)
        return _InThread(reader, workers)
    return _Later(reader, workers.meter)


class _Later:
    """Hashed when it is asked for."""

    def __init__(self, reader: FileReader, meter: Meter) -> None:
        self.reader = reader
        self.meter = meter

    def result(self) -> str | None:
        return _hash(self.reader, self.meter)

    def stop(self) -> None:
        self.reader.close()


class _InThread:
    """Hashed in a thread of the pool: the interpreter lock is free while bytes are."""

    def __init__(self, reader: FileReader, workers: Workers) -> None:
        self.reader = reader
        self.future: Future[str | None] = workers.submit(_hash, reader, workers.meter)

    def result(self) -> str | None:
        return self.future.result()

    def stop(self) -> None:
        if self.future.cancel() or self.future.done():
            self.reader.close()


class _InChild:
    """Hashed in a process of its own, which shares nothing and lets nothing of the parent run."""

    def __init__(self, reader: FileReader, meter: Meter) -> None:
        import hashlib  # noqa: F401 - the child must not have to import

        self.reader = reader
        self.meter = meter
        self.taking, telling = os.pipe()
        self.child = os.fork()
        if self.child == 0:
            _be_a_child(reader, telling)
        os.close(telling)

    def result(self) -> str | None:
        digest = _NOT_YET
        while message := os.read(self.taking, _MESSAGE.size):
            count, digest = _MESSAGE.unpack(message)
            self.meter.add(count)
        if digest == _NOT_YET:  # it was ended from outside, or could not read on: read here
            return _hash(self.reader, self.meter)
        return None if self.reader.changed() else digest.hex()

    def stop(self) -> None:
        if self.child:
            from ckpttool.io.mapped import end_child

            end_child(self.child)
            os.close(self.taking)
            self.child = 0
        self.reader.close()


def _be_a_child(reader: FileReader, telling: int) -> None:
    try:
        import signal

        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _tell(reader, telling)
    finally:
        os._exit(0)


def _tell(reader: FileReader, telling: int) -> None:
    from hashlib import sha256

    digest, done, told = sha256(), 0, 0
    for chunk in reader.chunks(0, reader.size, chunk_bytes=_CHUNK_BYTES):
        digest.update(chunk)
        done += len(chunk)
        if done - told >= _TOLD_BYTES:
            os.write(telling, _MESSAGE.pack(done - told, _NOT_YET))
            told = done
    os.write(telling, _MESSAGE.pack(done - told, digest.digest()))


def _hash(reader: FileReader, meter: Meter) -> str | None:
    from hashlib import sha256

    digest = sha256()
    try:
        for chunk in reader.chunks(0, reader.size, chunk_bytes=_CHUNK_BYTES):
            digest.update(chunk)
            meter.add(len(chunk))
    except UnreadableError:
        return None
    return None if reader.changed() else digest.hexdigest()
