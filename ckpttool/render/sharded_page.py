"""What `inspect` shows of one sharded step, a directory of `torch.distributed.checkpoint`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.checks.base import few, plural
from ckpttool.render.file_json import global_document, section_document, training_document
from ckpttool.render.file_page import columns, named_like, show_wrong, training_lines
from ckpttool.render.text import escape, size_text
from ckpttool.render.tree import JsonTree, TextTree
from ckpttool.render.words import coordinator_words, shape_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckpttool.checks.examine import Result
    from ckpttool.model.sharded import ShardedStep
    from ckpttool.model.sharded_metadata import Item, ShardedTensor
    from ckpttool.render.file_page import Wanted
    from ckpttool.render.text import Printer

_KIND = "a sharded checkpoint (torch.distributed.checkpoint)"
_LOAD = {
    "distributed": "torch.distributed.checkpoint.load; it unpickles .metadata",
    "distributed-runs-code": "do not: torch.distributed.checkpoint.load unpickles .metadata, which"
    " runs code that the file chooses",
}
_MOST_SHARDS = 40


def show_sharded(
    printer: Printer, sharded: ShardedStep, result: Result, wanted: Wanted, verify_command: str
) -> None:
    """Prints the page of a sharded step: the summary, or the lists that were asked for."""
    if wanted.any:
        _show_lists(printer, sharded, wanted)
    else:
        _show_summary(printer, sharded)
    show_wrong(printer, result.findings, verify_command)


def _show_summary(printer: Printer, sharded: ShardedStep) -> None:
    printer.line(printer.colour(escape(sharded.path), "bold"))
    printer.facts(_facts(sharded), indent="  ")
    facts = sharded.trainer
    if facts is not None and facts.is_training:
        printer.heading("training")
        lines = [line for line in training_lines(facts) if line != ("missing", "rng")]
        printer.facts(lines, indent="  ")
        if facts.coordinator is not None:
            printer.heading("coordinator")
            printer.facts(coordinator_words(facts.coordinator), indent="  ")
    if sharded.sections:
        printer.heading("sections")
        rows = [
            (escape(one.name), one.type, f"{one.tensors:,}", size_text(one.nbytes))
            for one in sharded.sections.values()
            if one.tensors
        ]
        headers = ("section", "type", "tensors", "bytes")
        columns(printer, headers, rows, right=(2, 3), indent="  ")
    if sharded.listed.shards:
        printer.heading("shards")
        _show_shards(printer, sharded)


def _facts(sharded: ShardedStep) -> Iterator[tuple[str, str]]:
    yield "kind", _KIND
    yield "size", f"{sharded.size:,} bytes ({size_text(sharded.size)})"
    if (metadata := sharded.metadata) is not None:
        version = f", version {escape(metadata.version)}" if metadata.version else ""
        yield "metadata", f"{plural(len(metadata.items), 'entry', 'entries')}{version}"
        nbytes = sum(tensor.nbytes for tensor in metadata.tensors.values())
        pieces = sum(len(tensor.pieces) for tensor in metadata.tensors.values())
        count = plural(len(metadata.tensors), "tensor")
        yield "tensors", f"{count} in {plural(pieces, 'piece')}, {size_text(nbytes)}"
        yield "objects", ", ".join(map(escape, [few(list(metadata.objects))]))
    if (need := sharded.load_need) in _LOAD:
        yield "load", _LOAD[need]
    world = sharded.world_size
    if world is not None or sharded.ranks:
        of = "" if world is None else f" of {world:,}"
        yield "ranks", f"files of {len(sharded.ranks):,}{of}"


def _show_shards(printer: Printer, sharded: ShardedStep) -> None:
    files = {} if sharded.metadata is None else sharded.metadata.files()
    names = sorted({*sharded.listed.shards, *files})
    rows = []
    for name in names[:_MOST_SHARDS]:
        size = sharded.listed.sizes.get(name)
        entries = f"{len(files[name]):,}" if name in files else "not named"
        rows.append((escape(name), "missing" if size is None else size_text(size), entries))
    columns(printer, ("shard", "size", "entries"), rows, right=(1, 2), indent="  ")
    if len(names) > _MOST_SHARDS:
        printer.line(f"  and {len(names) - _MOST_SHARDS:,} more")


def _show_lists(printer: Printer, sharded: ShardedStep, wanted: Wanted) -> None:
    metadata, checkpoint = sharded.metadata, sharded.checkpoint
    if wanted.globals and checkpoint is not None:
        rows = [(use.trust.value, escape(f"{use.module}.{use.name}")) for use in checkpoint.globals]
        columns(printer, ("trust", "global"), rows)
    if wanted.records and metadata is not None:
        items = [_item_cells(item) for items in metadata.files().values() for item in items]
        columns(printer, ("shard", "offset", "bytes", "entry", "from"), items, right=(1, 2))
    if wanted.tensors is not None and metadata is not None:
        tensors = named_like(wanted.tensors, metadata.tensors.values())
        headers = ("name", "dtype", "shape", "pieces", "bytes")
        columns(printer, headers, [_tensor_cells(one) for one in tensors], right=(3, 4))
    if wanted.tree and checkpoint is not None:
        TextTree(printer.line).show("", checkpoint.tree)


def _tensor_cells(tensor: ShardedTensor) -> tuple[str, ...]:
    shape, pieces = shape_text(tensor.shape), f"{len(tensor.pieces):,}"
    return escape(tensor.name), tensor.dtype, shape, pieces, size_text(tensor.nbytes)


def _item_cells(item: Item) -> tuple[str, ...]:
    begins = "" if item.offsets is None else str(list(item.offsets))
    file, name = escape(item.file), escape(item.name)
    return file, f"{item.offset:,}", f"{item.length:,}", name, begins


def sharded_document(sharded: ShardedStep, result: Result, wanted: Wanted) -> dict[str, Any]:
    """What `inspect --json` prints of a sharded step."""
    metadata, checkpoint = sharded.metadata, sharded.checkpoint
    tensors = [] if metadata is None else list(metadata.tensors.values())
    document: dict[str, Any] = {
        "path": sharded.path,
        "kind": "sharded-step",
        "size": sharded.size,
        "state": result.verdict.state,
        "version": metadata and metadata.version,
        "world_size": sharded.world_size,
        "ranks": sorted(sharded.ranks),
        "files": sharded.listed.sizes,
        "load_need": sharded.load_need,
        "trust": checkpoint and checkpoint.trust.value,
        "training": sharded.trainer and training_document(sharded.trainer),
        "sections": {name: section_document(one) for name, one in sharded.sections.items()},
        "globals": [] if checkpoint is None else list(map(global_document, checkpoint.globals)),
        "findings": [finding.as_dict() for finding in result.findings],
        "tensors": [_tensor_document(one) for one in named_like(wanted.tensors or "*", tensors)],
        "objects": [] if metadata is None else list(metadata.objects),
    }
    if wanted.records and metadata is not None:
        document["records"] = [_item_document(item) for item in metadata.items]
    if checkpoint is not None:
        document["tree"] = _tree_writer(checkpoint.tree)
    return document


def _tree_writer(tree: Any) -> Callable[[Callable[[str], object]], None]:
    return lambda write: JsonTree(write, {}).value(tree)


def _tensor_document(tensor: ShardedTensor) -> dict[str, Any]:
    pieces = [
        {
            "offsets": list(piece.offsets),
            "sizes": list(piece.sizes),
            "record": piece.item and _item_document(piece.item),
        }
        for piece in tensor.pieces
    ]
    shape, nbytes = list(tensor.shape), tensor.nbytes
    about = {"name": tensor.name, "dtype": tensor.dtype, "shape": shape, "nbytes": nbytes}
    return {**about, "pieces": pieces}


def _item_document(item: Item) -> dict[str, Any]:
    plain = item._asdict()
    plain["offsets"] = None if item.offsets is None else list(item.offsets)
    return {**plain, "transforms": list(item.transforms)}
