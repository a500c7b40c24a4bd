"""A file as what it is: kind, content, tensors, and what its bytes do that they should not.

Opening reads the container's directory and the pickle, a few kilobytes for most files of any size.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.errors import FormatError, LimitError
from ckpttool.formats.anomaly import Anomaly
from ckpttool.formats.collecting import paused_collection
from ckpttool.formats.globals import Trust, classify
from ckpttool.formats.limits import DEFAULT_LIMITS, ReaderLimits
from ckpttool.formats.sniff import sniff
from ckpttool.formats.static_pickle import PickleResult, read_pickle
from ckpttool.formats.values import StorageRef, TensorValue
from ckpttool.io.reading import BytesReader, FileReader
from ckpttool.model.mended import MARK_NAME, read_mark
from ckpttool.model.storages import Storages, storage_bytes
from ckpttool.model.tensor import TensorRef
from ckpttool.model.walk import Walk, find_tensors, key_text

if TYPE_CHECKING:
    from ckpttool.formats.container import Container

MAIN_PICKLE = "data.pkl"
_MOST_NESTING = 4  # files inside of files inside of files: nothing honest goes on for ever
_ZIP_KINDS = frozenset(("torch-zip", "torchscript", "zip", "pt2", "dcp-shard"))
_LEGACY_KINDS = frozenset(("torch-legacy", "torch-legacy-tar"))
_PICKLE_KINDS = frozenset(("pickle", "dcp-metadata"))
# Records that torch's writers put beside pickle and storages; and the mark of `mend`.
_HOUSEKEEPING = frozenset(
    (
        *("version", "byteorder", ".format_version", ".storage_alignment"),
        *(".data/serialization_id", MARK_NAME),
    )
)


class GlobalUse(NamedTuple):
    """A global that the file names. `called`: loading would call it, with no stand-in here."""

    module: str
    name: str
    trust: Trust
    called: bool


class Section(NamedTuple):
    """One top-level key: the type of its value, and the tensors in it with their bytes."""

    name: str
    type: str
    tensors: int
    nbytes: int


class TensorMap(Mapping[str, TensorRef]):
    """The tensors by dotted name, in the file's order; each `TensorRef` is made when asked for."""

    __slots__ = ("_container", "_values")

    def __init__(self, values: dict[str, TensorValue], container: Container | None) -> None:
        self._values = values
        self._container = container

    def __getitem__(self, name: str) -> TensorRef:
        return TensorRef(name, self._values[name], self._container)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Checkpoint:
    """An open file. Close it, or use it in a `with` block; the values of tensors need it open.

    `kind` tells what the file is (`formats.sniff` lists the kinds), `words` the same for people.
    `tree` is the inert content, None unless `readable`. `tensors` maps dotted names to `TensorRef`.
    `sections` are the top-level keys. `globals` are the names that the pickle uses, `trust` the
    worst class among them. `load_need` says what `torch.load` takes it with: `weights-only`,
    `allow-list`, `weights_only=False`, or `nothing` for what torch does not load. `anomalies` is
    all that was odd. `mended` is what `mend` has noted in a file that it put together, else None.
    `container` is None for what is no container; `storages` are the storages that
    the pickle refers to.
    """

    def __init__(
        self, path: str, reader: FileReader, limits: ReaderLimits, *, nesting: int = 0
    ) -> None:
        found = sniff(reader, limits)
        self.path = path
        self.reader = reader
        self.size = reader.size
        self.kind = found.kind
        self.words = found.words
        self.facts = found.facts
        self.limits = limits
        self.anomalies: list[Anomaly] = []
        self.container = _open_container(reader, found.kind, found.container, limits)
        self.mended = read_mark(self.container)
        self.tree: Any = None
        self.readable = False
        self._results: list[PickleResult] = []
        self._nesting = nesting
        self._read_content()
        self._describe()

    @property
    def trust(self) -> Trust:
        """The worst class of trust among the globals."""
        worst = max((use.trust for use in self.globals), key=_rank, default=Trust.TORCH_SAFE)
        return Trust.DANGEROUS if any(r.computed_calls for r in self._results) else worst

    @property
    def load_need(self) -> str:
        """What `torch.load` needs to take this file; see the class."""
        if not self.readable or self.kind not in ("torch-zip", *_LEGACY_KINDS):
            return "nothing"
        refused = any(result.refused_opcodes for result in self._results)
        if refused or self.kind == "torch-legacy-tar" or self.trust.rank >= Trust.UNKNOWN.rank:
            return "weights_only=False"
        return "weights-only" if self.trust is Trust.TORCH_SAFE else "allow-list"

    @property
    def protocol(self) -> int:
        """The protocol of the pickle with the content; 0 where the stream states none."""
        return self._results[0].protocol if self._results else 0

    @property
    def stored_bytes(self) -> int:
        """Bytes of all storages, each counted once."""
        return sum(map(storage_bytes, self.storages.values()))

    @property
    def used_bytes(self) -> int:
        """Bytes of the storages that some tensor reaches, each counted once."""
        return self._storages.used()

    def close(self) -> None:
        """Close the file. Facts stay; values of tensors can no longer be read."""
        self.reader.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({self.path!r}, {self.kind}, {len(self.tensors)} tensors)"

    # Reading.

    def _read_content(self) -> None:
        container = self.container
        if container is not None:
            self.anomalies += container.anomalies
            name = _main_pickle(container)
            if name is None:
                self._note_no_pickle()
                return
            done = container.pickle_results.get(name)
            if done is None:
                self._read_record(container, name)
            else:
                self._take(done, name)
                # The other pickles of a legacy file hold nothing that is anyone's content.
                others = container.pickle_results
                self._results += [others[part] for part in others if part != name]
        elif self.kind in _PICKLE_KINDS:
            self._read_plain_pickle()

    def _note_no_pickle(self) -> None:
        if self.kind in ("torch-zip", "zip"):
            self.anomalies.append(Anomaly("pickle-missing"))

    def _read_record(self, container: Container, name: str) -> None:
        try:
            data = container.read(name, limit=self.limits.pickle_bytes)
        except FormatError as error:
            self._note_unread(error, name)
            return
        self._read_pickle(data, name)

    def _read_plain_pickle(self) -> None:
        if self.size > self.limits.pickle_bytes:
            reason = f"the pickle has {self.size} bytes, more than the limit"
            self.anomalies.append(Anomaly("pickle-limit", reason=reason))
            return
        self._read_pickle(self.reader.read(0, self.size), None)

    def _read_pickle(self, data: bytes, name: str | None) -> None:
        result = read_pickle(data, limits=self.limits)
        self._take(result, name)
        if result.error is None and result.end < len(data):
            self._look_behind(data, result.end, name)

    def _take(self, result: PickleResult, name: str | None) -> None:
        """Make `result` this file's content, and note what was odd in it."""
        self._results.append(result)
        if result.error is not None:
            self._note_unread(result.error, name)
        else:
            self.tree, self.readable = result.value, True
        if result.computed_calls:
            self.anomalies.append(Anomaly("computed-calls", name, count=result.computed_calls))
        if result.refused_opcodes:
            opcodes = sorted(result.refused_opcodes)
            self.anomalies.append(Anomaly("opcodes-refused", name, opcodes=opcodes))
        for path, reason in result.malformed_calls[:100]:
            self.anomalies.append(Anomaly("call-malformed", name, call=path, reason=reason))
        for nested in result.nested:
            self._look_inside(nested, name)

    def _note_unread(self, error: FormatError, name: str | None) -> None:
        if isinstance(error, LimitError):
            self.anomalies.append(_limit_passed(error, name))
        else:
            self.anomalies.append(Anomaly("pickle-malformed", name, reason=str(error)))

    def _look_behind(self, data: bytes, end: int, name: str | None) -> None:
        """What follows STOP, at `end`, is never loaded, and is where scanners stop looking."""
        streams = _streams(data, end, self.limits)
        facts = {"length": len(data) - end, "dangerous": _dangerous(streams)}
        whole = any(stream.error is None and stream.protocol >= 2 for stream in streams)
        self.anomalies.append(Anomaly("pickle-trailing", name, pickle=whole, **facts))

    def _look_inside(self, nested: bytes, name: str | None) -> None:
        """Bytes that the file would load as a file of its own."""
        facts: dict[str, Any] = {"length": len(nested), "dangerous": [], "readable": False}
        if self._nesting < _MOST_NESTING:
            reader = BytesReader(nested, f"{self.path} ({name or 'pickle'})")
            inner = Checkpoint(reader.path, reader, self.limits, nesting=self._nesting + 1)
            self._results += inner._results
            facts["dangerous"] = _dangerous(inner._results)
            deeper = [item for item in inner.anomalies if item.code == "nested-pickle"]
            readable = inner.readable and all(item.facts["readable"] for item in deeper)
            facts["readable"] = readable
        self.anomalies.append(Anomaly("nested-pickle", name, **facts))

    # Describing.

    def _describe(self) -> None:
        self._storages = Storages()
        self.storages = self._storages.refs
        self.sections: dict[str, Section] = {}
        self._namesakes: dict[str, int] = {}
        values: dict[str, TensorValue] = {}
        try:
            self._find_tensors(values)
        except LimitError as error:
            self.anomalies.append(_limit_passed(error, MAIN_PICKLE))
        self.tensors = TensorMap(values, self.container)
        self.globals = _globals(self._results)
        if self.readable and self.container is not None:
            self.anomalies += self._compare_storages(self.container)

    def _find_tensors(self, values: dict[str, TensorValue]) -> None:
        """Fills `values`, and the sections where the content has any. Raises LimitError."""
        walk = Walk(self.limits)
        if isinstance(self.tree, dict):
            walk.seen.add(id(self.tree))
            for key, value in self.tree.items():
                name = key if isinstance(key, str) else key_text(key)
                count, size = self._gather(find_tensors(value, name, walk), values)
                self.sections[name] = Section(name, type_name(value), count, size)
        else:
            self._gather(find_tensors(self.tree, "", walk), values)
        for storage in walk.storages:
            self._storages.add_whole(storage)
        if walk.stopped is not None:
            raise LimitError(walk.stopped, limit="depth")

    def _gather(
        self, found: Iterable[tuple[str, TensorValue]], values: dict[str, TensorValue]
    ) -> tuple[int, int]:
        """Adds tensors to `values`, each under a name of its own; gives their number and bytes."""
        count = size = 0
        keep = self._storages.add
        for name, value in found:
            if name in values:
                name = self._unused(name, values)
            values[name] = value
            count += 1
            size += keep(value)
        return count, size

    def _unused(self, name: str, values: dict[str, TensorValue]) -> str:
        """Two tensors can have one name (`{"a": {"b": …}, "a.b": …}`): number the later ones."""
        count = self._namesakes.get(name, 1) + 1
        while f"{name}#{count}" in values:
            count += 1
        self._namesakes[name] = count
        return f"{name}#{count}"

    def _compare_storages(self, container: Container) -> Iterator[Anomaly]:
        """The pickle's storages against the container's records, both ways."""
        records, missing = container.records, 0
        for key, declared, stop in self._storages.declared():
            name = container.storage_record(key)
            record = records.get(name)
            if record is None:
                missing += 1
                yield Anomaly("storage-missing", name, key=key, declared=declared)
            elif record.size != declared:
                facts = {"key": key, "declared": declared, "actual": record.size}
                yield Anomaly("storage-size", name, **facts)
            if stop > declared:
                facts = {"key": key, "declared": stop, "actual": declared}
                yield Anomaly("tensor-beyond-storage", name, **facts)
        if self.kind in ("torch-zip", *_LEGACY_KINDS):
            # Counted first: most files have nothing more, and names for all of them cost time.
            known = _HOUSEKEEPING | {MAIN_PICKLE, *container.pickle_results}
            others = len(self.storages) - missing + sum(name in records for name in known)
            if len(records) > others:
                names = {container.storage_record(key) for key in self.storages}
                for name in sorted(records.keys() - names - known):
                    yield Anomaly("unreferenced-record", name)


def open_checkpoint(
    path: str | os.PathLike[str], *, limits: ReaderLimits = DEFAULT_LIMITS
) -> Checkpoint:
    """Open any file and say what it is, without running a byte of it.

    Raises UnreadableError if the system cannot read it; whatever else is wrong is in the result.
    """
    reader = FileReader(path)
    try:
        with paused_collection():
            return Checkpoint(os.fspath(path), reader, limits)
    except BaseException:
        reader.close()
        raise


def _rank(trust: Trust) -> int:
    return trust.rank


def _open_container(
    reader: FileReader, kind: str, opened: Container | None, limits: ReaderLimits
) -> Container | None:
    if kind in _ZIP_KINDS:
        if opened is not None:
            return opened
        from ckpttool.formats.torch_zip import open_zip

        return open_zip(reader, limits)
    if kind == "torch-legacy":
        from ckpttool.formats.torch_legacy import open_legacy

        return open_legacy(reader, limits)
    if kind == "torch-legacy-tar":
        from ckpttool.formats.torch_legacy_tar import open_legacy_tar

        return open_legacy_tar(reader, limits)
    return None


def _main_pickle(container: Container) -> str | None:
    if MAIN_PICKLE in container.records or MAIN_PICKLE in container.pickle_results:
        return MAIN_PICKLE
    return next(iter(container.pickles()), None)


def _streams(data: bytes, start: int, limits: ReaderLimits) -> list[PickleResult]:
    """The pickles that follow one another from `start` on; the last may be broken off."""
    streams: list[PickleResult] = []
    while start < len(data) and len(streams) < 100:
        result = read_pickle(data, start=start, limits=limits)
        streams.append(result)
        if result.error is not None or result.end <= start:
            break
        start = result.end
    return streams


def _dangerous(results: Iterable[PickleResult]) -> list[str]:
    """Paths of the dangerous globals that the streams name."""
    found = {use.module + "." + use.name for use in _globals(results) if use.trust.rank == 3}
    return sorted(found)


def _limit_passed(error: LimitError, name: str | None) -> Anomaly:
    return Anomaly("pickle-limit", name, reason=str(error), limit=error.limit)


def _globals(results: Iterable[PickleResult]) -> list[GlobalUse]:
    """All globals, the worst first, then by name."""
    uses: dict[tuple[str, str], GlobalUse] = {}
    for result in results:
        for path, ref in result.globals.items():
            called = path in result.called
            known = uses.get((ref.module, ref.name))
            if known is None or (called and not known.called):
                trust = classify(ref.module, ref.name)
                uses[ref.module, ref.name] = GlobalUse(ref.module, ref.name, trust, called)
    return sorted(uses.values(), key=lambda use: (-use.trust.rank, use.module, use.name))


def type_name(value: Any) -> str:
    """The type that a value would have: `dict`, `int`, `OrderedDict`, `torch.nn.Linear`."""
    from ckpttool.formats.values import GlobalRef, NumpyArray, NumpyScalar, Opaque, OrderedMap

    special = {
        OrderedMap: "OrderedDict",
        TensorValue: "Tensor",
        NumpyArray: "ndarray",
        NumpyScalar: "numpy scalar",
        StorageRef: "storage",
    }
    if isinstance(value, (Opaque, GlobalRef)):
        return value.path
    return special.get(type(value), type(value).__name__)
