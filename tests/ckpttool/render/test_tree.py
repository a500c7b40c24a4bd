"""Trees: real content of files, and content that would explode or recurse."""

from __future__ import annotations

import io
import json
import pickle
from typing import Any

import pytest

from ckpttool.formats.static_pickle import read_pickle
from ckpttool.formats.values import GlobalRef, Opaque, StorageRef, TensorValue
from ckpttool.model.tensor import TensorRef
from ckpttool.model.walk import find_tensors
from ckpttool.render.tree import JsonTree, TextTree


def as_json(value: Any, *named: tuple[str, TensorValue]) -> Any:
    stream = io.StringIO()
    refs = {name: TensorRef(name, tensor, None) for name, tensor in named}
    JsonTree(stream.write, refs).value(value)
    return json.loads(stream.getvalue())


def as_lines(value: Any) -> list[str]:
    lines: list[str] = []
    TextTree(lines.append).show("", value)
    return lines


def tensor() -> TensorValue:
    return TensorValue(StorageRef("float32", "0", "cpu", 6), 0, (2, 3), (3, 1), False, "float32")


def test_plain_data_stays_what_it_is() -> None:
    data = {"step": 4, "lr": 0.5, "names": ["a", None, True], "config": {"a": {"b": ""}}}
    assert as_json(data) == data


def test_tensors_by_name() -> None:
    one = tensor()
    tree = {"model": {"w": one}, "again": one}
    assert as_json(tree) == {"model": {"w": {"$tensor": "model.w"}}, "again": {"$tensor": "again"}}
    assert as_json(tree, ("model.w", one))["again"] == {"$tensor": "model.w"}


def test_names_are_those_of_the_tensor_list() -> None:
    state = Opaque(GlobalRef("a", "Net"), (tensor(),), opcode="NEWOBJ")
    state.state = {"w": tensor(), "deep": [tensor()]}
    state.pairs = [(3, tensor())]
    shared = [tensor()]
    tree = {
        "a": {"b": tensor()},
        "a.b": tensor(),
        "o": state,
        (1, 2): tensor(),
        7: [shared, shared],
    }
    listed = [(name, value) for name, value in find_tensors(tree)]
    listed[1] = ("a.b#2", listed[1][1])
    found: list[str] = []

    def collect(value: Any) -> None:
        if isinstance(value, dict) and list(value) == ["$tensor"]:
            found.append(value["$tensor"])
        elif isinstance(value, (dict, list)):
            for item in value.values() if isinstance(value, dict) else value:
                collect(item)

    collect(as_json(tree, *listed))
    assert sorted(found) == sorted(name for name, _ in listed)


def test_keys() -> None:
    assert as_json({0: "a", 1: "b"}) == {"0": "a", "1": "b"}
    assert as_json({0: "a", "0": "b"}) == {"$dict": [[0, "a"], ["0", "b"]]}
    assert as_json({(1, 2): 3, None: 4}) == {"$dict": [[[1, 2], 3], [None, 4]]}
    assert as_json({"$tensor": "forged"}) == {"$dict": [["$tensor", "forged"]]}
    huge = as_json({2**9_000: 1})
    assert list(huge) == ["(int of 9001 bits)"]


def test_other_values() -> None:
    assert as_json({"s": {3, 1, 2}})["s"] == {"$set": [1, 2, 3]}
    assert as_json(1 - 2j) == {"$complex": [1.0, -2.0]}
    assert as_json(float("nan")) == {"$float": "nan"}
    assert as_json(GlobalRef("torch", "float32")) == {"$global": "torch.float32"}


def test_opaque_values_keep_their_arguments() -> None:
    value = Opaque(GlobalRef("argparse", "Namespace"), (1,), opcode="REDUCE")
    value.state = {"lr": 0.1}
    assert as_json(value) == {
        "$opaque": "argparse.Namespace",
        "opcode": "REDUCE",
        "args": [1],
        "state": {"lr": 0.1},
    }
    assert as_lines({"config": value}) == [
        "dict of 1",
        "  config: argparse.Namespace",
        "    args: (1)",
        "    state: dict of 1",
        "      lr: 0.1",
    ]


def test_shared_small_things_are_repeated_and_large_ones_named() -> None:
    small, large = (0.9, 0.999), list(range(17))
    tree = {"a": small, "b": small, "c": large, "d": large}
    assert as_json(tree) == {"a": [0.9, 0.999], "b": [0.9, 0.999], "c": large, "d": {"$ref": "c"}}


def cycle() -> Any:
    value: list[Any] = [[]]
    value[0].append(value)
    return value


def doubled() -> Any:
    value: list[Any] = []
    for _ in range(60):
        value = [value, value]
    return value


def deep() -> Any:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


def shared_text() -> Any:
    text = "x" * 1_000_000
    return [[text] for _ in range(500)]


@pytest.mark.parametrize("make", [cycle, doubled, deep, shared_text])
def test_nothing_explodes(make: Any) -> None:
    value = make()
    stream = io.StringIO()
    JsonTree(stream.write, {}).value(value)
    assert len(stream.getvalue()) < 5_000_000
    json.loads(stream.getvalue())
    assert len("\n".join(as_lines(value))) < 200_000


def test_cycle_from_a_pickle() -> None:
    # A list that holds itself, as CPython's own pickler writes it.
    own: list[Any] = []
    own.append(own)
    value = read_pickle(pickle.dumps(own, 2)).value
    assert as_json(value) == [{"$ref": ""}]
    assert as_lines(value) == ["list of 1", "  0: list of 1, the same object as (root)"]


def test_listing_escapes_and_shortens() -> None:
    lines = as_lines({"a\x1b\n": "b\x9b" + "x" * 200, "n": list(range(20)), "b": b"12", "e": {}})
    assert lines[1].startswith(r"  a\x1b\n: 'b\x9bxxx")
    assert len(lines[1]) < 130
    assert lines[2:] == [
        "  n: list of 20",
        *[f"    {i}: {i}" for i in range(20)],
        "  b: 2 bytes",
        "  e: empty dict",
    ]
    assert as_lines([1, 2, 3])[0] == "[1, 2, 3]"
    assert as_lines(tensor()) == ["tensor float32 [2, 3]"]
