"""Telling zips apart by the records that they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.formats.sniff import Sniffed
from ckpttool.formats.zip_layout import (
    END_BYTES,
    END_RECORD,
    LOCAL_BYTES,
    LOCAL_HEADER,
    ZIP64_END_BYTES,
    ZIP64_END_LOCATOR,
    ZIP64_END_RECORD,
)

if TYPE_CHECKING:
    from ckpttool.formats.limits import ReaderLimits
    from ckpttool.formats.torch_zip import ZipContainer
    from ckpttool.io.reading import FileReader

_TAIL_BYTES = 1 << 16
# What torch.save leaves behind the directory.
_TORCH_END_BYTES = ZIP64_END_RECORD.size + ZIP64_END_LOCATOR.size + END_RECORD.size
# Two archives in a file are a mishap; a shard of a distributed checkpoint has one for each item.
_FEWEST_IN_SHARD = 3
# A dictionary as the outermost object: EMPTY_DICT, or a call of OrderedDict.
_MAPPING_STARTS = (b"}", b"ccollections\nOrderedDict")


def sniff_zip(reader: FileReader, limits: ReaderLimits) -> Sniffed:
    """What a file that begins like a zip is; its container is open in the answer."""
    from ckpttool.formats.torch_zip import open_zip

    container = open_zip(reader, limits)
    kind, words = _kind(reader, container)
    return Sniffed(kind, words, {"records": len(container.entries)}, container)


def sniff_shifted_zip(reader: FileReader, limits: ReaderLimits) -> Sniffed | None:
    """The same for a zip with other bytes in front of it; None if there is no zip in the file."""
    tail = reader.read(max(0, reader.size - _TAIL_BYTES), _TAIL_BYTES)
    if END_BYTES not in tail:
        return None
    found = sniff_zip(reader, limits)
    return found if found.container is not None and found.container.end is not None else None


def _kind(reader: FileReader, container: ZipContainer) -> tuple[str, str]:
    names = container.records
    if "constants.pkl" in names:  # what torch.load goes by
        return "torchscript", "a TorchScript archive (torch.jit.save)"
    if "archive_format" in names or "serialized_exported_program.json" in names:
        return "pt2", "an exported program (torch.export.save, .pt2)"
    if "data.pkl" in names:
        if _is_shard(reader, container):
            return "dcp-shard", "a shard of a distributed checkpoint (torch.distributed.checkpoint)"
        return "torch-zip", "a torch file (zip container, torch 1.6 or later)"
    full = [record.full_name for record in container.entries]
    if full and all(name.endswith(".npy") for name in full):
        return "npz", "NumPy arrays (.npz)"
    if not full and reader.read(0, 4) == LOCAL_BYTES:
        return "zip", "the beginning of a zip archive"
    return "zip", "a zip archive, but not one of torch's"


def _is_shard(reader: FileReader, container: ZipContainer) -> bool:
    """Whether at least three archives follow each other, the first one holding a bare value."""
    if container.end is None or container.end.shift <= 0:
        return False
    count, start = 1, container.end.shift
    while start > 0 and count < _FEWEST_IN_SHARD:
        previous = _start_of_archive_before(reader, start)
        if previous is None:
            return False
        count, start = count + 1, previous
    return count >= _FEWEST_IN_SHARD and not _first_is_mapping(reader)


def _start_of_archive_before(reader: FileReader, end: int) -> int | None:
    """Where the archive begins that torch.save ended at `end`; None if there is none."""
    position = end - _TORCH_END_BYTES
    data = reader.read(position, ZIP64_END_RECORD.size)
    if len(data) < ZIP64_END_RECORD.size or data[:4] != ZIP64_END_BYTES:
        return None
    size, offset = ZIP64_END_RECORD.unpack(data)[8:]
    start: int = position - size - offset
    return start if 0 <= start < end else None


def _first_is_mapping(reader: FileReader) -> bool:
    header = reader.read(0, LOCAL_HEADER.size)
    name_length, extra_length = LOCAL_HEADER.unpack(header)[9:]
    pickle = reader.read(LOCAL_HEADER.size + name_length + extra_length, 64)
    return pickle[2:].startswith(_MAPPING_STARTS)
