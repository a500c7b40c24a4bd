"""Runs that the workers make: one small model, one data set, each way of having it on many ranks."""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from trainer_core import CheckpointManager, Trainer

FEATURES, SAMPLES, BATCH, WORLD = 6, 96, 4, 2
ACCUMULATION, CLIP = 2, 0.5


class Net(torch.nn.Module):
    """Odd sizes, so that shards are uneven; dropout and batch statistics, which differ by rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(FEATURES, 7)
        self.norm = torch.nn.BatchNorm1d(7)
        self.drop = torch.nn.Dropout(0.25)
        self.second = torch.nn.Linear(7, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(torch.tanh(self.norm(self.first(x)))))


def net(seed: int = 7) -> Net:
    torch.manual_seed(seed)
    return Net()


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def loader(dataset: Any = None) -> DataLoader[Any]:
    """Under torchrun a share of each pass, shuffled with the number of the pass."""
    dataset = data() if dataset is None else dataset
    if not dist.is_initialized():
        return DataLoader(dataset, batch_size=BATCH, shuffle=True)
    return DataLoader(dataset, batch_size=BATCH, sampler=DistributedSampler(dataset, seed=5))


def wrapped(model: torch.nn.Module, kind: str) -> torch.nn.Module:
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model.first)
        fully_shard(model)
    return model


def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def trainer(kind: str, directory: Path | None, seed: int = 7, **options: Any) -> Trainer:
    """Ready to fit; random numbers are seeded by rank last."""
    model = wrapped(options.pop("model", None) or net(seed), kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    rank = dist.get_rank() if dist.is_initialized() else 0
    manager = options.pop("manager", None)
    if directory is not None and manager is None:
        manager = CheckpointManager(directory, every_steps=options.pop("every", 3), keep_last=None)
    one = Trainer(
        model,
        optimizer,
        options.pop("dataloader", None) or loader(),
        device="cpu",
        loss_fn=options.pop("loss_fn", loss),
        checkpoint_manager=manager,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7),
        accumulation_steps=ACCUMULATION,
        grad_clip=CLIP,
        **options,
    )
    torch.manual_seed(100 * seed + rank)
    return one


def bits(value: Any) -> str:
    """A hash of the very bits of nested tensors and values; shards are put together first."""
    digest = hashlib.sha256()
    _feed(value, digest)
    return digest.hexdigest()[:16]


def _feed(value: Any, digest: Any) -> None:
    if isinstance(value, torch.Tensor):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        digest.update(f"{whole.dtype}{tuple(whole.shape)}".encode())
        digest.update(whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            digest.update(str(key).encode())
            _feed(value[key], digest)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _feed(item, digest)
    else:
        digest.update(repr(value).encode())


def weights(one: Trainer) -> str:
    """The bits of the weights under their plain names."""
    named = one.model.named_parameters()
    return bits({name.removeprefix("module."): value for name, value in named})


def end(one: Trainer) -> dict[str, Any]:
    """What a run has come to, on this rank."""
    state = one.state_dict()
    return {
        "model": bits(state["model"]),
        "weights": weights(one),
        "optimizer": bits(state["optimizer"]["state"]),
        "scheduler": bits(state["scheduler"]),
        "rng": bits(state["rng"]),
        "counts": [one.step, one.samples, one.tokens],
        "lr": one.optimizer.param_groups[0]["lr"],
    }


def by_hand(kind: str, steps: int) -> dict[str, str]:
    """The same run in a plain loop that syncs gradients once for each step, as torch's documentation says."""
    model = wrapped(net(), kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
    batches = loader()
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(700 + rank)
    done = epoch = micro = 0
    while done < steps:
        if hasattr(batches.sampler, "set_epoch"):
            batches.sampler.set_epoch(epoch)
        for batch in batches:
            micro += 1
            is_last = micro % ACCUMULATION == 0
            if kind == "fsdp":
                model.set_requires_gradient_sync(is_last)
            with model.no_sync() if kind == "ddp" and not is_last else nullcontext():
                (loss(model, batch) / ACCUMULATION).backward()
            if not is_last:
                continue
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            done += 1
            if done == steps:
                break
        epoch += 1
    names = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
    return {"model": bits(names), "optimizer": bits(optimizer.state_dict()["state"])}


@contextmanager
def heard() -> Iterator[list[str]]:
    """What is warned of."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [str(one.message) for one in caught if issubclass(one.category, UserWarning)]


def quiet() -> None:
    """Lets no line of progress reach the terminal."""
    import logging

    logging.getLogger().addHandler(logging.NullHandler())
    sys.stdout.flush()
