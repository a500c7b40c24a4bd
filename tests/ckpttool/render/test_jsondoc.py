"""JSON documents: valid whatever goes in, schema version first."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.errors import UnreadableError
from ckpttool.render.jsondoc import TEXT_LIMIT, dumps, error_document, write_document


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def strict(text: str) -> Any:
    text.encode("ascii")
    return json.loads(text, parse_constant=refuse)


def document(**content: Any) -> Any:
    stream = io.StringIO()
    write_document(content, stream)
    assert stream.getvalue().endswith("}\n")
    return strict(stream.getvalue())


def test_schema_version_comes_first() -> None:
    found = document(path="a\x1b\ud800", numbers=[1, 2])
    assert list(found.items()) == [
        ("schema_version", 1),
        ("path", "a\x1b\ud800"),
        ("numbers", [1, 2]),
    ]
    assert document() == {"schema_version": 1}


def test_iterators_and_writers() -> None:
    found = document(
        some=iter([{"a": 1}, 2]), none=iter(()), own=lambda write: write('["by itself"]')
    )
    assert found["some"] == [{"a": 1}, 2]
    assert found["none"] == []
    assert found["own"] == ["by itself"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, {"$float": "nan"}),
        ([-math.inf], [{"$float": "-inf"}]),
        (b"\x00\xff", {"$bytes": "AP8=", "length": 2}),
        ({(1, 2): 3}, {"(1, 2)": 3}),
        ({"a": {1}}, {"a": [1]}),
        (10**400, 10**400),
        (True, True),
    ],
)
def test_what_json_lacks(value: Any, expected: Any) -> None:
    found = strict(dumps(value))
    assert found == expected


def test_huge_integers() -> None:
    found = strict(dumps([2**20_000, {(2**20_000,): 1}]))
    assert found[0]["bits"] == 20_001
    assert found[0]["$int"].startswith("0x1000")
    assert len(found[1]) == 1


def test_nesting_is_bounded() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert '{"$truncated": "depth"}' in dumps(deep)
    strict(dumps(deep))


def test_long_text_beside_what_json_lacks_is_cut() -> None:
    found = strict(dumps(["x" * (TEXT_LIMIT + 1), math.nan]))
    assert found[0] == {"$text": "x" * TEXT_LIMIT, "length": TEXT_LIMIT + 1}


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
        max_leaves=20,
    )
)
def test_always_valid(value: Any) -> None:
    strict(dumps(value))


def test_error_document() -> None:
    error = UnreadableError("a", "No such file")
    assert error_document(error, str(error), 3) == {
        "error": {"kind": "UnreadableError", "message": "a: No such file", "path": "a"},
        "exit_code": 3,
    }
