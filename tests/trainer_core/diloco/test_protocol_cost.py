"""The formulas of `python -m benchmarks diloco_protocol` are what real coordinators cost."""

from __future__ import annotations

from benchmarks.diloco_protocol import KEEP, compare


def test_formulas_are_exact() -> None:
    compared = compare(4)
    assert compared.counted == compared.formula
    assert compared.deltas == KEEP * 4
