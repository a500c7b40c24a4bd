"""Which of several namesakes torch reads: asked of torch itself, in a process of its own."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

from ckpttool.formats.zip_lookup import torch_choices, twins
from tests import corrupt

ASK_TORCH = """
import json, sys, torch
answers = []
for path in json.load(sys.stdin):
    reader = torch._C.PyTorchFileReader(path)
    answers.append(reader.get_record("data.pkl").decode())
json.dump(answers, sys.stdout)
"""


def archives() -> list[list[str]]:
    """Lists of record names with twins of `data.pkl` among them, of many lengths and orders."""
    rng = random.Random(4)
    others = ["data/0", "data/1", "DATA/1", "x", "é", "É", "aaa", "aa", "version2"]
    lists = []
    for _ in range(150):
        twins_ = [rng.choice(["data.pkl", "Data.pkl", "DATA.PKL"]) for _ in range(rng.randrange(4))]
        names = twins_ + ["data.pkl"] + [rng.choice(others) for _ in range(rng.randrange(40))]
        rng.shuffle(names)
        lists.append(["version", *names])
    return lists


def test_the_same_record_as_torch_reads(tmp_path: Path) -> None:
    lists, paths = archives(), []
    for number, names in enumerate(lists):
        records = [
            (f"a/{name}", b"3" if name == "version" else str(index).encode())
            for index, name in enumerate(names)
        ]
        path = tmp_path / f"{number}.pt"
        path.write_bytes(corrupt.torch_zip(records))
        paths.append(str(path))
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ASK_TORCH],
        input=json.dumps(paths),
        capture_output=True,
        text=True,
        check=True,
    )
    ours = [torch_choices([f"a/{n}" for n in names], ["a/data.pkl"])[0] for names in lists]
    assert [str(index) for index in ours] == json.loads(answer.stdout)
    assert len({names.index("data.pkl") == index for names, index in zip(lists, ours, strict=True)})


def test_beyond_what_is_sorted_it_is_the_last() -> None:
    names = ["a", *(f"n{index}" for index in range(60_000)), "A"]
    assert torch_choices(names, ["a"]) == [len(names) - 1]


def test_twins_differ_in_ascii_case_only() -> None:
    assert twins(["a", "b", "A", "é", "É", "b"]) == {"a": [0, 2], "b": [1, 5]}
