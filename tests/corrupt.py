"""Named mutations: each takes a healthy file's bytes and gives those of a damaged or odd one.

All are pure functions from bytes to bytes, so that a test reads as what happened to the file. Those
on zips find their way with code of their own and never with `ckpttool`'s: what is tested must not
make its own input. Names of records are below the root folder (`data/0`), as `ckpttool` shows them.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

_LOCAL = b"PK\x03\x04"
_CENTRAL = b"PK\x01\x02"
_END = b"PK\x05\x06"
_ZIP64_END = b"PK\x06\x06"

# Offsets of fields in a local header and in a central directory entry (APPNOTE.TXT 4.3.7, 4.3.12).
LOCAL_FIELDS = {
    "needed": (4, 2),
    "flags": (6, 2),
    "method": (8, 2),
    "time": (10, 2),
    "date": (12, 2),
    "crc": (14, 4),
    "stored": (18, 4),
    "size": (22, 4),
    "name_length": (26, 2),
    "extra_length": (28, 2),
}
CENTRAL_FIELDS = {
    "made_by": (4, 2),
    "needed": (6, 2),
    "flags": (8, 2),
    "method": (10, 2),
    "time": (12, 2),
    "date": (14, 2),
    "crc": (16, 4),
    "stored": (20, 4),
    "size": (24, 4),
    "name_length": (28, 2),
    "extra_length": (30, 2),
    "comment_length": (32, 2),
    "disk": (34, 2),
    "internal": (36, 2),
    "external": (38, 4),
    "offset": (42, 4),
}


def corrupt(path: Path, mutation: Callable[..., bytes], *args: object, **kwargs: object) -> Path:
    """Applies a mutation to a file in place, and gives its path back."""
    path.write_bytes(mutation(path.read_bytes(), *args, **kwargs))
    return path


# ---- bytes of any file


def flip_bit(data: bytes, offset: int, bit: int = 0) -> bytes:
    """One bit of the byte at `offset` turned; a negative offset counts from the end."""
    changed = bytearray(data)
    changed[offset] ^= 1 << bit
    return bytes(changed)


def flip_byte(data: bytes, offset: int, mask: int = 0xFF) -> bytes:
    """The byte at `offset` exclusive-ored with `mask`, so that it surely changes."""
    assert mask & 0xFF
    changed = bytearray(data)
    changed[offset] ^= mask
    return bytes(changed)


def put_bytes(data: bytes, offset: int, new: bytes) -> bytes:
    """The bytes at `offset` overwritten by `new`."""
    assert 0 <= offset <= len(data) - len(new)
    return data[:offset] + new + data[offset + len(new) :]


def cut_end(data: bytes, count: int) -> bytes:
    """Without its last `count` bytes."""
    return data[: max(0, len(data) - count)]


def keep_first(data: bytes, count: int) -> bytes:
    """Its first `count` bytes alone, as an interrupted copy leaves them."""
    return data[:count]


def cut_out(data: bytes, offset: int, count: int) -> bytes:
    """Without `count` bytes in the middle."""
    return data[:offset] + data[offset + count :]


def zero_tail(data: bytes, count: int) -> bytes:
    """The last `count` bytes zero and the size kept: what a power loss leaves of unflushed data."""
    count = min(count, len(data))
    return data[: len(data) - count] + bytes(count)


def zero_range(data: bytes, offset: int, count: int) -> bytes:
    """`count` bytes from `offset` on zero: a lost block in the middle."""
    return put_bytes(data, offset, bytes(count))


def zeros_like(data: bytes) -> bytes:
    """The same size, nothing but zeros."""
    return bytes(len(data))


def append(data: bytes, tail: bytes) -> bytes:
    """With `tail` behind its end."""
    return data + tail


def prepend(data: bytes, front: bytes) -> bytes:
    """With `front` before its beginning."""
    return front + data


def concatenate(data: bytes, *others: bytes) -> bytes:
    """Several files one behind another, as saving twice to one open handle leaves them."""
    return b"".join((data, *others))


# ---- places in a zip


def entry_offsets(data: bytes) -> dict[str, int]:
    """Where each record's entry in the central directory begins, by its name below the root."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        position = archive.start_dir
        names = [info.filename for info in archive.infolist()]
    offsets = {}
    for name in names:
        assert data[position : position + 4] == _CENTRAL
        offsets[_short(name)] = position
        position += 46 + sum(struct.unpack_from("<HHH", data, position + 28))
    return offsets


def header_offset(data: bytes, record: str) -> int:
    """Where a record's local header begins."""
    (offset,) = struct.unpack_from("<I", data, entry_offsets(data)[record] + 42)
    return int(offset)


def content_range(data: bytes, record: str) -> range:
    """The offsets of a record's content, as stored."""
    offset = header_offset(data, record)
    name_length, extra_length = struct.unpack_from("<HH", data, offset + 26)
    start = offset + 30 + name_length + extra_length
    (stored,) = struct.unpack_from("<I", data, entry_offsets(data)[record] + 20)
    return range(start, start + stored)


def end_record_offset(data: bytes) -> int:
    """Where the end of central directory record begins."""
    return data.rindex(_END)


def content_bytes(data: bytes) -> set[int]:
    """Offsets of all bytes that are some record's content; the others are the zip's own."""
    return {offset for record in entry_offsets(data) for offset in content_range(data, record)}


# ---- one field or structure of a zip changed


def set_central(data: bytes, record: str, field: str, value: int) -> bytes:
    """A field of a record's directory entry set; see `CENTRAL_FIELDS`."""
    offset, width = CENTRAL_FIELDS[field]
    new = value.to_bytes(width, "little")
    return put_bytes(data, entry_offsets(data)[record] + offset, new)


def set_local(data: bytes, record: str, field: str, value: int) -> bytes:
    """A field of a record's local header set; see `LOCAL_FIELDS`."""
    offset, width = LOCAL_FIELDS[field]
    return put_bytes(data, header_offset(data, record) + offset, value.to_bytes(width, "little"))


def set_descriptor(data: bytes, record: str, *, crc: int, stored: int, size: int) -> bytes:
    """A record's data descriptor written anew, with four-byte sizes."""
    stop = content_range(data, record).stop
    return put_bytes(data, stop, b"PK\x07\x08" + struct.pack("<III", crc, stored, size))


def set_crc(data: bytes, record: str, crc: int) -> bytes:
    """A record's checksum set wherever it stands: directory entry and data descriptor."""
    content = content_range(data, record)
    data = set_central(data, record, "crc", crc)
    return set_descriptor(data, record, crc=crc, stored=len(content), size=len(content))


def drop_checksums(data: bytes) -> bytes:
    """All checksums zero, as with `torch.serialization.set_crc32_options(False)`."""
    for record in entry_offsets(data):
        if content_range(data, record):
            data = set_crc(data, record, 0)
    return data


def fix_checksums(data: bytes) -> bytes:
    """All checksums as the contents are now: a change that leaves no trace in them."""
    for record in entry_offsets(data):
        content = content_range(data, record)
        if content:
            data = set_crc(data, record, zlib.crc32(data[content.start : content.stop]))
    return data


def set_encrypted(data: bytes, record: str, *, central: bool, local: bool) -> bytes:
    """The flag for encryption set in the directory, in the local header, or in both."""
    if central:
        flags = struct.unpack_from("<H", data, entry_offsets(data)[record] + 8)[0]
        data = set_central(data, record, "flags", flags | 1)
    if local:
        flags = struct.unpack_from("<H", data, header_offset(data, record) + 6)[0]
        data = set_local(data, record, "flags", flags | 1)
    return data


def fake_sizes(data: bytes, record: str, *, stored: int, size: int) -> bytes:
    """Other sizes announced in the directory than the record has."""
    return set_central(set_central(data, record, "stored", stored), record, "size", size)


def rename_local(data: bytes, record: str, new: str) -> bytes:
    """Another name of the same length in the local header; `new` is below the root, too."""
    return _rename(data, header_offset(data, record) + 30, record, new)


def rename_central(data: bytes, record: str, new: str) -> bytes:
    """Another name of the same length in the directory."""
    return _rename(data, entry_offsets(data)[record] + 46, record, new)


def rename(data: bytes, record: str, new: str) -> bytes:
    """Another name of the same length in both places."""
    return rename_central(rename_local(data, record, new), record, new)


def drop_end_record(data: bytes) -> bytes:
    """Without its end of central directory record and what follows it."""
    return data[: end_record_offset(data)]


def drop_end_records(data: bytes) -> bytes:
    """Without any end record: the directory is there, but nothing leads to it."""
    zip64 = data.rfind(_ZIP64_END)
    return data[: zip64 if zip64 >= 0 else end_record_offset(data)]


def drop_directory(data: bytes) -> bytes:
    """Cut off where the central directory begins: every record is whole, none is listed."""
    return data[: min(entry_offsets(data).values())]


# ---- zips built anew


def read_records(data: bytes) -> list[tuple[str, bytes]]:
    """Full names and contents of all records, by Python's zipfile."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [(info.filename, archive.read(info)) for info in archive.infolist()]


def rezip(data: bytes, *, deflate: bool = False, root: str | None = None) -> bytes:
    """Unpacked and zipped again by a common tool: no padding, no descriptors, times, other root."""
    method = zipfile.ZIP_DEFLATED if deflate else zipfile.ZIP_STORED
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", method) as archive:
        for name, content in read_records(data):
            new = name if root is None else f"{root}/{_short(name)}"
            archive.writestr(zipfile.ZipInfo(new, (2024, 5, 17, 10, 20, 30)), content, method)
    return target.getvalue()


def add_member(data: bytes, name: str, content: bytes) -> bytes:
    """A member added by Python's zipfile, with `name` as it is (no root folder put before it)."""
    target = io.BytesIO(data)
    with zipfile.ZipFile(target, "a") as archive:
        archive.writestr(zipfile.ZipInfo(name, (2024, 5, 17, 10, 20, 30)), content)
    return target.getvalue()


def replace_record(data: bytes, record: str, content: bytes) -> bytes:
    """Another content for a record, all else as torch writes it, checksums right."""
    records = [
        (name, content if _short(name) == record else old) for name, old in read_records(data)
    ]
    return torch_zip(records)


def drop_record(data: bytes, record: str) -> bytes:
    """Without a record, all else as torch writes it."""
    return torch_zip([(n, c) for n, c in read_records(data) if _short(n) != record])


def duplicate_record(
    data: bytes, record: str, content: bytes, *, name: str | None = None, first: bool = False
) -> bytes:
    """A second record of the same name (or of `name`), in front of all others or behind them."""
    records = read_records(data)
    root = records[0][0].partition("/")[0]
    twin = [(f"{root}/{name or record}", content)]
    return torch_zip(twin + records if first else records + twin)


def zip_bomb(record: str = "archive/data.pkl", *, size: int = 1 << 30, claim: int = 0) -> bytes:
    """A zip with one deflated record that inflates to `size` zeros and announces `claim` bytes."""
    compressor = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = bytes(1 << 20)
    parts = [compressor.compress(block[: min(len(block), size - at)]) for at in _steps(size)]
    stored = b"".join([*parts, compressor.flush()])
    name, announced = record.encode(), claim or size
    crc = zlib.crc32(b"")
    local = struct.pack(
        "<4s5H3I2H", _LOCAL, 20, 0, 8, 0, 33, crc, len(stored), announced, len(name), 0
    )
    entry = struct.pack(
        *("<4s6H3I5H2I", _CENTRAL, 20, 20, 0, 8, 0, 33),
        *(crc, len(stored), announced, len(name), 0, 0, 0, 0, 0, 0),
    )
    body = local + name + stored
    directory = entry + name
    end = struct.pack("<4s4H2IH", _END, 0, 0, 1, 1, len(directory), len(body), 0)
    return body + directory + end


def torch_zip(records: Iterable[tuple[str, bytes]], *, alignment: int = 64) -> bytes:
    """A zip laid out as torch lays it out, from full names and contents (after miniz in torch)."""
    body, directory, count = bytearray(), bytearray(), 0
    for full_name, content in records:
        name, offset, count = full_name.encode(), len(body), count + 1
        flags = 0x808 if content else 0x800
        padding = -(offset + 30 + len(name) + 4) % alignment
        body += struct.pack("<4s5H3I2H", _LOCAL, 0, flags, 0, 0, 0, 0, 0, 0, len(name), padding + 4)
        body += name + b"FB" + struct.pack("<H", padding) + b"Z" * padding + content
        crc, size = zlib.crc32(content), len(content)
        if content:
            body += b"PK\x07\x08" + struct.pack("<III", crc, size, size)
        directory += struct.pack("<4s6H3I", _CENTRAL, 0, 0, flags, 0, 0, 0, crc, size, size)
        directory += struct.pack("<5H2I", len(name), 0, 0, 0, 0, 0, offset) + name
    start, size = len(body), len(directory)
    zip64 = struct.pack("<4sQ2H2I4Q", _ZIP64_END, 44, 798, 45, 0, 0, count, count, size, start)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, start + size, 1)
    end = struct.pack("<4s4H2IH", _END, 0, 0, min(count, 65535), min(count, 65535), size, start, 0)
    return bytes(body + directory + zip64 + locator + end)


def _short(name: str) -> str:
    return name.partition("/")[2] or name


def _rename(data: bytes, offset: int, record: str, new: str) -> bytes:
    assert len(new.encode()) == len(record.encode())
    length = 0
    while data[offset + length : offset + length + len(record)] != record.encode():
        length += 1
    return put_bytes(data, offset + length, new.encode())


def _steps(size: int) -> range:
    return range(0, size, 1 << 20)
