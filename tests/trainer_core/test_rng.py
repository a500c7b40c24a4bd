"""Generators go on where they were, whatever form their state was stored in."""

import io
import logging
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer_core import capture_rng_state, restore_rng_state

SEED_RUNS = Path(__file__).parents[2] / "fixtures/corpus/seed-runs"


@pytest.fixture(autouse=True)
def own_generators() -> Iterator[None]:
    """Every test starts from known states, and the other tests' numbers stay as they were."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def draw() -> tuple[Any, ...]:
    # gauss and standard_normal come in pairs: the second of a pair is part of the state.
    numbers = random.random(), random.gauss(0, 1), np.random.rand(), np.random.standard_normal()
    return (*numbers, torch.rand(3).tolist(), torch.randn(1).item())


def through_torch(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_a_state_that_went_through_a_file_continues_the_same_numbers() -> None:
    draw()  # so that half of each gaussian pair is pending
    stored = through_torch(capture_rng_state())
    expected = draw(), draw()
    assert restore_rng_state(stored) == {}
    assert (draw(), draw()) == expected


def test_another_process_without_this_package_can_use_the_state(tmp_path: Path) -> None:
    torch.save(capture_rng_state(), tmp_path / "rng.pt")
    expected = draw()
    program = (
        "import random, sys, numpy as np, torch\n"
        "s = torch.load(sys.argv[1], weights_only=True)\n"
        "random.setstate(s['python']); np.random.set_state(s['numpy'])\n"
        "torch.set_rng_state(s['torch'])\n"
        "print((random.random(), random.gauss(0, 1), float(np.random.rand()),"
        " float(np.random.standard_normal()), torch.rand(3).tolist(), torch.randn(1).item()))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "rng.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == repr(tuple(map(plain, expected)))


def plain(value: Any) -> Any:
    return float(value) if isinstance(value, float) else value


def test_the_original_forms_restore_tuples_and_arrays() -> None:
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    expected = draw()
    assert restore_rng_state(state) == {}
    assert draw() == expected


def test_lists_for_tuples_and_numpys_dictionary_form_restore() -> None:
    version, words, gauss = random.getstate()
    state = {
        "python": [version, list(words), gauss],
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    expected = draw()
    assert restore_rng_state(state) == {}
    assert draw() == expected


def test_numpy_words_may_be_a_tensor() -> None:
    name, words, *rest = np.random.get_state()
    state = {**capture_rng_state(), "numpy": (name, torch.tensor(words.astype(np.int64)), *rest)}
    expected = draw()
    assert restore_rng_state(state) == {}
    assert draw() == expected


@pytest.mark.parametrize("run", ["plain", "master", "worker", "pending"])
def test_states_of_the_original_system_restore(run: str) -> None:
    files = sorted((SEED_RUNS / run).glob("step_*.pt"))
    stored = torch.load(files[-1], weights_only=False)["rng"]
    assert restore_rng_state(stored) == {}
    assert random.getstate() == stored["python"]
    assert np.array_equal(np.random.get_state()[1], stored["numpy"][1])
    assert np.random.get_state()[2:] == stored["numpy"][2:]
    assert torch.equal(torch.get_rng_state(), stored["torch"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16, torch.float16])
def test_a_cast_that_lost_nothing_is_undone(dtype: torch.dtype) -> None:
    state = capture_rng_state()
    expected = draw()
    state["torch"] = state["torch"].to(dtype)
    assert restore_rng_state(state) == {}
    assert draw() == expected


def test_a_cast_that_lost_values_is_reported_and_changes_nothing() -> None:
    state = capture_rng_state()
    before = torch.get_rng_state()
    state["torch"] = state["torch"].float() + 0.25
    assert "cast to torch.float32" in restore_rng_state(state)["torch"]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_tensor_without_values_is_reported() -> None:
    state = {**capture_rng_state(), "torch": torch.empty(5056, dtype=torch.uint8, device="meta")}
    failures = restore_rng_state(state)
    assert list(failures) == ["torch"]
    assert "meta" in failures["torch"]


def test_every_part_is_tried_though_the_first_fails(caplog: pytest.LogCaptureFixture) -> None:
    state = capture_rng_state()
    np.random.rand(), torch.rand(1)
    with caplog.at_level(logging.WARNING):
        failures = restore_rng_state({**state, "python": "garbage"})
    assert list(failures) == ["python"]
    assert torch.equal(torch.get_rng_state(), state["torch"])
    assert [int(word) for word in np.random.get_state()[1]] == state["numpy"][1]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "python" in caplog.text


VALID_WORDS = list(range(624))
GARBAGE: list[tuple[str, Any]] = [
    ("python", None),
    ("python", 7),
    ("python", (3, (1, 2), None)),
    ("python", (4, tuple(range(625)), None)),
    ("python", (3, (*range(624), 625), None)),
    ("python", (3, (-1, *range(624)), None)),
    ("python", (3, (1 << 32, *range(624)), None)),
    ("python", (3, (0.5, *range(624)), None)),
    ("python", (3, (*range(624), 624), "gauss")),
    ("numpy", None),
    ("numpy", {}),
    ("numpy", {"bit_generator": "MT19937"}),
    ("numpy", {"bit_generator": "PCG64", "state": {"state": 1, "inc": 2}}),
    ("numpy", ("MT19937", VALID_WORDS[:-1], 1, 0, 0.0)),
    ("numpy", ("MT19937", VALID_WORDS, 625, 0, 0.0)),
    ("numpy", ("MT19937", VALID_WORDS, -1, 0, 0.0)),
    ("numpy", ("MT19937", VALID_WORDS, 1, 7, 0.0)),
    ("numpy", ("MT19937", VALID_WORDS, 1, 0, "x")),
    ("numpy", ("MT19937", [*VALID_WORDS[:-1], 1 << 32], 1, 0, 0.0)),
    ("numpy", ("MT19937", [*VALID_WORDS[:-1], 1.5], 1, 0, 0.0)),
    ("numpy", (["MT19937"], VALID_WORDS, 1, 0, 0.0)),
    ("torch", None),
    ("torch", [1, 2]),
    ("torch", torch.zeros(3, dtype=torch.uint8)),
    ("torch", torch.full((5056,), 255, dtype=torch.uint8)),
    ("torch", torch.full((5056,), float("nan"))),
]


@pytest.mark.parametrize(("part", "garbage"), GARBAGE)
def test_garbage_in_one_part_is_named_and_leaves_that_generator_alone(
    part: str, garbage: Any
) -> None:
    before = random.getstate(), repr(np.random.get_state()), torch.get_rng_state()
    failures = restore_rng_state({**capture_rng_state(), part: garbage})
    assert list(failures) == [part]
    assert failures[part]
    assert random.getstate() == before[0]
    assert repr(np.random.get_state()) == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


@pytest.mark.parametrize("state", [None, 5, "rng", [1], torch.ones(2)])
def test_what_is_no_mapping_is_reported_as_a_whole(state: Any) -> None:
    assert list(restore_rng_state(state)) == ["rng"]


def test_missing_and_unknown_parts_are_named() -> None:
    assert set(restore_rng_state({})) == {"python", "numpy", "torch"}
    assert set(restore_rng_state({**capture_rng_state(), "loader": 1, 7: 2})) == {"loader", "7"}


def test_another_bit_generator_is_stored_as_plain_data_and_restores() -> None:
    original = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        stored = through_torch(capture_rng_state())
        expected = np.random.rand(5).tolist()
        assert restore_rng_state(stored) == {}
        assert np.random.rand(5).tolist() == expected
    finally:
        np.random.set_bit_generator(original)
    failures = restore_rng_state(stored)
    assert list(failures) == ["numpy"]
    assert "PCG64" in failures["numpy"]


class Devices:
    """Stands in for torch.cuda on a machine without one: as many devices as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.states = [torch.full((16,), index, dtype=torch.uint8) for index in range(count)]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: list(self.states))
        monkeypatch.setattr(torch.cuda, "set_rng_state", self.set)

    def set(self, state: torch.Tensor, device: int) -> None:
        if state.numel() != 16:
            raise RuntimeError("RNG state is wrong size\nand more")
        self.states[device] = state


@pytest.mark.parametrize(("saved", "here"), [(2, 2), (3, 1), (1, 3)])
def test_cuda_devices_that_both_sides_have_are_restored_and_the_others_named(
    saved: int, here: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    Devices(monkeypatch, saved)
    state = through_torch(capture_rng_state())
    assert len(state["cuda"]) == saved
    present = Devices(monkeypatch, here)
    present.states = [torch.full((16,), 99, dtype=torch.uint8) for _ in range(here)]
    failures = restore_rng_state(state)
    shared = min(saved, here)
    assert set(failures) == {f"cuda:{index}" for index in range(shared, max(saved, here))}
    expected = [*range(shared), *[99] * (here - shared)]
    assert [int(state[0]) for state in present.states] == expected
    for reason in failures.values():
        assert f"saved for {saved} devices" in reason


def test_one_bad_cuda_state_costs_only_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    Devices(monkeypatch, 2)
    state = capture_rng_state()
    state["cuda"][0] = torch.zeros(3, dtype=torch.uint8)
    present = Devices(monkeypatch, 2)
    present.states[1].fill_(50)
    assert restore_rng_state(state) == {"cuda:0": "RNG state is wrong size"}
    assert int(present.states[1][0]) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_states_of_devices_that_are_not_here_are_reported() -> None:
    state = {**capture_rng_state(), "cuda": [torch.zeros(16, dtype=torch.uint8)] * 2}
    failures = restore_rng_state(state)
    assert list(failures) == ["cuda"]
    assert "2 CUDA devices" in failures["cuda"]


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has MPS")
def test_an_mps_state_without_mps_is_reported() -> None:
    state = {**capture_rng_state(), "mps": torch.zeros(44, dtype=torch.uint8)}
    assert list(restore_rng_state(state)) == ["mps"]


def test_mps_is_captured_and_restored_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    restored: list[torch.Tensor] = []
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: torch.full((44,), 3).byte())
    monkeypatch.setattr(torch.mps, "set_rng_state", restored.append)
    state = through_torch(capture_rng_state())
    assert restore_rng_state(state) == {}
    assert [int(tensor[0]) for tensor in restored] == [3]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_real_cuda_devices_continue_the_same_numbers() -> None:
    torch.cuda.manual_seed_all(5)
    state = through_torch(capture_rng_state())
    expected = torch.rand(3, device="cuda").tolist()
    state["cuda"] = [saved.to("cuda").float() for saved in state["cuda"]]
    assert restore_rng_state(state) == {}
    assert torch.rand(3, device="cuda").tolist() == expected


def test_works_where_numpy_is_not_installed() -> None:
    program = (
        "import sys; sys.modules['numpy'] = None\n"
        "import torch\n"
        "from trainer_core.rng import capture_rng_state, restore_rng_state\n"
        "state = capture_rng_state()\n"
        "assert sorted(state) == ['python', 'torch'], state.keys()\n"
        "assert restore_rng_state(state) == {}\n"
        "words = ('MT19937', list(range(624)), 1, 0, 0.0)\n"
        "print(restore_rng_state({**state, 'numpy': words}))\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{'numpy': 'numpy is not installed here'}"
