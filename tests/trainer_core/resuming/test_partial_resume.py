"""What may be left out of a resume, by name; and everything else, which may not."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from trainer_core import CheckpointError, PrecisionPlan, ResumeWarning, Trainer

SCALED = PrecisionPlan("fp16", autocast_enabled=False, use_scaler=True)


class Net(nn.Module):
    def __init__(self, last: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.last = nn.Linear(3, last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.last(torch.relu(self.first(x))).square().sum()
        return loss


def trainer(
    seed: int = 0, *, model: nn.Module | None = None, kind: Any = None, **options: Any
) -> Trainer:
    torch.manual_seed(seed)
    model = Net() if model is None else model
    optimizer = (kind or (lambda p: torch.optim.Adam(p, lr=0.1)))(model.parameters())
    options.setdefault("loader", [torch.full((2, 2), float(i)) for i in range(5)])
    make = options.pop("make_scheduler", lambda o: torch.optim.lr_scheduler.StepLR(o, 2))
    loader = options.pop("loader")
    return Trainer(model, optimizer, loader, device="cpu", scheduler=make(optimizer), **options)


@pytest.fixture
def state() -> dict[str, Any]:
    one = trainer()
    one.fit(3)
    return copy.deepcopy(one.state_dict())


def all_of(one: Trainer) -> dict[str, Any]:
    return copy.deepcopy(one.state_dict())


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return bool(torch.equal(one, other))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def refused(one: Trainer, state: Any, words: str, error: Any = CheckpointError) -> None:
    """Without leave it is an error that changes nothing."""
    before = all_of(one)
    with pytest.raises(error, match=words):
        one.resume(state)
    assert same(all_of(one), before)


def told(one: Trainer, state: Any, *allowed: str) -> str:
    with pytest.warns(ResumeWarning) as caught:
        one.resume(state, allow_partial=allowed)
    assert caught[-1].filename == __file__
    return str(caught[-1].message)


def test_names_that_no_part_has_are_refused(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no part is called 'weights': model, optimizer, "):
        trainer().resume(state, allow_partial=("weights",))


def test_one_name_may_be_given_alone(state: dict[str, Any]) -> None:
    trainer(9).resume(state, allow_partial="rng")


@pytest.mark.filterwarnings("ignore::trainer_core.resuming.resume.ResumeWarning")
def test_a_model_with_another_head(state: dict[str, Any]) -> None:
    refused(trainer(9, model=Net(4)), state, "size mismatch", RuntimeError)


def test_a_model_with_another_head_takes_what_fits(state: dict[str, Any]) -> None:
    one = trainer(9, model=Net(4))
    head = one.model.last.weight.clone()  # type: ignore[union-attr, operator]
    words = told(one, state, "model", "optimizer")
    assert "  - model: 2 of 4 tensors not restored, as allowed: last.weight, last.bias" in words
    assert "  - optimizer: not restored, as allowed: " in words
    assert torch.equal(one.model.first.weight, state["model"]["first.weight"])  # type: ignore[union-attr]
    assert torch.equal(one.model.last.weight, head)  # type: ignore[union-attr]
    assert one.optimizer.state_dict()["state"] == {}
    assert one.fit(5).steps == 5


@pytest.mark.filterwarnings(
    "ignore:the checkpoint of step:trainer_core.resuming.resume.ResumeWarning"
)
def test_another_optimizer(state: dict[str, Any]) -> None:
    def rprop(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Rprop(parameters, lr=0.3)

    one = trainer(9, kind=rprop)
    refused(one, state, "which Rprop needs")
    assert "optimizer: not restored, as allowed: " in told(one, state, "optimizer")
    assert one.optimizer.param_groups[0]["lr"] == 0.3 and one.step == 3
    assert same(one.model.state_dict(), state["model"])


def test_a_scheduler_that_refuses(state: dict[str, Any]) -> None:
    class Refusing(torch.optim.lr_scheduler.StepLR):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            if state_dict["last_epoch"] == 3:
                raise RuntimeError("not this one")
            super().load_state_dict(state_dict)

    one = trainer(9, make_scheduler=lambda o: Refusing(o, 2))
    refused(one, state, "not this one", RuntimeError)
    assert "scheduler: not restored, as allowed: not this one" in told(one, state, "scheduler")
    assert one.scheduler.last_epoch == 0 and one.step == 3


def test_a_scaler_that_refuses(state: dict[str, Any]) -> None:
    state = {**state, "scaler": {"scale": 8.0}, "precision": SCALED.as_dict()}
    one = trainer(9, precision=SCALED)
    one.resume(state)
    with pytest.raises(CheckpointError, match="scaler: could not be restored: "):
        one.fit(4)
    one = trainer(9, precision=SCALED)
    one.resume(state, allow_partial=("scaler",))
    with pytest.warns(ResumeWarning, match="scaler: 'growth_factor'"):
        one.fit(4)
    assert one.state_dict()["scaler"]["scale"] == 65536.0


def test_a_coordinator_that_refuses(state: dict[str, Any]) -> None:
    class Coordinator:
        def start(self) -> None: ...
        def after_optimizer_step(self, model: nn.Module, step: int) -> None: ...
        def stop(self) -> None: ...
        def state_dict(self) -> dict[str, Any] | None:
            return None

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            raise ConnectionError("not now")

    state["coordinator"] = {"local_step": 3}
    one = trainer(9, coordinator=Coordinator())
    one.resume(state, allow_partial=("coordinator",))
    with pytest.warns(ResumeWarning, match="coordinator: not now"):
        assert one.fit(4).steps == 4


class Lost:
    """A loader that cannot find its place."""

    def __iter__(self) -> Any:
        return iter([torch.ones(2, 2)] * 3)

    def state_dict(self) -> dict[str, Any]:
        return {"at": 1}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise OSError("the index is gone")


def test_data_whose_place_is_lost() -> None:
    first = trainer(loader=Lost())
    first.fit(1)
    state = copy.deepcopy(first.state_dict())
    one = trainer(9, loader=Lost())
    one.resume(state)
    with pytest.raises(CheckpointError, match="data: the loader could not go to its place"):
        one.fit(2)
    one = trainer(9, loader=Lost())
    one.resume(state, allow_partial=("data",))
    with pytest.warns(ResumeWarning, match="approximate.*\n.*the index is gone; a new pass begins"):
        assert one.fit(2).steps == 2


def stopped() -> dict[str, Any]:
    one = trainer(accumulation_steps=3)
    seen: list[Any] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        seen.append(batch)
        if len(seen) == 5:
            one.stop("enough")
        return model(batch)

    one.loss_fn = loss
    assert one.fit(4).stopped_by == "enough"
    return copy.deepcopy(one.state_dict())


def test_micro_batches_of_a_step_of_another_size() -> None:
    state = stopped()
    section = state["accumulation"]
    assert (section["micro_batches"], section["of"], section["samples"]) == (2, 3, 4)
    one = trainer(9, accumulation_steps=2)
    refused(one, state, "accumulation: 2 of a step's 3 micro-batches were done, while a step has 2")
    assert "accumulation: 2 of a step's 3" in told(one, state, "accumulation")
    assert "accumulation" not in one.state_dict()
    assert one.fit(3).samples == 2 * 3 + 2 * 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gradients": 3}, "is not the state of a step"),
        ({"samples": -1}, "its counts are not whole numbers"),
        ({"loss": 3.0}, "accumulation.loss: is not one number"),
        (
            {"gradients": {"other": torch.ones(1)}},
            "accumulation.gradients.other: fits no parameter",
        ),
        ({"gradients": {"last.bias": torch.ones(7)}}, "accumulation.gradients.last.bias: fits no"),
    ],
)
def test_micro_batches_that_are_malformed(change: dict[str, Any], words: str) -> None:
    state = stopped()
    state["accumulation"] = {**state["accumulation"], **change}
    refused(trainer(9, accumulation_steps=3), state, words)


# What an optimizer was given and has not kept


class Forgetful(torch.optim.Adam):
    """Loads in place what it already has, and nothing else: as loaders of sharded files did."""

    forgets = "state"

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.forgets == "state":
            state_dict = {**state_dict, "state": {}}
        super().load_state_dict(state_dict)
        if self.forgets == "lr":
            self.param_groups[0]["lr"] = 1.0
        if self.forgets == "part":
            for entry in self.state.values():
                del entry["exp_avg_sq"]


@pytest.mark.parametrize(
    ("forgets", "words"),
    [
        ("state", r"optimizer\.state\.0\.step: was saved, and is gone after loading"),
        ("part", r"optimizer\.state\.0\.exp_avg_sq: was saved, and is gone after loading"),
        ("lr", r"optimizer\.param_groups\[0\]\.lr: 0\.\d+ was saved, and after loading it is 1\.0"),
    ],
)
def test_what_an_optimizer_has_not_kept_is_an_error(
    forgets: str, words: str, state: dict[str, Any]
) -> None:
    one = trainer(9, kind=lambda p: Forgetful(p, lr=0.1))
    one.optimizer.forgets = forgets  # type: ignore[attr-defined]
    refused(one, state, words)


def test_random_numbers_stay_as_they_were_where_a_resume_fails(state: dict[str, Any]) -> None:
    one = trainer(9, kind=lambda p: Forgetful(p, lr=0.1))
    before = torch.get_rng_state()
    refused(one, state, "is gone after loading")
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_that_are_not_finite_are_told(state: dict[str, Any]) -> None:
    state["model"]["last.bias"][0] = float("nan")
    words = told(trainer(9), state)
    assert words.splitlines()[1:] == ["  - model.last.bias: holds numbers that are not finite"]


# What is approximate is said once


class Drawing(IterableDataset[torch.Tensor]):
    """Draws for each batch, so that what it gives hangs on what the model has drawn in between."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.randn(2)


def test_a_stream_that_draws_is_approximate_and_says_so_once() -> None:
    def made(seed: int) -> Trainer:
        return trainer(seed, loader=DataLoader(Drawing(), batch_size=2))

    first = made(0)
    first.fit(3)
    one = made(9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        one.resume(copy.deepcopy(first.state_dict()))
        one.fit(4)
        one.fit(6)
    (warning,) = caught
    assert warning.filename == __file__ and warning.category is ResumeWarning
    lines = str(warning.message).splitlines()
    assert lines[0] == "approximate: the data do not go on exactly where they were:"
    assert lines[1].startswith("  - batches were read again, and that drew random numbers")


def test_an_iterator_is_approximate_and_says_so_once() -> None:
    def made(seed: int) -> Trainer:
        return trainer(seed, loader=iter([torch.ones(2, 2)] * 9))

    first = made(0)
    first.fit(3)
    one = made(9)
    words = told(one, copy.deepcopy(first.state_dict()))
    assert words.splitlines()[1:] == [
        "  - data: approximate: the loader is an iterator, and goes on from wherever it stands"
    ]
    assert one.fit(4).steps == 4


def test_another_loader_after_the_resume_takes_the_place_over() -> None:
    batches = [torch.full((2, 2), float(i)) for i in range(5)]
    first = trainer(loader=batches)
    first.fit(3)
    one = trainer(9, loader=batches)
    one.resume(copy.deepcopy(first.state_dict()))
    one.dataloader = list(batches)
    seen: list[float] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        seen.append(float(batch[0, 0]))
        return model(batch)

    one.loss_fn = loss
    one.fit(6)
    assert seen == [3.0, 4.0, 0.0]


def test_weights_too_great_to_be_summed_up_are_finite_all_the_same(state: dict[str, Any]) -> None:
    state["model"]["last.weight"][:] = 3e38
    trainer(9).resume(state)  # a warning would be an error


class TwoAlike(nn.Module):
    """Two layers of one shape: by position alone their moments could be taken for each other's."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        setattr(self, first, nn.Linear(2, 2))
        setattr(self, second, nn.Linear(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.get_submodule("b")(self.get_submodule("a")(x)).square().mean()
        return out


def test_layers_that_were_declared_in_another_order_do_not_get_each_others_moments() -> None:
    one = trainer(model=TwoAlike("a", "b"))
    one.fit(3)
    saved = copy.deepcopy(one.state_dict())
    words = r"optimizer.param_groups.0: .* another order: b.weight where a.weight was"
    refused(trainer(model=TwoAlike("b", "a")), saved, words)
    del saved["optimizer_names"]  # as older files are: nothing tells
    trainer(model=TwoAlike("b", "a")).resume(saved)


# What does not fit is told in words that help


def refusal(one: Trainer, state: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResumeWarning)
        with pytest.raises(CheckpointError) as caught:
            one.resume(state)
    return caught.value


def test_a_model_that_does_not_fit_is_told_by_names_and_with_the_way_out(
    state: dict[str, Any],
) -> None:
    state["model"] |= {f"old.{number}": torch.ones(1) for number in range(6)}
    del state["model"]["first.bias"]
    error = refusal(trainer(9, model=Net(4)), state)
    first, _, rest = str(error).partition("\n")
    assert first == (
        "model: does not fit: 1 not in the checkpoint: first.bias; 6 only in the checkpoint: "
        "old.0, old.1, old.2, old.3 and 2 more; 2 of another shape: last.weight (1, 3), "
        'here (4, 3), last.bias (1,), here (4,) (allow_partial=("model",) loads what fits)'
    )
    assert rest.startswith("Error(s) in loading state_dict for Net") and len(rest) <= 2000
    assert type(error.__cause__) is RuntimeError  # torch's own


def test_each_part_that_does_not_fit_names_its_way_out(state: dict[str, Any]) -> None:
    groups = {**state["optimizer"], "param_groups": state["optimizer"]["param_groups"] * 2}
    error = refusal(trainer(9), {**state, "optimizer": groups})
    assert isinstance(error, ValueError) and type(error.__cause__) is ValueError  # as torch's
    assert 'allow_partial=("optimizer",) goes on without that state' in str(error)

    def sequence(optimizer: Any) -> Any:
        parts = [torch.optim.lr_scheduler.ConstantLR(optimizer) for _ in range(2)]
        return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [2])

    error = refusal(trainer(9, make_scheduler=sequence), state)
    assert "scheduler: does not fit: '_schedulers' (allow_partial=(\"scheduler\",) " in str(error)
    assert type(error.__cause__) is KeyError


def test_a_failure_of_the_system_is_no_misfit(state: dict[str, Any]) -> None:
    class Full(torch.optim.Adam):
        def load_state_dict(self, state_dict: Any) -> None:
            raise torch.OutOfMemoryError("no room")

    one = trainer(9, kind=lambda parameters: Full(parameters, lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResumeWarning)
        with pytest.raises(torch.OutOfMemoryError, match="^no room$"):
            one.resume(state, allow_partial=("model",))
