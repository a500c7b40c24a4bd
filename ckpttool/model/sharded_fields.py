"""What torch's `Metadata` class says of the fields that no tensor is found by, held to its word.

Nobody reads most of them on the way to a tensor, so that damage in them shows only when torch loads
the file, or not at all: `planner_data` (how flat names become nested dictionaries again),
`storage_meta`, `version`, the properties of tensors, the hints of indices. Types and structure are
checked here, as torch 2.1 to 2.13 write them. What another planner or storage keeps is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ckpttool.formats.values import GlobalRef, Opaque
from ckpttool.model.inert import what

_OF_METADATA = frozenset(
    ("torch.distributed.checkpoint.metadata", "torch.distributed._shard.checkpoint.metadata")
)
_OF_STORAGE = frozenset(
    ("torch.distributed.checkpoint.filesystem", "torch.distributed._shard.checkpoint.filesystem")
)
# Before torch 2.3 the properties were those of sharded tensors.
_OF_TENSORS = _OF_METADATA | {"torch.distributed._shard.sharded_tensor.metadata"}
_MODULES = {
    **dict.fromkeys(("Metadata", "MetadataIndex", "StorageMeta"), _OF_METADATA),
    **dict.fromkeys(("TensorStorageMetadata", "BytesStorageMetadata"), _OF_METADATA),
    "ChunkStorageMetadata": _OF_METADATA,
    "TensorProperties": _OF_TENSORS,
    "_StorageInfo": _OF_STORAGE,
}
_MEMORY_FORMAT = re.compile(r"torch\.distributed\..*\._?MEM_FORMAT_ENCODING\Z")
_FIELDS = {
    "Metadata": frozenset(
        ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version")
    ),
    "MetadataIndex": frozenset(("fqn", "index", "offset")),
    "StorageMeta": frozenset(("checkpoint_id", "save_id", "load_id", "modules")),
}
_PATHS = frozenset(
    f"{pure}{kind}Path" for pure in ("", "Pure") for kind in ("", "Posix", "Windows")
)
_VERSION = re.compile(r"[0-9]+(\.[0-9]+)*\Z")
_LAYOUT = re.compile(r"torch\.(strided|sparse_(coo|csr|csc|bsr|bsc)|jagged|_mkldnn)\Z")
_PROPERTIES = 5  # dtype, layout, requires_grad, memory format, pin_memory
_MEMORY_FORMATS = ((0,), (1,), (2,))

Problem = tuple[str, str | None]


class FieldCheck:
    """Looks at one tree; `problems` are words and the name that each is about, if any."""

    def __init__(self) -> None:
        self._proven: set[tuple[str, str]] = set()

    def problems(self, content: dict[str, Any]) -> Iterator[Problem]:
        """What is wrong with the fields of a `Metadata` object."""
        entries = content.get("state_dict_metadata")
        entries = entries if isinstance(entries, dict) else {}
        for field in ("state_dict_metadata", "planner_data", "storage_data"):
            if field not in content:
                yield f"it has no {field}", None
        if problem := _other_field(content, _FIELDS["Metadata"]):
            yield problem, None
        yield from _planner_data(content.get("planner_data"), entries)
        for name, entry in entries.items():
            for problem in self._entry(entry):
                yield problem, name if isinstance(name, str) else None
        yield from self._storage(content.get("storage_data"))
        yield from self._storage_meta(content.get("storage_meta"))
        version = content.get("version")
        if version is not None and not (isinstance(version, str) and _VERSION.match(version)):
            shown = version[:40] if isinstance(version, str) else what(version)
            yield f'its version is "{shown}", no number of a version', None

    def is_of(self, value: Any, name: str) -> str | None:
        """What is wrong with the class of an object that should be torch's `name`."""
        target = value.target if isinstance(value, Opaque) else None
        if not isinstance(target, GlobalRef):
            return f"there is {what(value)} where torch's {name} belongs"
        if (target.module, target.name) in self._proven:
            return None
        if target.name != name or target.module not in _MODULES[name]:
            return f"there is {target.path[:120]} where torch's {name} belongs"
        self._proven.add((target.module, target.name))
        return None

    def _entry(self, entry: Any) -> Iterator[str]:
        if not isinstance(entry, Opaque) or not isinstance(entry.target, GlobalRef):
            return  # said already
        kind = entry.target.name
        if kind not in ("TensorStorageMetadata", "BytesStorageMetadata"):
            return
        if problem := self.is_of(entry, kind):
            yield problem
        if kind == "BytesStorageMetadata" or not isinstance(entry.state, dict):
            return
        properties = entry.state.get("properties")
        if problem := self.is_of(properties, "TensorProperties") or _properties(properties):
            yield problem
        chunks = entry.state.get("chunks")
        for chunk in chunks if isinstance(chunks, (list, tuple)) else ():
            if problem := self.is_of(chunk, "ChunkStorageMetadata"):
                yield problem
                return

    def _storage(self, storage: Any) -> Iterator[Problem]:
        for index, info in storage.items() if isinstance(storage, dict) else ():
            about = index.state if isinstance(index, Opaque) else None
            name = about.get("fqn") if isinstance(about, dict) else None
            name = name if isinstance(name, str) else None
            if problem := self.is_of(index, "MetadataIndex"):
                yield problem, name
            elif isinstance(about, dict):
                if not _is_count(about.get("index")):
                    yield f"its index is {what(about['index'])} where a number belongs", name
                if problem := _other_field(about, _FIELDS["MetadataIndex"]):
                    yield problem, name
            if problem := self._place(info):
                yield problem, name

    def _place(self, info: Any) -> str | None:
        target = info.target if isinstance(info, Opaque) else None
        if not isinstance(target, GlobalRef):
            return f"there is {what(info)} where its place belongs"
        if target.module in _OF_METADATA:
            return f"there is torch's {target.name[:40]} where its place belongs"
        # Storages of other programs have classes of their own.
        ours = target.name == "_StorageInfo" or target.module in _OF_STORAGE
        if ours and (problem := self.is_of(info, "_StorageInfo")):
            return problem
        transforms = info.state.get("transform_descriptors") if isinstance(info.state, dict) else ()
        if transforms is not None and not _are_texts(transforms):
            return "its transform_descriptors are no list of names"
        return None

    def _storage_meta(self, meta: Any) -> Iterator[Problem]:
        if meta is None:
            return
        if problem := self.is_of(meta, "StorageMeta"):
            yield f"in its storage_meta {problem}", None
            return
        content = meta.state if isinstance(meta.state, dict) else {}
        if problem := _other_field(content, _FIELDS["StorageMeta"]):
            yield f"in its storage_meta {problem}", None
        for key in ("save_id", "load_id"):
            if not isinstance(content.get(key), (str, type(None))):
                yield f"its storage_meta has {what(content[key])} as {key}", None
        if not _are_texts(content.get("modules", [])):
            yield "its storage_meta has modules that are no list of names", None
        if not _is_path(content.get("checkpoint_id")):
            yield "its storage_meta has a checkpoint_id that is no path", None


def _other_field(content: dict[Any, Any], known: frozenset[str]) -> str | None:
    """A field that torch's class does not have, in the place of one that it has.

    A later torch may have more fields, an earlier one has fewer; neither has one for the other.
    """
    if any(not isinstance(name, str) for name in content):
        return "the name of a field is no text"
    other = [name for name in content if name not in known]
    if other and known - content.keys():
        return f'there is a field "{other[0][:40]}", and {min(known - content.keys())} is missing'
    return None


def _planner_data(data: Any, entries: dict[Any, Any]) -> Iterator[Problem]:
    """The default planner's: of each flat name the keys that it was joined of, by dots."""
    if not isinstance(data, dict) or not any(isinstance(path, tuple) for path in data.values()):
        return  # a planner's own; the default one writes none where nothing was flattened
    for name, path in data.items():
        known = name if isinstance(name, str) else None
        plain = isinstance(path, tuple) and all(type(key) in (str, int) for key in path)
        if not plain or ".".join(map(str, path)) != name:
            yield "its planner_data has other keys for it than its name is joined of", known
        elif name not in entries:
            yield "its planner_data has keys for something that it does not describe", known
    for name in entries:
        if name not in data:
            known = name if isinstance(name, str) else None
            yield "its planner_data has no keys for it", known


def _properties(properties: Any) -> str | None:
    """What is wrong with the properties of a tensor; the dtype is looked at elsewhere."""
    state = properties.state
    if isinstance(state, dict):
        return None  # of a version that had no order of its own for them
    if not isinstance(state, tuple) or len(state) != _PROPERTIES:
        return "its properties are not the five that torch writes"
    _, layout, requires_grad, memory_format, pin_memory = state
    if not _is_layout(layout):
        return "its properties have a layout that is none of torch's"
    if not isinstance(requires_grad, bool) or not isinstance(pin_memory, bool):
        return "its properties have something else where yes or no belongs"
    encoded = isinstance(memory_format, Opaque) and memory_format.args in _MEMORY_FORMATS
    if not encoded or not _MEMORY_FORMAT.match(memory_format.path):
        return "its properties have a memory format that is none of torch's"
    return None


def _is_layout(layout: Any) -> bool:
    if isinstance(layout, GlobalRef):
        return _LAYOUT.match(layout.path) is not None
    if not isinstance(layout, Opaque) or layout.path != "torch.serialization._get_layout":
        return False
    (name,) = layout.args if len(layout.args) == 1 else ("",)
    return isinstance(name, str) and _LAYOUT.match(name) is not None


def _is_count(value: Any) -> bool:
    return value is None or (type(value) is int and value >= 0)


def _are_texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value)


def _is_path(value: Any) -> bool:
    """A text, or an object of a class of paths: made of its parts, which are texts."""
    if value is None or isinstance(value, str):
        return True
    target = value.target if isinstance(value, Opaque) else None
    if not isinstance(target, GlobalRef) or not all(isinstance(one, str) for one in value.args):
        return False
    return not target.module.startswith("pathlib") or target.name in _PATHS
