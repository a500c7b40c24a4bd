"""The same training written four ways: a bare loop, our Trainer, Lightning Fabric, Hugging Face.

Model, data, optimizer, scheduler, clipping, precision (fp32) and the order of the batches are the
same, so the losses are too. Everything else is as each of them does it by default.
"""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from trainer_core import CheckpointManager, Trainer
from trainer_core.demo.model import CharTransformer
from trainer_core.demo.text import VOCABULARY, own_text

POSITIONS = 64
EXAMPLES = 4096
CLIP = 1.0


class Size(NamedTuple):
    """Of a model and its batches."""

    width: int
    layers: int
    batch: int


class Examples(Dataset[dict[str, torch.Tensor]]):
    """`EXAMPLES` pieces of this project's text: `inputs` and `targets`, [POSITIONS] each."""

    characters = own_text().characters

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = index * 31 % (len(self.characters) - POSITIONS)
        piece = self.characters[start : start + POSITIONS + 1]
        return {"inputs": piece[:-1], "targets": piece[1:]}


class Clock:
    """Makes batches of examples, and notes the processor time at each: once a step on each side."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, examples: list[Any]) -> Any:
        self.times.append(time.process_time())
        return default_collate(examples)


class Model(torch.nn.Module):
    """Gives its loss as a mapping, which every side takes, and keeps it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.inner = CharTransformer(
            VOCABULARY, POSITIONS, width=size.width, layers=size.layers, heads=4
        )
        self.loss = torch.tensor(0.0)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = self.inner(inputs, targets)
        self.loss = loss.detach()
        return {"loss": loss}


class Side:
    """One way to train: `model`, `optimizer` and `scheduler` are new, and the same on all sides.

    `first_used` is when the model was first called. The model itself does not keep it: ours would
    restore that, too.
    """

    name = ""
    needs: tuple[str, ...] = ()

    def __init__(self, size: Size, where: Path) -> None:
        torch.manual_seed(0)
        self.size, self.where, self.clock = size, where, Clock()
        self.model = Model(size)
        self.first_used: float | None = None
        self.model.register_forward_pre_hook(self._note_use)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 1 / (1 + step / 100)
        )

    def _note_use(self, *_: object) -> None:
        if self.first_used is None:
            self.first_used = time.perf_counter()

    def loader(self) -> Any:
        return DataLoader(Examples(), batch_size=self.size.batch, collate_fn=self.clock)

    def train(self, steps: int) -> None:
        """Trains a new model for `steps` steps."""
        raise NotImplementedError  # each side's own

    def save(self) -> None:
        """Writes a full training checkpoint after `train`, as this side does."""
        raise NotImplementedError  # each side's own

    def resume(self, done: int) -> None:
        """Loads what `save` wrote after `done` steps, and makes one step more."""
        raise NotImplementedError  # each side's own

    def remove(self) -> None:
        """Takes away what was saved."""
        shutil.rmtree(self.where, ignore_errors=True)
        self.where.mkdir(parents=True)


class Bare(Side):
    """As one writes it by hand."""

    name = "bare loop"

    def train(self, steps: int) -> None:
        self._train(islice(cycle_of(self.loader()), steps))

    def _train(self, batches: Iterator[Any]) -> None:
        for batch in batches:
            inputs = {key: value.to("cpu") for key, value in batch.items()}
            self.model(**inputs)["loss"].backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": torch.get_rng_state(),
        }
        torch.save(state, self.where / "state.pt")

    def resume(self, done: int) -> None:
        state = torch.load(self.where / "state.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"])
        self._train(islice(cycle_of(self.loader()), done, done + 1))


class Ours(Side):
    """`Trainer` and `CheckpointManager`."""

    name = "ours"

    def _trainer(self, *, saving: bool) -> tuple[Trainer, CheckpointManager]:
        manager = CheckpointManager(self.where, every_steps=10**9, enabled=saving)
        trainer = Trainer(
            self.model,
            self.optimizer,
            self.loader(),
            device="cpu",
            scheduler=self.scheduler,
            precision="fp32",
            grad_clip=CLIP,
            checkpoint_manager=manager,
        )
        return trainer, manager

    def train(self, steps: int) -> None:
        self.trainer, self.manager = self._trainer(saving=False)
        self.trainer.fit(steps)

    def save(self) -> None:
        self.manager.save(self.trainer.step, self.trainer.state_dict())

    def remove(self) -> None:
        if hasattr(self, "manager"):
            self.manager.close()
        super().remove()

    def resume(self, done: int) -> None:
        trainer, _ = self._trainer(saving=True)
        trainer.fit(done + 1, resume="must")


class Fabric(Side):
    """Lightning Fabric, with the loop that its documentation shows."""

    name = "Lightning Fabric"
    needs = ("lightning_fabric",)

    def _set_up(self) -> Any:
        from lightning_fabric import Fabric

        self.fabric = Fabric(accelerator="cpu", devices=1, precision="32-true")
        self.fabric.launch()
        self.wrapped, self.wrapped_optimizer = self.fabric.setup(self.model, self.optimizer)
        return self.fabric.setup_dataloaders(self.loader())

    def train(self, steps: int) -> None:
        self._train(islice(cycle_of(self._set_up()), steps))

    def _train(self, batches: Iterator[Any]) -> None:
        for batch in batches:
            self.fabric.backward(self.wrapped(**batch)["loss"])
            self.fabric.clip_gradients(self.wrapped, self.wrapped_optimizer, max_norm=CLIP)
            self.wrapped_optimizer.step()
            self.wrapped_optimizer.zero_grad()
            self.scheduler.step()

    def save(self) -> None:
        rng = torch.get_rng_state()
        self.fabric.save(self.where / "state.ckpt", {**self._parts(), "rng": rng})

    def _parts(self) -> dict[str, Any]:
        parts = {"model": self.wrapped, "optimizer": self.wrapped_optimizer}
        return {**parts, "scheduler": self.scheduler}

    def resume(self, done: int) -> None:
        loader = self._set_up()
        rest = self.fabric.load(self.where / "state.ckpt", self._parts())
        torch.set_rng_state(rest["rng"])
        self._train(islice(cycle_of(loader), done, done + 1))


class HuggingFace(Side):
    """`transformers.Trainer`, without its progress bar."""

    name = "Hugging Face Trainer"
    needs = ("transformers", "accelerate")

    def _trainer(self, steps: int) -> Any:
        from transformers import Trainer, TrainingArguments

        arguments = TrainingArguments(
            output_dir=str(self.where),
            max_steps=steps,
            per_device_train_batch_size=self.size.batch,
            train_sampling_strategy="sequential",
            max_grad_norm=CLIP,
            use_cpu=True,
            dataloader_pin_memory=False,
            remove_unused_columns=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        return Trainer(
            self.model,
            arguments,
            data_collator=self.clock,
            train_dataset=Examples(),
            optimizers=(self.optimizer, self.scheduler),
        )

    def train(self, steps: int) -> None:
        self.trainer = self._trainer(steps)
        self.trainer.train()

    def save(self) -> None:
        self.trainer._save_checkpoint(self.trainer.model, None)  # what it calls at save_steps

    def resume(self, done: int) -> None:
        checkpoint = self.where / f"checkpoint-{done}"
        self._trainer(done + 1).train(resume_from_checkpoint=str(checkpoint))


SIDES: tuple[type[Side], ...] = (Bare, Ours, Fabric, HuggingFace)


def cycle_of(loader: Any) -> Iterator[Any]:
    """Its batches, over and over."""
    return (batch for epoch in cycle([loader]) for batch in epoch)


def missing(side: type[Side]) -> list[str]:
    """The packages that it needs and that are not installed."""
    return [name for name in side.needs if importlib.util.find_spec(name) is None]
