"""Size and SHA-256 of a file, taken from the bytes on their way to it: nothing is read again.

SHA-256 cannot be split, and is slower than the copy into the page cache. So it runs beside it, on a
thread of its own: both let go of the interpreter while they work.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, BinaryIO, TypeAlias

from ckpttool.io.checksum import crc32_function

_Queue: TypeAlias = "queue.SimpleQueue[bytes | memoryview | threading.Event | None]"

# Fits second-level caches. Smaller ones cost more: each is two turns at the interpreter's lock.
_PIECE = 512 * 1024
_ZEROS = 1 << 20
_INLINE = 64 * 1024  # less than this is not worth a thread


class HashedFile:
    """Passes what is written on to `file`, counts and hashes it. Use it as a context manager.

    `size` is in bytes. Without `digest` it only counts. With `beside`, big pieces are hashed on
    another thread: a buffer that was written must then not change before `drain` has returned, or
    the file is closed. `watch` is called before each write, and may raise. `file` is left open.
    """

    def __init__(
        self,
        file: BinaryIO,
        *,
        digest: bool = True,
        beside: bool = True,
        watch: Callable[[], object] | None = None,
    ) -> None:
        from hashlib import sha256

        self.size = 0
        self._file = file
        self._digest = sha256() if digest else None
        self._beside = beside
        self._watch = watch
        self._queue: _Queue | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Writes all of `data`. Gives its length in bytes; raises OSError."""
        if self._watch is not None:
            self._watch()
        length = memoryview(data).nbytes
        if self._digest is not None:
            if self._queue is not None or (self._beside and length >= _INLINE):
                self._hand_over(data if isinstance(data, memoryview) else bytes(data))
            else:
                self._digest.update(data)
        self._file.write(data)
        self.size += length
        return length

    def flush(self) -> None:
        """Hands what is buffered to the system."""
        self._file.flush()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Forwards only, as `torch.save` does under `skip_data`: what is left out is zeros."""
        if whence != os.SEEK_CUR or offset < 0:
            raise OSError(errno.ESPIPE, "can only go forwards from here")
        for start in range(0, offset, _ZEROS):
            self.write(bytes(min(_ZEROS, offset - start)))
        return self.size

    def tell(self) -> int:
        """Bytes written so far."""
        return self.size

    def drain(self) -> None:
        """Returns when nothing that was written is needed any more."""
        if self._queue is not None:
            reached = threading.Event()
            self._queue.put(reached)
            reached.wait()
        if self._failure is not None:
            raise self._failure

    def sha256(self) -> str | None:
        """Of all that was written, as 64 hexadecimal digits; None without `digest`."""
        self.drain()
        return None if self._digest is None else self._digest.hexdigest()

    def _hand_over(self, data: bytes | memoryview) -> None:
        if self._queue is None:
            items: _Queue = queue.SimpleQueue()
            # A daemon: an interrupt may leave it waiting, which must not keep the program alive.
            self._thread = threading.Thread(
                target=self._hash, args=(items, self._digest), daemon=True
            )
            self._thread.start()
            self._queue = items
        self._queue.put(data)

    def _hash(self, items: _Queue, digest: Any) -> None:
        checksum = crc32_function()
        while (item := items.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                for start in range(0, len(item), _PIECE):
                    piece = item[start : start + _PIECE]
                    # Its result is of no use. But it reads memory six times as fast as SHA-256
                    # does, which then finds the piece in the cache: together they take less time.
                    checksum(piece)
                    digest.update(piece)
            except BaseException as error:
                self._failure = error  # and go on, so that nobody waits for ever

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._queue is not None and self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._queue = self._thread = None
