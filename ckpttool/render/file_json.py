"""What `inspect --json` prints of one file: the Python API's facts, under the same names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.render.tree import JsonTree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ckpttool.findings import Finding
    from ckpttool.model.checkpoint import Checkpoint
    from ckpttool.model.schema import TrainingFacts
    from ckpttool.model.tensor import TensorRef


def file_document(
    checkpoint: Checkpoint,
    facts: TrainingFacts,
    findings: list[Finding],
    tensors: Iterable[TensorRef],
    *,
    records: bool,
) -> dict[str, Any]:
    """The document for `write_document`; long lists and the tree are written as they come."""
    document: dict[str, Any] = {
        "path": checkpoint.path,
        "kind": checkpoint.kind,
        "words": checkpoint.words,
        "facts": checkpoint.facts,
        "size": checkpoint.size,
        "readable": checkpoint.readable,
        "load_need": checkpoint.load_need,
        "trust": checkpoint.trust.value,
        "stored_bytes": checkpoint.stored_bytes,
        "used_bytes": checkpoint.used_bytes,
        "container": _container(checkpoint),
        "mended": checkpoint.mended,
        "training": training_document(facts),
        "sections": {name: section_document(s) for name, s in checkpoint.sections.items()},
        "globals": [global_document(use) for use in checkpoint.globals],
        "findings": [finding.as_dict() for finding in findings],
        "tensors": (tensor_facts(tensor) for tensor in tensors),
    }
    if records:
        document["records"] = _records(checkpoint)
    document["tree"] = _tree_writer(checkpoint)
    return document


def tensor_facts(tensor: TensorRef) -> dict[str, Any]:
    """A `TensorRef` as plain data."""
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": None if tensor.shape is None else list(tensor.shape),
        "stride": None if tensor.stride is None else list(tensor.stride),
        "offset": tensor.offset,
        "device": tensor.device,
        "storage": tensor.storage,
        "nbytes": tensor.nbytes,
        "storage_nbytes": tensor.storage_nbytes,
        "layout": tensor.layout,
        "requires_grad": tensor.requires_grad,
        "subclass": tensor.subclass,
        "parts": list(tensor.parts or ()),
    }


def _container(checkpoint: Checkpoint) -> dict[str, Any] | None:
    container = checkpoint.container
    if container is None:
        return None
    return {
        "format": container.format,
        "prefix": container.prefix,
        "records": len(container.entries),
        "byteorder": container.byteorder,
        "has_checksums": container.has_checksums,
        "facts": container.facts,
    }


def section_document(section: Any) -> dict[str, Any]:
    """A `Section` as plain data."""
    return {"type": section.type, "tensors": section.tensors, "nbytes": section.nbytes}


def global_document(use: Any) -> dict[str, Any]:
    """A `GlobalUse` as plain data."""
    return {
        "module": use.module,
        "name": use.name,
        "trust": use.trust.value,
        "called": use.called,
    }


def training_document(facts: TrainingFacts) -> dict[str, Any] | None:
    """The training schema's facts as plain data; None for what is no training checkpoint."""
    if not facts.is_training:
        return None
    return {
        "step": facts.step,
        "samples": facts.samples,
        "tokens": facts.tokens,
        "present": list(facts.present),
        "missing": list(facts.missing),
        "precision": facts.precision and facts.precision._asdict(),
        "optimizer": facts.optimizer and facts.optimizer._asdict(),
        "scheduler": facts.scheduler and facts.scheduler._asdict(),
        "rng": facts.rng,
        "coordinator": coordinator_document(facts),
    }


def coordinator_document(facts: TrainingFacts) -> dict[str, Any] | None:
    """The coordinator's facts as plain data, with the copies among its parts."""
    if facts.coordinator is None:
        return None
    return {**facts.coordinator.as_dict(), "copies": [list(group) for group in facts.copies]}


def _records(checkpoint: Checkpoint) -> Iterator[dict[str, Any]]:
    entries = checkpoint.container.entries if checkpoint.container is not None else ()
    return (
        {
            "name": record.name,
            "size": record.size,
            "stored_size": record.stored_size,
            "crc32": record.crc,
            "method": record.method,
            "header_offset": record.header_offset,
        }
        for record in entries
    )


def _tree_writer(checkpoint: Checkpoint) -> Callable[[Callable[[str], object]], None]:
    def write_tree(write: Callable[[str], object]) -> None:
        JsonTree(write, checkpoint.tensors).value(checkpoint.tree)

    return write_tree
