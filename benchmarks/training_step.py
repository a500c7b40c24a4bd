"""`Trainer.fit` against a bare loop that does the same arithmetic, in turn, in one process.

A step is processor time on one thread from one batch to the next: nothing is waited for, and what
other programs do counts for less. Each round trains both sides for a few steps from the same random
numbers, in random order; what begins and ends a fit is no part of it. Compared are the two medians
of one round, which the same disturbances befell, and the ratio is the median of all rounds.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

from benchmarks.measure import Row, in_one_process

STEPS, ROUNDS = 10, 61
"""Many short ones: the bar is narrow, and what disturbs a round must be left behind soon."""

MOST_ADDED_US = 100.0
"""3 % of a step of some 3 ms: shorter ones leave a processor waiting for Python anyway."""

INSIDE = """
import json, random, statistics, sys, time

import torch

from trainer_core import Trainer
from trainer_core.demo.model import CharTransformer
from trainer_core.demo.text import VOCABULARY, Crops, own_text

WIDTH, BATCH, STEPS, ROUNDS = map(int, sys.argv[1:])
POSITIONS, FIRST = 64, 3
torch.set_num_threads(1)  # two threads on a busy machine wait for each other, not for us
CHARACTERS = own_text().characters

class Clocked(Crops):
    def __iter__(self):
        self.times = []
        for batch in super().__iter__():
            self.times.append(time.process_time())
            yield batch

    def step(self):
        times = self.times[FIRST:]  # the first steps of a fit begin something
        return statistics.median(after - before for before, after in zip(times, times[1:]))

def parts():
    torch.manual_seed(0)
    model = CharTransformer(VOCABULARY, POSITIONS, width=WIDTH, layers=2, heads=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 100))
    return model, optimizer, scheduler

def bare(model, optimizer, scheduler, loader):
    batches = iter(loader)
    for _ in range(STEPS):
        inputs, targets = next(batches)
        inputs, targets = inputs.to("cpu"), targets.to("cpu")
        loss = model(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
    return loss.item()

model, optimizer, scheduler = parts()
loader = Clocked(CHARACTERS, batch=BATCH, positions=POSITIONS)
trainer = Trainer(
    model, optimizer, loader, device="cpu", scheduler=scheduler, precision="fp32", grad_clip=1.0
)
theirs = parts()
seconds = {"ours": [], "baseline": []}
for turn in range(ROUNDS + 1):  # the first one warms up
    losses = {}
    for side in random.Random(turn).sample(["ours", "baseline"], 2):
        torch.manual_seed(turn)
        if side == "ours":
            losses[side] = trainer.fit(trainer.step + STEPS).final_loss
        else:
            losses[side] = bare(*theirs, loader)
        if turn:
            seconds[side].append(loader.step())
    if losses["ours"] != losses["baseline"]:
        raise SystemExit(f"not the same arithmetic: {losses}")
print(json.dumps(seconds))
"""


class Step(NamedTuple):
    """Seconds of a step of the bare loop, and how many times that ours takes: medians."""

    bare: float
    ratio: float

    @property
    def added_us(self) -> float:
        """What ours adds, in microseconds."""
        return (self.ratio - 1) * self.bare * 1e6


def run() -> list[Row]:
    """Two models of which the bar of 3 % is asked, and a tiny one that shows what is added."""
    tiny = measured(width=16, batch=1)
    return [
        *(_row(width, measured(width=width, batch=16)) for width in (192, 64)),
        Row(
            "what Trainer adds to a training step",
            *(tiny.added_us, None, "us"),
            at_most=MOST_ADDED_US,
        ),
    ]


def measured(*, width: int, batch: int) -> Step:
    """One comparison, of a model of that width and batches of that size."""
    taken = in_one_process(INSIDE, str(width), str(batch), str(STEPS), str(ROUNDS))
    pairs = zip(taken["ours"], taken["baseline"], strict=True)
    ratio = statistics.median(ours / bare for ours, bare in pairs)
    return Step(statistics.median(taken["baseline"]), ratio)


def _row(width: int, step: Step) -> Row:
    name = f"training step, 2 layers of width {width} / bare loop, same arithmetic"
    return Row(name, step.ratio * step.bare, step.bare, at_most=1.03)


def main() -> None:
    for width, batch in ((192, 16), (64, 16), (16, 1)):
        step = measured(width=width, batch=batch)
        words = (
            f"width {width}, batch {batch}: bare {step.bare * 1e3:.3f} ms, ours {step.ratio:.4f}"
        )
        print(f"{words} times that, {step.added_us:+.0f} us")


if __name__ == "__main__":
    main()
