"""`export`: the tensors of a checkpoint as a safetensors file.

The content is made plain first, so that arrays and whole modules go with it. Names are those of a
state dict: keys joined by dots. Sharing, prefixes and the format itself: `converting.shared`,
`converting.prefixes`, `converting.safetensors`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpttool.converting import safetensors
from ckpttool.converting.checked import Written, open_verified, publish
from ckpttool.converting.dense import dense_chunks, dense_size, is_contiguous
from ckpttool.converting.plain import Plainer
from ckpttool.converting.prefixes import counts, seen, strip_all
from ckpttool.converting.sections import SectionError, section, section_names, there_are
from ckpttool.converting.shared import find_shared
from ckpttool.converting.storages import NewStorages, StorageBytes
from ckpttool.converting.terms import LEFT_OUT, Refusal
from ckpttool.errors import FormatError, LimitError, RefusedError, UnreadableError
from ckpttool.formats.values import NumpyArray, Opaque, TensorValue
from ckpttool.io.output import refuse_output
from ckpttool.model.inert import what
from ckpttool.model.sharded_listing import holds_shards
from ckpttool.model.walk import key_text

if TYPE_CHECKING:
    from typing import BinaryIO

    from ckpttool.io.durable import Progress
    from ckpttool.model.checkpoint import Checkpoint

# Where training frameworks keep a model's state dict, the likeliest first.
MODEL_SECTIONS = ("model", "state_dict", "model_state_dict", "module")
_METADATA = {"format": "pt"}
_MOST_NAMES = 1_000_000
_LONG_NAME = 200
_MOST_NAMED = 3
_HINT = "--allow-loss leaves that out"
# What a tensor is called that is the whole content.
_ALONE = "tensor"


class Exporting:
    """What `export` is about to write; a context manager, which keeps the source open.

    `section` is the section's name, None for the whole content. `tensors` maps the new names to
    tensors. `renamed` maps old names to new ones, `collisions` are pairs of old names that would
    become one. `prefixes` are those of wrappers that could be stripped and are not; `stripped`
    tells off how many names, of `names` in all, each that was asked for was taken. `aliases` maps
    names that are left out to the equal tensor that has their memory. `changes` tells what was
    made a tensor. `refused` can't be written: it is left out with `allow_loss`, and without it
    nothing is written.
    """

    def __init__(
        self, checkpoint: Checkpoint, name: str | None, strip_prefixes: Sequence[str]
    ) -> None:
        assert checkpoint.container is not None
        self.path = checkpoint.path
        self.size = checkpoint.size
        self._checkpoint = checkpoint
        self.byteorder = checkpoint.container.byteorder
        self.section = name if name is not None else default_section(checkpoint.tree)
        self.refused: list[Refusal] = []
        new = NewStorages(checkpoint.storages.keys(), self.byteorder)
        found = self._plain_tensors(checkpoint, new)
        self._storages = StorageBytes(checkpoint.container, new.added)
        self.prefixes = [p for p in seen(found) if p not in strip_prefixes]
        self.stripped = counts(found, strip_prefixes)
        self.names = len(found)
        self.renamed, self.collisions = strip_all(found, strip_prefixes)
        self.tensors = {self.renamed[old]: t for old, t in found.items() if old in self.renamed}
        self.aliases: dict[str, str] = {}
        self._leave_out_shared()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the new file."""
        return sum(map(dense_size, self.tensors.values()))

    @property
    def made_contiguous(self) -> list[str]:
        """Names of the tensors whose elements are laid out anew."""
        return [name for name, tensor in self.tensors.items() if not is_contiguous(tensor)]

    def problem(self, *, allow_loss: bool) -> RefusedError | None:
        """What stands against writing: names that collide, or what would be lost and was not given
        up.
        """
        if self.collisions:
            first, second = self.collisions[0]
            new = self.renamed[first]
            return RefusedError(f"{self.path}: {first} and {second} would both become {new}")
        if self.refused and not allow_loss:
            names = [f"{one.path} ({one.what}: {one.why})" for one in self.refused[:_MOST_NAMED]]
            more = len(self.refused) - len(names)
            listed = "; ".join(names) + (f"; and {more:,} more" if more else "")
            return RefusedError(f"{self.path}: not for safetensors: {listed}; {_HINT}")
        if not self.tensors:
            return RefusedError(f"{self.path}: there are no tensors to export")
        return None

    def write(
        self,
        out: str,
        *,
        allow_loss: bool = False,
        force: bool = False,
        progress: Progress | None = None,
    ) -> Written:
        """Writes `out`. Raises RefusedError, WriteError, UnreadableError, MissingLibraryError."""
        safetensors.require_library()
        problem = self.problem(allow_loss=allow_loss)
        if problem is not None:
            raise problem
        refuse_output(out, self.path, force=force)
        entries = safetensors.ordered(self._entries())
        metadata = {**self.aliases, **_METADATA}

        def write(file: BinaryIO) -> None:
            safetensors.write(file, entries, metadata, progress)
            if self._source_changed():
                raise UnreadableError(self.path, "changed while it was read")

        def check(path: str) -> None:
            safetensors.prove(out, path, entries, metadata, progress)

        return publish(out, write, check, needed=self.nbytes, force=force)

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain data."""
        return {
            "path": self.path,
            "section": self.section,
            "tensors": len(self.tensors),
            "nbytes": self.nbytes,
            "renamed": {old: new for old, new in self.renamed.items() if old != new},
            "prefixes": self.prefixes,
            "stripped": self.stripped,
            "aliases": self.aliases,
            "made_contiguous": self.made_contiguous,
            "collisions": [list(pair) for pair in self.collisions],
            "changes": [change._asdict() for change in self.changes],
            "refused": [refusal._asdict() for refusal in self.refused],
        }

    def __enter__(self) -> Exporting:
        return self

    def __exit__(self, *exception: object) -> None:
        self._checkpoint.close()

    def _source_changed(self) -> bool:
        return self._checkpoint.reader.changed()

    def _plain_tensors(self, checkpoint: Checkpoint, new: NewStorages) -> dict[str, TensorValue]:
        """The section's tensors by dotted name; all else is noted in `refused`."""
        tree = checkpoint.tree if self.section is None else section(checkpoint.tree, self.section)
        plainer = Plainer(new)
        plain = plainer.plain(tree)
        self.changes = plainer.changes
        self.refused += plainer.refused
        found: dict[str, TensorValue] = {}
        if plain is LEFT_OUT:
            return found
        alone = isinstance(plain, TensorValue)
        for name, value in ((_ALONE, plain),) if alone else _flattened(plain):
            why = _unfit(name, value)
            if why is None and name in found:
                why = "another tensor has this name already"
            if why is None:
                found[name] = value
            else:
                self.refused.append(Refusal(name, what(value), why))
        return found

    def _leave_out_shared(self) -> None:
        shared, unclear = find_shared(self.tensors, _METADATA)
        for name, kept, same in shared:
            if same:
                self.aliases[name] = kept
            else:
                why = f"another view of the memory of {kept}; without sharing it has no place"
                self.refused.append(Refusal(name, "a tensor", why))
            del self.tensors[name]
        for names in unclear:
            for name in names:
                other = names[0] if name != names[0] else names[1]
                why = f"it overlaps {other}, and none covers all that they share"
                self.refused.append(Refusal(name, "a tensor", why))
                del self.tensors[name]

    def _entries(self) -> Iterator[safetensors.Entry]:
        for name, tensor in self.tensors.items():
            yield safetensors.Entry(
                name,
                tensor.dtype,
                tensor.shape or (),
                dense_size(tensor),
                partial(dense_chunks, tensor, self._storages, self.byteorder),
            )


def plan_export(
    path: str,
    *,
    section: str | None = None,
    strip_prefixes: Sequence[str] = (),
    progress: Progress | None = None,
) -> Exporting:
    """Verifies a file and finds the tensors that go into a safetensors file.

    `section` names a top-level key; without it the model's is taken, or the whole content where
    that is a state dict itself. A directory is taken for a sharded step. Raises SectionError where
    there is none, and what `open_verified` raises.
    """
    if os.path.isdir(path) and holds_shards(path):
        from ckpttool.converting.export_sharded import plan_sharded_export

        return plan_sharded_export(
            path, section=section, strip_prefixes=strip_prefixes, progress=progress
        )
    checkpoint = open_verified(path, progress)
    try:
        return Exporting(checkpoint, section, strip_prefixes)
    except BaseException:
        checkpoint.close()
        raise


def default_section(tree: Any) -> str | None:
    """The section with the model; None for content that is a state dict, or a module, by itself.

    Raises SectionError where it is not clear which is meant.
    """
    names = section_names(tree)
    for name in MODEL_SECTIONS:
        if name in names and not isinstance(section(tree, name), TensorValue):
            return name
    if not isinstance(tree, dict) or _is_state_dict(tree):
        return None
    asked = " or ".join(MODEL_SECTIONS[:2])
    raise SectionError(f"which section? none is called {asked}; {there_are(names)}")


def _is_state_dict(tree: dict[Any, Any]) -> bool:
    """Whether tensors lie in it directly, with nothing below them (an empty one counts)."""
    kinds = [isinstance(value, (TensorValue, NumpyArray)) for value in tree.values()]
    nested = any(isinstance(v, (dict, list, tuple, set, Opaque)) for v in tree.values())
    return all(kinds) or (any(kinds) and not nested)


def _flattened(plain: Any) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of all that is no dictionary, list or tuple."""
    todo: list[Iterator[tuple[str, Any]]] = [iter((("", plain),))]
    open_ids: list[int] = []
    room = _MOST_NAMES  # what is shared is named anew in each place
    while todo:
        for name, value in todo[-1]:
            room -= 1 + len(name) // _LONG_NAME
            if room < 0:
                raise LimitError("it has too many names, or too long ones", limit="memo_entries")
            members = _named_members(name, value)
            if members is None:
                yield name, value
                continue
            if id(value) in open_ids:
                raise FormatError(f"{name or 'the content'} contains itself")
            open_ids.append(id(value))
            todo.append(members)
            break
        else:
            todo.pop()
            if open_ids:
                open_ids.pop()


def _named_members(name: str, value: Any) -> Iterator[tuple[str, Any]] | None:
    prefix = f"{name}." if name else ""
    if isinstance(value, dict):
        return (
            (f"{prefix}{k if isinstance(k, str) else key_text(k)}", v) for k, v in value.items()
        )
    if isinstance(value, (list, tuple)):
        return ((f"{prefix}{index}", item) for index, item in enumerate(value))
    return None


def _unfit(name: str, value: Any) -> str | None:
    """Why a value has no place in a safetensors file; None if it has one."""
    if not isinstance(value, TensorValue):
        return "no tensor"
    if value.layout != "strided" or value.storage is None:
        return f"a tensor of layout {value.layout}"
    if value.dtype not in safetensors.DTYPES:
        return f"the format has no dtype {value.dtype}"
    if value.dtype == "float4_e2m1fn_x2" and not value.shape:
        return "a packed dtype without dimensions"
    if name == safetensors.RESERVED_NAME:
        return "the format keeps this name for itself"
    if any("\ud800" <= char <= "\udfff" for char in name):
        return "its name is not UTF-8"
    return None
