"""Interrupted and resumed is never interrupted: not one bit differs, whatever the feature and step.

The features are those of `python -m benchmarks exact_resume`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.resume_features import FEATURES, STEPS, Feature, Net, Run, differing_bits
from tests.torch_process import TorchProcesses

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
IN_PROCESS = [feature for feature in FEATURES if not feature.workers]
# Each fit begins with all modules in training mode, whatever a callback has made of them.
STAYING = [feature for feature in FEATURES if "callbacks" not in feature.more(Net())]
WITH_WORKERS = [feature for feature in FEATURES if feature.workers]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """So that no sum is taken in another order because a machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def name_of(feature: Feature) -> str:
    return feature.name


class Whole:
    """The run that is never interrupted, with a checkpoint of each of its steps."""

    def __init__(self, feature: Feature, directory: Path) -> None:
        run = Run(feature, 0, directory)
        self.feature = feature
        self.losses = [record["loss"] for record in run.trainer.fit(STEPS).metrics]
        self.end = run.trainer.state_dict()
        self.batches = run.batches
        self.path_for = run.manager.path_for

    def saved(self, step: int) -> Any:
        return torch.load(self.path_for(step), weights_only=True)

    def compare(self, run: Run, losses: list[float]) -> None:
        """The end of a run that did the last of the steps."""
        end = run.trainer.state_dict()
        assert list(end) == list(self.end)
        assert {key: differing_bits(end[key], self.end[key]) for key in end} == dict.fromkeys(
            end, 0
        )
        assert differing_bits(run.batches, self.batches[-len(run.batches) :]) == 0
        assert losses == self.losses[-len(losses) :]


Wholes = Callable[[Feature], Whole]


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Wholes:
    """The whole run of a feature, made when it is first asked for; only looked at after that."""
    made: dict[str, Whole] = {}

    def whole(feature: Feature) -> Whole:
        if feature.name not in made:
            made[feature.name] = Whole(feature, tmp_path_factory.mktemp("whole"))
        return made[feature.name]

    return whole


def resumed(feature: Feature, state: Any) -> Run:
    """A new run, with other weights and other random numbers than the one that was saved."""
    run = Run(feature, 99)
    run.trainer.resume(state)
    return run


def resume_at(whole: Whole, steps: Iterator[int] | range) -> None:
    for step in steps:
        run = resumed(whole.feature, whole.saved(step))
        result = run.trainer.fit(STEPS)
        assert len(result.metrics) == STEPS - step
        whole.compare(run, [record["loss"] for record in result.metrics])


@pytest.mark.parametrize("feature", IN_PROCESS, ids=name_of)
def test_resumed_after_any_step(feature: Feature, wholes: Wholes) -> None:
    resume_at(wholes(feature), range(1, STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("feature", WITH_WORKERS, ids=name_of)
def test_resumed_after_any_step_with_worker_processes(feature: Feature, wholes: Wholes) -> None:
    """Of each every third step, of all together every one; `benchmarks.exact_resume` has all."""
    resume_at(wholes(feature), range(1 + WITH_WORKERS.index(feature) % 3, STEPS, 3))


# With a state that neither a state dict nor a generator has.
REMEMBERING = [f for f in IN_PROCESS if any(w in f.name for w in ("remembers", "passes"))]


@pytest.mark.filterwarnings(
    "ignore:approximate:trainer_core.ResumeWarning"
)  # which is told where it can be known
@pytest.mark.parametrize("feature", REMEMBERING, ids=name_of)
def test_without_what_is_remembered_it_would_be_another_run(
    feature: Feature, wholes: Wholes
) -> None:
    whole = wholes(feature)
    state = whole.saved(9)
    state.pop("attributes")
    state["data"].pop("attributes", None)
    run = resumed(feature, state)
    losses = [record["loss"] for record in run.trainer.fit(STEPS).metrics]
    assert losses != whole.losses[-len(losses) :]


def chain(feature: Feature, whole: Whole) -> None:
    """A new trainer for each step: so also twice in one pass, and at the end of each."""
    state, losses, batches = whole.saved(1), whole.losses[:1], []
    for step in range(2, STEPS + 1):
        run = resumed(feature, state)
        losses += [record["loss"] for record in run.trainer.fit(step).metrics]
        batches += run.batches
        state = run.trainer.state_dict()
    run.batches = batches
    whole.compare(run, losses)


@pytest.mark.parametrize("feature", IN_PROCESS, ids=name_of)
def test_resumed_after_every_step(feature: Feature, wholes: Wholes) -> None:
    chain(feature, wholes(feature))


@pytest.mark.slow
@pytest.mark.parametrize("feature", WITH_WORKERS, ids=name_of)
def test_resumed_after_every_step_with_worker_processes(feature: Feature, wholes: Wholes) -> None:
    chain(feature, wholes(feature))


@pytest.mark.parametrize(
    "feature",
    [pytest.param(f, marks=pytest.mark.slow if f.workers else ()) for f in STAYING],
    ids=name_of,
)
def test_fits_in_a_row_are_one_fit(feature: Feature, wholes: Wholes) -> None:
    whole = wholes(feature)
    run = Run(feature, 0)
    losses = [run.trainer.fit(step).final_loss for step in range(1, STEPS + 1)]
    whole.compare(run, losses)  # type: ignore[arg-type]


# In the midst of a step


@pytest.mark.parametrize(
    "name", ["accumulation over 3 micro-batches", "accumulation, fp16, clipping"]
)
@pytest.mark.parametrize("stop_after", range(1, 20))
def test_stopped_after_any_micro_batch(
    name: str, stop_after: int, tmp_path: Path, wholes: Wholes
) -> None:
    feature = next(feature for feature in FEATURES if feature.name == name)
    whole = wholes(feature)
    first = Run(feature, 0, tmp_path / "first", stop_after=stop_after)
    result = first.trainer.fit(STEPS)
    assert result.stopped_by == "enough" and len(first.batches) == stop_after
    state = first.manager.load_latest()
    assert state["step"] == result.steps
    per_step = feature.options["accumulation_steps"]
    if "fp16" not in name:  # there some steps are skipped, and not counted
        assert result.steps == stop_after // per_step
        assert ("accumulation" in state) == (stop_after % per_step > 0)
    run = resumed(feature, state)
    losses = [record["loss"] for record in run.trainer.fit(STEPS).metrics]
    whole.compare(run, losses)
    assert len(run.batches) + stop_after == len(whole.batches)


# In another process, after a kill

RUN = """
import os, signal, sys
import torch
from benchmarks.resume_features import FEATURES, STEPS, Run

name, directory, kill_at, end = sys.argv[1:]
torch.set_num_threads(1)
feature = next(feature for feature in FEATURES if feature.name == name)

class Kill:
    def on_save(self, trainer, step, path):
        if step == int(kill_at):
            os.kill(os.getpid(), signal.SIGKILL)

seed = 99 if os.path.exists(directory) else 0  # only the first one is to count
run = Run(feature, seed, directory, callbacks=[Kill()])
state = run.manager.load_latest()
if state is not None:
    run.trainer.resume(state)
run.trainer.fit(STEPS)
torch.save({**run.trainer.state_dict(), "batches": run.batches}, end)
"""

KILLED = ["2 workers, and all of these together", "StatefulDataLoader, 2 workers, augmentation"]


@pytest.mark.parametrize("name", KILLED)
def test_killed_and_resumed_in_other_processes(
    name: str, torch_processes: TorchProcesses, tmp_path: Path
) -> None:
    def run(directory: str, kill_at: int, expected: int) -> Any:
        arguments = [name, str(tmp_path / directory), str(kill_at), str(tmp_path / "end.pt")]
        done = torch_processes.run("-c", RUN, *arguments)
        assert done.returncode == expected, done.stderr
        return torch.load(tmp_path / "end.pt", weights_only=True) if not expected else None

    whole = run("whole", 0, 0)
    for kill_at in (2, 9):
        run("killed", kill_at, -9)
    again = run("killed", 0, 0)
    batches = again.pop("batches")
    assert differing_bits(batches, whole.pop("batches")[-len(batches) :]) == 0
    assert {key: differing_bits(again[key], whole[key]) for key in whole} == dict.fromkeys(whole, 0)
    assert whole["step"] == STEPS
