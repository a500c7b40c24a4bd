"""VAL: the values of tensors, read in pieces and counted by their bits.

IEEE 754: a number is not finite when all bits of its exponent are set; with a fraction of zero it
is infinite, otherwise NaN. The eight-bit formats follow "FP8 Formats for Deep Learning" (arXiv
2209.05433) and its fnuz variants (one NaN, no infinities), e8m0 the OCP MX specification.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.checks.base import FileCheck, FileSubject
from ckpttool.checks.elements import repeats, words
from ckpttool.checks.measure import Workers
from ckpttool.errors import FormatError, LimitError
from ckpttool.findings import Finding, Place, Severity
from ckpttool.formats.anomaly import Anomaly

if TYPE_CHECKING:
    from ckpttool.formats.container import Container
    from ckpttool.model.checkpoint import Checkpoint
    from ckpttool.model.tensor import TensorRef


class Pattern(NamedTuple):
    """Which bits of a format's words mean NaN and infinite.

    `size` is that of one word in bytes. A word is not finite if `word & mask == mask`; then it is
    NaN if `word & fraction`, else infinite (a format whose fraction is its mask has no infinities).
    With `only`, that one word is NaN and no other.
    """

    size: int
    mask: int
    fraction: int
    only: int | None = None


PATTERNS = {
    "float64": Pattern(8, 0x7FF0_0000_0000_0000, 0x000F_FFFF_FFFF_FFFF),
    "float32": Pattern(4, 0x7F80_0000, 0x007F_FFFF),
    "float16": Pattern(2, 0x7C00, 0x03FF),
    "bfloat16": Pattern(2, 0x7F80, 0x007F),
    "float8_e5m2": Pattern(1, 0x7C, 0x03),
    "float8_e4m3fn": Pattern(1, 0x7F, 0x7F),
    "float8_e5m2fnuz": Pattern(1, 0, 0, only=0x80),
    "float8_e4m3fnuz": Pattern(1, 0, 0, only=0x80),
    "float8_e8m0fnu": Pattern(1, 0, 0, only=0xFF),
}
# A complex number counts once for each of its two parts.
PATTERNS |= {
    "complex128": PATTERNS["float64"],
    "complex64": PATTERNS["float32"],
    "complex32": PATTERNS["float16"],
}


class ValueCheck(FileCheck):
    """A check of tensor values; `code` is that of the anomaly which `count_values` notes."""

    code = ""
    what = ""

    @classmethod
    def look(cls, subject: FileSubject) -> Iterator[Finding]:
        for anomaly in subject.seen(cls.code):
            count, name = anomaly.facts["count"], str(anomaly.facts["tensor"])
            place = Place(subject.path, record=anomaly.record, tensors=(name,))
            words = f"{name} holds {count:,} {cls.what} of {anomaly.facts['elements']:,} values"
            yield cls.finding(place, words, cls.mends, count=count)


class NanValues(ValueCheck):
    id = "VAL101"
    code = "values-nan"
    what = "NaN"
    title = "A tensor holds NaN"
    meaning = "Values of a tensor are not numbers. Looked for only when asked (`--finite`)."
    why = "Training that resumes from it computes NaN from there on, mostly in silence."
    mends = "Resume from an earlier step."


class InfiniteValues(ValueCheck):
    id = "VAL102"
    severity = Severity.WARNING
    code = "values-infinite"
    what = "infinite"
    title = "A tensor holds infinite values"
    meaning = "Values of a tensor are infinite. Looked for only when asked (`--finite`)."
    why = "Some tensors hold them on purpose (attention masks); in weights they turn into NaN."
    mends = "If it is not on purpose, resume from an earlier step."


CHECKS: tuple[type[ValueCheck], ...] = (NanValues, InfiniteValues)


def count_values(checkpoint: Checkpoint, workers: Workers) -> Iterator[Anomaly]:
    """Counts NaN and infinities of every floating-point tensor: `values-nan`, `values-infinite`.

    Sparse and nested tensors are counted by their parts. Tensors whose bytes are not there are left
    out: that is a finding of its own.
    """
    container = checkpoint.container
    if container is None:
        return
    tensors = [part for tensor in checkpoint.tensors.values() for part in _with_bytes(tensor)]
    total = sum(tensor.nbytes for tensor in tensors)

    def work(tensor: TensorRef) -> list[Anomaly]:
        try:
            return list(_count(container, tensor))
        except LimitError as error:
            return [Anomaly("record-limit", tensor.record, reason=str(error))]
        except FormatError:
            return []

    for anomalies in workers.map(work, tensors, total):
        yield from anomalies


def _with_bytes(tensor: TensorRef) -> Iterator[TensorRef]:
    """The tensor itself, or what it is built from, as far as it is stored in floating point."""
    if tensor.storage is not None and tensor.stride is not None and tensor.dtype in PATTERNS:
        yield tensor
    for part in tensor.parts.values():
        yield from _with_bytes(part)


def _count(container: Container, tensor: TensorRef) -> Iterator[Anomaly]:
    from math import prod

    pattern = PATTERNS[tensor.dtype]
    parts = 2 if tensor.dtype.startswith("complex") else 1
    nan = infinite = 0
    for piece in words(container, tensor, pattern.size, parts):
        found = _count_words(piece, pattern)
        nan, infinite = nan + found[0], infinite + found[1]
    factor = repeats(tensor)
    for code, count in (("values-nan", nan), ("values-infinite", infinite)):
        if count:
            elements = prod(tensor.shape or ()) * parts
            facts = {"tensor": tensor.name, "count": count * factor, "elements": elements}
            yield Anomaly(code, tensor.record, **facts)


def _count_words(piece: Any, pattern: Pattern) -> tuple[int, int]:
    """NaN and infinities in an array of unsigned integers."""
    import numpy as np

    if pattern.only is not None:
        return int(np.count_nonzero(piece == pattern.only)), 0
    mask = piece.dtype.type(pattern.mask)
    special = piece[(piece & mask) == mask]
    if not special.size:
        return 0, 0
    if pattern.mask == pattern.fraction:  # a format without infinities
        return int(special.size), 0
    nan = int(np.count_nonzero(special & piece.dtype.type(pattern.fraction)))
    return nan, int(special.size) - nan
