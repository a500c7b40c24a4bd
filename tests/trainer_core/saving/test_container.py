"""The fast container against torch's own, byte by byte; and what is left to torch."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import textwrap
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_core import atomic_torch_save
from trainer_core.saving.container import (
    Container,
    as_bytes,
    content_of,
    pieces_of,
    take_apart,
    through,
)
from trainer_core.saving.hashed import HashedFile
from trainer_core.saving.publishing import TorchSave


def by_torch(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def by_us(state: Any) -> bytes:
    buffer = io.BytesIO()
    with HashedFile(buffer) as file:
        content_of(state).write(file)
    return buffer.getvalue()


def training() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    model(torch.randn(5, 30)).square().sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 4,
        "rng": {"torch": torch.get_rng_state()},
        "config": {"a": [1, 2.5, None, True, "é", b"x", (1, 2), {3}, 1 << 70]},
    }


def shared() -> Any:
    base = torch.arange(1000.0)
    return {
        "base": base,
        "view": base[3:900:7],
        "twice": [base, base.reshape(2, 500).T],
        "part": base[5:],
    }


def kinds() -> Any:
    from_numpy = torch.from_numpy(__import__("numpy").arange(6))
    return [
        *(torch.ones(3, dtype=kind) for kind in (torch.bfloat16, torch.float8_e4m3fn, torch.bool)),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.tensor(1.0),
        torch.empty(0),
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
        torch.nn.Parameter(torch.ones(2)),
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
        torch.ones(2).untyped_storage(),
        from_numpy,
        from_numpy[::2],
        torch.Size([2]),
        torch.float16,
        torch.device("cpu"),
        torch.ones(2, requires_grad=True),
        torch.ones(4, 4)[1:, 1:],
        torch.zeros(1).expand(5),
    ]


def inference() -> Any:
    with torch.inference_mode():
        return {"x": torch.ones(5) * 2}


STATES: dict[str, Callable[[], Any]] = {
    "a training checkpoint": training,
    "shared storages": shared,
    "kinds of tensors": kinds,
    "a module": lambda: torch.nn.Linear(3, 4),
    "an ordered dictionary": lambda: OrderedDict(a=torch.ones(2)),
    "no tensor": lambda: {"step": 4},
    "bare": lambda: None,
    "without data": lambda: {"x": torch.ones(5, device="meta")},
    "inference": inference,
    "a bigger one": lambda: {"w": torch.arange(1 << 20), "v": torch.arange(300_000)},
}


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:Sparse invariant")
@pytest.mark.parametrize("make", STATES.values(), ids=STATES)
def test_every_byte_is_that_of_torch(make: Callable[[], Any]) -> None:
    state = make()
    assert isinstance(content_of(state), Container)
    assert by_us(state) == by_torch(state)


def test_torch_loads_it_with_and_without_a_mapping_and_sharing_is_kept(tmp_path: Path) -> None:
    state = {"step": 4, **shared(), **training()}
    atomic_torch_save(state, tmp_path / "a.pt")
    for mmap in (False, True):
        loaded = torch.load(tmp_path / "a.pt", weights_only=True, mmap=mmap)
        assert torch.equal(loaded["view"], state["view"])
        assert loaded["base"].data_ptr() == loaded["view"].data_ptr() - 3 * 4
        assert torch.equal(loaded["model"]["0.weight"], state["model"]["0.weight"])
        assert list(loaded) == list(state)


def test_what_only_torch_can_save_goes_to_torch(tmp_path: Path) -> None:
    state = {"a": torch.ones(5, device="meta").untyped_storage(), "b": torch.ones(3)}
    assert isinstance(content_of(state), TorchSave)
    with torch.serialization.skip_data():
        assert isinstance(content_of({"b": torch.ones(3)}), TorchSave)
        atomic_torch_save({"b": torch.ones(3)}, tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt", weights_only=True)["b"].shape == (3,)


def test_one_memory_under_two_types_is_torchs_own_error(tmp_path: Path) -> None:
    numbers = torch.ones(4)
    state = {"a": numbers, "b": numbers.view(torch.int32)}
    with pytest.raises(RuntimeError) as theirs:
        torch.save(state, io.BytesIO())
    with pytest.raises(RuntimeError) as ours:
        atomic_torch_save(state, tmp_path / "a.pt")
    assert str(ours.value) == str(theirs.value)


def test_pickling_errors_are_those_of_pickle() -> None:
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        content_of({"f": lambda: 1})


class Fresh:
    """Its state is made anew whenever it is pickled, so that memory is used again if it is free."""

    def __reduce__(self) -> Any:
        return dict, ([("x", torch.full((64,), float(id(self) % 1000)))],)


def test_tensors_that_exist_only_while_pickling_are_kept() -> None:
    parts = [Fresh() for _ in range(50)]
    loaded = torch.load(io.BytesIO(by_us(parts)), weights_only=False)
    assert [part["x"].unique().tolist() for part in loaded] == [[id(p) % 1000] for p in parts]


def test_the_state_is_not_copied() -> None:
    state = {"w": torch.arange(10)}
    taken = take_apart(state)
    assert taken is not None
    assert taken.storages[0].data_ptr() == state["w"].data_ptr()
    assert taken.nbytes == len(taken.pickle) + 80


@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 10_000])
def test_memory_elsewhere_comes_through_one_small_buffer(size: int) -> None:
    memory = torch.randint(0, 256, (size,), dtype=torch.uint8)
    buffer = torch.empty(4096, dtype=torch.uint8)
    written = io.BytesIO()
    with HashedFile(written, digest=False) as file:
        for piece in through(buffer, memory, file):
            file.write(piece)
    assert written.getvalue() == memory.numpy().tobytes()


def test_memory_here_comes_as_it_lies() -> None:
    memory = as_bytes(torch.arange(300_000).untyped_storage())
    with HashedFile(io.BytesIO()) as file:
        pieces = list(pieces_of(memory, file))
    assert b"".join(pieces) == memory.numpy().tobytes()
    assert len(pieces) == 3


PEAK = textwrap.dedent(
    """
    import os, resource, sys, torch
    from trainer_core import CheckpointManager
    manager = CheckpointManager(sys.argv[1], async_save=sys.argv[2] == "async")
    state = lambda: {"step": 4, "model": {f"w{i}": torch.ones(16 << 20, dtype=torch.uint8)
                     for i in range(16)}}
    manager.save(1, {"step": 1})
    held = state()
    def peak():
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = peak()
    manager.save(4, held)
    manager.close()
    print((peak() - before) / (256 << 20))
    """
)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc")
@pytest.mark.parametrize(("how", "most"), [("sync", 0.2), ("async", 1.2)])
def test_a_save_takes_little_memory_beside_the_state(tmp_path: Path, how: str, most: float) -> None:
    """Less than 1.2 times the state in all; saving beside the training needs its one copy."""
    command = [sys.executable, "-c", PEAK, str(tmp_path), how]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < most
