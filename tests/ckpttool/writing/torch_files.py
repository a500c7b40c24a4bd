"""Run by itself, with torch: writes files in every way in which `torch.save` lays a zip out.

    python torch_files.py FOLDER

What is written here is only ever compared with; nothing of the tool is imported.
"""

from __future__ import annotations

import collections
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.serialization import config

GIB = 1 << 30


def sized(sizes: list[int]) -> dict[str, torch.Tensor]:
    """A tensor of each number of bytes."""
    return {f"{n} bytes": torch.arange(n).to(torch.uint8) for n in sizes}


def sparse(folder: Path) -> None:
    """Sizes and offsets on both sides of 2**32, without a byte of content."""
    limit = 1 << 32
    for name, sizes in {
        "one-below": [limit - 2],
        "one-at": [limit - 1],
        "one-above": [limit + 100],
        "many": [5, limit + 100, 0, 80, limit - 1, 3],
        "offset": [3 * GIB, GIB - 1500, 700, 0, 9],
    }.items():
        state = {str(i): torch.empty(n, dtype=torch.uint8) for i, n in enumerate(sizes)}
        with torch.serialization.skip_data():
            torch.save(state, folder / f"sparse-{name}.pt")


class Call:
    """Pickled as a call of torch's that this machine's tensors do not need."""

    def __init__(self, name: str, *args: Any) -> None:
        self.call = getattr(torch._utils, name), args

    def __reduce__(self) -> Any:
        return self.call


def contents() -> dict[str, Any]:
    """Whatever else a file can hold: tensors of other devices, attributes, cycles, plain data."""
    ring: list[Any] = [1]
    ring.append((ring, {"ring": ring}))
    noted = torch.nn.Parameter(torch.ones(3))
    noted.note = ring
    shared = torch.arange(12.0)
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    return {
        "moved": Call("_rebuild_device_tensor_from_cpu_tensor", shared[2:], torch.float16, "cpu", True),
        "numpy": Call("_rebuild_device_tensor_from_numpy", np.ones((2, 3)), torch.float32, "cpu", False),
        "not coalesced": torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (3,)),
        "coalesced": torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (3,)).coalesce(),
        "jagged": jagged,
        "parameter": noted,
        "both": [noted, shared, shared[3:], shared.view(3, 4).t()],
        "lazy": torch.nn.UninitializedParameter(),
        "hooked": torch.nn.Linear(2, 2),
        "ring": ring,
        "data": [b"", b"\xff\0", bytearray(b"ab"), bytearray(), {1, "a"}, frozenset({(2,)}), set(),
                 1j, 2**70, -(2**63), 2**2000, "\ud800", "", (), (1,), (1, 2), (1, 2, 3, 4), True,
                 None, float("nan"), -0.0, torch.Size((2, 3)), torch.device("cuda", 1), torch.int4],
        "long": {i: [i] * (i % 5) for i in range(2500)},
        "ordered": collections.OrderedDict((str(i), i) for i in range(1001)),
        "counted": collections.Counter("abca"),
        "default": collections.defaultdict(list, {1: [2]}),
        "deque": collections.deque([1, 2], 5),
        "generator": np.random.default_rng(1),
        "arrays": [np.arange(6, dtype=">f8").reshape(2, 3), np.array(["ab", "c"]), np.float32(2.5),
                   np.asfortranarray(np.arange(6).reshape(2, 3)), np.array([None, ring], dtype=object),
                   np.array("2024-05-17", "M8[D]"), np.zeros(2, [("a", "i4"), ("b", "f8", 2)])],
    }  # fmt: skip


def pairs(folder: Path) -> None:
    """Pairs of files that only differ in one thing each: what compares them must see it."""
    base, order = torch.arange(4.0), {"a": 1, "b": 2}
    unlike: dict[str, tuple[Any, Any]] = {
        "value": (base, base + 1),
        "sharing": ([base, base[1:]], [base, base.clone()[1:]]),
        "storage": (base[:2], base[:2].clone()),
        "identity": ([base, base], [base, base[:]]),
        "list": ([[order], [order]], [[order], [dict(order)]]),
        "order": (order, {"b": 2, "a": 1}),
        "type": ([1], [True]),
        "grad": (base, base.clone().requires_grad_()),
        "coalesced": (contents()["not coalesced"].coalesce(), contents()["not coalesced"]),
        "dtype": (base, base.double()),
        "array": (np.arange(3), np.arange(3, dtype="i4")),
    }
    for name, states in unlike.items():
        for side, state in zip("ab", states, strict=True):
            torch.save(state, folder / f"unlike-{name}-{side}.pt")


def main(folder: Path) -> None:
    """Every file."""

    def save(name: str, state: Any, **options: Any) -> None:
        torch.save(state, folder / f"{name}.pt", **options)

    save("empty", {})
    save("sizes", sized([*range(131), 4095, 4096, 4097, 1_000_001]))
    save("zeros", {"none": torch.empty(0), "some": torch.empty(0, 3), "one": torch.ones(1)})
    save("records", {f"layer.{i}": torch.full((3,), float(i)) for i in range(3000)})
    save("a name with spaces, and ümläuts", sized([1, 2, 3]))
    save("x" * 200, sized([1, 2, 3]))
    with (folder / "stream.pt").open("wb") as file:
        torch.save(sized([7, 64, 100]), file)
    for alignment in (1, 8, 256, 4096):
        config.save.storage_alignment = alignment
        save(f"aligned-{alignment}", sized([1, 63, 64, 65, 5000]))
    config.save.storage_alignment = 64
    torch.serialization.set_crc32_options(False)
    save("no-checksums", sized([0, 1, 100]))
    torch.serialization.set_crc32_options(True)
    sparse(folder)
    (folder / "contents").mkdir()
    save("contents/contents", contents())
    save("contents/contents-protocol4", contents(), pickle_protocol=4)
    # The legacy format has the bytes behind the pickle: what is computed while loading is garbage.
    settled = {
        k: v for k, v in contents().items() if k not in ("moved", "coalesced", "not coalesced")
    }
    save("contents/contents-legacy", settled, _use_new_zipfile_serialization=False)
    pairs(folder / "contents")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
