"""What a file is, told by its content and never by its name.

Magic numbers are those of each format's own specification. Nothing is decompressed without a cap,
and a file is never read whole, except while it goes on being nothing but zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckpttool.formats.limits import DEFAULT_LIMITS, ReaderLimits

if TYPE_CHECKING:
    from typing import Any

    from ckpttool.formats.torch_zip import ZipContainer
    from ckpttool.io.reading import FileReader

HEAD_BYTES = 1 << 12
_ZERO_STEP_BYTES = 64 << 20


class Sniffed(NamedTuple):
    """What a file is: a short `kind` for programs, `words` for people, and `facts` where known.

    `container` is the open zip for kinds that are zips, since they can only be told apart by their
    records; None for all others.

    Kinds: `torch-zip`, `torchscript`, `pt2`, `dcp-shard`, `npz`, `zip`; `torch-legacy`,
    `torch-legacy-tar`, `tar`; `dcp-metadata`, `pickle`; `safetensors`, `gguf`, `hdf5`, `numpy`;
    `git-lfs-pointer` (facts `oid`, `size`), `html` and `xml` (`title`), `json`, `text`;
    `gzip`, `bzip2`, `xz` (`inner`: the kind of what is inside), `zstd`, `lz4`, `7z`, `rar`;
    `empty`, `zeros`, `unknown`.
    """

    kind: str
    words: str
    facts: dict[str, Any]
    container: ZipContainer | None = None


_MAGIC: tuple[tuple[int, bytes, str, str], ...] = (
    (0, b"\x89HDF\r\n\x1a\n", "hdf5", "an HDF5 file (Keras, h5py)"),
    (0, b"\x93NUMPY", "numpy", "a NumPy array (.npy)"),
    (0, b"GGUF", "gguf", "a GGUF model (llama.cpp)"),
    (0, b"7z\xbc\xaf\x27\x1c", "7z", "a 7z archive"),
    (0, b"Rar!\x1a\x07", "rar", "a RAR archive"),
    (0, b"\x28\xb5\x2f\xfd", "zstd", "Zstandard-compressed data"),
    (0, b"\x04\x22\x4d\x18", "lz4", "LZ4-compressed data"),
    (0, b"%PDF-", "unknown", "a PDF document"),
    (0, b"\x89PNG\r\n\x1a\n", "unknown", "a PNG image"),
    (0, b"\xff\xd8\xff", "unknown", "a JPEG image"),
    (0, b"\x7fELF", "unknown", "a program or shared library (ELF)"),
    (0, b"SQLite format 3\0", "unknown", "an SQLite database"),
    (0, b"PAR1", "unknown", "a Parquet file"),
    (0, b"ARROW1", "unknown", "an Arrow file"),
    (4, b"TFL3", "unknown", "a TensorFlow Lite model"),
)


def sniff(reader: FileReader, limits: ReaderLimits = DEFAULT_LIMITS) -> Sniffed:
    """Says what the file is. Raises UnreadableError if the system can't read it."""
    if reader.size == 0:
        return Sniffed("empty", "an empty file", {})
    head = reader.read(0, HEAD_BYTES)
    if not head.strip(b"\0"):
        return _zeros(reader)
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        from ckpttool.formats.sniff_zip import sniff_zip

        return sniff_zip(reader, limits)
    found = sniff_head(head, reader.size) or _by_content(reader, head)
    if found is None:
        from ckpttool.formats.sniff_zip import sniff_shifted_zip

        found = sniff_shifted_zip(reader, limits)
    return found or Sniffed("unknown", "no format that is known here", {})


def sniff_head(head: bytes, size: int) -> Sniffed | None:
    """What can be told from a file's first bytes and its size alone; None if nothing."""
    from ckpttool.formats.sniff_pickle import sniff_pickle_head

    for offset, magic, kind, words in _MAGIC:
        if head.startswith(magic, offset):
            return Sniffed(kind, words, {})
    if head.startswith(b"PK\x03\x04"):
        return Sniffed("zip", "a zip archive", {})
    return sniff_pickle_head(head)


def _by_content(reader: FileReader, head: bytes) -> Sniffed | None:
    """Formats that take more than a look at the magic number, each in a module of its own."""
    from ckpttool.formats.sniff_binary import sniff_compressed, sniff_safetensors, sniff_tar
    from ckpttool.formats.sniff_pickle import sniff_old_pickle
    from ckpttool.formats.sniff_text import sniff_text

    return (
        sniff_compressed(reader, head)
        or sniff_safetensors(reader, head)
        or sniff_tar(reader, head)
        or sniff_old_pickle(reader, head)
        or sniff_text(reader, head)
    )


def _zeros(reader: FileReader) -> Sniffed:
    position = reader.next_data(0)
    while position < reader.size:
        for chunk in reader.chunks(position, _ZERO_STEP_BYTES):
            # The buffer behind the view is a bytearray, which its declared type does not say.
            if chunk.obj.count(0, 0, len(chunk)) < len(chunk):  # type: ignore[attr-defined]
                return Sniffed("unknown", "no known format; it begins with zeros", {})
        position = reader.next_data(min(reader.size, position + _ZERO_STEP_BYTES))
    return Sniffed("zeros", f"nothing but zeros ({reader.size:,} bytes)", {"size": reader.size})
