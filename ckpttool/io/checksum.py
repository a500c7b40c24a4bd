"""CRC-32 (ISO-HDLC, as zip uses it; APPNOTE.TXT 4.4.7) and SHA-256 over files, streamed.

Intel's ISA-L computes CRC-32 about as fast as memory can be read; where it is not installed, zlib
gives the same numbers, slower. Both release the GIL while they work, so threads run side by side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpttool.io.reading import FileReader

_SHA_CHUNK_BYTES = 1 << 20

_fastest: Callable[..., int] | None = None


def crc32(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """CRC-32 of `data`, going on from `value`: the checksum of what came before, 0 at the start."""
    return crc32_function()(data, value)


def crc32_function() -> Callable[..., int]:
    """The fastest `crc32(data, value)` there is, for loops that call it often."""
    global _fastest  # found once, on first use: most commands never need it
    if _fastest is None:
        try:
            from isal.isal_zlib import crc32 as fastest
        except ImportError:
            from zlib import crc32 as fastest
        _fastest = fastest
    return _fastest


def crc32_of(reader: FileReader, offset: int, length: int, value: int = 0) -> int:
    """CRC-32 of `length` bytes of a file from `offset` on, read piece by piece.

    Where the file ends early, it is that of the bytes there are. Raises UnreadableError.
    """
    update = crc32_function()
    for chunk in reader.chunks(offset, length):
        value = update(chunk, value)
    return value


def sha256_of(reader: FileReader) -> str:
    """SHA-256 of a whole file as 64 hexadecimal digits. Raises UnreadableError."""
    from hashlib import sha256

    digest = sha256()
    for chunk in reader.chunks(0, reader.size, chunk_bytes=_SHA_CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()
