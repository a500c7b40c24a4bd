"""Reading pickles one after another from a file, when only reading one tells where it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.errors import LimitError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ckpttool.formats.limits import ReaderLimits
    from ckpttool.formats.static_pickle import PickleResult
    from ckpttool.io.reading import FileReader

_FIRST_BYTES = 1 << 16
_GROWTH = 8

# Arguments of opcodes, by Lib/pickletools.py: a line of text, a fixed number of bytes, or that many
# bytes behind a count of this width.
_LINES = frozenset(b"ciILFSVgpP")
_FIXED = {
    **dict.fromkeys(b"Khq\x80\x82", 1),
    **dict.fromkeys(b"M\x83", 2),
    **dict.fromkeys(b"Jjr\x84", 4),
    ord("G"): 8,
}
_COUNTED = {
    **dict.fromkeys(b"UC\x8a\x8c", 1),
    **dict.fromkeys(b"XTB\x8b", 4),
    **dict.fromkeys(b"\x8d\x8e\x96\x95", 8),  # the last is FRAME, which counts what follows
}


class PickleCursor:
    """Reads the pickle at `position` and moves behind it; stays where it is on an error.

    A pickle is read from a piece of the file that grows while the pickle does not end in it, so
    that neither a small pickle before gigabytes of data nor a malformed one makes the whole file be
    read. `stop` is where the pickles' part of the file ends. `ended_early` tells of the last error
    whether the stream ran into that end, instead of being malformed.
    """

    def __init__(self, reader: FileReader, limits: ReaderLimits, position: int, stop: int) -> None:
        self.reader = reader
        self.limits = limits
        self.position = position
        self.stop = min(stop, reader.size)
        self.ended_early = False

    def next(self, persistent: Callable[[Any], Any] | None = None) -> PickleResult:
        """The next pickle; its `end` counts from the file's first byte. Raises UnreadableError.

        `persistent` is as for `read_pickle`; it is called anew each time that the piece grows.
        """
        available = max(0, self.stop - self.position)
        permitted = min(available, self.limits.pickle_bytes)
        length = _FIRST_BYTES
        while True:
            data = self.reader.read(self.position, min(length, permitted))
            result = self._read(data, persistent)
            if result.error is None:
                result.end += self.position
                self.position = result.end
                return result
            runs_out = not isinstance(result.error, LimitError) and runs_out_at(data, result.end)
            if not runs_out or length >= permitted:
                self.ended_early = runs_out and permitted == available
                if runs_out and not self.ended_early:
                    result.error = LimitError(
                        f"the pickle is longer than the limit of {permitted:,} bytes",
                        limit="pickle_bytes",
                    )
                return result
            length *= _GROWTH

    def _read(self, data: bytes, persistent: Callable[[Any], Any] | None) -> PickleResult:
        from ckpttool.formats.static_pickle import read_pickle

        if persistent is None:
            return read_pickle(data, limits=self.limits)
        return read_pickle(data, limits=self.limits, persistent=persistent)


def runs_out_at(data: bytes, position: int) -> bool:
    """Whether a stream that failed at `position`, behind an opcode, failed for want of bytes."""
    if position >= len(data) or position == 0:
        return True
    opcode = data[position - 1]
    if opcode in _LINES:
        first = data.find(b"\n", position)
        return first < 0 or (opcode in b"ci" and data.find(b"\n", first + 1) < 0)
    if opcode in _FIXED:
        return position + _FIXED[opcode] > len(data)
    width = _COUNTED.get(opcode)
    if width is None:
        return False
    count = int.from_bytes(data[position : position + width], "little")
    return position + width + count > len(data)
