from __future__ import annotations

import pytest

from trainer_core.diloco.errors import BadNameError, DiLoCoError
from trainer_core.diloco.names import check_name, check_node_id


@pytest.mark.parametrize("text", ["a", "0", "node-1", "gpu.3_b", "x" * 64, "a..b"])
def test_node_ids(text: str) -> None:
    assert check_node_id(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "..",
        "A",
        "-a",
        "_a",
        ".a",
        "a.",
        "a b",
        "a/b",
        "a\\b",
        "x" * 65,
        "ä",
        "a\n",
        "a\0",
        None,
        3,
        b"a",
    ],
)
def test_what_is_no_node_id(text: str) -> None:
    with pytest.raises(BadNameError) as caught:
        check_node_id(text)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, DiLoCoError)


@pytest.mark.parametrize(
    "text", ["a", "global/step_count.json", "nodes/n.1/delta_7.safetensors", "a/_b/C-d=e+f"]
)
def test_names(text: str) -> None:
    assert check_name(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "/a",
        "a/",
        "a//b",
        "./a",
        "a/.",
        "a/..",
        "../a",
        "a/../b",
        ".a",
        "a\\b",
        "c:/x",
        "a*",
        "a\n",
        "a ",
        "é",
        "a/" * 400 + "a",
        "x" * 201,
        None,
    ],
)
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(BadNameError):
        check_name(text)
