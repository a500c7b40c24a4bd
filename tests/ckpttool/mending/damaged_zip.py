"""Small torch files, and where their structure is; found with code of this file's own."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from ckpttool.mending.plan import plan_mend
from ckpttool.mending.write import Written, write_mended
from tests import corrupt


@cache
def small() -> bytes:
    """Four storages, one of them empty, and a number: written by torch."""
    generator = torch.Generator().manual_seed(3)
    state = {
        "model": {"a": torch.randn(5, generator=generator), "none": torch.empty(0)},
        "optimizer": {"b": torch.randn(3, 2, generator=generator), "c": torch.arange(9)},
        "step": 7,
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def structure(data: bytes) -> list[int]:
    """Offsets of all bytes that are no record's content."""
    content = corrupt.content_bytes(data)
    return [offset for offset in range(len(data)) if offset not in content]


def header_range(data: bytes, record: str) -> range:
    """The bytes of a record's local header, with name and padding."""
    return range(corrupt.header_offset(data, record), corrupt.content_range(data, record).start)


def descriptor_range(data: bytes, record: str) -> range:
    """The bytes of a record's data descriptor; none for an empty record."""
    content = corrupt.content_range(data, record)
    return range(content.stop, content.stop + 16 if len(content) else content.stop)


def entry_range(data: bytes, record: str) -> range:
    """The bytes of a record's entry in the central directory."""
    start = corrupt.entry_offsets(data)[record]
    lengths = struct.unpack_from("<HHH", data, start + 28)
    return range(start, start + 46 + sum(lengths))


def overwritten(data: bytes, places: range, fill: int) -> bytes:
    """Every byte of a range replaced by the same one."""
    return corrupt.put_bytes(data, places.start, bytes((fill,)) * len(places))


def byte_changes(data: bytes, offset: int) -> Iterator[bytes]:
    """The byte at `offset` changed: all its bits turned, and one more than it was."""
    yield corrupt.flip_byte(data, offset)
    yield corrupt.put_bytes(data, offset, bytes(((data[offset] + 1) & 0xFF,)))


def mended(tmp_path: Path, data: bytes, **options: object) -> tuple[bytes | None, Written | None]:
    """What `mend` makes of a file with this content: its bytes (None if it wrote nothing)."""
    path, out = tmp_path / "damaged.pt", tmp_path / "mended.pt"
    path.write_bytes(data)
    out.unlink(missing_ok=True)
    plan_options = {
        key: options.pop(key)
        for key in ("siblings", "known_sha256", "bit_odds", "bursts", "archive")
        if key in options
    }
    with plan_mend(path, **plan_options) as plan:  # type: ignore[arg-type]
        written = write_mended(plan, out, **options)  # type: ignore[arg-type]
    assert path.read_bytes() == data
    return (out.read_bytes() if written is not None else None), written
