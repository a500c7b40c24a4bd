"""Pseudo-gradients: what a node's local steps changed, and whether it may be averaged in.

A delta is `baseline - target`, over the floating tensors, in FP32 on the CPU: as a gradient, it
points away from where the node went. It lies at `nodes/<node_id>/delta_<local_step>.safetensors`,
with metadata (all texts): `algorithm`, `node_id`, `local_step`, `base_outer_step` (the global model
that the baseline came from, -1 for none), and, absent in files of older writers, `previous_step`
(the node's delivery before this one, -1 for none), `since` (the local step after which the progress
in it begins), `samples`, `fingerprint` of the model, and
`sha256` of the tensors' bytes in the order of their names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from trainer_core.diloco.fingerprint import Spec, State, is_float
from trainer_core.diloco.names import check_node_id
from trainer_core.diloco.tensorfile import BadFileError, Header

ALGORITHM = "dumb_diloco"
NODES = "nodes"
_FILE = re.compile(r"delta_(\d{1,15})\.safetensors")
_NUMBER = re.compile(r"-?\d{1,15}")


@dataclass(frozen=True)
class Job:
    """One upload: immutable from the boundary that made it until it is delivered.

    `delta` is `baseline - target_state`, where the baseline had this `generation` and was taken at
    local step `since`; `samples` went into it.
    """

    step: int
    base_outer_step: int
    generation: int
    delta: State
    target_state: State
    since: int
    samples: int


class DeltaFacts(NamedTuple):
    """What a delta's metadata say; from `previous_step` on they may not be there.

    The steps in it are those after `since` up to `local_step`.
    """

    node_id: str
    local_step: int
    base_outer_step: int
    previous_step: int | None
    since: int | None
    samples: int | None
    fingerprint: str | None
    sha256: str | None


def difference(baseline: Mapping[str, Any], target: Mapping[str, Any]) -> State:
    """`baseline - target` over floating tensors, in FP32."""
    return {
        name: tensor.float() - target[name].float()
        for name, tensor in baseline.items()
        if is_float(tensor)
    }


def folder_of(node_id: str) -> str:
    """Where a node's deltas lie."""
    return f"{NODES}/{check_node_id(node_id)}"


def delta_name(node_id: str, local_step: int) -> str:
    """The name of one delta on the store."""
    return f"{folder_of(node_id)}/delta_{local_step}.safetensors"


def step_of(file_name: str) -> int | None:
    """The local step in a file's name, None if it isn't a delta's."""
    match = _FILE.fullmatch(file_name)
    # One name for each step: `delta_07` is none.
    return int(match[1]) if match and str(int(match[1])) == match[1] else None


def metadata_of(
    job: Job, node_id: str, previous_step: int, spec: Spec, sha256: str
) -> dict[str, str]:
    """The metadata of a job's file."""
    return {
        "algorithm": ALGORITHM,
        "node_id": node_id,
        "local_step": str(job.step),
        "base_outer_step": str(job.base_outer_step),
        "previous_step": str(previous_step),
        "since": str(job.since),
        "samples": str(job.samples),
        "fingerprint": spec.fingerprint,
        "sha256": sha256,
    }


def facts_of(header: Header, node_id: str, local_step: int) -> DeltaFacts:
    """What a delta in this node's folder says of itself. Raises BadFileError if that can't be."""
    metadata = header.metadata
    if metadata.get("algorithm") != ALGORITHM:
        raise BadFileError(f"is of the algorithm {metadata.get('algorithm', 'none')[:40]!r}")
    facts = DeltaFacts(
        metadata.get("node_id", ""),
        _number(metadata, "local_step"),
        _number(metadata, "base_outer_step"),
        _number(metadata, "previous_step") if "previous_step" in metadata else None,
        _number(metadata, "since") if "since" in metadata else None,
        _number(metadata, "samples") if "samples" in metadata else None,
        metadata.get("fingerprint"),
        metadata.get("sha256"),
    )
    if (facts.node_id, facts.local_step) != (node_id, local_step):
        named = f"{facts.node_id[:64]!r}, step {facts.local_step}"
        raise BadFileError(f"says that it is of node {named}; it lies elsewhere")
    if facts.base_outer_step < -1 or (facts.samples is not None and facts.samples < 1):
        raise BadFileError("has a base or a number of samples that can't be")
    if facts.since is not None and not 0 <= facts.since < max(1, facts.local_step):
        raise BadFileError(f"says that it begins after step {facts.since}")
    return facts


def judge_header(header: Header, node_id: str, local_step: int, spec: Spec) -> DeltaFacts:
    """The same; also raises BadFileError where it does not fit the model."""
    facts = facts_of(header, node_id, local_step)
    if (problem := spec.problem(header.tensors, only_floats=True)) is not None:
        raise BadFileError(problem)
    if facts.fingerprint not in (None, spec.fingerprint):
        raise BadFileError(f"is of a model with the fingerprint {str(facts.fingerprint)[:32]!r}")
    return facts


def norm(delta: State) -> float:
    """The Euclidean norm over all values; inf or nan where one of them is."""
    squares = [tensor.double().square().sum() for tensor in delta.values()]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def _number(metadata: Mapping[str, str], key: str) -> int:
    text = metadata.get(key, "")
    if not _NUMBER.fullmatch(text):
        raise BadFileError(f"has no number as {key}: {text[:20]!r}")
    return int(text)
