"""Telling pickles apart: torch's legacy stream, metadata of distributed checkpoints, plain ones.

Sources: torch/serialization.py (`MAGIC_NUMBER`, `_legacy_save`), PEP 3154, Lib/pickletools.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.formats.sniff import Sniffed

if TYPE_CHECKING:
    from ckpttool.io.reading import FileReader

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
# The same number as protocol 2 and later write it (LONG1, ten bytes), and as 0 and 1 do (LONG).
_MAGIC_BINARY = b"\x8a\x0a" + LEGACY_MAGIC.to_bytes(10, "little")
_MAGIC_TEXT = b"L%dL\n" % LEGACY_MAGIC
_HIGHEST_PROTOCOL = 5
_DCP_MODULE = b"torch.distributed.checkpoint.metadata"
# Opcodes with which a pickle of protocol 0 or 1 can begin.
_OLD_STARTS = b"(c]})IJKMLFGSTUVXN"
_OLD_PICKLE_BYTES = 16 << 20


def sniff_pickle_head(head: bytes) -> Sniffed | None:
    """Pickles of protocol 2 and later, and torch's legacy stream of any protocol."""
    if head.startswith(_MAGIC_TEXT) or _MAGIC_BINARY in head[:32]:
        return Sniffed("torch-legacy", "a torch file (legacy stream, as before torch 1.6)", {})
    if len(head) < 2 or head[0] != 0x80 or not 2 <= head[1] <= _HIGHEST_PROTOCOL:
        return None
    facts = {"protocol": head[1]}
    if _DCP_MODULE in head[:256]:
        return Sniffed("dcp-metadata", "the metadata of a distributed checkpoint (pickle)", facts)
    return Sniffed("pickle", f"a plain pickle (protocol {head[1]}), not a torch file", facts)


def sniff_old_pickle(reader: FileReader, head: bytes) -> Sniffed | None:
    """Pickles of protocol 0 and 1, which have no magic number: so they have to read to the end."""
    if head[0] not in _OLD_STARTS or not 2 < reader.size <= _OLD_PICKLE_BYTES:
        return None
    data = reader.read(0, reader.size)
    if not data.rstrip().endswith(b"."):
        return None
    from ckpttool.formats.static_pickle import read_pickle

    result = read_pickle(data)
    if result.error is not None or data[result.end :].strip():
        return None
    return Sniffed("pickle", "a plain pickle (protocol 0 or 1), not a torch file", {"protocol": 0})
