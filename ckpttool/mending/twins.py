"""The copies of a record's facts, each read as it stands in the file, damaged or not.

A torch zip states a record's name, place, size and checksum up to four times: in the local header
in front of it (APPNOTE.TXT 4.3.7), the data descriptor behind it (4.3.9), the central directory
(4.3.12), and the pickle. Nothing here decides which copy is right: a checksum does, later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckpttool.formats.zip_layout import (
    DESCRIPTOR_32,
    DESCRIPTOR_64,
    DESCRIPTOR_BYTES,
    EXTRA_ZIP64,
    LOCAL_BYTES,
    LOCAL_HEADER,
    extra_fields,
    zip64_values,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpttool.io.reading import FileReader

LONGEST_NAME = 4096
# The two constants between a torch header's signature and its lengths, by whether a descriptor
# follows: versions, flags, method, time, date, checksum and sizes.
_TORCH_CONSTANTS = (b"\0\0\x08\x08" + bytes(18), b"\0\0\0\x08" + bytes(18))
_MOST_WRONG = 3
_WINDOW_BYTES = 1 << 16


class LocalCopy(NamedTuple):
    """A local header as it stands there. `content` is where its lengths say that content begins.

    `sound` tells that nothing in it is impossible, `wide` that it has a zip64 field.
    """

    offset: int
    raw_name: bytes
    flags: int
    method: int
    crc: int
    stored: int
    size: int
    content: int
    wide: bool
    sound: bool


class Claim(NamedTuple):
    """An entry of the central directory as it stands there.

    `number` counts entries from the directory's first; `offset` is in the file. `sound` tells that
    its signature is right and that its lengths lead to the next entry. `start` and `stop` say where
    in the file it is. `usual` tells that it is, byte for byte, what torch writes for its facts.
    """

    number: int
    raw_name: bytes
    flags: int
    method: int
    crc: int
    stored: int
    size: int
    offset: int
    wide: bool
    sound: bool
    start: int
    stop: int
    usual: bool


class DescriptorCopy(NamedTuple):
    """A data descriptor as it stands at a place: its length, and how many of its parts fit."""

    length: int
    crc: int
    stored: int
    size: int
    fitting: int


class Window:
    """Reads small neighbouring pieces of a file at one go."""

    __slots__ = ("_data", "_start", "reader", "size")

    def __init__(self, reader: FileReader) -> None:
        self.reader = reader
        self.size = reader.size
        self._start = 0
        self._data = b""

    def read(self, offset: int, length: int) -> bytes:
        """Up to `length` bytes from `offset`; fewer only where the file ends."""
        start, data = self._start, self._data
        if not start <= offset <= offset + length <= start + len(data):
            if length > _WINDOW_BYTES:
                return self.reader.read(offset, length)
            start = self._start = offset
            data = self._data = self.reader.read(offset, _WINDOW_BYTES)
        return data[offset - start : offset - start + length]


def local_copy(window: Window, offset: int) -> LocalCopy | None:
    """What stands at `offset` where a local header is expected; None where the file ends first."""
    data = window.read(offset, LOCAL_HEADER.size)
    if len(data) < LOCAL_HEADER.size:
        return None
    _, _, flags, method, _, _, crc, stored, size, name_length, extra_length = LOCAL_HEADER.unpack(
        data
    )
    start = offset + LOCAL_HEADER.size
    content = start + name_length + extra_length
    rest = window.read(start, min(name_length, LONGEST_NAME) + extra_length)
    raw_name, extra = rest[:name_length], rest[name_length:]
    fields = extra_fields(extra)
    wide = any(kind == EXTRA_ZIP64 for kind, _ in fields or ())
    size, stored = zip64_values(extra, (size, stored))
    sound = (
        data[:4] == LOCAL_BYTES
        and fields is not None
        and len(rest) == name_length + extra_length
        and is_plausible_name(raw_name)
    )
    return LocalCopy(offset, raw_name, flags, method, crc, stored, size, content, wide, sound)


def looks_like_local(window: Window, offset: int) -> bool:
    """Whether a local header stands at `offset`, even one of torch's with a few bytes damaged."""
    data = window.read(offset, LOCAL_HEADER.size)
    if len(data) < LOCAL_HEADER.size:
        return False
    wrong = min(_differing(data[4:26], constants) for constants in _TORCH_CONSTANTS)
    signature = _differing(data[:4], LOCAL_BYTES)
    return signature == 0 or (signature + wrong <= _MOST_WRONG)


def padded_copy(window: Window, offset: int, base: int, alignment: int) -> tuple[bytes, int] | None:
    """Name and begin of the content, as torch's padding tells them: `FB`, a length, and all `Z`.

    It leads to a multiple of `alignment`, counted from the archive's begin at `base`. For a header
    whose own lengths are damaged. None where there is no such padding.
    """
    start = offset + LOCAL_HEADER.size
    data = window.read(start, LONGEST_NAME)
    found = data.find(b"FB")
    while found > 0:
        length = int.from_bytes(data[found + 2 : found + 4], "little")
        content = start + found + 4 + length
        padding = data[found + 4 : found + 4 + length]
        whole = len(padding) == length and padding.count(b"Z") >= length - 1
        name = data[:found]
        if whole and (content - base) % alignment == 0 and is_plausible_name(name):
            return name, content
        found = data.find(b"FB", found + 1)
    return None


def descriptor_copies(
    window: Window, stop: int, length: int, *, wide: bool
) -> list[DescriptorCopy]:
    """What stands behind a content of `length` bytes that ends at `stop`, read as a descriptor.

    With four-byte and with eight-byte sizes, the likelier first. `fitting` counts what agrees with
    a descriptor of that content among signature, stored size and size.
    """
    copies = []
    for layout in (DESCRIPTOR_64, DESCRIPTOR_32) if wide else (DESCRIPTOR_32, DESCRIPTOR_64):
        data = window.read(stop, layout.size)
        if len(data) == layout.size:
            _, crc, stored, size = layout.unpack(data)
            fitting = (data[:4] == DESCRIPTOR_BYTES) + (stored == length) + (size == length)
            copies.append(DescriptorCopy(layout.size, crc, stored, size, fitting))
    return sorted(copies, key=lambda copy: -copy.fitting)


def is_plausible_name(raw: bytes) -> bool:
    """Whether bytes can be a record's name: UTF-8, printable, not empty, of a sane length."""
    if not 0 < len(raw) <= LONGEST_NAME:
        return False
    try:
        return raw.decode("utf-8").isprintable()
    except UnicodeDecodeError:
        return False


def signatures(reader: FileReader, signature: bytes, start: int, stop: int) -> Iterator[int]:
    """Every place of `signature` (four bytes) in a range of the file, in order; skips holes."""
    step = 1 << 12  # most searches end soon
    while start < stop:
        start = max(start, reader.next_data(start))
        data = reader.read(start, min(step + 3, stop - start))
        step = min(2 * step, 1 << 20)
        found = data.find(signature)
        while found >= 0:
            yield start + found
            found = data.find(signature, found + 1)
        if len(data) <= 3 or start + len(data) >= stop:
            return
        start += len(data) - 3


def _differing(a: bytes, b: bytes) -> int:
    return sum(x != y for x, y in zip(a, b, strict=False)) + abs(len(a) - len(b))
