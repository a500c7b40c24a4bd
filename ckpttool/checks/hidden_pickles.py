"""Pickles where none should be: every record that torch does not load as data is looked at.

By content, never by name. A storage that the main pickle refers to is data, whatever it looks like.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckpttool.errors import FormatError
from ckpttool.formats.anomaly import Anomaly

if TYPE_CHECKING:
    from ckpttool.formats.container import Container, Record
    from ckpttool.formats.static_pickle import PickleResult
    from ckpttool.model.checkpoint import Checkpoint

MAIN = "data.pkl"
# Of a longer record the beginning is looked at: a pickle that hides needs few bytes to do harm.
_LONGEST_LOOK = 16 << 20


def hidden_pickles(checkpoint: Checkpoint) -> Iterator[Anomaly]:
    """A `hidden-pickle` for each, with its dangerous and unknown globals, and if it ends well."""
    from ckpttool.formats.globals import Trust, classify

    container = checkpoint.container
    if container is None:
        return
    data = {container.storage_record(key) for key in checkpoint.storages}
    for record in container.entries:
        read_as = container.records.get(record.name)
        if record is read_as and (record.name == MAIN or record.name in data):
            continue
        result = _pickle_in(container, record)
        if result is None:
            continue
        trusts = [(path, classify(ref.module, ref.name)) for path, ref in result.globals.items()]
        dangerous = [path for path, trust in trusts if trust is Trust.DANGEROUS]
        if dangerous or (result.error is None and result.protocol >= 2):
            unknown = [path for path, trust in trusts if trust is Trust.UNKNOWN]
            facts = {"dangerous": dangerous, "unknown": unknown, "whole": result.error is None}
            yield Anomaly("hidden-pickle", record.name, **facts)


def _pickle_in(container: Container, record: Record) -> PickleResult | None:
    from ckpttool.formats.static_pickle import read_pickle

    try:
        content = _beginning(container, record)
    except FormatError:
        return None  # what cannot be read is a finding of its own
    return read_pickle(content, limits=container.limits) if content else None


def _beginning(container: Container, record: Record) -> bytes:
    if record.size <= _LONGEST_LOOK:
        return container.read(record)
    parts: list[bytes] = []
    length = 0
    for chunk in container.chunks(record):
        parts.append(bytes(chunk))
        length += len(chunk)
        if length >= _LONGEST_LOOK:
            break
    return b"".join(parts)
