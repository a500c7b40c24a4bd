"""`slim`: a smaller file with the same values: sections left out, storages cut to what is used.

A tensor that is a view brings its whole storage into a file of torch's: `x[:10].clone()` was
meant, `x[:10]` was saved. Cut are the bytes of storages that no tensor reaches. Tensors that
overlap go on sharing a storage; what nothing refers to is not taken over. Nothing else changes:
strides, dtypes, classes and names are those of the source, and so is what it takes to load it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.converting.checked import (
    Written,
    is_danger,
    open_judged,
    write_torch_file,
)
from ckpttool.converting.contents import dangerous, storage_users
from ckpttool.converting.extents import Piece, lay_out
from ckpttool.converting.sections import choose, section_names
from ckpttool.converting.storages import StorageBytes
from ckpttool.errors import RefusedError
from ckpttool.formats.values import StorageRef
from ckpttool.io.output import refuse_output
from ckpttool.model.mended import MARK_NAME
from ckpttool.model.storages import storage_bytes

if TYPE_CHECKING:
    from ckpttool.findings import Finding
    from ckpttool.io.durable import Progress
    from ckpttool.model.checkpoint import Checkpoint

# Findings that are about the content, and so about some section of it.
_BY_CONTENT = frozenset(("TRU101", "TRU111"))
_HARDEN = "see `ckpttool harden --help`"
_HINT = f"drop its section, or {_HARDEN}"


class Saving(NamedTuple):
    """Bytes that the new file does not have: `kind` is `section`, `cut` or `record`.

    `name` is the section; the first tensor on the storage that was cut, with `#<key>` of the
    storage where none has a name; or the record that nothing refers to.
    """

    kind: str
    name: str
    nbytes: int


class Slimming:
    """What `slim` is about to write; a context manager, which keeps the source open.

    `savings` tells what goes, the sections first. `dropped` names the sections that are left out.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        keep: Sequence[str],
        drop: Sequence[str],
        dangers: Sequence[Finding] = (),
    ) -> None:
        self.path = checkpoint.path
        self.size = checkpoint.size
        self._checkpoint = checkpoint
        if checkpoint.kind == "torchscript":
            raise RefusedError(f"{self.path}: a TorchScript program, which slim would not keep")
        before = dict(checkpoint.storages)
        names = _names_of_storages(checkpoint)
        sections = _sections_of_storages(checkpoint)
        self._tree, self.dropped = choose(checkpoint.tree, keep, drop)
        _refuse_dangerous(self.path, self._tree, dangers, chosen=bool(self.dropped))
        storages = StorageBytes(checkpoint.container)
        self._pieces = lay_out(self._tree, storages, cut=True)
        sizes = {key: storage_bytes(storage) for key, storage in before.items()}
        self.savings = [
            *_dropped(self.dropped, sections, sizes, self._pieces),
            *_cut(sizes, self._pieces, names),
            *_unreferenced(checkpoint),
        ]

    @property
    def saved(self) -> int:
        """Bytes of storages and records that the new file will not have."""
        return sum(saving.nbytes for saving in self.savings)

    def write(self, out: str, *, force: bool = False, progress: Progress | None = None) -> Written:
        """Writes `out`. Raises RefusedError, WriteError, UnreadableError, UnwritableError."""
        refuse_output(out, self.path, force=force)
        return write_torch_file(
            self._checkpoint,
            out,
            self._tree,
            self._pieces,
            {},
            weights_only=self._checkpoint.load_need == "weights-only",
            force=force,
            progress=progress,
        )

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain data."""
        return {
            "path": self.path,
            "size": self.size,
            "dropped": self.dropped,
            "savings": [saving._asdict() for saving in self.savings],
            "saved": self.saved,
        }

    def __enter__(self) -> Slimming:
        return self

    def __exit__(self, *exception: object) -> None:
        self._checkpoint.close()


def plan_slim(
    path: str,
    *,
    keep: Sequence[str] = (),
    drop: Sequence[str] = (),
    progress: Progress | None = None,
) -> Slimming:
    """Verifies a file and finds what a smaller one needs. `keep` or `drop` name sections.

    Raises SectionError for unknown names, RefusedError where dangerous content would stay, and what
    `open_judged` raises.
    """
    checkpoint, dangers = open_judged(path, progress)
    try:
        return Slimming(checkpoint, keep, drop, dangers)
    except BaseException:
        checkpoint.close()
        raise


def _refuse_dangerous(path: str, tree: Any, dangers: Sequence[Finding], *, chosen: bool) -> None:
    """Nothing that `verify` calls dangerous is written anew: `tree` is what would be.

    What the file as a whole is accused of goes away with no section; all else only if some are
    left out (`chosen`).
    """
    name = dangerous(tree)
    if name is not None:
        raise RefusedError(f"{path}: {name} can run code, and is not written anew; {_HINT}")
    for danger in dangers:
        if danger.id not in _BY_CONTENT:
            raise RefusedError(f"{path}: {danger.words}: it is not written anew; {_HARDEN}")
    if dangers:
        for danger in _dangers_of(path, tree) if chosen else dangers:
            raise RefusedError(f"{path}: {danger.words}: it is not written anew; {_HINT}")


def _dangers_of(path: str, tree: Any) -> list[Finding]:
    """What `verify` would call dangerous in a file with just this content."""
    from io import BytesIO

    from ckpttool.checks.base import FileSubject
    from ckpttool.checks.trust import CHECKS
    from ckpttool.formats.limits import DEFAULT_LIMITS
    from ckpttool.io.reading import BytesReader
    from ckpttool.model.checkpoint import Checkpoint
    from ckpttool.model.schema import training_facts
    from ckpttool.writing.container import TorchZipWriter
    from ckpttool.writing.pickled import pickled

    file = BytesIO()
    writer = TorchZipWriter(file)
    writer.add("data.pkl", pickled(tree))
    writer.finish()
    written = Checkpoint(path, BytesReader(file.getvalue(), path), DEFAULT_LIMITS)
    if not written.readable:
        raise RefusedError(f"{path}: what is left cannot be judged, and is not written; {_HINT}")
    subject = FileSubject(path, written, training_facts(None), None, 0)
    subject.anomalies.extend(written.anomalies)
    return [one for check in CHECKS for one in check.look(subject) if is_danger(one)]


def _names_of_storages(checkpoint: Checkpoint) -> dict[str, str]:
    """The first tensor on each storage."""
    names: dict[str, str] = {}
    for name, tensor in checkpoint.tensors.items():
        for part in (tensor, *tensor.parts.values()):
            if part.storage is not None:
                names.setdefault(part.storage, name)
    return names


def _sections_of_storages(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """The storages that each section uses, by its name."""
    found: dict[str, list[str]] = {}
    if not isinstance(checkpoint.tree, dict):
        return found
    for name, value in zip(section_names(checkpoint.tree), checkpoint.tree.values(), strict=True):
        keys = found.setdefault(name, [])
        for one in storage_users(value):
            storage = one if isinstance(one, StorageRef) else one.storage
            if storage is not None:
                keys.append(storage.key)
    return found


def _dropped(
    dropped: list[str], sections: dict[str, list[str]], sizes: dict[str, int], pieces: list[Piece]
) -> list[Saving]:
    """What each section alone had: a storage that another one keeps is not saved."""
    counted = {piece.old for piece in pieces}
    savings = []
    for name in dropped:
        own = set(sections.get(name, ())) - counted
        counted |= own
        savings.append(Saving("section", name, sum(sizes.get(key, 0) for key in own)))
    return savings


def _cut(sizes: dict[str, int], pieces: list[Piece], names: dict[str, str]) -> list[Saving]:
    left: dict[str, int] = {}
    for piece in pieces:
        left[piece.old] = left.get(piece.old, 0) + piece.length
    return [
        Saving("cut", names.get(key, f"#{key}"), sizes[key] - length)
        for key, length in left.items()
        if sizes[key] > length
    ]


def _unreferenced(checkpoint: Checkpoint) -> list[Saving]:
    container = checkpoint.container
    assert container is not None
    return [
        Saving("record", one.record, container.records[one.record].size)
        for one in checkpoint.anomalies
        if one.code == "unreferenced-record" and one.record and one.record != MARK_NAME
    ]
