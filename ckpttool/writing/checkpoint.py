"""A whole torch file from its parts: the pickle, the storages, and the records around them.

Order and content of the records follow torch/serialization.py (`_save`) and `PyTorchStreamWriter`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from ckpttool.writing import serialization_id
from ckpttool.writing.container import TorchZipWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ckpttool.io.durable import Progress

ALIGNMENT = 64
# What torch writes in its housekeeping records; version 3 is that of all files without TorchScript.
FORMAT_VERSION = b"1"
VERSION = b"3\n"
_NOTHING: Mapping[str, bytes] = MappingProxyType({})
_BEFORE = ("data.pkl", ".format_version", ".storage_alignment", "byteorder")
_BEHIND = ("version", serialization_id.NAME)


class StorageSource(NamedTuple):
    """A storage to be written as `data/<key>`.

    `nbytes` is its size; each call of `chunks` gives its bytes anew, in pieces of which each is
    valid until the next is asked for.
    """

    key: str
    nbytes: int
    chunks: Callable[[], Iterable[bytes | memoryview]]


def write_checkpoint(
    file: BinaryIO,
    tree: Any,
    storages: Iterable[StorageSource],
    *,
    root: str = "archive",
    byteorder: str = "little",
    extra: Mapping[str, bytes] = _NOTHING,
    pickle: bytes | None = None,
    progress: Progress | None = None,
) -> list[tuple[str, int, int]]:
    """Writes a file that `torch.load` takes, from where `file` stands; it is not closed.

    `tree` is the inert content, `storages` the bytes that it refers to, in the order of the file;
    `byteorder` (`little` or `big`) is that of these bytes. `pickle` is written in place of the tree
    where it is given. `extra` are further records by name; one with the name of a record of torch's
    replaces it, in its place. Without one, `.data/serialization_id` is made from the names and
    checksums as torch makes it. `progress` hears of the bytes of the storages.
    Gives (name below the root, size, CRC-32) of each record.

    Raises UnwritableError, before anything is written, for content without a form in a pickle, and
    FormatError for a storage of another size than it says; the file is spoiled then.
    """
    if pickle is None:
        from ckpttool.writing.pickled import pickled

        pickle = pickled(tree)
    writer = TorchZipWriter(file, root, alignment=ALIGNMENT)
    usual = {
        "data.pkl": pickle,
        ".format_version": FORMAT_VERSION,
        ".storage_alignment": str(ALIGNMENT).encode(),
        "byteorder": byteorder.encode(),
        "version": VERSION,
    }
    records = {**usual, **extra}
    for name in _BEFORE:
        writer.add(name, records[name])
    _add_storages(writer, list(storages), progress)
    writer.add("version", records["version"])
    for name, content in records.items():
        if name not in _BEFORE and name not in _BEHIND:
            writer.add(name, content)
    known = records.get(serialization_id.NAME)
    made = known or serialization_id.serialization_id(writer.records).encode()
    writer.add(serialization_id.NAME, made)
    writer.finish()
    return writer.records


def _add_storages(
    writer: TorchZipWriter, storages: list[StorageSource], progress: Progress | None
) -> None:
    done, total = 0, sum(storage.nbytes for storage in storages)
    for key, nbytes, chunks in storages:
        pieces: Iterable[bytes | memoryview] = chunks()
        if progress is not None:
            pieces = _reported(pieces, done, total, progress)
        writer.add(f"data/{key}", pieces, nbytes)
        done += nbytes


def _reported(
    pieces: Iterable[bytes | memoryview], done: int, total: int, progress: Progress
) -> Iterator[bytes | memoryview]:
    for piece in pieces:
        yield piece
        done += len(piece)
        progress(done, total, "writing")
