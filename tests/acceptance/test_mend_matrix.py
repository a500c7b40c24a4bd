"""The matrix of README: damage by what comes back, with torch and `zip -FF` beside `mend`.

Worked out by `benchmarks.mend_matrix`, whose judge is torch in another process.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from benchmarks.mend_matrix import Kind, Matrix, Result, table

pytestmark = pytest.mark.slow

LOSSLESS = (
    *("the end record cut", "the central directory cut", "each byte of the zip structure damaged"),
    *("each local header zeroed", "one bit flipped, in one record", "the same, with a donor"),
)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("matrix"), shown=19)


@pytest.fixture(scope="module")
def kinds(matrix: Matrix) -> list[Kind]:
    return list(matrix.kinds(flips=40, stride=29))


def rows(matrix: Matrix, kinds: list[Kind], part: str, *, others: bool = False) -> Iterator[Result]:
    found = [kind for kind in kinds if part in kind.name]
    assert found
    for kind in found:
        yield matrix.result(kind, others=others)


def test_the_file_is_small_and_has_many_records(matrix: Matrix) -> None:
    assert len(matrix.tensors) == 32
    assert len(matrix.data) < 100_000


@pytest.mark.parametrize("name", LOSSLESS)
def test_all_comes_back_byte_for_byte(name: str, matrix: Matrix, kinds: list[Kind]) -> None:
    for result in rows(matrix, kinds, name):
        assert result.identical == result.files, result.name
        assert result.tensors == result.there
        assert result.wrong == 0


def test_a_cut_file_gives_back_all_that_precedes_the_cut(matrix: Matrix, kinds: list[Kind]) -> None:
    for result in rows(matrix, kinds, "cut at every 5 %", others=True):
        assert result.files == 19
        assert result.there > 200
        assert (result.tensors, result.wrong) == (result.there, 0)
        assert result.others["torch"][0] == 0


def test_what_cannot_be_proven_is_refused(matrix: Matrix, kinds: list[Kind]) -> None:
    for name in ("two bits", "three bits", "64 bytes", "4 KiB zeroed"):
        for result in rows(matrix, kinds, name):
            assert (result.identical, result.invented) == (0, 0), result.name
            assert result.refused == result.files
            assert (result.tensors, result.wrong) == (result.there, 0)


@pytest.mark.skipif(shutil.which("zip") is None, reason="Info-ZIP's zip is not installed")
def test_zip_ff_gives_back_less(matrix: Matrix, kinds: list[Kind]) -> None:
    """It needs whole local headers, and never looks at a checksum."""
    (headers,) = rows(matrix, kinds, "each local header zeroed", others=True)
    right, there, _ = headers.others["zip -FF"]
    assert right < there == headers.there
    (bits,) = rows(matrix, kinds, "one bit flipped", others=True)
    assert bits.others["zip -FF"][2] > 0 == bits.wrong


def test_the_table(matrix: Matrix, kinds: list[Kind]) -> None:
    result = matrix.result(kinds[0], others=True)
    text = table([result])
    assert "the end record cut" in text
    assert "as it was written" in text
