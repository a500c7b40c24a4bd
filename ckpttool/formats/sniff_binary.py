"""Formats that a magic number alone does not settle: safetensors, tar, compressed streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.formats.sniff import HEAD_BYTES, Sniffed, sniff_head

if TYPE_CHECKING:
    from typing import Any

    from ckpttool.io.reading import FileReader

# The format's own bound on its header (safetensors/src/tensor.rs, MAX_HEADER_SIZE).
_SAFETENSORS_HEADER_BYTES = 100_000_000
# As much of the header as is parsed here to tell whether the file is whole.
_PARSED_HEADER_BYTES = 16 << 20
_INNER_BYTES = 1 << 16
# bzip2 gives nothing before a whole block of up to 900 kB is there.
_COMPRESSED_BYTES = 1 << 20

_COMPRESSED = (
    (b"\x1f\x8b", "gzip", "gzip-compressed data"),
    (b"BZh", "bzip2", "bzip2-compressed data"),
    (b"\xfd7zXZ\x00", "xz", "xz-compressed data"),
)


def sniff_compressed(reader: FileReader, head: bytes) -> Sniffed | None:
    """gzip, bzip2 and xz, and what is inside, judged by its first 64 KiB at most."""
    for magic, kind, words in _COMPRESSED:
        if head.startswith(magic):
            inner = _inner_head(kind, reader.read(0, _COMPRESSED_BYTES))
            facts: dict[str, Any] = {}
            if inner:
                found = sniff_head(inner[:HEAD_BYTES], len(inner)) or _tar(inner[:HEAD_BYTES])
                if found is not None:
                    facts["inner"] = found.kind
                    words += f"; inside it looks like {found.words}"
            return Sniffed(kind, words, facts)
    return None


def _inner_head(kind: str, data: bytes) -> bytes:
    """At most 64 KiB of what the compressed data hold; empty if damaged."""
    try:
        if kind == "gzip":
            import zlib

            return zlib.decompressobj(wbits=31).decompress(data, _INNER_BYTES)
        if kind == "bzip2":
            import bz2

            return bz2.BZ2Decompressor().decompress(data, _INNER_BYTES)
        import lzma

        return lzma.LZMADecompressor(memlimit=64 << 20).decompress(data, _INNER_BYTES)
    except Exception:  # zlib.error, lzma.LZMAError, OSError: only a hint is lost
        return b""


def sniff_safetensors(reader: FileReader, head: bytes) -> Sniffed | None:
    """safetensors: eight bytes of header length, then that much JSON, then the tensors' bytes.

    Facts: `header_bytes`; `needed`, the size that the header calls for; `problem`, if damaged.
    """
    if len(head) < 9 or head[8:9] != b"{":
        return None
    length = int.from_bytes(head[:8], "little")
    facts: dict[str, Any] = {"header_bytes": length}
    if length > _SAFETENSORS_HEADER_BYTES:
        if head[9:10] not in (b'"', b"}"):
            return None
        facts["problem"] = "its header length is out of bounds"
    elif 8 + length > reader.size:
        facts["problem"] = "it ends within its header"
    elif length <= _PARSED_HEADER_BYTES:
        header = _safetensors_header(reader.read(8, length))
        if header is None:
            return None if head[9:10] != b'"' else _safetensors(facts, "its header is malformed")
        facts["tensors"] = len(header)
        facts["needed"] = needed = 8 + length + max([0, *header.values()])
        if needed != reader.size:
            cut = "is cut" if needed > reader.size else "has bytes behind its end"
            facts["problem"] = f"it {cut}: {reader.size:,} bytes instead of {needed:,}"
    return _safetensors(facts, facts.get("problem"))


def _safetensors(facts: dict[str, Any], problem: str | None) -> Sniffed:
    if problem is not None:
        facts["problem"] = problem
    words = "a safetensors file" + (f" ({problem})" if problem else "")
    return Sniffed("safetensors", words, facts)


def _safetensors_header(data: bytes) -> dict[str, int] | None:
    """Where each tensor ends, counted from the header's end; None if this is no such header."""
    import json

    try:
        header = json.loads(data)
        return {
            name: int(entry["data_offsets"][1])
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, IndexError):
        return None


def sniff_tar(reader: FileReader, head: bytes) -> Sniffed | None:
    """tar, and torch's own legacy tar with its four members (torch before 0.1.10)."""
    found = _tar(head)
    if found is None:
        return None
    from ckpttool.formats.tar_layout import tar_members

    names = {member.name for member in tar_members(reader, most=64)}
    if {"sys_info", "pickle", "storages"} <= names:
        return Sniffed("torch-legacy-tar", "a torch file (legacy tar, as before torch 0.1.10)", {})
    return found


def _tar(head: bytes) -> Sniffed | None:
    # POSIX.1-1988 ustar and GNU tar have the magic number; older tars are told by their checksum.
    from ckpttool.formats.tar_layout import parse_header

    is_tar = head[257:262] == b"ustar" or parse_header(head[:512], 0) is not None
    return Sniffed("tar", "a tar archive", {}) if is_tar else None
