"""Decompressing the content of a deflated record (RFC 1951), counting what really comes out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.errors import FormatError, LimitError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpttool.formats.container import Record

_OUTPUT_BYTES = 1 << 18


def inflated(pieces: Iterator[memoryview], record: Record, limit: int) -> Iterator[bytes]:
    """The content of `record`, whose compressed bytes are `pieces`, in parts of at most 256 KiB.

    Stops with LimitError once more than `limit` bytes have come out, and with FormatError where the
    data is damaged, ends early, goes on behind its end, or gives another number of bytes than the
    record declares: what a header announces is never allocated nor believed.
    """
    import zlib

    inflater, produced = zlib.decompressobj(-zlib.MAX_WBITS), 0
    for piece in pieces:
        pending: bytes | memoryview = piece
        while True:
            if inflater.eof:
                if pending:
                    raise _damaged(record, "goes on behind its end")
                break
            try:
                output = inflater.decompress(pending, _OUTPUT_BYTES)
            except zlib.error as error:
                raise _damaged(record, "is malformed") from error
            pending = inflater.unused_data or inflater.unconsumed_tail
            produced += len(output)
            _check_growth(record, produced, limit)
            yield output
            if len(output) < _OUTPUT_BYTES and not inflater.eof:
                break  # all of this piece is used up
    if not inflater.eof:
        raise _damaged(record, "ends too soon")
    if produced != record.size:
        raise _damaged(record, f"gives {produced:,} bytes, not the {record.size:,} declared")


def _check_growth(record: Record, produced: int, limit: int) -> None:
    if produced > limit:
        raise LimitError(
            f"record {record.name!r} inflates to more than {limit:,} bytes",
            limit="inflated_bytes",
            record=record.name,
        )
    if produced > record.size:
        raise _damaged(record, f"gives more than the {record.size:,} bytes declared")


def _damaged(record: Record, words: str) -> FormatError:
    return FormatError(f"record {record.name!r}: compressed data {words}", record=record.name)
