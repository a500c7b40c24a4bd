"""`Trainer.fit` against a bare loop that does the same arithmetic, a few steps each in turn.

Processor time on one thread: nothing is waited for, and what other programs do counts for less.
"""

from __future__ import annotations

from benchmarks.measure import Row, in_one_process

ROUNDS = 31
"""More than elsewhere: the bar is narrow, and a step is short."""

INSIDE = """
import json, statistics, sys, time

import torch

from trainer_core import Trainer
from trainer_core.demo.model import CharTransformer
from trainer_core.demo.text import VOCABULARY, Crops, own_text

BATCH, STEPS, ROUNDS = map(int, sys.argv[1:])
POSITIONS = 64
torch.set_num_threads(1)  # two threads on a busy machine wait for each other, not for us
CHARACTERS = own_text().characters

def parts():
    torch.manual_seed(0)
    model = CharTransformer(VOCABULARY, POSITIONS, width=64, layers=2, heads=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 100))
    return model, optimizer, scheduler

def bare(model, optimizer, scheduler, batches):
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
loader = Crops(CHARACTERS, batch=BATCH, positions=POSITIONS)
trainer = Trainer(
    model, optimizer, loader, device="cpu", scheduler=scheduler, precision="fp32", grad_clip=1.0
)
theirs = parts()
seconds = {"ours": [], "baseline": []}
for index in range(ROUNDS + 1):  # the first one warms up
    losses = {}
    for side in ("ours", "baseline") if index % 2 else ("baseline", "ours"):
        torch.manual_seed(index)
        start = time.process_time()
        if side == "ours":
            losses[side] = trainer.fit(trainer.step + STEPS).final_loss
        else:
            losses[side] = bare(*theirs, iter(loader))
        if index:
            seconds[side].append((time.process_time() - start) / STEPS)
    if losses["ours"] != losses["baseline"]:
        raise SystemExit(f"not the same arithmetic: {losses}")
print(json.dumps({side: statistics.median(taken) for side, taken in seconds.items()}))
"""


def run() -> list[Row]:
    """A step of some milliseconds, and a short one, where what is added weighs most."""
    return [_row(batch=16, steps=20), _row(batch=1, steps=60)]


def _row(*, batch: int, steps: int) -> Row:
    times = in_one_process(INSIDE, str(batch), str(steps), str(ROUNDS))
    name = f"training step, batch of {batch} / bare loop, same arithmetic"
    return Row(name, times["ours"], times["baseline"], at_most=1.03)


if __name__ == "__main__":
    for row in run():
        print(
            f"{row.name}: {row.ours * 1e3:.3f} ms / {row.baseline * 1e3:.3f} ms = {row.ratio:.3f}"
        )
