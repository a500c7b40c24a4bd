"""Whether a pending upload's delta is what its parts say: `baseline - target_state`, bit for bit.

DiLoCo's pseudo-gradient (arXiv 2311.08105, algorithm 1), computed in float32 over floating tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckpttool.errors import FormatError
from ckpttool.formats.anomaly import Anomaly
from ckpttool.model.inert import state_tensors
from ckpttool.model.tensor import TensorRef

if TYPE_CHECKING:
    from ckpttool.formats.container import Container
    from ckpttool.formats.values import TensorValue
    from ckpttool.model.checkpoint import Checkpoint
    from ckpttool.model.coordinator_state import CoordinatorFacts

Triple = tuple["TensorValue", "TensorValue", "TensorValue"]
"""Delta, baseline and target of one tensor."""

_JOB = "coordinator.pending_upload"


def check_pending_delta(checkpoint: Checkpoint, facts: CoordinatorFacts) -> Iterator[Anomaly]:
    """A `schema-pending-delta` that lists the tensors which differ.

    Looks only while the baseline is still the one that the delta was measured from.
    """
    job = facts.pending_upload
    container = checkpoint.container
    if container is None or job is None or job.generation is None:
        return
    if job.generation != facts.baseline_generation:
        return
    section = checkpoint.tree["coordinator"]
    upload = section["pending_upload"]
    delta, target = state_tensors(upload.get("delta")), state_tensors(upload.get("target_state"))
    baseline = state_tensors(section.get("baseline"))
    # What is not covered by all three is a finding of its own.
    names = [name for name in delta if name in baseline and name in target]
    triples = {name: (delta[name], baseline[name], target[name]) for name in names}
    wrong = [name for name, values in triples.items() if not _holds(container, name, values)]
    if wrong and not all(_delivered(container, name, triples[name]) for name in names):
        yield Anomaly("schema-pending-delta", key=f"{_JOB}.delta", tensors=wrong)


def _holds(container: Container, name: str, values: Triple) -> bool:
    """Whether the equation holds for one tensor; also where there is nothing to compare with."""
    if len({value.shape for value in values}) > 1 or values[0].dtype != "float32":
        return True  # a finding of its own
    try:
        delta, baseline, target = (_float32(TensorRef(name, value, container)) for value in values)
    except (FormatError, ValueError):
        return True  # likewise
    return _equal(delta, baseline, target)


def _delivered(container: Container, name: str, values: Triple) -> bool:
    """Whether the baseline has moved to the target already.

    The upload runs in the background: when it has just been delivered, the baseline is the snapshot
    that was uploaded, and the job may still stand in the checkpoint. Real files show it.
    """
    import numpy as np

    try:
        baseline, target = (_float32(TensorRef(name, value, container)) for value in values[1:])
    except (FormatError, ValueError):
        return False
    return bool(np.array_equal(baseline.view(np.uint32), target.view(np.uint32)))


def _equal(delta: Any, baseline: Any, target: Any) -> bool:
    import numpy as np

    with np.errstate(all="ignore"):  # infinities and NaN are compared as well
        expected = baseline - target
    same = expected.view(np.uint32) == delta.view(np.uint32)
    both_nan = np.isnan(expected) & np.isnan(delta)  # the bits of a NaN are the machine's choice
    return bool(np.all(same | both_nan))


def _float32(tensor: TensorRef) -> Any:
    import numpy as np

    # Not mapped: a file that is cut meanwhile would end the process.
    return np.array(tensor.numpy(mmap=False), dtype=np.float32)
