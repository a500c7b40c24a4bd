"""Whatever was done to a file, `mend` never gives a tensor that is not what was saved.

Blocks zeroed, overwritten, cut out, inserted and doubled, several at once, in a file of many records
of the same size: so that a content could be taken for another's.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.mend_matrix import Matrix, load
from ckpttool.mending.plan import plan_mend
from ckpttool.mending.write import sha256_of_rewritten, write_mended
from tests import corrupt


def damage(data: bytes, rng: random.Random) -> bytes:
    """Up to three blocks changed, and sometimes the end cut off."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        offset = rng.randrange(len(data))
        length = min(rng.choice((1, 7, 16, 64, 200, 512, 896, 4096, 9000)), len(data) - offset)
        block, rest = data[offset : offset + length], data[offset:]
        kind = rng.choice(("zero", "overwrite", "cut out", "insert", "double"))
        if kind == "zero":
            data = corrupt.zero_range(data, offset, length)
        elif kind == "overwrite":
            data = corrupt.put_bytes(data, offset, rng.randbytes(length))
        elif kind == "cut out":
            data = corrupt.cut_out(data, offset, length)
        else:
            new = rng.randbytes(length) if kind == "insert" else block
            data = data[:offset] + new + rest
    if rng.random() < 0.4:
        data = corrupt.keep_first(data, rng.randrange(len(data) // 2, len(data)))
    return data


@pytest.mark.slow
def test_no_tensor_is_ever_wrong(tmp_path: Path) -> None:
    matrix = Matrix(tmp_path)
    rng = random.Random(77)
    counts: Counter[str] = Counter()
    unproven: dict[Path, set[str]] = {}
    for number in range(120):
        path, out = tmp_path / "damaged.pt", tmp_path / f"out_{number}.pt"
        path.write_bytes(damage(matrix.data, rng))
        with plan_mend(path) as plan:
            if plan.healthy or plan.hopeless is not None:
                counts["hopeless"] += plan.hopeless is not None
                continue
            if not plan.loses:
                assert sha256_of_rewritten(plan) == matrix.digest
                counts["whole"] += 1
            # What the pickle says, if that is damaged, is said not to be proven.
            doubtful = any(loss.tensor == "data.pkl" for loss in plan.losses)
            unproven[out] = matrix.all if doubtful else set(plan.unproven)
            write_mended(plan, out, allow_loss=True)
    for name, tensors in load(list(unproven)).items():
        assert tensors is not None, name
        for tensor, value in tensors.items():
            if tensor not in unproven[Path(name)] and unproven[Path(name)] != matrix.all:
                assert value == matrix.tensors[tensor], (name, tensor)
                counts["right"] += 1
    assert counts["whole"] >= 5
    assert counts["right"] > 1500
