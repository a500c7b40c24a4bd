"""Run by itself, with torch: files with what people put beside tensors, and what they export.

python torch_makes.py FOLDER
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import fractions
import pathlib
import sys
import types
import uuid
import warnings
from typing import Any

import numpy as np
import omegaconf
import torch

from tests.ckpttool.model import torch_says


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Config:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Pair(tuple):
    __slots__ = ()

    def __new__(cls, one: Any, other: Any) -> Pair:
        return super().__new__(cls, (one, other))

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self)


class Tied(torch.nn.Module):
    """Two names for one weight, a buffer that stays out, a layer that is called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.module = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.ones(3), persistent=False)
        self.register_buffer("kept", torch.arange(5.0))
        self.register_parameter("none", None)


def everyday() -> dict[str, Any]:
    """Configurations and the like, as training scripts save them."""
    weight = torch.arange(12.0).reshape(3, 4)
    config = omegaconf.OmegaConf.create(
        {"lr": 0.1, "layers": [1, 2, {"name": "${lr}", "todo": "???", "none": None}]}
    )
    return {
        "model": {"weight": weight, "tied": weight, "row": weight[1]},
        "args": argparse.Namespace(lr=0.1, out=pathlib.PurePosixPath("/runs/a"), seed=np.int64(7)),
        "cfg": config,
        "layers": config.layers,
        "simple": types.SimpleNamespace(a=1, b=[Color.RED]),
        "best": np.float32(0.1),
        "half": np.float16(0.1),
        "epoch": np.int64(2**40),
        "flag": np.bool_(True),
        "history": collections.defaultdict(list, {"loss": [np.float64(1.5), 2.5]}),
        "window": collections.deque([1, 2, 3], maxlen=3),
        "level": Level.HIGH,
        "keys": {Color.RED: 1, (1, Level.HIGH): 2, np.int64(4): 3, frozenset({"x"}): 4},
        "frozen": frozenset({1, 2}),
        "span": range(2, 10, 3),
        "cut": slice(None, 5, None),
        "money": decimal.Decimal("1.10"),
        "third": fractions.Fraction(1, 3),
        "when": datetime.datetime(2024, 2, 29, 12, 30, 1, 5, datetime.timezone.utc),
        "day": datetime.date(2024, 2, 29),
        "long": datetime.timedelta(days=1, seconds=2, microseconds=3),
        "id": uuid.UUID(int=5),
        "config": Config(width=8, inner=Config(depth=2)),
        "pair": Pair(1, "x"),
        "numbers": np.arange(6, dtype=">i4").reshape(2, 3),
        "turned": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "unsigned": np.array([2**16 - 1], np.uint16),
        "words": np.array([["a", "bc"], ["", "d"]]),
        "raw": np.array([b"ab\x00c"], "V4"),
        "things": np.array([[1, "a"], [None, 2.5]], object),
        "table": np.array([(1, 2.5, "x"), (2, 3.5, "yz")], [("n", "i4"), ("v", "f8"), ("s", "U2")]),
        "days": np.array(["2024-02-29", "NaT"], "M8[D]"),
        "masked": np.ma.MaskedArray([1, 2], [False, True], fill_value=9),
        "zero": np.array(5, np.int16),
        "empty": np.zeros((0, 3), np.float32),
        "generator": np.random.Generator(np.random.PCG64(5)),
        "state": np.random.RandomState(5).get_state(),
        "torch generator": torch.Generator().manual_seed(5),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 1),
        "size": torch.Size((2, 3)),
        "layout": torch.sparse_coo,
        "bytes": b"\x00\xff",
        "no bytes": b"",
        "bytearray": bytearray(b"ab"),
        "set": {1, 2},
        "complex": 1 + 2j,
        "counter": collections.Counter("aab"),
        "big": 2**100,
        "text": "π\ud800\u2028",
        "version": torch.__version__,
        "class": torch.nn.Linear,
        "nothing": None,
        "many": [True, 1.5, -1, float("inf")],
    }


def main(folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    torch_says.make(folder)
    home = pathlib.Path(folder)
    for protocol in (2, 3, 4, 5):
        torch.save(everyday(), home / f"everyday-{protocol}.pt", pickle_protocol=protocol)
    torch.save(everyday(), home / "everyday-legacy.pt", _use_new_zipfile_serialization=False)
    cyclic: dict[str, Any] = {"list": [1]}
    cyclic["self"] = cyclic
    cyclic["list"].append(cyclic["list"])
    cyclic["parent"] = Config(child=Config(depth=2))
    cyclic["parent"].child.up = cyclic["parent"]
    torch.save(cyclic, home / "cyclic.pt")
    torch.save(Tied(), home / "module.pt")
    torch.save(Tied().state_dict(), home / "state.pt")
    torch.save(
        {"module": torch.nn.DataParallel(Tied()).state_dict(), "step": 3}, home / "wrapped-ddp.pt"
    )
    torch.save({"model": torch.nn.DataParallel(Tied()).state_dict(), "step": 3}, home / "ddp.pt")
    torch.save({"weight": torch.arange(1_000_000.0)[10:20]}, home / "slice.pt")
    chunks = torch.arange(4096.0)
    torch.save(
        {
            "first": chunks[:8], "again": chunks[4:12], "later": chunks[2000:2010:3], "last": chunks[4090:], "none": chunks[7:7],
            "column": torch.arange(20_000.0).reshape(100, 200)[:, 7],
        },
        home / "chunks.pt",
    )  # fmt: skip
    apart = home / "apart"
    apart.mkdir()
    torch.save(layers(), apart / "layers.pt")
    torch.save(drawn(), apart / "generators.pt")


def layers() -> torch.nn.Module:
    attention = torch.nn.Sequential(torch.nn.MultiheadAttention(4, 2))
    return torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.InstanceNorm1d(4), attention
    )


def drawn() -> dict[str, np.random.Generator]:
    """Generators of every kind, in the middle of a number of 64 bits where they have one."""
    generators = {}
    for name in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"):
        generators[name] = np.random.Generator(getattr(np.random, name)(3))
        generators[name].integers(0, 9, 3, dtype=np.int32)
    return generators


if __name__ == "__main__":
    main(*sys.argv[1:])
