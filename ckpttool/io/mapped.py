"""Checksums of a mapped file, taken by child processes: the fast way, where it is a safe one.

Mapping saves the copy out of the page cache, which costs several times what the checksum does. But
who touches a page of a mapped file that has been cut meanwhile is ended by the system (SIGBUS, see
`mmap(2)`). So children do it: one that ends early leaves its work undone, and the caller does that
by reading, which can tell what happened. Only local file systems are mapped: on network ones
mapped reads have hung whole jobs.
"""

from __future__ import annotations

import os
import sys
import threading
from struct import Struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Iterator

    from ckpttool.io.reading import FileReader

Span = tuple[int, int]

_LOCAL = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "tmpfs", "overlay"))
_WINDOW_BYTES = 32 << 20
# What a child tells, in one write that a pipe never splits (`pipe(7)`): which span, its checksum,
# and how many bytes have been done since it last told.
_MESSAGE = Struct("<iIQ")
_NO_SPAN = -1


def can_map(reader: FileReader) -> bool:
    """Whether `mapped_checksums` is fit for this file, and for this process as it is now.

    A process with several threads must not be forked: another one may hold a lock.
    """
    if not sys.platform.startswith("linux") or threading.active_count() > 1:
        return False
    if not reader.is_whole_file:
        return False
    return _file_system(os.fstat(reader.fileno()).st_dev) in _LOCAL


def _file_system(device: int) -> str | None:
    """The type of the mounted file system with this device number (`proc_pid_mountinfo(5)`)."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                before, _, after = line.partition(" - ")
                if before.split(" ")[2:3] == [wanted]:
                    return after.split(" ")[0]
    except OSError:
        return None
    return None


def mapped_checksums(
    reader: FileReader, spans: list[Span], jobs: int, done: Callable[[int], object]
) -> dict[int, int]:
    """CRC-32 of each span (offset, length) of a file, by the span's place in the list.

    Spans that no child came to the end of are missing in the result. `done(count)` is called as
    bytes get done. Ask `can_map` first.
    """
    import mmap  # noqa: F401 - children must not have to import: they use it right after the fork

    from ckpttool.io.checksum import crc32_function

    crc32_function()
    taking, telling = os.pipe()
    children = []
    try:
        for share in _shares(spans, jobs):
            child = os.fork()
            if child == 0:
                _be_a_child(reader, share, telling)
            children.append(child)
        os.close(telling)
        telling = -1
        return _listen(taking, done)
    finally:
        if telling >= 0:
            os.close(telling)
        os.close(taking)
        for child in children:
            end_child(child)


def _shares(spans: list[Span], jobs: int) -> Iterator[list[tuple[int, Span]]]:
    """The spans with their places, dealt out so that all children have about the same to do."""
    shares: list[list[tuple[int, Span]]] = [[] for _ in range(max(1, jobs))]
    loads = [0] * len(shares)
    for item in sorted(enumerate(spans), key=lambda item: -item[1][1]):
        lightest = loads.index(min(loads))
        shares[lightest].append(item)
        loads[lightest] += item[1][1]
    return (sorted(share, key=lambda item: item[1]) for share in shares if share)


def _be_a_child(reader: FileReader, share: list[tuple[int, Span]], telling: int) -> None:
    """Never returns, and never lets anything of the parent's run: no handlers, no clean-up."""
    try:
        import signal

        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _take_checksums(reader, share, telling)
    finally:
        os._exit(0)


def _take_checksums(reader: FileReader, share: list[tuple[int, Span]], telling: int) -> None:
    import mmap

    from ckpttool.io.checksum import crc32_function

    crc32 = crc32_function()
    with mmap.mmap(reader.fileno(), reader.size, access=mmap.ACCESS_READ) as mapped:
        view = memoryview(mapped)
        kept = 0  # from here on, mapped pages are still counted as this process's memory
        for place, (offset, length) in share:
            value, left = 0, length
            while left > _WINDOW_BYTES:
                value = crc32(view[offset : offset + _WINDOW_BYTES], value)
                offset, left = offset + _WINDOW_BYTES, left - _WINDOW_BYTES
                kept = _let_go(mapped, kept, offset)
                os.write(telling, _MESSAGE.pack(_NO_SPAN, 0, _WINDOW_BYTES))
            value = crc32(view[offset : offset + left], value)
            kept = _let_go(mapped, kept, offset + left)
            os.write(telling, _MESSAGE.pack(place, value, left))
        view.release()


def _let_go(mapped: mmap.mmap, start: int, stop: int) -> int:
    """Gives back the pages from `start` up to `stop`, once they are many; gives the new start."""
    import mmap

    if stop - start < _WINDOW_BYTES:
        return start
    stop -= stop % mmap.PAGESIZE
    # They stay in the page cache; only this mapping of them goes (madvise(2)).
    mapped.madvise(mmap.MADV_DONTNEED, start, stop - start)
    return stop


def _listen(taking: int, done: Callable[[int], object]) -> dict[int, int]:
    """Gathers what the children tell until the last of them has ended."""
    found: dict[int, int] = {}
    rest = b""
    while data := os.read(taking, 1 << 16):
        data = rest + data
        whole = len(data) - len(data) % _MESSAGE.size
        for place, value, count in _MESSAGE.iter_unpack(data[:whole]):
            if place != _NO_SPAN:
                found[place] = value
            done(count)
        rest = data[whole:]
    return found


def end_child(child: int) -> None:
    """Makes sure that a child is gone: it is, unless the parent was interrupted."""
    import signal

    try:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    except OSError:
        return
