"""A sharded step: a directory that `torch.distributed.checkpoint` wrote, with what lies beside it.

    step_000000000004/
    ├── .metadata          which tensors there are, and where their pieces lie; DCP's last file
    ├── __0_0.distcp       a shard: one archive of torch's for each piece, one behind another
    ├── trainer.pt         counters, config, precision, random numbers: all but the tensors
    └── rank_00000.pt      what belongs to one process of the run, by its global rank, and under
                           "shards" size and SHA-256 of each shard that this process wrote

Opening one reads `.metadata` and lists the directory; no shard is touched.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from ckpttool.errors import UnreadableError
from ckpttool.formats.anomaly import Anomaly
from ckpttool.formats.globals import Trust
from ckpttool.formats.limits import DEFAULT_LIMITS, ReaderLimits
from ckpttool.model.checkpoint import Checkpoint, Section, open_checkpoint
from ckpttool.model.inert import integer
from ckpttool.model.schema import TrainingFacts, training_facts
from ckpttool.model.sharded_listing import METADATA_NAME, list_sharded
from ckpttool.model.sharded_metadata import (
    ShardedMetadata,
    bytes_of,
    coverage_problems,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckpttool.model.sharded_metadata import Item

TRAINER_NAME = "trainer.pt"
_RANK_FILE = re.compile(r"rank_([0-9]{5})\.pt\Z")
_METADATA_OF_RANK = re.compile(r"__[0-9]+\.metadata\Z")
_MOST_RANKS = 100_000
# Finder, Explorer, KDE; NFS and FUSE for a file that is open and was deleted; NAS boxes.
_OF_SYSTEMS = re.compile(
    r"(\.DS_Store|\._.*|[Tt]humbs\.db|[Dd]esktop\.ini|\.directory|\.nfs[0-9a-f]+|\.fuse_hidden.*"
    r"|\.Trash.*|\.snapshot|@eaDir|lost\+found|\.localized)\Z"
)


class ShardedStep:
    """A sharded step that is open: its metadata and its list of files. Close it, or use `with`.

    `metadata` is what `.metadata` says (None where it is missing or no pickle), and `checkpoint`
    the open file itself. `trainer` are the facts of `trainer.pt`, `trainer_tree` its inert content;
    both None where it is missing or cannot be read. `anomalies` is what is wrong with the parts as
    they fit each other, by names, sizes and numbers alone; their `record` is the name of a file.

    `places` are paths by name: those files are taken for the ones of these names, wherever they
    lie, and for no others. So a step can be looked at as it would be before its files are moved.
    """

    def __init__(
        self,
        path: str,
        limits: ReaderLimits = DEFAULT_LIMITS,
        places: Mapping[str, str] | None = None,
    ) -> None:
        self.path = path
        self.limits = limits
        self._places = dict(places or {})
        self.listed = list_sharded(path).with_places(path, self._places)
        self.checkpoint: Checkpoint | None = None
        self.metadata: ShardedMetadata | None = None
        self.trainer: TrainingFacts | None = None
        self.trainer_tree: Any = None
        if METADATA_NAME in self.listed.sizes:
            self.checkpoint = open_checkpoint(self.file(METADATA_NAME), limits=limits)
            if self.checkpoint.readable:
                self.metadata = ShardedMetadata(self.checkpoint.tree)
        self._sidecar_sections: dict[str, Section] = {}
        self._read_trainer()
        self.anomalies = list(self._compare())

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return self.listed.size

    @property
    def world_size(self) -> int | None:
        """How many processes wrote it, as `trainer.pt` says; None where it does not."""
        about = self.trainer_tree.get("sharded") if isinstance(self.trainer_tree, dict) else None
        count = integer(about.get("world_size")) if isinstance(about, dict) else None
        return count if count is not None and 0 < count <= _MOST_RANKS else None

    @property
    def ranks(self) -> dict[int, str]:
        """The file of each global rank that has one."""
        found = ((rank_of(name), name) for name in self.listed.sizes)
        return {rank: name for rank, name in found if rank is not None}

    @property
    def sections(self) -> dict[str, Section]:
        """The top-level keys, with their tensors in the shards and beside them."""
        counts: dict[str, tuple[int, int]] = {}
        if self.metadata is not None:
            for tensor in self.metadata.tensors.values():
                key = tensor.name.partition(".")[0]
                number, nbytes = counts.get(key, (0, 0))
                counts[key] = number + 1, nbytes + tensor.nbytes
        sections = dict(self._sidecar_sections)
        for key, (number, nbytes) in counts.items():
            sections[key] = Section(key, "sharded", number, nbytes)
        return sections

    @property
    def load_need(self) -> str:
        """What loads it; see `Checkpoint.load_need`.

        `distributed`, and `distributed-runs-code` where that runs, or may run, what `.metadata`
        chooses.
        """
        if self.checkpoint is not None and self.checkpoint.trust.rank > Trust.BENIGN.rank:
            return "distributed-runs-code"
        return "nothing" if self.metadata is None else "distributed"

    def file(self, name: str) -> str:
        """The path of one of its files."""
        return self._places.get(name) or os.path.join(self.path, name)

    def close(self) -> None:
        """Closes `.metadata`."""
        if self.checkpoint is not None:
            self.checkpoint.close()

    def __enter__(self) -> ShardedStep:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_trainer(self) -> None:
        if TRAINER_NAME not in self.listed.sizes:
            return
        try:
            with open_checkpoint(self.file(TRAINER_NAME), limits=self.limits) as checkpoint:
                if checkpoint.readable:
                    self.trainer_tree = checkpoint.tree
                    self.trainer = training_facts(checkpoint.tree)
                    self._sidecar_sections = dict(checkpoint.sections)
        except UnreadableError:
            return  # said when the file is examined

    def odd(self, name: str) -> str | None:
        """Says of a file that is something else that it is; None of one that is a file, or not."""
        kind = self.listed.odd.get(name)
        return None if kind is None else f"it is {kind}, no regular file, and is not followed"

    # What does not fit.

    def _compare(self) -> Iterator[Anomaly]:
        if problem := self.odd(METADATA_NAME):
            yield Anomaly("sharded-metadata-malformed", names=(), problem=problem)
        elif METADATA_NAME not in self.listed.sizes and self._metadata_by_rank:
            yield Anomaly("sharded-metadata-by-rank", ranks=len(self._metadata_by_rank))
        elif METADATA_NAME not in self.listed.sizes:
            yield Anomaly("sharded-metadata-missing", shards=len(self.listed.shards))
        elif self.metadata is not None:
            yield from self.metadata.anomalies
            yield from coverage_problems(self.metadata.tensors.values())
            yield from self._compare_items()
            yield from self._compare_files(self.metadata.files())

    def _compare_items(self) -> Iterator[Anomaly]:
        """Entries that are too short for the values that they should hold."""
        assert self.metadata is not None
        for tensor in self.metadata.tensors.values():
            for piece in tensor.pieces:
                needed = bytes_of(tensor.dtype, piece.numel)
                item = piece.item
                if item is not None and not item.transforms and item.length < needed:
                    problem = f"has {item.length:,} bytes, while its values take {needed:,}"
                    names = (tensor.name,)
                    yield Anomaly("sharded-item-differs", item.file, names=names, problem=problem)

    def _compare_files(self, files: dict[str, list[Item]]) -> Iterator[Anomaly]:
        sizes = self.listed.sizes
        for file, items in files.items():
            names = tuple(dict.fromkeys(item.name for item in items))
            if not is_plain(file):
                yield Anomaly("sharded-unsafe-path", names=names, file=file)
            elif file in self.listed.odd:
                yield Anomaly("sharded-unsafe-path", file, names=names, file=file, odd=True)
            elif file not in sizes:
                yield Anomaly("sharded-shard-missing", file, names=names)
            else:
                yield from _compare_spans(file, sizes[file], items)
        # Where the metadata says nothing at all, nothing is known of any shard.
        for name in self.listed.shards if files else ():
            if name not in files:
                yield Anomaly("sharded-stale", name, size=sizes[name])

    @property
    def _metadata_by_rank(self) -> list[str]:
        """The metadata of each rank, as torch writes it with `use_collectives=False`."""
        return [name for name in self.listed.sizes if _METADATA_OF_RANK.match(name)]

    def foreign_names(self) -> list[str]:
        """What lies in it and is no part of a step, folders with a slash at the end.

        Without the files by which operating systems keep their own books.
        """
        known = {METADATA_NAME, TRAINER_NAME, *self.trainer_files, *self.listed.shards}
        known.update(self._metadata_by_rank)
        known.update({} if self.metadata is None else self.metadata.files())
        return [
            f"{name}/" if self.listed.odd.get(name) == "a directory" else name
            for name in sorted({*self.listed.sizes, *self.listed.odd} - known)
            if rank_of(name) is None and not _OF_SYSTEMS.match(name)
        ]

    @property
    def trainer_files(self) -> list[str]:
        """The names of files beside it that `trainer.pt` lists."""
        about = self.trainer_tree.get("sharded") if isinstance(self.trainer_tree, dict) else None
        files = about.get("files") if isinstance(about, dict) else None
        if not isinstance(files, (list, tuple, dict)):
            return []
        return [name for name in files if isinstance(name, str) and is_plain(name)]

    def rank_anomalies(self) -> Iterator[Anomaly]:
        """Files of ranks that are missing, or of ranks that the run did not have."""
        world = self.world_size
        if world is None:
            return
        ranks = self.ranks
        odd = {rank: name for name in self.listed.odd if (rank := rank_of(name)) is not None}
        for rank in sorted(odd):
            problem = self.odd(odd[rank])
            yield Anomaly("sharded-rank-differs", odd[rank], rank=rank, problem=problem)
        if missing := [r for r in range(world) if r not in ranks and r not in odd]:
            yield Anomaly("sharded-rank-missing", ranks=missing, world_size=world)
        for rank in sorted(ranks):
            if rank >= world:
                yield Anomaly("sharded-stale", ranks[rank], world_size=world)


def _compare_spans(file: str, size: int, items: list[Item]) -> Iterator[Anomaly]:
    """The entries of one shard against its size, and against each other."""
    beyond = [item for item in items if item.stop > size]
    if beyond:
        names = tuple(dict.fromkeys(item.name for item in beyond))
        needed = max(item.stop for item in beyond)
        yield Anomaly("sharded-shard-short", file, names=names, size=size, needed=needed)
    end = unclaimed = 0
    for item in items:
        if item.offset < end and item.length:
            problem = "its bytes in the shard are partly those of another entry"
            names = (item.name,)
            yield Anomaly("sharded-metadata-malformed", names=names, problem=problem)
        unclaimed += max(0, item.offset - end)
        end = max(end, item.stop)
    unclaimed += max(0, size - end)
    if unclaimed:
        yield Anomaly("sharded-unclaimed", file, length=unclaimed)


def is_plain(file: str) -> bool:
    """Whether a file that the metadata names lies in the very directory: nothing else is read."""
    return bool(file) and not (set(file) & set("/\\\0")) and file not in (".", "..")


def rank_of(name: str) -> int | None:
    """The global rank in the name of a rank's file, or None."""
    match = _RANK_FILE.match(name)
    return int(match[1]) if match else None


def open_sharded(path: str, *, limits: ReaderLimits = DEFAULT_LIMITS) -> ShardedStep:
    """Opens a sharded step. Raises UnreadableError where it, or `.metadata`, cannot be read."""
    return ShardedStep(path, limits)
