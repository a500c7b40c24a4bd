"""`export` of a sharded step: the model's tensors, put together, as one safetensors file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpttool.converting import safetensors
from ckpttool.converting.assembled import assembled_chunks
from ckpttool.converting.export import MODEL_SECTIONS, Exporting
from ckpttool.converting.prefixes import counts, seen, strip_all
from ckpttool.converting.sections import SectionError, there_are
from ckpttool.converting.terms import Refusal
from ckpttool.errors import RefusedError, UnreadableError
from ckpttool.formats.values import TensorValue
from ckpttool.io.reading import FileReader
from ckpttool.model.sharded import ShardedStep, open_sharded

if TYPE_CHECKING:
    from ckpttool.io.durable import Progress
    from ckpttool.model.sharded_metadata import ShardedTensor

_GOOD = frozenset({"valid", "intact", "wrong-step"})
_NO_PLACE = "the format keeps this name for itself"


class ShardedExporting(Exporting):
    """The same for a sharded step: see `Exporting`."""

    def __init__(self, sharded: ShardedStep, name: str | None, strip_prefixes: Sequence[str]):
        assert sharded.metadata is not None
        self.path = sharded.path
        self.size = sharded.size
        self.changes = []
        self.aliases = {}
        self.refused = []
        self._sharded = sharded
        self._shards: dict[str, FileReader] = {}
        self.section = _section(sharded, name)
        found = self._fitting(_of_section(sharded.metadata.tensors, self.section))
        self.refused += self._objects(sharded.metadata.objects)
        self.prefixes = [prefix for prefix in seen(found) if prefix not in strip_prefixes]
        self.stripped = counts(found, strip_prefixes)
        self.names = len(found)
        self.renamed, self.collisions = strip_all(found, strip_prefixes)
        self._whole = {self.renamed[old]: t for old, t in found.items() if old in self.renamed}
        self.tensors = {
            name: TensorValue(None, 0, tensor.shape, None, False, tensor.dtype)
            for name, tensor in self._whole.items()
        }

    @property
    def made_contiguous(self) -> list[str]:
        """None is said of: putting together is the purpose."""
        return []

    def __exit__(self, *exception: object) -> None:
        for reader in self._shards.values():
            reader.close()
        self._sharded.close()

    def _source_changed(self) -> bool:
        return any(reader.changed() for reader in self._shards.values())

    def _fitting(self, tensors: dict[str, ShardedTensor]) -> dict[str, ShardedTensor]:
        """Those that the format has a place for; the others are noted in `refused`."""
        found = {}
        for name, tensor in tensors.items():
            if tensor.dtype not in safetensors.DTYPES:
                why = f"the format has no dtype {tensor.dtype}"
            elif name == safetensors.RESERVED_NAME:
                why = _NO_PLACE
            elif any("\ud800" <= char <= "\udfff" for char in name):
                why = "its name is not UTF-8"
            else:
                found[name] = tensor
                continue
            self.refused.append(Refusal(name, "a tensor", why))
        return found

    def _objects(self, objects: Any) -> Iterator[Refusal]:
        for name in _of_section(dict.fromkeys(objects), self.section):
            yield Refusal(name, "an object in a shard", "no tensor")

    def _entries(self) -> Iterator[safetensors.Entry]:
        limits = self._sharded.limits
        for name, tensor in self._whole.items():
            chunks = partial(assembled_chunks, tensor, self._open, limits)
            yield safetensors.Entry(name, tensor.dtype, tensor.shape, tensor.nbytes, chunks)

    def _open(self, file: str) -> FileReader:
        if file not in self._shards:
            self._shards[file] = FileReader(self._sharded.file(file))
        return self._shards[file]


def plan_sharded_export(
    path: str,
    *,
    section: str | None = None,
    strip_prefixes: Sequence[str] = (),
    progress: Progress | None = None,
) -> ShardedExporting:
    """Verifies a sharded step and finds the tensors of a section, the model's without one.

    Raises RefusedError for a step that is not whole, UnreadableError for what cannot be read or
    checked, SectionError where there is no such section.
    """
    from ckpttool.checks.verify import verify

    report = verify(path, progress=progress)
    state = report.files[0].state
    if state in ("unreadable", "changing"):
        raise UnreadableError(path, f"could not be checked: {report.findings[0].words}")
    if state not in _GOOD:
        worst = report.findings[0]
        raise RefusedError(f"{path}: {state}: {worst.id}: {worst.words}")
    sharded = open_sharded(path)
    try:
        return ShardedExporting(sharded, section, strip_prefixes)
    except BaseException:
        sharded.close()
        raise


def _section(sharded: ShardedStep, name: str | None) -> str | None:
    """The section to take; None for a state dict that was saved by itself, without a name."""
    assert sharded.metadata is not None
    names = [*sharded.metadata.tensors, *sharded.metadata.objects]
    sections = list(dict.fromkeys(one.partition(".")[0] for one in names if "." in one))
    if name is not None:
        if name in sections:
            return name
        raise SectionError(f"there is no section {name!r}; {there_are(sections)}")
    for likely in MODEL_SECTIONS:
        if likely in sections:
            return likely
    if sharded.metadata.objects:
        asked = " or ".join(MODEL_SECTIONS[:2])
        raise SectionError(f"which section? none is called {asked}; {there_are(sections)}")
    return None


def _of_section(entries: dict[str, Any], section: str | None) -> dict[str, Any]:
    """Names without the section's own, which keys in a state dict do not have."""
    if section is None:
        return entries
    start = f"{section}."
    return {name[len(start) :]: one for name, one in entries.items() if name.startswith(start)}
