"""Numbers, texts and bytes against Python's own pickle."""

from __future__ import annotations

import math
import pickle

import pytest

from ckpttool.writing.pickled import pickled


@pytest.mark.parametrize("bits", [0, 7, 8, 15, 16, 31, 32, 63, 64, 500, 2030, 2039, 2040, 2100])
def test_integers_at_their_edges(bits: int) -> None:
    for offset in (-1, 0, 1):
        for number in (2**bits + offset, -(2**bits) + offset):
            assert pickled(number) == pickle.dumps(number, 2)


def test_numbers_that_equal_others() -> None:
    for value in (0.0, -0.0, math.inf, -math.inf, 1.0, True, 1, float("nan")):
        assert repr(pickle.loads(pickled(value))) == repr(value)
        assert type(pickle.loads(pickled(value))) is type(value)


@pytest.mark.parametrize("text", ["", "a", "ä" * 300, "\ud800", "\0\n", "x" * 70_000, "😀"])
def test_texts(text: str) -> None:
    assert pickle.loads(pickled(text)) == text
    assert pickle.loads(pickled({text: [text]})) == {text: [text]}
