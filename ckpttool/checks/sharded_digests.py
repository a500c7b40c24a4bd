"""Whether each shard is the one that its step was saved with.

Each rank's file records, under "shards", size and SHA-256 of the shards that this rank wrote. They
are what binds a shard to its step: `.metadata` of two steps differs in nothing that shows a mix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.formats.anomaly import Anomaly
from ckpttool.model.inert import integer, what

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckpttool.model.sharded import ShardedStep

KEY = "shards"
_SHA256_DIGITS = 64
_NOT_ITS_OWN = "it is not the shard that this step was saved with"


class Recorded(NamedTuple):
    """What the file `by` of a rank records of a shard: its size in bytes and its SHA-256."""

    shard: str
    size: int
    sha256: str
    by: str


def read_records(
    sharded: ShardedStep, trees: Mapping[str, Any], records: list[Recorded]
) -> Iterator[Anomaly]:
    """What the ranks' files record of the shards, and how names and sizes differ from that.

    `trees` are their contents, by name. Files without the key say nothing of their shards. Adds to
    `records` what is still to be compared by its SHA-256. No shard is opened.
    """
    for by, tree in trees.items():
        found = recorded_by(tree, by)
        if found is None:
            problem = f'its "{KEY}" is {what(tree[KEY])}, no record of sizes and SHA-256'
            yield Anomaly("sharded-rank-differs", by, problem=problem)
            records.clear()
            return
        records += found
    yield from _strangers(sharded, trees, {one.shard for one in records})
    sizes = sharded.listed.sizes
    there = [one for one in records if one.shard in sizes]
    for one in there:
        if sizes[one.shard] != one.size:
            problem = f"{_NOT_ITS_OWN}: {one.by} records {one.size:,} bytes, it has "
            problem += f"{sizes[one.shard]:,}"
            yield Anomaly("sharded-shard-differs", one.shard, problem=problem)
    records[:] = [one for one in there if sizes[one.shard] == one.size]


def compare(records: list[Recorded], sha256: str) -> Iterator[Anomaly]:
    """Holds the SHA-256 of one shard against what is recorded of it."""
    for one in records:
        if sha256 != one.sha256:
            problem = f"{_NOT_ITS_OWN}: its SHA-256 is not the one that {one.by} records"
            yield Anomaly("sharded-shard-differs", one.shard, problem=problem)


def recorded_by(tree: Any, by: str) -> list[Recorded] | None:
    """The records in a rank's file, none where it has no such key; None where they are nonsense."""
    if not isinstance(tree, dict) or KEY not in tree:
        return []
    value = tree[KEY]
    if not isinstance(value, dict):
        return None
    found = []
    for shard, about in value.items():
        size = integer(about.get("size")) if isinstance(about, dict) else None
        sha256 = about.get("sha256") if isinstance(about, dict) else None
        if not isinstance(shard, str) or size is None or not isinstance(sha256, str):
            return None
        if len(sha256) != _SHA256_DIGITS:
            return None
        found.append(Recorded(shard, size, sha256.lower(), by))
    return found


def _strangers(
    sharded: ShardedStep, trees: Mapping[str, Any], recorded: set[str]
) -> Iterator[Anomaly]:
    """Shards that no rank wrote, where every rank says what it wrote; and those that are gone."""
    named = set(sharded.metadata.files()) if sharded.metadata is not None else set()
    world = sharded.world_size
    told = [tree for tree in trees.values() if isinstance(tree, dict) and KEY in tree]
    if world is not None and len(told) == world:
        for shard in sorted((named & set(sharded.listed.sizes)) - recorded):
            problem = f"{_NOT_ITS_OWN}: no rank records that it wrote it"
            yield Anomaly("sharded-shard-differs", shard, problem=problem)
    # What the metadata names and is not there is said already.
    if sharded.metadata is not None:
        for shard in sorted(recorded - named - set(sharded.listed.sizes)):
            problem = "the shard is missing, and the metadata does not name it: it is of another"
            yield Anomaly("sharded-shard-differs", shard[:120], problem=f"{problem} save")
