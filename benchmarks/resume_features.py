"""Small trainings, each with one feature that is hard to resume exactly, and how to compare them.

A feature makes its trainer from scratch, as a new process would. `differing_bits` compares whatever
a checkpoint holds.
"""

from __future__ import annotations

import logging
import math
import random
import struct
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Subset
from torch.utils.data.distributed import DistributedSampler

from trainer_core import CheckpointManager, PrecisionPlan, Trainer

STEPS = 13
"""Two passes and a bit over `SAMPLES` in batches of `BATCH`; the last batch of a pass is short."""

SAMPLES, BATCH, WIDTH = 22, 4, 6
FP16 = PrecisionPlan("fp16", autocast_enabled=True, use_scaler=True)


class Net(nn.Module):
    """Dropout, batch statistics, two layers; gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.3)
        self.second = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(torch.relu(self.norm(self.first(x))))
        loss: torch.Tensor = (self.second(hidden) - x.sum(1, keepdim=True)).square().mean()
        return loss


class Remembering(Net):
    """Its forward hangs on what no state dict has, and changes it."""

    seen: torch.Tensor
    drift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.recent = 0, deque([1.0], maxlen=3)
        self.mask: torch.Tensor | None = None
        self.generator = torch.Generator().manual_seed(31)
        self.noise = Noise()
        self.register_buffer("seen", torch.zeros(WIDTH), persistent=False)
        self.register_buffer("drift", torch.ones(WIDTH), persistent=False)
        self.aliases = {"seen": self.seen}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.dropout.p = 0.3 / self.calls  # a schedule within torch's own module
        if self.mask is None:
            self.mask = torch.rand(WIDTH) > 0.2
        self.aliases["seen"] += x.mean(0)  # in place: the buffer itself
        self.drift = self.drift * 0.9 + x.mean(0)
        kept = torch.rand(WIDTH, generator=self.generator) > 0.3
        x = x * kept * self.mask + 0.1 * self.seen + self.drift + self.noise.draw()
        self.loss: torch.Tensor = super().forward(x) / sum(self.recent)
        self.recent.append(1.0 + self.calls % 4)
        return self.loss


@dataclass(frozen=True)
class Pace:
    """Replaced at each step."""

    steps: int = 0
    factor: Fraction = Fraction(1)


class Noise:
    """An object of the program's own within a model, in slots."""

    __slots__ = ("pace", "recent", "rng", "sizes")

    def __init__(self) -> None:
        self.rng, self.sizes = np.random.default_rng(32), np.array([1.0, 2.0])
        self.recent, self.pace = array("d", [1.0]), Pace()

    def draw(self) -> float:
        self.sizes *= 0.95
        self.recent.append(self.pace.steps / 20)
        self.pace = replace(self.pace, steps=self.pace.steps + 1, factor=self.pace.factor * 9 / 10)
        drawn = self.rng.normal() * self.sizes.sum()
        return float(drawn * self.pace.factor + sum(self.recent[-2:]))


def sample(index: int) -> torch.Tensor:
    return torch.linspace(-1, 1, WIDTH) * math.sin(index + 1) + index / 10


class Plain(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.stack([sample(i) for i in index]) if isinstance(index, list) else sample(index)


class Augmented(Plain):
    """Draws from all three libraries, which a worker process does by itself."""

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.randn(WIDTH) + random.random() + float(np.random.normal())
        return sample(index) + noise


class OwnGenerators(Plain):
    """Augments with generators of its own, as many transforms do."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)
        self.legacy = np.random.RandomState(6)
        self.others = {"torch": torch.Generator().manual_seed(7), "python": random.Random(8)}

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = self.rng.normal() + self.legacy.normal() + self.others["python"].gauss(0, 1)
        return sample(index) + noise * torch.rand(WIDTH, generator=self.others["torch"])


class Harder(Plain):
    """Counts what has been read, and gets harder with it."""

    def __init__(self) -> None:
        self.read = 0

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.read += 1
        return super().__getitem__(index) * (1 + self.read / SAMPLES)


class ByPasses:
    """What counts its passes and shuffles by them: samples for a loader, or batches themselves."""

    def __init__(self, *, batches: bool = False) -> None:
        self.passes, self.batches = 0, batches

    def __len__(self) -> int:
        return 6 if self.batches else SAMPLES

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        order = list(range(SAMPLES))
        random.Random(self.passes).shuffle(order)
        if not self.batches:
            return iter(order)
        starts = range(0, SAMPLES, BATCH)
        return (torch.stack([sample(i) for i in order[at : at + BATCH]]) for at in starts)


class CountingStream(IterableDataset[torch.Tensor]):
    """A stream of which each pass is another one."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.passes += 1
        for index in range(SAMPLES):
            yield sample(index + self.passes)


class Stream(IterableDataset[torch.Tensor]):
    """Single samples through a shuffle buffer, split among workers where there are any."""

    def __init__(self, *, augmented: bool = False) -> None:
        self.augmented = augmented

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = torch.utils.data.get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        buffer: list[int] = []
        draw = random if self.augmented else random.Random(3)
        for index in range(first, SAMPLES, stride):
            buffer.append(index)
            if len(buffer) == 4:
                yield self.one(buffer.pop(draw.randrange(4)))
        yield from map(self.one, buffer)

    def one(self, index: int) -> torch.Tensor:
        return sample(index) + (torch.randn(WIDTH) if self.augmented else 0)


class Shuffled:
    """A loader that is none of torch's, with a length, drawing from Python when a pass begins."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = list(range(SAMPLES))
        random.shuffle(order)
        for start in range(0, SAMPLES, BATCH):
            yield torch.stack([sample(index) for index in order[start : start + BATCH]])


class Crops:
    """Endless batches that hang on nothing but the random numbers of the process."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.stack([sample(i) for i in torch.randint(SAMPLES, (BATCH,)).tolist()])

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class Buckets:
    """A batch sampler that shuffles with Python's and numpy's generators."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(SAMPLES))
        random.shuffle(order)
        batches = [order[start : start + BATCH] for start in range(0, SAMPLES, BATCH)]
        return iter([batches[index] for index in np.random.permutation(len(batches))])


class Counting:
    """A sampler that says itself where it is, and keeps a state that nothing else could know."""

    def __init__(self) -> None:
        self.seed, self.given = 17, 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        while self.given < SAMPLES:
            self.seed = (self.seed * 1103515245 + 12345) % 2**31
            self.given += 1
            yield self.seed % SAMPLES
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "given": self.given}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.seed, self.given = state["seed"], state["given"]


def loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    if dataset is None:
        dataset = Plain()
    if not isinstance(dataset, IterableDataset) and not options.keys() & {
        "sampler",
        "batch_sampler",
    }:
        options.setdefault("shuffle", True)
    if "batch_sampler" not in options:
        options.setdefault("batch_size", BATCH)
    return DataLoader(dataset, **options)


def with_generator(**options: Any) -> DataLoader[Any]:
    return loader(generator=torch.Generator().manual_seed(21), **options)


def drawn_anew(workers: int) -> DataLoader[Any]:
    """Drawn with replacement, little by little in the course of a pass."""
    generator = torch.Generator().manual_seed(22)
    sampler = RandomSampler(Plain(), replacement=True, num_samples=70, generator=generator)
    return loader(sampler=sampler, num_workers=workers)


def distributed(workers: int) -> DataLoader[Any]:
    sampler = DistributedSampler(Plain(), num_replicas=2, rank=1, shuffle=True)
    return loader(sampler=sampler, num_workers=workers, batch_size=3)


def stateful(dataset: Any = None, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    if "batch_sampler" not in options:
        options.setdefault("batch_size", BATCH)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata with torch 2.13
        return StatefulDataLoader(Plain() if dataset is None else dataset, **options)


def warm_up_and_cosine(optimizer: torch.optim.Optimizer) -> Any:
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, STEPS - 3)
    return lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[3])


def average(model: nn.Module) -> dict[str, Any]:
    return {"ema": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)}


class Freezing:
    """Stops batch statistics from step 5 on, and keeps a mean of the losses."""

    def __init__(self) -> None:
        self.mean, self.best = 0.0, torch.tensor(math.inf)

    def on_step_end(self, trainer: Trainer, step: int, metrics: dict[str, Any]) -> None:
        self.mean += (float(metrics["loss"]) - self.mean) / step
        self.best = torch.minimum(self.best, metrics["loss"])
        if step == 5:
            trainer.model.norm.eval()
        if self.mean < float(self.best) * 2:  # what it keeps has an effect
            trainer.optimizer.param_groups[0]["lr"] *= 0.9

    def state_dict(self) -> dict[str, Any]:
        return {"mean": np.float64(self.mean), "best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.mean, self.best = state["mean"], state["best"].clone()


class Stopping:
    """As most write it: without a state, and it begins anew where it is told of a start."""

    def __init__(self) -> None:
        self.best, self.bad, self.seen = math.inf, 0, deque([0.0], maxlen=3)

    def on_fit_start(self, trainer: Trainer) -> None:
        self.best, self.bad = math.inf, 0

    def on_step_end(self, trainer: Trainer, step: int, metrics: dict[str, Any]) -> None:
        loss = float(metrics["loss"])
        self.seen.append(loss)
        self.best, self.bad = (loss, 0) if loss < self.best else (self.best, self.bad + 1)
        if self.bad >= 2:
            trainer.optimizer.param_groups[0]["lr"] *= 0.7 + sum(self.seen) % 0.2


class Second:
    """Trains something of its own beside the model, which the model is trained by."""

    def __init__(self) -> None:
        torch.manual_seed(33)
        self.net = nn.Linear(WIDTH, 1)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.05, fused=True)

    def on_step_end(self, trainer: Trainer, step: int, metrics: dict[str, Any]) -> None:
        self.optimizer.zero_grad()
        (self.net(sample(step)) - step).square().sum().backward()
        self.optimizer.step()
        trainer.optimizer.param_groups[0]["lr"] = 0.01 * (1 + abs(float(self.net.bias.detach())))


class Slowing(torch.optim.Optimizer):
    """An optimizer of one's own, with a memory beside `state`."""

    def __init__(self, parameters: Any) -> None:
        self.calls = 0
        self.velocity: list[torch.Tensor] = []
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        own = [one for one in self.param_groups[0]["params"] if one.grad is not None]
        self.velocity = self.velocity or [torch.zeros_like(one) for one in own]
        for one, velocity in zip(own, self.velocity, strict=True):
            velocity.mul_(0.9).add_(one.grad)
            one.sub_(velocity / self.calls, alpha=self.param_groups[0]["lr"])


def part_of(dataset: Dataset[torch.Tensor]) -> Any:
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(34)).tolist()
    return Subset(dataset, order)


class Feature(NamedTuple):
    """`options` are the Trainer's, and so is what `more` makes of the model.

    `workers`: processes are started, which takes a while.
    """

    name: str
    make_loader: Callable[[], Any] = loader
    options: Mapping[str, Any] = {}
    make_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    more: Callable[[nn.Module], dict[str, Any]] = lambda model: {}
    workers: bool = False
    make_model: Callable[[], Net] = Net


FEATURES = (
    Feature("shuffling, dropout, batch norm"),
    Feature("the last batch dropped", lambda: loader(drop_last=True)),
    Feature("accumulation over 3 micro-batches", options={"accumulation_steps": 3}),
    Feature(
        "accumulation, fp16, clipping",
        options={"accumulation_steps": 3, "precision": FP16, "grad_clip": 0.5},
    ),
    Feature("clipping and warm-up", options={"grad_clip": 0.1}, make_scheduler=warm_up_and_cosine),
    Feature(
        "one-cycle schedule, SGD with momentum",
        make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        make_scheduler=lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS),
    ),
    Feature("averaged weights (EMA)", more=average),
    Feature(
        "a callback with a state, modules in eval mode",
        more=lambda model: {"callbacks": [Freezing()]},
    ),
    Feature(
        "an early stopper without a state",
        more=lambda model: {"callbacks": [Stopping()]},
    ),
    Feature("a second optimizer in a callback", more=lambda model: {"callbacks": [Second()]}),
    Feature("an optimizer that remembers beside its state", make_optimizer=Slowing),
    Feature("bf16 autocast", options={"precision": "bf16"}),
    Feature("fp16 autocast, loss scaling", options={"precision": FP16, "grad_clip": 1.0}),
    Feature("augmentation in the dataset", lambda: loader(Augmented())),
    Feature("augmentation by generators of its own", lambda: loader(OwnGenerators())),
    Feature("a model that remembers outside of its state dict", make_model=Remembering),
    Feature(
        "a dataset that counts what is read, a sampler its passes",
        lambda: loader(Harder(), sampler=ByPasses()),
    ),
    Feature("a part of a dataset that counts", lambda: loader(part_of(Harder()))),
    Feature("a stream that counts its passes", lambda: loader(CountingStream())),
    Feature("a loader that shuffles by its passes", lambda: ByPasses(batches=True)),
    Feature("2 workers", lambda: loader(num_workers=2), workers=True),
    Feature("2 workers, augmentation", lambda: loader(Augmented(), num_workers=2), workers=True),
    Feature(
        "2 workers, augmentation by own generators",
        lambda: loader(OwnGenerators(), num_workers=2),
        workers=True,
    ),
    Feature(
        "2 persistent workers, augmentation",
        lambda: loader(Augmented(), num_workers=2, persistent_workers=True),
        workers=True,
    ),
    Feature(
        "2 workers, augmentation, accumulation, fp16",
        lambda: loader(Augmented(), num_workers=2, prefetch_factor=3),
        {"accumulation_steps": 2, "precision": FP16},
        workers=True,
    ),
    Feature(
        "2 workers, and all of these together",
        lambda: with_generator(dataset=OwnGenerators(), num_workers=2, drop_last=True),
        {"accumulation_steps": 2, "precision": FP16, "grad_clip": 0.5},
        make_scheduler=warm_up_and_cosine,
        more=lambda model: {**average(model), "callbacks": [Freezing()]},
        workers=True,
    ),
    Feature("a generator of the loader's own", with_generator),
    Feature(
        "a generator of the loader's own, 2 workers",
        lambda: with_generator(num_workers=2),
        workers=True,
    ),
    Feature("drawn with replacement", lambda: drawn_anew(0)),
    Feature("drawn with replacement, 2 workers", lambda: drawn_anew(2), workers=True),
    Feature("a batch sampler of one's own", lambda: loader(batch_sampler=Buckets())),
    Feature("a sampler that keeps its state", lambda: loader(sampler=Counting())),
    Feature(
        "a sampler that keeps its state, 2 workers",
        lambda: loader(sampler=Counting(), num_workers=2),
        workers=True,
    ),
    Feature("DistributedSampler", lambda: distributed(0)),
    Feature("no automatic batches", lambda: loader(batch_size=None, sampler=Buckets())),
    Feature("IterableDataset, shuffle buffer", lambda: loader(Stream())),
    Feature(
        "IterableDataset, 2 workers, augmentation",
        lambda: loader(Stream(augmented=True), num_workers=2),
        workers=True,
    ),
    Feature("a list of batches", lambda: [sample(i).repeat(3, 1) for i in range(4)]),
    Feature("a loader of one's own", Shuffled),
    Feature("endless random crops", Crops),
    Feature("StatefulDataLoader", lambda: stateful(shuffle=True)),
    Feature("StatefulDataLoader, augmentation", lambda: stateful(Augmented(), shuffle=True)),
    Feature(
        "StatefulDataLoader, 2 workers", lambda: stateful(shuffle=True, num_workers=2), workers=True
    ),
    Feature(
        "StatefulDataLoader, 2 workers, augmentation",
        lambda: stateful(Augmented(), shuffle=True, num_workers=2),
        workers=True,
    ),
    Feature(
        "StatefulDataLoader, IterableDataset",
        lambda: stateful(Stream()),
    ),
    Feature(
        "StatefulDataLoader, 2 workers, IterableDataset",
        lambda: stateful(Stream(augmented=True), num_workers=2),
        workers=True,
    ),
)


class Run:
    """A trainer of a feature, and the batches that it was given.

    With a directory, each step is saved there. `stop_after` so many micro-batches it is stopped.
    """

    def __init__(
        self,
        feature: Feature,
        seed: int,
        directory: str | Path | None = None,
        *,
        stop_after: int = 0,
        callbacks: Iterable[Any] = (),
    ) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.batches: list[torch.Tensor] = []
        model = feature.make_model()
        make = feature.make_optimizer or (lambda p: torch.optim.AdamW(p, lr=0.01))
        optimizer = make(model.parameters())
        scheduler = None if feature.make_scheduler is None else feature.make_scheduler(optimizer)
        manager = None
        if directory is not None:
            manager = CheckpointManager(directory, every_steps=1, keep_last=None)
        self.manager: Any = manager
        self.trainer = Trainer(
            model,
            optimizer,
            feature.make_loader(),
            device="cpu",
            scheduler=scheduler,
            loss_fn=_noting(self.batches),
            logger=_quiet(),
            checkpoint_manager=manager,
            **self._options(feature, model, callbacks),
        )
        if stop_after:
            self.trainer.loss_fn = _stopping(self.trainer, stop_after, self.batches)

    @staticmethod
    def _options(feature: Feature, model: nn.Module, callbacks: Iterable[Any]) -> dict[str, Any]:
        options = {"precision": "fp32", **feature.options, **feature.more(model)}
        return {**options, "callbacks": [*options.get("callbacks", []), *callbacks]}


def _quiet() -> logging.Logger:
    logger = logging.getLogger("benchmarks.resume_features.quiet")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
    return logger


def _stopping(trainer: Trainer, after: int, batches: list[torch.Tensor]) -> Any:
    inner = _noting(batches)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        value = inner(model, batch)
        if len(batches) == after:
            trainer.stop("enough")
        return value

    return loss


def _noting(batches: list[torch.Tensor]) -> Callable[[nn.Module, Any], torch.Tensor]:
    """A function, not a method of `Run`: a cycle would let worker processes linger."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        batch = batch[0] if isinstance(batch, list) else batch
        batches.append(batch.clone())
        value: torch.Tensor = model(batch if batch.ndim == 2 else batch[None])
        return value

    return loss


def differing_bits(one: Any, other: Any) -> int:
    """How many bits two nested states differ in; what cannot be compared counts as 64."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return 64
        return _bits_of_arrays(_bytes(one), _bytes(other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if list(one) != list(other):
            return 64
        return sum(differing_bits(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            return 64
        return sum(map(differing_bits, one, other))
    if isinstance(one, float) and isinstance(other, float):
        sides = (int.from_bytes(struct.pack("<d", side), "little") for side in (one, other))
        return (next(sides) ^ next(sides)).bit_count()
    return 0 if type(one) is type(other) and one == other else 64


def _bytes(tensor: torch.Tensor) -> Any:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()


def _bits_of_arrays(one: Any, other: Any) -> int:
    return int(np.unpackbits(one ^ other).sum())
