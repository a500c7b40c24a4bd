"""The schema builds what safe loading takes, and names by key path what it does not."""

import argparse
import collections
import enum
import io
import pathlib
import pickletools
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer_core import (
    CheckpointError,
    PrecisionPlan,
    build_checkpoint,
    check_checkpoint,
)
from trainer_core.state import KEYS, checkpoint_problems, to_plain

SEED_RUNS = Path(__file__).parents[2] / "fixtures/corpus/seed-runs"
FP32 = PrecisionPlan("fp32", autocast_enabled=False, use_scaler=False)


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def built(**changes: Any) -> dict[str, Any]:
    model, optimizer = trained()
    parts: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 4,
        "samples": 8,
        "tokens": 16,
        "precision": FP32,
    }
    return build_checkpoint(**{**parts, **changes})


def loaded_safely(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_every_key_of_the_schema_is_there_and_no_other() -> None:
    assert tuple(built()) == KEYS
    assert set(KEYS) == {
        *("model", "optimizer", "scaler", "scheduler", "step", "samples", "tokens", "config"),
        *("rng", "coordinator", "precision"),
    }


def test_what_is_built_loads_in_another_process_with_weights_only(tmp_path: Path) -> None:
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    state = built(
        model=model.state_dict(),
        optimizer=optimizer.state_dict(),
        scheduler=scheduler.state_dict(),
        scaler={"scale": 65536.0, "growth_factor": 2.0, "_growth_tracker": 0},
        config=argparse.Namespace(lr=1e-3, out=pathlib.Path("/runs/a"), token="hf_x"),
        coordinator={"local_step": 4, "baseline": model.state_dict(), "outer": None},
    )
    torch.save(state, tmp_path / "a.pt")
    program = (
        "import sys, torch; s = torch.load(sys.argv[1], weights_only=True)\n"
        "print(s['step'], s['config'], s['precision'], s['scheduler']['last_epoch'],\n"
        "      s['model']['weight'].tolist())"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "a.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    config = {"lr": 1e-3, "out": "/runs/a", "token": "<redacted>"}
    expected = (4, config, FP32.as_dict(), 0, model.state_dict()["weight"].tolist())
    assert done.stdout.strip() == " ".join(map(str, expected))
    assert "numpy" not in pickled_globals(tmp_path / "a.pt")


def pickled_globals(path: Path) -> str:
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        operations = pickletools.genops(archive.read(name))
        return " ".join(str(argument) for code, argument, _ in operations if code.name == "GLOBAL")


def test_tensors_and_untouched_containers_are_taken_as_they_are() -> None:
    model, _ = trained()
    weights = model.state_dict()
    state = built(model=weights)
    assert state["model"] is weights
    assert state["model"]._metadata is weights._metadata  # type: ignore[attr-defined]
    assert state["model"]["weight"].data_ptr() == model.weight.data_ptr()  # type: ignore[operator,union-attr]


def test_rng_is_captured_now_unless_given() -> None:
    assert torch.equal(built()["rng"]["torch"], torch.get_rng_state())
    assert built(rng={"python": (3, (), None)})["rng"] == {"python": (3, (), None)}


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


def test_numpy_scalars_enums_and_paths_become_plain_exactly() -> None:
    third = np.float64(1) / 3
    group = {
        "params": [0],
        "lr": third,
        "half": np.float16(0.1),
        "steps": np.int64(2**62),
        "on": np.bool_(True),
        "where": pathlib.PurePosixPath("a/b"),
        "color": Color.RED,
        "level": Level.LOW,
        "betas": (np.float32(0.5), 0.999),
        "version": torch.__version__,
        "count": collections.Counter("aab"),
        "default": collections.defaultdict(list, {np.int64(3): [1]}),
    }
    optimizer = {"state": {}, "param_groups": [group]}
    stored = loaded_safely(built(optimizer=optimizer))["optimizer"]["param_groups"][0]
    assert stored == {
        "params": [0],
        "lr": 1 / 3,
        "half": 0.0999755859375,  # 1638/2**14, the nearest float16 to 0.1
        "steps": 2**62,
        "on": True,
        "where": "a/b",
        "color": "red",
        "level": 1,
        "betas": (0.5, 0.999),
        "version": str(torch.__version__),
        "count": {"a": 2, "b": 1},
        "default": {3: [1]},
    }
    assert {type(value) for value in stored.values()} <= {
        *(list, float, int, bool, str, tuple, dict, collections.Counter)
    }
    assert group["lr"] is third  # the caller's own state is not changed


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda: 1, "a function"),
        (np.array(["a"]), "an array of <U1"),
        (np.array([object()]), "an array of object"),
        (np.zeros(2, "datetime64[s]"), "an array of datetime64"),
        (np.zeros(2, ">f4"), "an array of >f4"),
        (np.longdouble(1) / 3, "longdouble"),
        (np.datetime64("2026-01-01"), "datetime64"),
        (object(), "object"),
        (frozenset((1,)), "frozenset"),
        (range(3), "range"),
        (types.SimpleNamespace(a=1), "SimpleNamespace"),
        (torch.Generator(), "Generator"),
    ],
)
def test_what_has_no_plain_form_is_named_by_its_path(value: Any, words: str) -> None:
    scheduler = {"last_epoch": 1, "lr_lambdas": [None, {"deep": (value,)}]}
    with pytest.raises(CheckpointError, match=r"scheduler\.lr_lambdas\[1\]\.deep\[0\]: ") as caught:
        built(scheduler=scheduler)
    assert words in str(caught.value)


class Marked(torch.Tensor):
    pass


def test_a_tensor_subclass_is_refused_until_it_is_registered() -> None:
    weights = {"w": torch.ones(2).as_subclass(Marked)}
    with pytest.raises(CheckpointError, match=r"model\.w: .*Marked.*add_safe_globals"):
        built(model=weights)
    with torch.serialization.safe_globals([Marked]):
        assert type(loaded_safely(built(model=weights))["model"]["w"]) is Marked


def test_a_structure_that_contains_itself_is_refused_without_a_recursion_error() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="contains itself"):
        to_plain({"a": loop}, "scheduler")


def test_sharing_survives_conversion_and_costs_one_visit() -> None:
    shared = [np.float64(2)]
    doubled: Any = shared
    for _ in range(60):  # 2**60 visits, if each were walked
        doubled = [doubled, doubled]
    plain = to_plain(doubled, "coordinator")
    assert plain[0] is plain[1]
    assert to_plain([shared, shared], "x") == [[2.0], [2.0]]


# ------------------------------------------------------------------------------------- checking


def test_checkpoints_of_the_original_system_pass() -> None:
    files = sorted(SEED_RUNS.glob("*/step_*.pt"))
    assert len(files) == 12
    for file in files:
        check_checkpoint(torch.load(file, weights_only=False), complete=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": [1]}, "model: is a list, not a mapping"),
        ({"model": {1: 2}}, "model: has the key 1"),
        ({"optimizer": None}, "optimizer: is nothing"),
        ({"optimizer": {"state": {}}}, "optimizer.param_groups: is missing"),
        ({"optimizer": {"param_groups": []}}, "optimizer.state: is missing"),
        ({"optimizer": {"state": [], "param_groups": []}}, "optimizer.state: is a list"),
        ({"optimizer": {"state": {}, "param_groups": [{}]}}, "optimizer.param_groups[0]: "),
        ({"step": "4"}, "step: is a str, not an integer"),
        ({"step": True}, "step: is a bool"),
        ({"step": 4.0}, "step: is a float"),
        ({"step": -1}, "step: is -1, below zero"),
        ({"samples": None}, "samples: is nothing"),
        ({"tokens": -5}, "tokens: is -5"),
        ({"scaler": 1}, "scaler: is a int"),
        ({"scheduler": []}, "scheduler: is a list"),
        ({"config": "x"}, "config: is a str"),
        ({"rng": [1]}, "rng: is a list"),
        ({"precision": "fp32"}, "precision: is a str"),
        ({"precision": {"mode": "fp32"}}, "precision.autocast_enabled: is nothing"),
        ({"precision": {**FP32.as_dict(), "use_scaler": 1}}, "precision.use_scaler: is a int"),
        ({"coordinator": 3}, "coordinator: is a int"),
        ({"coordinator": {"role": 1}}, "coordinator.role: is a int"),
        ({"coordinator": {"baseline": [1]}}, "coordinator.baseline: is a list"),
        ({"coordinator": {"local_step": None}}, "coordinator.local_step: is nothing"),
        ({"coordinator": {"local_step": 5}}, "coordinator.local_step: is 5, while step is 4"),
    ],
)
def test_each_wrong_key_is_named(changes: dict[str, Any], words: str) -> None:
    state = {**built(), **changes}
    assert any(problem.startswith(words) for problem in checkpoint_problems(state))
    with pytest.raises(CheckpointError):
        check_checkpoint(state)


def test_every_problem_is_listed_and_the_first_is_in_the_words() -> None:
    state = {**built(), "step": -1, "rng": 5}
    assert len(checkpoint_problems(state)) == 2
    with pytest.raises(CheckpointError, match=r"step: is -1, below zero \(and 1 more\)"):
        check_checkpoint(state)


@pytest.mark.parametrize("key", KEYS)
def test_a_missing_key(key: str) -> None:
    state = built()
    del state[key]
    assert checkpoint_problems(state, complete=True) == [f"{key}: is missing"]
    required = key in ("model", "optimizer", "step")
    assert checkpoint_problems(state) == ([f"{key}: is missing"] if required else [])


def test_other_keys_are_welcome_and_nothing_but_a_dictionary_passes() -> None:
    check_checkpoint({**built(), "ema": {"w": 1}}, complete=True)
    for other in (None, [1], torch.ones(1)):
        with pytest.raises(CheckpointError, match="not a dictionary"):
            check_checkpoint(other)


def test_a_checkpoint_is_never_built_wrong() -> None:
    with pytest.raises(CheckpointError, match="step: is -1"):
        built(step=-1)
    assert built(step=np.int64(4))["step"] == 4


def test_empty_bytes_do_not_make_a_checkpoint_that_torch_refuses(tmp_path: Path) -> None:
    """torch writes them as a call of `bytes`, which its own safe loading does not know."""
    state = built(
        config={"a": b"", "b": [b"x"]}, coordinator={"deep": [(b"", b"full")], "set": {b"s"}}
    )
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert loaded["coordinator"] == {"deep": [(b"", b"full")], "set": {b"s"}}
    for value in ({b"": 1}, {("a", b""): 1}, {b""}):
        with pytest.raises(CheckpointError, match=r"coordinator\.deep: .* empty bytes"):
            built(coordinator={"deep": value})
